"""Run the engine suite with real vLLM servers, in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import ConfigError
from lightspan.protocols.engine import TokenEngine
from lightspan_testing.engine_suite import EngineSuite
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.requirements import FLAGS
from tests.vllm_servers.conftest import OnServers, Start

pytestmark = pytest.mark.timeout(900)


class TestVLLMEngine(OnServers, EngineSuite):
    """Run the suite on running servers; each engine first restores the model's own weights."""

    served_by = "served"
    transfer: Any = "files"

    @pytest.fixture(autouse=True)
    def _servers(self, address: str, other: str, tmp_path: Path) -> None:
        self.addresses, self.logs = (address, other), tmp_path

    def make_engine(self, models: Mapping[str, Path]) -> TokenEngine:
        addresses = {
            policy: (address,) for policy, address in zip(models, self.addresses, strict=False)
        }
        vllm = VLLM(addresses=addresses, transfer=self.transfer)
        return VLLMEngine(vllm, models, logs=self.logs)


class TestSent(TestVLLMEngine):
    """Run the suite with weights that are sent to the servers by torch.distributed."""

    transfer = "gloo"


async def test_each_missing_flag_is_named(start: Start, served: Path, tmp_path: Path) -> None:
    """Check the error for a server that lacks every option that lightspan needs."""
    # beside the loop of the test: `start` has one of its own
    address = await asyncio.to_thread(start, "--dtype", "bfloat16", flags=FLAGS[4:6])
    engine = VLLMEngine(VLLM(addresses=(address,)), {"writer": served}, logs=tmp_path)
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    for flag in (
        "--dtype float32",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--weight-transfer-config",
        "--hf-overrides '{\"tie_word_embeddings\": false}'",
    ):
        assert flag in str(caught.value)

"""Run the engine suite with LoRA on the weights of one model, on one server and on two."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from lightspan.errors import ConfigError
from lightspan.protocols.engine import TokenEngine
from lightspan_testing.lora_suite import RANK, LoRAEngineSuite
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.requirements import flags_of
from lightspan_vllm.weights import ServerSpec
from tests.vllm_servers.conftest import OnServers, Start

pytestmark = pytest.mark.timeout(900)


def flags(folder: Path, *, loras: int) -> tuple[str, ...]:
    spec = ServerSpec.of(folder, dtype="float32", context=None)
    return flags_of(ServerSpec(**{**vars(spec), "lora_rank": RANK, "loras": loras}))


@pytest.fixture(scope="module")
def addresses(start: Start, served: Path) -> tuple[str, str]:
    return start(flags=flags(served, loras=3)), start(flags=flags(served, loras=3))


class TestVLLMEngineWithLoRA(OnServers, LoRAEngineSuite):
    """Run the suite with all policies on one running server, with tied embeddings."""

    served_by = "served"

    @pytest.fixture(autouse=True)
    def _servers(self, addresses: tuple[str, ...], tmp_path: Path) -> None:
        self.addresses, self.logs = addresses[:1], tmp_path

    def make_lora_engine(self, models: Mapping[str, Path], ranks: Mapping[str, int]) -> TokenEngine:
        return VLLMEngine(VLLM(addresses=self.addresses), models, lora=ranks, logs=self.logs)


class TestTwoServers(TestVLLMEngineWithLoRA):
    """Run the suite with all policies on each of two servers."""

    @pytest.fixture(autouse=True)
    def _servers(self, addresses: tuple[str, ...], tmp_path: Path) -> None:
        self.addresses, self.logs = addresses, tmp_path


async def test_missing_flags_of_lora_are_named(start: Start, served: Path, tmp_path: Path) -> None:
    address = await asyncio.to_thread(start, flags=flags(served, loras=1))
    ranks = {"writer": 2 * RANK, "checker": 1}
    models = dict.fromkeys(ranks, served)
    engine = VLLMEngine(VLLM(addresses=(address,)), models, lora=ranks, logs=tmp_path)
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    for flag in ("--max-lora-rank 16", "--max-loras 3"):
        assert flag in str(caught.value)

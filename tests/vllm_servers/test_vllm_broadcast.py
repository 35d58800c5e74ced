"""The engine suite with weights that are sent over torch.distributed, by Gloo, to real servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.vllm_servers.conftest import TOLERANCE

from lightspan.engines.protocol import TokenEngine
from lightspan.engines.vllm.description import VLLM
from lightspan.engines.vllm.engine import VLLMEngine
from lightspan.testing.engine_suite import EngineSuite

pytestmark = pytest.mark.timeout(900)


class TestSent(EngineSuite):
    """On two servers that run already, whose flags are those of servers that read files."""

    tolerance = TOLERANCE
    begun = 1
    tokens_in_flight = 200

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, request: pytest.FixtureRequest) -> Path:
        path: Path = request.getfixturevalue("served")
        return path

    @pytest.fixture(autouse=True)
    def _servers(self, address: str, other: str, tmp_path: Path) -> None:
        self.addresses, self.logs = (address, other), tmp_path

    def make_engine(self, models: Mapping[str, Path]) -> TokenEngine:
        addresses = {
            policy: (address,) for policy, address in zip(models, self.addresses, strict=False)
        }
        return VLLMEngine(VLLM(addresses=addresses, transfer="gloo"), models, logs=self.logs)

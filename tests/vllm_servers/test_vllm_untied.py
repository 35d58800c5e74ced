"""Run the engine suite with a model whose output layer is not tied to its embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from lightspan.protocols.engine import TokenEngine
from lightspan_testing.engine_suite import CONTEXT, EngineSuite
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_vllm.config import VLLM
from lightspan_vllm.engine import VLLMEngine
from lightspan_vllm.requirements import FLAGS
from tests.vllm_servers.conftest import OnServers, Start

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model(
        tmp_path_factory.mktemp("untied") / "model", seed=2, context=CONTEXT, hidden=128
    )
    model = load_model(path)
    model.config.tie_word_embeddings = False
    head = torch.nn.Linear(128, model.config.vocab_size, bias=False)
    with torch.no_grad():
        head.weight.copy_(model.get_input_embeddings().weight.flip(0))
    model.set_output_embeddings(head)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def addresses(start: Start, untied: Path) -> tuple[str, str]:
    return start(model=untied, flags=FLAGS), start(model=untied, flags=FLAGS)


class TestUntied(OnServers, EngineSuite):
    """Run the suite on two running servers."""

    served_by = "untied"

    @pytest.fixture(autouse=True)
    def _servers(self, addresses: tuple[str, str], tmp_path: Path) -> None:
        self.addresses, self.logs = addresses, tmp_path

    def make_engine(self, models: Mapping[str, Path]) -> TokenEngine:
        addresses = {
            policy: (address,) for policy, address in zip(models, self.addresses, strict=False)
        }
        return VLLMEngine(VLLM(addresses=addresses), models, logs=self.logs)

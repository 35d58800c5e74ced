"""LoRA policies in the embedded engine, next to policies with a model's own weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightspan.errors import ConfigError
from lightspan_testing.engine_suite import low_rank
from lightspan_testing.lora_suite import LoRAEngineSuite, merged
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.lora import LowRank
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.engine.weights import load_model


class TestTransformersEngineWithLoRA(LoRAEngineSuite):
    def make_lora_engine(
        self, models: Mapping[str, Path], ranks: Mapping[str, int]
    ) -> TransformersEngine:
        return TransformersEngine(models, lora=ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("low-rank") / "model", seed=2, context=256)


def places(engine: TransformersEngine, policy: str) -> set[int]:
    """Return the memory addresses of a policy's weights."""
    model: Any = engine._workers[policy]._model
    return {tensor.data_ptr() for tensor in model.state_dict().values()}


def test_policies_of_one_model_hold_its_weights_once(folder: Path) -> None:
    models = {"writer": folder, "checker": str(folder), "base": folder, "whole": folder}
    engine = TransformersEngine(models, lora={"writer": 4, "checker": 8, "base": 0})
    assert places(engine, "writer") == places(engine, "checker") == places(engine, "base")
    assert not places(engine, "writer") & places(engine, "whole")


async def test_the_hash_is_of_the_lora_too(folder: Path) -> None:
    engine = TransformersEngine({"writer": folder, "base": folder}, lora={"writer": 4, "base": 0})
    await engine.start()
    assert engine.weight_hash("writer") == engine.weight_hash("base")
    await engine.update("writer", low_rank(load_model(folder), seed=3), 1)
    moved = engine.weight_hash("writer")
    assert moved != engine.weight_hash("base")
    await engine.update("writer", low_rank(load_model(folder), seed=4), 2)
    assert engine.weight_hash("writer") != moved
    await engine.close()


def test_a_layer_that_the_next_version_lacks_is_as_it_was(folder: Path) -> None:
    model, ids = load_model(folder), torch.tensor([[5, 6, 7]])
    held, weights = LowRank(model, 4), low_rank(model, seed=3)
    name, pair = next(iter(weights.layers.items()))
    fewer = type(weights)(rank=4, scale=2.0, layers={name: pair})
    with torch.no_grad():
        for now in (weights, fewer):
            held.change(now, "writer")()
            expected = merged(folder, now)(ids).logits
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)


def test_half_types_are_computed_as_peft_does(folder: Path) -> None:
    """The LoRA is computed in its own float32, and the sum is rounded once."""
    layer = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    model = load_model(folder, dtype=torch.bfloat16)
    model.layer = layer
    pair = (torch.randn(2, 8), torch.randn(4, 2))
    held = LowRank(model, 2)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        plain = layer(x)
        held.change(type(low_rank(model, 1))(rank=2, scale=0.5, layers={"layer": pair}), "writer")()
        expected = plain + (x.float() @ pair[0].T) @ pair[1].T * 0.5
        assert layer(x).equal(expected.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"critic": 4}, r"lora= names 'critic'; the engine's policies: \['writer'\]"),
        ({"writer": -1}, "the rank of policy writer=-1"),
    ],
)
def test_ranks_that_are_none(folder: Path, ranks: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformersEngine({"writer": folder}, lora=ranks)

"""Check the tokens of a pass, and that they change memory and time alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightspan.protocols.learner import LoRA, PolicyLoss
from lightspan_testing.learner_suite import make_call_rows
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.microbatch import (
    CPU_ACTIVATIONS,
    activation_bytes,
    default_token_budget,
)
from lightspan_torch.learner.torch import TorchLearner


def model_of(hidden: int, inner: int, layers: int) -> Any:
    """Return an object with the sizes of a model in its configuration."""
    text = SimpleNamespace(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))


def test_larger_models_get_fewer_tokens_on_a_cpu() -> None:
    tiny, middle, smollm = (128, 344, 3), (512, 1408, 12), (576, 1536, 30)
    budgets = [default_token_budget("cpu", [model_of(*sizes)]) for sizes in (tiny, middle, smollm)]
    assert budgets == [2048, 640, 256]
    assert 640 * activation_bytes(model_of(*middle).config) <= CPU_ACTIVATIONS
    assert default_token_budget("cpu", [model_of(*tiny), model_of(*smollm)]) == 256
    assert default_token_budget("cpu") == 2048
    assert default_token_budget("cuda", [model_of(*smollm)]) == 4096


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_loss_and_gradient_do_not_depend_on_the_tokens_of_a_pass(
    tmp_path: Path, lora: LoRA | None
) -> None:
    folder = tiny_model(tmp_path / "model", seed=4, hidden=32, context=128)
    rows = make_call_rows(load_model(folder))
    results = []
    for budget in (16, 64, 100_000):
        learner = TorchLearner({"writer": folder}, lora=lora, token_budget=budget)
        results.append(learner.update(rows, PolicyLoss(form="gspo")))
    for metrics in results[1:]:
        assert metrics["loss"] == pytest.approx(results[0]["loss"], rel=1e-6, abs=1e-8)
        assert metrics["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-5)

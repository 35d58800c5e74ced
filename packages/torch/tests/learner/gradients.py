"""Small models of several families, and the gradients of an update without its optimiser step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Loss
from lightspan_torch.learner.torch import TorchLearner


def make_model(kind: str, seed: int = 0, **options: Any) -> Any:
    import transformers

    values = {
        "vocab_size": 405,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "bos_token_id": None,
        **options,
    }
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{kind}Config")(**values)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def gradients(
    learner: TorchLearner, rows: Sequence[Row], loss: Loss, **more: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the metrics of an update and its gradients by name."""
    stepper = learner._steppers["writer"]
    caught: dict[str, Tensor] = {}

    def catch() -> float:
        for name, parameter in stepper._parameters.items():
            assert parameter.grad is not None
            caught[name] = parameter.grad.clone()
        return math.nan  # nothing is stepped

    stepper.clip = catch  # type: ignore[method-assign]
    return learner.update(rows, loss, **more), caught


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that each parameter's gradient has a relative error below 1e-4."""
    assert set(found) == set(expected)
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert total > 0
    for name, gradient in expected.items():
        # one that is zero but for rounding (a bias of keys) is measured by the others
        scale = max(float(gradient.norm()), 1e-3 * float(total))
        assert float((found[name] - gradient).norm()) < 1e-4 * scale, name

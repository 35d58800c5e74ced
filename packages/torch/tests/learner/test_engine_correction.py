"""Check importance weights and masks by enumeration of all answers of a small policy.

The policy answers with two tokens out of three. The engine samples from another distribution than
the learner's. All nine answers are trained, each weighted with its probability in the engine, so
that the gradient is the expected gradient.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import PolicyLoss
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.transformers import TransformersEngine
from lightspan_torch.learner import losses
from lightspan_torch.learner.metrics import MetricAccumulator
from lightspan_torch.learner.objective import TokenValues, policy_losses
from lightspan_torch.learner.torch import TorchLearner

ANSWERS: Final = [*itertools.product(range(3), repeat=2)]
REWARDS: Final = [1.0, -0.5, 0.3, 0.0, 2.0, -1.0, 0.7, 0.1, -0.3]
CALLS: Final = torch.tensor([number for number in range(9) for _ in range(2)])


def logits(seed: int, scale: float) -> Tensor:
    """Return random logits [4, 3]: of the first token, and of the second after each first one."""
    return scale * torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).double()


def logprobs(table: Tensor) -> Tensor:
    """Return the log-probabilities of the 18 tokens of all answers."""
    logs = table.log_softmax(-1)
    tokens = [(logs[0, a], logs[1 + a, b]) for a, b in ANSWERS]
    return torch.stack([log for pair in tokens for log in pair])


def expected_gradient(learner: Tensor, engine: Tensor, loss: PolicyLoss) -> Tensor:
    """Return the gradient that the learner's code computes, with respect to its logits."""
    table = learner.clone().requires_grad_()
    current, behaviour = logprobs(table), logprobs(engine)
    values = TokenValues(
        behaviour=behaviour,
        advantages=torch.tensor(REWARDS).double().repeat_interleave(2),
        fresh=torch.ones(18, dtype=torch.bool),
        old=current.detach() if loss.needs_old_logprobs else None,
    )
    old = current.detach()
    if loss.importance_level == "sequence":
        assert loss.importance_cap is not None
        weights = losses.call_importance_weight(old, behaviour, CALLS, loss.importance_cap)
        values = values._replace(call_importance=weights)
    if loss.importance_mask is not None:
        kept = losses.call_kept(old, behaviour, CALLS, loss.importance_mask)
        values = values._replace(call_kept=kept)
    metrics = MetricAccumulator(policy_gradient=True, rows=9)
    per_token = policy_losses(loss, values, current, torch.zeros(18).double(), metrics)
    chances = behaviour.view(9, 2).sum(-1).exp().repeat_interleave(2)
    (chances * per_token).sum().backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    return table.grad


def reference(
    learner: Tensor, engine: Tensor, cap: float = math.inf, mask: float = math.inf
) -> Tensor:
    """Return the expected gradient by formula: -Σ q(y) A(y) Σ_t min(ρ_t, cap) ∇log π(y_t).

    Answers with Π ρ_t above `mask` are left out.
    """
    pi, q = learner.softmax(-1), engine.softmax(-1)
    gradient = torch.zeros(4, 3).double()
    for (a, b), reward in zip(ANSWERS, REWARDS, strict=True):
        places = [(0, a), (1 + a, b)]
        ratios = [float(pi[place] / q[place]) for place in places]
        chance = math.prod(float(q[place]) for place in places)
        if math.prod(ratios) > mask:
            continue
        for (state, token), ratio in zip(places, ratios, strict=True):
            one = torch.nn.functional.one_hot(torch.tensor(token), 3).double()
            gradient[state] -= chance * reward * min(ratio, cap) * (one - pi[state])
    return gradient


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("cap", "mask"), [(1e9, None), (1.2, None), (1.2, 1.5), (None, 1.5)])
def test_truncation_and_mask(seed: int, cap: float | None, mask: float | None) -> None:
    learner, engine = logits(seed, 1.0), logits(seed, 1.0) + logits(100 + seed, 0.7)
    loss = PolicyLoss(importance_cap=cap, importance_mask=mask)
    limits: dict[str, Any] = {"cap": cap or 1.0, "mask": mask or math.inf}
    if cap is None:  # without a weight, each token counts once
        pi, q = logprobs(learner), logprobs(engine)
        kept = ((pi - q).view(9, 2).sum(-1) <= math.log(1.5)).double()
        assert 0 < kept.sum() < 9
        expected = _unweighted(learner, engine, kept)
    else:
        expected = reference(learner, engine, **limits)
    torch.testing.assert_close(expected_gradient(learner, engine, loss), expected)


def _unweighted(learner: Tensor, engine: Tensor, kept: Tensor) -> Tensor:
    table = learner.clone().requires_grad_()
    chances = logprobs(engine).view(9, 2).sum(-1).exp()
    per_answer = logprobs(table).view(9, 2).sum(-1)
    total = -(chances * kept * torch.tensor(REWARDS).double() * per_answer).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    return table.grad


def test_forced_tokens_do_not_change_the_ratio_of_gspo() -> None:
    """An answer has the same ratio with and without tokens that a grammar forces into it."""
    new, old = logprobs(logits(1, 1.0)), logprobs(logits(2, 1.0))
    plain = losses.call_ratios(new, old, CALLS)
    zeros = torch.zeros(9, 5).double()
    calls = torch.arange(9).repeat_interleave(7)
    forced = torch.tensor([False, False, *[True] * 5]).repeat(9)
    wide = [torch.cat([logs.view(9, 2), zeros], 1).flatten() for logs in (new, old)]
    ratios = losses.call_ratios(*wide, calls, forced)
    torch.testing.assert_close(ratios.view(9, 7)[:, :2].flatten(), plain)
    diluted = losses.call_ratios(*wide, calls)
    assert torch.all((diluted.log().abs() < ratios.log().abs()) | (ratios == 1))


def test_the_weight_of_a_call_without_a_cap_gives_the_gradient_of_the_expected_reward() -> None:
    """Check against ∇ Σ π(y) A(y), which knows nothing of the engine."""
    learner, engine = logits(7, 1.0), logits(8, 1.0)
    table = learner.clone().requires_grad_()
    chances = logprobs(table).view(9, 2).sum(-1).exp()
    (-(chances * torch.tensor(REWARDS).double()).sum()).backward()  # type: ignore[no-untyped-call]
    loss = PolicyLoss(importance_cap=1e9, importance_level="sequence")
    assert table.grad is not None
    torch.testing.assert_close(expected_gradient(learner, engine, loss), table.grad)
    # without a correction the ratio is clipped, which removes part of the gradient
    plain = expected_gradient(learner, engine, PolicyLoss())
    assert torch.dist(plain, table.grad) > 0.1 * table.grad.norm()


def test_only_the_embedded_engine_of_the_same_data_type_is_not_corrected(tmp_path: Path) -> None:
    models: Any = {"writer": tiny_model(tmp_path / "model", seed=0, hidden=32, context=64)}
    learner = TorchLearner(models).capabilities
    loss = PolicyLoss()
    assert loss.corrected(TransformersEngine(models).capabilities, learner) == loss
    narrow = TransformersEngine(models, dtype=torch.bfloat16).capabilities
    corrected = PolicyLoss(importance_cap=2.0, importance_mask=3.0)
    assert loss.corrected(narrow, learner) == corrected
    assert loss.corrected(EngineCapabilities(exact_tokens=True), learner) == corrected

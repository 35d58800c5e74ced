"""The loss formulas, checked against numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from lightspan import LoRA, Optimizer, PolicyLoss
from lightspan.errors import ConfigError
from lightspan.protocols.learner import FORM_DEFAULTS, LearnerCapabilities, SFTLoss
from lightspan_torch.learner import losses
from lightspan_torch.learner.metrics import MetricAccumulator
from lightspan_torch.learner.objective import TokenValues, policy_losses
from lightspan_torch.learner.policy_model import rate_factor

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def of_one_token(
    form: str, ratio: float, advantage: float, dual_clip: float | None = 3.0
) -> tuple[float, float, bool]:
    """Return a token's loss, its derivative by the log-probability, and whether it is clipped."""
    old = torch.tensor([-2.0], dtype=torch.float64)
    logprob = (old + math.log(ratio)).requires_grad_()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    if form == "gspo":
        of_call = torch.tensor([ratio], dtype=torch.float64)
        result = losses.gspo_loss(logprob, of_call, advantages, **CLIP)
    elif form == "cispo":
        result = losses.cispo_loss(logprob, old, advantages, **CLIP)
    else:
        result = losses.clipped_ratio_loss(logprob, old, advantages, dual_clip=dual_clip, **CLIP)
    result.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logprob.grad is not None
    assert float(result.ratio.detach()) == pytest.approx(ratio)
    return float(result.loss.detach()), float(logprob.grad), bool(result.clipped)


@pytest.mark.parametrize(
    ("form", "ratio", "advantage", "loss", "gradient"),
    [
        ("clip", 1.0, 2.0, -2.0, -2.0),
        ("clip", 1.2, 2.0, -2.4, -2.4),
        ("clip", 1.5, 2.0, -2.56, 0.0),  # above 1 + .28: no further up
        ("clip", 0.5, 2.0, -1.0, -1.0),  # unlikely and good: full pull
        ("clip", 0.9, -2.0, 1.8, 1.8),
        ("clip", 0.5, -2.0, 1.6, 0.0),  # below 1 - .2: no further down
        ("clip", 2.0, -2.0, 4.0, 4.0),
        ("clip", 4.0, -2.0, 6.0, 0.0),  # dual clip: at most 3 · 2
        ("clip", 4.0, 2.0, -2.56, 0.0),
        # clipped by the call's ratio; its gradient is the ratio's
        ("gspo", 1.0, 2.0, -2.0, -2.0),
        ("gspo", 1.2, 2.0, -2.4, -2.4),
        ("gspo", 1.5, 2.0, -2.56, 0.0),
        ("gspo", 0.5, -2.0, 1.6, 0.0),
        ("gspo", 4.0, -2.0, 8.0, 8.0),  # no dual clip
    ],
)
def test_a_clipped_token_has_no_gradient(
    form: str, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    expected = pytest.approx(loss), pytest.approx(gradient), gradient == 0
    assert of_one_token(form, ratio, advantage) == expected


def test_no_dual_clip() -> None:
    expected = pytest.approx(8.0), pytest.approx(8.0), False
    assert of_one_token("clip", 4.0, -2.0, dual_clip=None) == expected


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (1.0, 2.0, 1.0),
        (1.5, 2.0, 1.28),  # bounded, and still pulled
        (0.5, -2.0, 0.8),
        (0.5, 2.0, 0.8),
        (4.0, -2.0, 1.28),
    ],
)
def test_cispo(ratio: float, advantage: float, weight: float) -> None:
    """The loss is -clip(r) · A · log π, and clipped tokens keep their gradient."""
    gradient = -weight * advantage
    loss = gradient * (-2.0 + math.log(ratio))
    expected = pytest.approx(loss), pytest.approx(gradient), weight != ratio
    assert of_one_token("cispo", ratio, advantage) == expected


CALLS = torch.tensor([0, 0, 1, 0, 1])
"""Call number of each token, for tokens of two calls in mixed order."""
RATIOS = torch.tensor([2.0, 4.0, 0.5, 1.0, 2.0], dtype=torch.float64)
OLD = torch.tensor([-2.0, -3.0, -4.0, -5.0, -6.0], dtype=torch.float64)


def test_the_ratio_of_a_call_is_the_geometric_mean() -> None:
    """The two calls have the ratios (2 · 4 · 1)^(1/3) = 2 and (0.5 · 2)^(1/2) = 1."""
    logprobs = (OLD + RATIOS.log()).requires_grad_()
    ratios = losses.call_ratios(logprobs, OLD, CALLS)
    assert ratios.tolist() == pytest.approx([2.0, 2.0, 1.0, 2.0, 1.0])
    assert not ratios.requires_grad
    assert losses.call_ratios(OLD[:0], OLD[:0], CALLS[:0]).tolist() == []


def test_the_gradient_of_gspo_is_that_of_the_ratio() -> None:
    """Summed over a call's tokens, the token form has the gradient of max(-A·s, -A·clip(s))."""
    advantages = torch.tensor([2.0, 2.0, -1.0, 2.0, -1.0], dtype=torch.float64)
    wide = {"clip_low": 0.2, "clip_high": 3.0}
    logprobs = (OLD + RATIOS.log()).requires_grad_()
    ratios = losses.call_ratios(logprobs, OLD, CALLS)
    result = losses.gspo_loss(logprobs, ratios, advantages, **wide)
    (found,) = torch.autograd.grad(result.loss.sum(), logprobs)
    first = (logprobs[[0, 1, 3]] - OLD[[0, 1, 3]]).mean().exp()
    second = (logprobs[[2, 4]] - OLD[[2, 4]]).mean().exp()
    (expected,) = torch.autograd.grad(3 * -2.0 * first + 2 * 1.0 * second, logprobs)
    assert found.tolist() == pytest.approx(expected.tolist())
    assert found.tolist() == pytest.approx([-4.0, -4.0, 1.0, -4.0, 1.0])


def test_forced_tokens_do_not_shrink_the_gradient_of_gspo() -> None:
    """Check a call of four tokens, two of them forced, and one of six that are all forced.

    s = √(2 · 8) = 4 and A = 1: with weights of 1/4 the loss is -4, and the gradient of -s is -4/2
    for each of the two tokens. Forced tokens have no gradient, because their log π is constant.
    """
    calls = torch.tensor([0] * 4 + [1] * 6)
    forced = torch.tensor([False, True, False, True] + [True] * 6)
    old = torch.full((10,), -9.0, dtype=torch.float64)
    ratios = torch.tensor([2.0, 1.0, 8.0] + [1.0] * 7, dtype=torch.float64)
    logprobs = (old + ratios.log()).requires_grad_()
    of_call = losses.call_ratios(logprobs, old, calls, forced)
    scales = losses.call_scales(calls, forced)
    assert scales.tolist() == [2.0] * 4 + [6.0] * 6
    values = TokenValues(
        behaviour=old,
        advantages=torch.ones_like(old),
        fresh=torch.zeros(10, dtype=torch.bool),
        call_ratios=of_call,
        call_scales=scales,
    )
    loss = PolicyLoss(form="gspo", clip_low=0.2, clip_high=9.0)
    metrics = MetricAccumulator(True, 1)
    per_token = policy_losses(loss, values, logprobs, torch.zeros(10), metrics)
    total = per_token[:4].sum() / 4
    assert float(total.detach()) == pytest.approx(-4.0)
    (gradient,) = torch.autograd.grad(total, logprobs)
    assert gradient[:4][~forced[:4]].tolist() == pytest.approx([-2.0, -2.0])


def test_importance_weights_of_calls_are_products_truncated_and_constant() -> None:
    """2 · 4 · 1 = 8, which is capped at 3, and 0.5 · 0.5 = 0.25."""
    ratios = torch.tensor([2.0, 4.0, 0.5, 1.0, 0.5], dtype=torch.float64)
    old = (OLD + ratios.log()).requires_grad_()
    weight = losses.call_importance_weight(old, OLD, CALLS, cap=3.0)
    assert weight.tolist() == pytest.approx([3.0, 3.0, 0.25, 3.0, 0.25])
    assert not weight.requires_grad


def test_log_ratios_and_their_sums_are_clamped() -> None:
    """The product and the mean of many ratios stay finite."""
    big = torch.tensor([1000.0, -1000.0])
    assert losses.log_ratio(big, torch.zeros(2)).tolist() == [20.0, -20.0]
    far, calls = torch.full((100,), 1.0), torch.zeros(100, dtype=torch.int64)
    weight = losses.call_importance_weight(far, -far, calls, cap=1e12)
    assert weight.tolist() == pytest.approx([math.exp(20.0)] * 100)
    assert losses.call_ratios(-30 * far, far, calls)[0] == pytest.approx(math.exp(-20.0))


def test_importance_weights_are_truncated_and_constant() -> None:
    old = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    weight = losses.importance_weight(old, torch.tensor([-1.5, -3.0, -1.0]), cap=2.0)
    assert weight.tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-2.0)])
    assert not weight.requires_grad


POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
BASE = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)


def test_kl_estimators_on_three_tokens() -> None:
    """Each estimator's expectation over the policy is compared with the exact KL divergence."""
    expected = {"k2": 0.024862, "k3": 0.025267}
    exact = float((POLICY * (POLICY / BASE).log()).sum())
    for name, value in expected.items():
        found = losses.kl_divergence(POLICY.log(), BASE.log(), name)  # type: ignore[arg-type]
        assert float((POLICY * found).sum()) == pytest.approx(value, abs=5e-7)
    assert exact == pytest.approx(0.025267, abs=5e-7)


@pytest.mark.parametrize(("name", "right"), [("k2", True), ("k3", False)])
def test_expected_gradient_of_the_kl_estimators(name: str, right: bool) -> None:
    """As a loss, k2 has the gradient of the KL, and k3 that of the reverse KL."""
    logits = POLICY.log().requires_grad_()
    logp = logits.log_softmax(-1)
    (true,) = torch.autograd.grad((logp.exp() * (logp - BASE.log())).sum(), logits)
    logp = logits.log_softmax(-1)
    estimate = losses.kl_divergence(logp, BASE.log(), name)  # type: ignore[arg-type]
    (found,) = torch.autograd.grad((POLICY * estimate).sum(), logits)
    assert torch.allclose(found, true, atol=1e-12) is right
    if name == "k3":
        assert torch.allclose(found, POLICY - BASE, atol=1e-12)


def test_entropy() -> None:
    uniform = torch.zeros(2, 8).log_softmax(-1)
    assert losses.entropy(uniform).tolist() == pytest.approx([math.log(8)] * 2)
    certain = torch.tensor([[0.0, -math.inf, -math.inf]])
    assert losses.entropy(certain).tolist() == [0.0]


def test_the_gradient_of_entropy_where_most_is_impossible() -> None:
    """The gradient is -p (log p + H); it is 0 for a distribution with a single possible token."""
    logits = torch.tensor([[0.0, math.log(3), 5.0, 5.0], [2.0, 5.0, 5.0, 5.0]]).requires_grad_()
    impossible = torch.tensor([[False, False, True, True], [False, True, True, True]])
    spread = losses.entropy(logits.masked_fill(impossible, -math.inf).log_softmax(-1))
    mean = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert spread.tolist() == pytest.approx([mean, 0.0])
    spread.sum().backward()  # type: ignore[no-untyped-call]
    slope = 0.25 * (math.log(4) - mean)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([slope, -slope, 0.0, 0.0])
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (PolicyLoss, {"clip_low": -1}, "clip_low=-1 must be a finite number at least 0 and at"),
        (PolicyLoss, {"dual_clip": 0.5}, "dual_clip=0.5 must be a finite number above 1"),
        (PolicyLoss, {"form": "ppo"}, "form='ppo': use one of 'clip', 'gspo', 'cispo'"),
        (
            PolicyLoss,
            {"form": "gspo", "dual_clip": 3.0},
            "dual_clip=3.0 applies only to form='clip'",
        ),
        (PolicyLoss, {"form": "cispo", "clip_low": 10}, "clip_low=10 must be .* at most 1"),
        (
            PolicyLoss,
            {"importance_level": "sequence"},
            "importance_level='sequence' has no effect without importance_cap=: set that too",
        ),
        (PolicyLoss, {"kl": -0.1}, "kl=-0.1 must be a finite number at least 0"),
        (PolicyLoss, {"kl_estimator": "k1"}, "kl_estimator='k1': use one of 'k2', 'k3'"),
        (PolicyLoss, {"kl_estimator": "k2"}, "kl_estimator='k2' has no effect without kl=: set"),
        (
            PolicyLoss,
            {"correction": "off", "importance_cap": 2.0},
            "correction='off' has no effect with importance_cap= or importance_mask=.*: leave it",
        ),
        (PolicyLoss, {"correction": "off", "importance_mask": 2.0}, "correction='off' has no eff"),
        (LoRA, {"rank": 2.5}, "LoRA: rank=2.5 must be a whole number of at least 1"),
        (LoRA, {"alpha": 0}, "LoRA: alpha=0 must be a finite number above 0"),
        (LoRA, {"dropout": 1.0}, "dropout=1.0 must be a finite number at least 0 and below 1"),
        (LoRA, {"target_modules": ["q_proj", 1]}, r"target_modules=\['q_proj', 1\] must be names"),
        (LoRA, {"target_modules": ""}, "LoRA: target_modules='' must be names of layers"),
        (Optimizer, {"name": "sgd"}, "Optimizer: name='sgd': use one of 'adamw', 'muon'"),
        (
            Optimizer,
            {"muon_learning_rate": 0.1},
            "muon_learning_rate=0.1 has no effect with name='adamw': set learning_rate=, or name=",
        ),
        (Optimizer, {"learning_rate": math.nan}, "learning_rate=nan must be a finite number"),
        (Optimizer, {"betas": (0.9, 1.0)}, r"betas\[1\]=1.0 must be .* below 1"),
        (Optimizer, {"decay_steps": 0}, "decay_steps=0 must be at least 1"),
    ],
)
def test_impossible_settings(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


@pytest.mark.parametrize("given", [["q_proj", "v_proj"], {"v_proj", "q_proj"}])
def test_targets_in_any_sequence_are_the_same_adapters(given: Any) -> None:
    """Settings given as a list (PEFT's usual form) are equal to a tuple and have the same hash."""
    lora = LoRA(target_modules=given)
    assert lora == LoRA(target_modules=("q_proj", "v_proj"))
    assert len({lora, LoRA(target_modules=("q_proj", "v_proj"))}) == 1
    assert msgspec.convert(msgspec.to_builtins(lora), LoRA) == lora


def test_every_form_has_its_own_bounds() -> None:
    found = {form: PolicyLoss(form=form) for form in FORM_DEFAULTS}
    assert {form: (x.clip_low, x.clip_high, x.dual_clip) for form, x in found.items()} == {
        "clip": (0.2, 0.28, 3.0),
        "gspo": (3e-4, 4e-4, None),
        "cispo": (1.0, 4.0, None),
    }
    assert PolicyLoss() == PolicyLoss(form="clip", clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert PolicyLoss(form="gspo", clip_low=0.1).clip_high == 4e-4
    with pytest.raises(ConfigError, match=r"dual_clip=3.0 applies only to form='clip'"):
        msgspec.structs.replace(PolicyLoss(), form="cispo")


def test_what_a_learner_refuses_of_a_loss() -> None:
    plain = LearnerCapabilities(kl=False, entropy=False)
    assert plain.refusals(PolicyLoss()) == plain.refusals(SFTLoss()) == []
    loss = PolicyLoss(
        form="gspo", kl=0.1, entropy=0.1, importance_cap=2.0, importance_level="sequence"
    )
    assert plain.refusals(loss) == [
        "the loss form 'gspo' (PolicyLoss.form)",
        "a KL term (PolicyLoss.kl)",
        "an entropy bonus (PolicyLoss.entropy)",
        "importance weights per sequence (PolicyLoss.importance_level)",
    ]
    whole = LearnerCapabilities(
        loss_forms=("clip", "gspo"), importance_levels=("token", "sequence")
    )
    assert whole.refusals(loss) == []


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({}, [1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1]),
        ({"decay_steps": 4}, [1, 0.7625, 0.525, 0.2875, 0.05, 0.05]),
        ({"warmup_steps": 1, "decay_steps": 4}, [1, 0.7625, 0.525, 0.2875, 0.05, 0.05]),
        ({"warmup_steps": 2, "decay_steps": 2}, [0.5, 1, 0.525, 0.05, 0.05]),
        ({"decay_steps": 1}, [1, 0.05, 0.05]),
    ],
)
def test_factors_of_the_learning_rate(options: dict[str, int], factors: list[float]) -> None:
    """The peak is reached, and the factor depends on nothing but the number of earlier steps."""
    settings = Optimizer(**options)  # type: ignore[arg-type]
    assert [rate_factor(settings, step) for step in range(len(factors))] == pytest.approx(factors)

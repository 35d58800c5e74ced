"""The gradient of distillation is that of the reverse KL, enumerated over a small vocabulary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightspan.lightning.advantages import Explanation
from lightspan.lightning.rows import Response, Row
from lightspan.protocols.learner import PolicyLoss
from lightspan_torch.distill.reverse_kl import (
    LOG_RATIO_LIMIT,
    baselines,
    distil,
    log_ratio,
    weighted,
    with_advantages,
    without_reward,
)
from lightspan_torch.learner.losses import reverse_kl
from lightspan_torch.learner.token_losses import FrozenStates
from lightspan_torch.learner.torch import TorchLearner
from packages.torch.tests.learner.gradients import gradients, make_model

VOCABULARY, LENGTH, TEMPERATURE = 6, 2, 0.7
PROMPT = [1, 4, 2]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
}
ANSWERS = list(itertools.product(range(VOCABULARY), repeat=LENGTH))


def make_rows(temperature: float = TEMPERATURE) -> list[Row]:
    """Return a row for each answer of `LENGTH` tokens."""
    size, before = len(PROMPT) + LENGTH, [0.0] * len(PROMPT)
    return [
        Row(
            rollout_id=f"ro-{number}",
            policy="writer",
            ids=[*PROMPT, *answer],
            mask=[False] * len(PROMPT) + [True] * LENGTH,
            advantages=[0.0] * size,
            weights=[0.0] * size,
            logprobs=[0.0] * size,
            versions=[0] * size,
            temperatures=[1.0] * len(before) + [temperature] * LENGTH,
            call_ids=(("call", 0),),
            responses=(Response(len(PROMPT), LENGTH),),
        )
        for number, answer in enumerate(ANSWERS)
    ]


def explain(rows: list[Row], **values: Any) -> dict[Any, Explanation]:
    plain = {
        "group_id": "g",
        "agent_path": "writer",
        "estimator": "grpo",
        "unit": "rollout",
        "credit_rule": "terminal",
        "weighting": "token",
        "credit": 0.0,
        "value": 0.0,
        "baseline": 0.0,
        "scale": 1.0,
        "size": 1,
        "zero_reason": None,
        "tokens": LENGTH,
        "token_weight": 1.0,
        "share": 1.0,
        **values,
    }
    return {
        (f"at-{row.rollout_id}", "call", 0): Explanation(rollout_id=row.rollout_id, **plain)
        for row in rows
    }


def all_logprobs(model: Any, answers: Tensor, temperature: float) -> Tensor:
    """Return [answers, LENGTH, VOCABULARY] log-probabilities of the next token."""
    prompt = torch.tensor([PROMPT]).expand(len(answers), -1)
    logits = model(input_ids=torch.cat([prompt, answers], 1), use_cache=False).logits
    return (logits[:, len(PROMPT) - 1 : -1].double() / temperature).log_softmax(-1)


def of_tokens(logprobs: Tensor, answers: Tensor) -> Tensor:
    return logprobs.gather(-1, answers[..., None])[..., 0]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Return a student and a teacher with other weights, in float64."""
    return (
        make_model("Qwen2", 0, **SIZES).double(),
        make_model("Qwen2", 1, **SIZES).double(),
    )


def expected_gradient(models: tuple[Any, Any]) -> Tensor:
    """Return the gradient of Σ_t E[KL(p(·|s_t) ‖ q(·|s_t))], prefixes s_t not differentiated."""
    student, teacher = models
    answers = torch.tensor(ANSWERS)
    p = all_logprobs(student, answers, TEMPERATURE)
    with torch.no_grad():
        q = all_logprobs(teacher, answers, TEMPERATURE)
        chance = of_tokens(p, answers).sum(-1).exp()
    divergence = (p.exp() * (p - q)).sum(-1)
    parameters = list(student.parameters())
    parts = torch.autograd.grad((chance[:, None] * divergence).sum(), parameters, allow_unused=True)
    return flat(dict(zip([n for n, _ in student.named_parameters()], parts, strict=True)))


def flat(by_name: dict[str, Any]) -> Tensor:
    tensors = [by_name[name] for name in sorted(by_name)]
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


def sampled_gradient(
    models: tuple[Any, Any],
    *,
    teacher_temperature: float = TEMPERATURE,
    student_temperature: float = TEMPERATURE,
    change: Callable[[float], float] = lambda advantage: advantage,
    is_return: bool = False,
    has_baseline: bool = False,
) -> Tensor:
    """Return the expected gradient of what the algorithm trains, over all answers.

    Args:
        models: student and teacher.
        teacher_temperature: temperature of the teacher's log-probabilities.
        student_temperature: temperature of the student's log-probabilities in the advantage.
        change: changes the advantage of a token.
        is_return: whether the advantage of a token also has those of later tokens.
        has_baseline: whether another rollout, of any answer, gives the baseline.
    """
    student, teacher = models
    learner = TorchLearner({"writer": student}, dtype=torch.float64)
    frozen = TorchLearner({"writer": teacher}, dtype=torch.float64)
    rows = make_rows()
    scores = frozen.score_trained(make_rows(teacher_temperature)).logprobs
    own = learner.score_trained(make_rows(student_temperature)).logprobs
    behaviour = learner.score_trained(rows).logprobs
    for row, logprobs in zip(rows, behaviour, strict=True):
        row.logprobs[:] = logprobs
        row.weights[:] = [math.exp(math.fsum(logprobs))] * len(row.ids)
    if has_baseline:
        trained = with_another(rows, scores, own, behaviour)
    else:
        whys = explain(rows)  # each row alone, so that its baseline is 0
        parts = zip(rows, scores, own, strict=True)
        trained = [distil([row], [q], [p], whys).rows[0] for row, q, p in parts]
    for row in trained:
        values = [change(value) for value in row.advantages]
        if is_return:
            values = [math.fsum(values[place:]) for place in range(len(values))]
        row.advantages[:] = values
    _, by_name = gradients(learner, trained, PolicyLoss(dual_clip=None))
    return flat(by_name)


def with_another(
    rows: list[Row], teacher: Any, student: Any, logprobs: list[list[float]]
) -> list[Row]:
    """Return the rows with the mean of the advantages that each has beside another rollout."""
    whys = explain(rows)
    chances = [math.exp(math.fsum(values)) for values in logprobs]
    results = []
    for first, row in enumerate(rows):
        values = [0.0] * len(row.ids)
        for second, chance in enumerate(chances):
            both = [row, replace(rows[second], rollout_id="another")]
            why = next(iter(whys.values()))
            others = {("at-another", "call", 0): msgspec.structs.replace(why, rollout_id="another")}
            pair = [first, second]
            scores, own = ([each[place] for place in pair] for each in (teacher, student))
            done = distil(both, scores, own, {**whys, **others})
            added = done.rows[0].advantages
            values = [value + chance * more for value, more in zip(values, added, strict=True)]
        results.append(replace(row, advantages=values))
    return results


def distance(gradient: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a share of the largest expected value."""
    return float((gradient - expected).abs().max() / expected.abs().max())


def test_the_expected_gradient_is_that_of_the_reverse_kl(models: tuple[Any, Any]) -> None:
    expected = expected_gradient(models)
    assert float(expected.abs().max()) > 0.01
    assert distance(sampled_gradient(models), expected) < 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        {"teacher_temperature": 1.0},
        {"student_temperature": 1.0},
        {"change": lambda advantage: -advantage},
        {"change": lambda advantage: math.exp(advantage)},  # the forward KL's weights
        {"is_return": True},  # the divergence of whole answers
    ],
    ids=["teacher at 1", "student at 1", "sign", "forward", "returns"],
)
def test_other_ways_have_another_gradient(models: tuple[Any, Any], wrong: dict[str, Any]) -> None:
    assert distance(sampled_gradient(models, **wrong), expected_gradient(models)) > 0.01


def test_the_baseline_changes_no_expected_gradient(models: tuple[Any, Any]) -> None:
    """Check every pair of two rollouts, each of which is the other's baseline."""
    gradient = sampled_gradient(models, has_baseline=True)
    assert distance(gradient, expected_gradient(models)) < 1e-6


# --- the whole vocabulary ------------------------------------------------------------------------
def states_of(model: Any, rows: list[Row]) -> FrozenStates:
    """Return what a teacher's distributions are computed from."""
    frozen = TorchLearner({"teacher": model}, dtype=torch.float64)
    scores = frozen.score_trained([replace(row, policy="teacher") for row in rows])
    return FrozenStates(scores.states, frozen.logits_of("teacher"))


def taught_gradient(student: Any, teacher: Any, rows: list[Row]) -> tuple[dict[str, float], Tensor]:
    """Return the metrics and the gradient of an update with the divergence from the teacher."""
    learner = TorchLearner({"writer": student}, dtype=torch.float64)
    with learner.taught(states_of(teacher, rows)):
        metrics, by_name = gradients(learner, rows, PolicyLoss())
    return metrics, flat(by_name)


def divergence_of(
    student: Any, teacher: Any, answers: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return [answers, LENGTH] KL(p‖q), and the gradient of Σ weight · KL by torch's autograd."""
    p = all_logprobs(student, answers, TEMPERATURE)
    with torch.no_grad():
        q = all_logprobs(teacher, answers, TEMPERATURE)
    divergence = (p.exp() * (p - q)).sum(-1)
    names = [name for name, _ in student.named_parameters()]
    parameters = list(student.parameters())
    total = (weights[:, None] * divergence).sum()
    parts = torch.autograd.grad(total, parameters, allow_unused=True)
    return divergence.detach(), flat(dict(zip(names, parts, strict=True)))


def test_the_gradient_over_the_vocabulary_needs_no_expectation(models: tuple[Any, Any]) -> None:
    """Every answer by itself has the gradient of the divergences at its prefixes."""
    for place in (0, 17, 35):
        row = replace(make_rows()[place], weights=[1.0] * (len(PROMPT) + LENGTH))
        metrics, gradient = taught_gradient(*models, [row])
        divergence, expected = divergence_of(
            *models, torch.tensor([ANSWERS[place]]), torch.ones(1, dtype=torch.float64)
        )
        assert distance(gradient, expected) < 1e-6
        assert metrics["reverse_kl"] == pytest.approx(float(divergence.mean()), rel=1e-6)
        assert metrics["loss"] == pytest.approx(float(divergence.sum()), rel=1e-6)


def weighted_rows(student: Any) -> list[Row]:
    """Return all rows, each with the probability of its answer as its weight."""
    rows = make_rows()
    learner = TorchLearner({"writer": student}, dtype=torch.float64)
    for row, logprobs in zip(rows, learner.score_trained(rows).logprobs, strict=True):
        row.logprobs[:] = logprobs
        row.weights[:] = [math.exp(math.fsum(logprobs))] * len(row.ids)
    return rows


def test_both_estimates_have_the_same_expected_gradient(models: tuple[Any, Any]) -> None:
    """Rows that share prefixes, in trees, against sampled tokens."""
    _, gradient = taught_gradient(*models, weighted_rows(models[0]))
    assert distance(gradient, expected_gradient(models)) < 1e-6
    assert distance(gradient, sampled_gradient(models)) < 1e-6


def test_the_reward_is_added_to_the_divergence(models: tuple[Any, Any]) -> None:
    rows = weighted_rows(models[0])
    for number, row in enumerate(rows):
        row.advantages[:] = [number % 3 - 1.0] * len(row.ids)
    _, both = taught_gradient(*models, rows)
    learner = TorchLearner({"writer": models[0]}, dtype=torch.float64)
    of_reward = flat(gradients(learner, rows, PolicyLoss())[1])
    assert float(of_reward.abs().max()) > 0.01
    assert distance(both, of_reward + expected_gradient(models)) < 1e-6


@pytest.mark.parametrize("sizes", [(VOCABULARY, VOCABULARY + 3), (VOCABULARY + 3, VOCABULARY)])
def test_a_teacher_with_another_number_of_unused_tokens(sizes: tuple[int, int]) -> None:
    """Families pad their vocabularies to different sizes; no answer has an unused token."""
    student, teacher = (
        make_model("Qwen2", seed, **{**SIZES, "vocab_size": size}).double()
        for seed, size in enumerate(sizes)
    )
    rows, answers = weighted_rows(student), torch.tensor(ANSWERS)
    p = all_logprobs(student, answers, TEMPERATURE)
    with torch.no_grad():
        q = all_logprobs(teacher, answers, TEMPERATURE)[..., : sizes[0]].log_softmax(-1)
        q = pad(q, (0, sizes[0] - q.shape[-1]), value=-math.inf)
        ratios = (p - q).clamp(max=LOG_RATIO_LIMIT)
        weights = torch.tensor([row.weights[-1] for row in rows], dtype=torch.float64)
    total = (weights[:, None, None] * p.exp() * ratios).sum()
    parts = torch.autograd.grad(total, list(student.parameters()), allow_unused=True)
    names = [name for name, _ in student.named_parameters()]
    _, gradient = taught_gradient(student, teacher, rows)
    assert distance(gradient, flat(dict(zip(names, parts, strict=True)))) < 1e-5


def test_after_the_block_nothing_is_taught(models: tuple[Any, Any]) -> None:
    learner = TorchLearner({"writer": models[0]}, dtype=torch.float64)
    rows = weighted_rows(models[0])
    with learner.taught(states_of(models[1], rows)):
        assert "reverse_kl" in gradients(learner, rows, PolicyLoss())[0]
    metrics, by_name = gradients(learner, rows, PolicyLoss())
    assert "reverse_kl" not in metrics
    assert float(flat(by_name).abs().max()) == 0.0


def test_scaled_logits_have_no_states() -> None:
    """A model that scales the output layer's result, whose teacher scores sampled tokens only."""
    capped = make_model("Gemma2", 0, **{**SIZES, "num_hidden_layers": 2})
    learner = TorchLearner({"writer": capped})
    scores = learner.score_trained(make_rows())
    assert scores.states == {}
    every = learner.score(make_rows())
    assert scores.logprobs[7][-1] == pytest.approx(every[7][-1], abs=1e-5)


def test_a_grammar_leaves_forbidden_tokens_out() -> None:
    forbidden = torch.tensor([[False, False, True]])
    logits = torch.tensor([[0.25, 0.75, 1.0]], dtype=torch.float64).log().requires_grad_()
    p = logits.masked_fill(forbidden, -math.inf).log_softmax(-1)
    q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    value = reverse_kl(p, q).sum()
    value.backward()  # type: ignore[no-untyped-call]
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert value.item() == pytest.approx(expected)
    assert logits.grad is not None
    wish = [0.25 * (math.log(0.5) - expected), 0.75 * (math.log(1.5) - expected), 0.0]
    assert logits.grad[0].tolist() == pytest.approx(wish)


def test_trained_tokens_are_scored_as_all_tokens_are(models: tuple[Any, Any]) -> None:
    learner = TorchLearner({"writer": models[0]}, dtype=torch.float64)
    rows = make_rows()
    own, every = learner.score_trained(rows).logprobs, learner.score(rows)
    for row, few, many in zip(rows, own, every, strict=True):
        assert few[: len(PROMPT)] == [0.0] * len(PROMPT)
        assert few[len(PROMPT) :] == pytest.approx(many[len(PROMPT) :], abs=1e-6)
        assert len(few) == len(row.ids)


def test_advantages_metrics_and_explanations() -> None:
    rows = make_rows()[:2]
    whys = explain(rows, credit=3.0, baseline=1.0, scale=2.0)  # an advantage of 1
    whys = {key: weighted(why, 0.5) for key, why in whys.items()}
    rows = [*with_advantages(rows, whys)]
    assert rows[0].advantages == [0.0] * 3 + [0.5] * 2
    teacher = [[0.0, 0.0, 0.0, -1.0, -9.0], [0.0, 0.0, 0.0, -1.0, -math.inf]]
    student = [[0.0, 0.0, 0.0, -0.5, -1.0], [0.0, 0.0, 0.0, -1.0, -2.0]]
    done = distil(rows, teacher, student, whys)
    first, second = (-0.5 - 8.0) / 2, -LOG_RATIO_LIMIT / 2
    expected = [0.5 - 0.5 - second, 0.5 - 8.0 - second]
    assert done.rows[0].advantages == pytest.approx([0.0] * 3 + expected)
    expected = [0.5 - first, 0.5 - LOG_RATIO_LIMIT - first]
    assert done.rows[1].advantages == pytest.approx([0.0] * 3 + expected)
    assert done.metrics == {
        "reverse_kl": pytest.approx((8.5 + LOG_RATIO_LIMIT) / 4),
        "improbable": 2 / 4,
        "tokens": 4.0,
    }
    for row, why in zip(done.rows, done.explanations.values(), strict=True):
        assert why.advantage == pytest.approx(math.fsum(row.advantages) / LENGTH)
        assert [term.name for term in why.terms] == ["teacher", "teacher, other rollouts"]
    bare = without_reward(next(iter(whys.values())))
    assert bare.advantage == 0.0


def test_the_baseline_is_of_other_rollouts_of_the_policy() -> None:
    rows = make_rows()[:4]
    rows[1] = replace(rows[1], rollout_id=rows[0].rollout_id)
    rows[3] = replace(rows[3], policy="other")
    assert baselines(rows, [[1.0, 2.0], [3.0], [5.0], [9.0]]) == [5.0, 5.0, 2.0, 0.0]


def test_the_log_ratio_is_clamped() -> None:
    assert log_ratio(-math.inf, -1.0) == -LOG_RATIO_LIMIT
    assert log_ratio(-1.0, -math.inf) == LOG_RATIO_LIMIT
    assert log_ratio(-1.0, -2.5) == 1.5

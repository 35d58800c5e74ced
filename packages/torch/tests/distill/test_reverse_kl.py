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
    scores = frozen.score_trained(make_rows(teacher_temperature))
    own = learner.score_trained(make_rows(student_temperature))
    behaviour = learner.score_trained(rows)
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


def test_trained_tokens_are_scored_as_all_tokens_are(models: tuple[Any, Any]) -> None:
    learner = TorchLearner({"writer": models[0]}, dtype=torch.float64)
    rows = make_rows()
    own, every = learner.score_trained(rows), learner.score(rows)
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

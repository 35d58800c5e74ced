"""Losses of whole calls through `TorchLearner.update`: against finite differences of the formulas
written plainly in float64, where a call's tokens are spread over parts and passes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightspan.errors import DataError
from lightspan.lightning import (
    Selection,
    build_episode,
    build_rows,
    classify_calls,
    trained_transitions,
)
from lightspan.lightning.rows import Response, Row
from lightspan.protocols.learner import LoRA, PolicyLoss
from lightspan_testing.learner_suite import make_call_rows
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner import token_losses
from lightspan_torch.learner.call_index import number_calls
from lightspan_torch.learner.torch import TorchLearner

Scores = Sequence[Mapping[int, float]]
"""For each row, the log-probability of each trained token, by place."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("calls") / "model", seed=4, hidden=32, context=128)


# --- the formulas, plainly ----------------------------------------------------------------------


def float64_model(folder: Path) -> Any:
    """The model with nothing rounded to float32 on the way, as its norms otherwise do."""
    model = load_model(folder, dtype=torch.float64)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    assert model.config._attn_implementation == "sdpa"
    return model


def _norm(module: Any, hidden: Tensor) -> Tensor:
    mean = hidden.square().mean(-1, keepdim=True)
    scaled: Tensor = module.weight * hidden * torch.rsqrt(mean + module.variance_epsilon)
    return scaled


@torch.no_grad()
def scores_of(model: Any, rows: Sequence[Row]) -> list[dict[int, float]]:
    scores = []
    for row in rows:
        logits = model(torch.tensor([row.ids])).logits[0]
        scores.append(
            {
                place: float((logits[place - 1] / row.temperatures[place]).log_softmax(-1)[token])
                for place, token in enumerate(row.ids)
                if row.mask[place]
            }
        )
    return scores


def plain_loss(
    rows: Sequence[Row], loss: PolicyLoss, scores: Scores, old: Scores, anchor: Scores
) -> float:
    """Σ weight · loss, call by call.

    Args:
        anchor: the scores at the weights whose gradient is meant: what the formulas take without
            gradient is of these.
    """
    total = 0.0
    for row, now, before, at in zip(rows, scores, old, anchor, strict=True):
        for start, length in row.responses:
            call = range(start, start + length)
            sequence = math.exp(sum(now[t] - before[t] for t in call) / length)
            product = math.exp(sum(before[t] - row.logprobs[t] for t in call))
            for t in call:
                value = token_loss(row.advantages[t], now[t], before[t], at[t], sequence, loss)
                if loss.importance_cap is not None:
                    token = math.exp(before[t] - row.logprobs[t])
                    weight = token if loss.importance_level == "token" else product
                    value *= min(weight, loss.importance_cap)
                total += row.weights[t] * value
    return total


def token_loss(
    advantage: float, now: float, before: float, anchor: float, sequence: float, loss: PolicyLoss
) -> float:
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    if loss.form == "cispo":
        return -min(max(math.exp(anchor - before), low), high) * advantage * now
    ratio = sequence if loss.form == "gspo" else math.exp(now - before)
    value = max(-advantage * ratio, -advantage * min(max(ratio, low), high))
    if advantage < 0 and loss.dual_clip is not None:
        value = min(value, -loss.dual_clip * advantage)
    return value


def gradient_of(learner: TorchLearner, update: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(each parameter's gradient, the metrics) of an update that is not taken."""
    caught: dict[str, Tensor] = {}
    stepper = learner._steppers["writer"]

    def catch() -> float:
        for name, parameter in stepper._parameters.items():
            assert parameter.grad is not None
            caught[name] = parameter.grad.double().clone()
        return math.nan  # the step is skipped

    stepper.clip = catch  # type: ignore[method-assign]
    metrics = update(learner)
    return caught, metrics


def earlier(scores: Scores, rng: random.Random) -> list[dict[int, float]]:
    """Scores from before some updates."""
    moved = []
    for row in scores:
        by = rng.uniform(-0.2, 0.2)
        moved.append({t: x + by + rng.uniform(-0.2, 0.2) for t, x in row.items()})
    return moved


def as_lists(rows: Sequence[Row], scores: Scores) -> list[list[float]]:
    pairs = zip(rows, scores, strict=True)
    return [[found.get(place, 0.0) for place in range(len(row.ids))] for row, found in pairs]


LOSSES = [
    PolicyLoss(dual_clip=1.4),
    PolicyLoss(form="gspo"),
    PolicyLoss(form="gspo", clip_low=0.15, clip_high=0.15),
    PolicyLoss(form="gspo", clip_low=1.0, clip_high=50.0),
    PolicyLoss(form="cispo"),
    PolicyLoss(form="cispo", clip_low=0.2, clip_high=0.2),
    PolicyLoss(importance_cap=1.2),
    PolicyLoss(importance_cap=1.2, importance_level="sequence"),
    PolicyLoss(
        form="gspo",
        clip_low=0.15,
        clip_high=0.15,
        importance_cap=1.2,
        importance_level="sequence",
    ),
    PolicyLoss(form="cispo", importance_cap=1.2, importance_level="sequence"),
]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.form}-{loss.importance_level}")
@pytest.mark.parametrize(("budget", "logits"), [(2048, 2**24), (16, 3 * 405), (2048, 405)])
def test_the_gradient_is_that_of_finite_differences(
    folder: Path, monkeypatch: pytest.MonkeyPatch, loss: PolicyLoss, budget: int, logits: int
) -> None:
    """Along its own direction and five random ones. With 405 logits at once every token is a part
    by itself; with 16 tokens at once a call of 60 is cut over four passes."""
    monkeypatch.setattr(token_losses, "LOGITS", logits)
    rows = make_call_rows(load_model(folder))
    model = float64_model(folder)
    anchor = scores_of(model, rows)
    behaviour = [dict(enumerate(row.logprobs)) for row in rows]
    old = behaviour if loss.importance_cap is None else earlier(anchor, random.Random(3))
    given = None if loss.importance_cap is None else as_lists(rows, old)
    gradient, metrics = gradient_of(
        TorchLearner({"writer": folder}, token_budget=budget),
        lambda learner: learner.update(rows, loss, old_logprobs=given),
    )
    value = plain_loss(rows, loss, anchor, old, anchor)
    assert metrics["loss"] == pytest.approx(value, rel=1e-4, abs=1e-6)
    parameters = dict(model.named_parameters())
    size = math.sqrt(sum(float(part.square().sum()) for part in gradient.values()))
    assert size > 0
    generator = torch.Generator().manual_seed(0)
    directions = [{name: part / size for name, part in gradient.items()}]
    for _ in range(5):
        drawn = {
            name: torch.randn(part.shape, generator=generator, dtype=torch.float64)
            for name, part in gradient.items()
        }
        length = math.sqrt(sum(float(part.square().sum()) for part in drawn.values()))
        directions.append({name: part / length for name, part in drawn.items()})
    for direction in directions:
        found = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.add_(direction[name], alpha=step)
                found.append(plain_loss(rows, loss, scores_of(model, rows), old, anchor))
                for name, parameter in parameters.items():
                    parameter.sub_(direction[name], alpha=step)
        difference = (found[0] - found[1]) / 2e-6
        along = sum(float((gradient[name] * direction[name]).sum()) for name in gradient)
        assert along == pytest.approx(difference, abs=1e-5 * size)


# --- what is the torch learner's own ------------------------------------------------------------


def test_a_call_s_ratio_has_the_dropout_of_the_update(folder: Path) -> None:
    """Where every call has one token its ratio is that token's, so both forms say the same, and
    would not if the scores before the update were made without dropout, or with another draw."""
    rows = [
        replace(row, responses=tuple(Response(t, 1) for t, m in enumerate(row.mask) if m))
        for row in make_call_rows(load_model(folder))
    ]
    found = []
    for form in ("clip", "gspo"):
        learner = TorchLearner({"writer": folder}, lora=LoRA(rank=4, dropout=0.5))
        learner.update(rows, PolicyLoss())  # the adapters begin at zero, where nothing is dropped
        loss = PolicyLoss(form=form, clip_low=0.2, clip_high=0.28, dual_clip=None)  # type: ignore[arg-type]
        found.append(learner.update(rows, loss))
    for name in ("loss", "ratio_mean", "ratio_max", "clip_fraction"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5), name
    other = TorchLearner({"writer": folder}, lora=LoRA(rank=4, dropout=0.5), seed=1)
    other.update(rows, PolicyLoss())
    assert other.update(rows, PolicyLoss())["ratio_max"] != pytest.approx(
        found[0]["ratio_max"], rel=1e-5
    )


def test_an_update_of_calls_draws_as_any_other(folder: Path) -> None:
    """The forward pass before it leaves the learner's random state as it was."""
    rows = make_call_rows(load_model(folder))
    hashes = []
    for first in (PolicyLoss(clip_low=0, clip_high=0), PolicyLoss(form="gspo")):
        learner = TorchLearner({"writer": folder}, lora=LoRA(rank=4, dropout=0.5))
        learner.update([replace(row, weights=[0.0] * len(row.ids)) for row in rows], first)
        learner.update(rows, PolicyLoss())
        hashes.append(learner.weight_hash("writer"))
    assert hashes[0] == hashes[1]


def row_of(responses: tuple[Response, ...], size: int = 8) -> Row:
    return Row(
        rollout_id="ro-7",
        policy="writer",
        ids=list(range(size)),
        mask=[place >= 2 for place in range(size)],
        advantages=[0.0] * size,
        weights=[0.0] * size,
        logprobs=[0.0] * size,
        versions=[0] * size,
        temperatures=[1.0] * size,
        responses=responses,
    )


def test_calls_are_numbered_over_rows() -> None:
    """The second row's calls are others; a call without a selected-at token keeps its number."""
    rows = [
        row_of((Response(2, 2), Response(4, 1), Response(6, 2))),
        row_of((Response(3, 3),)),
    ]
    assert number_calls(rows, [[2, 3, 6, 7], [3, 5]], "x") == [0, 0, 2, 2, 3, 3]


def test_built_rows_say_where_their_calls_are() -> None:
    """Two calls in one row, the second without a token of prompt of its own, and one in another."""
    records = [
        make_record("c1", [1, 2], [3, 4], (1, 2)),
        make_record("c2", [1, 2, 3, 4], [5], (3, 4)),
        make_record("c3", [1, 9], [3, 4], (5, 6)),
    ]
    episode = build_episode(make_attempt(), make_rollout(), [], records)
    coverage = classify_calls(episode, Selection.of("*").routing)
    rows = build_rows(trained_transitions(episode, coverage)).rows
    selected = [[place for place, trained in enumerate(row.mask) if trained] for row in rows]
    assert selected == [[2, 3, 4], [2, 3]]
    assert number_calls(rows, selected, "form='gspo'") == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ((), r"has no call for its token 2 \(Row.responses\), which form='gspo' needs"),
        ((Response(2, 2), Response(5, 3)), "its token 4 "),
        ((Response(2, 4), Response(5, 3)), "a call of 3 of them from place 5: outside the row, or"),
        ((Response(2, 7),), "has 8 ids and a call of 7 of them from place 2"),
        ((Response(2, 0), Response(2, 6)), "a call of 0 of them"),
    ],
)
def test_a_row_that_is_wrong_about_its_calls_is_named(
    responses: tuple[Response, ...], message: str
) -> None:
    with pytest.raises(DataError, match=f"rollout ro-7 .*{message}"):
        number_calls([row_of(responses)], [[2, 3, 4, 5, 6, 7]], "form='gspo'")

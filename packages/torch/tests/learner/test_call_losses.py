"""Losses over whole calls in `TorchLearner.update`: dropout, and the numbering of calls."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightspan.errors import DataError
from lightspan.lightning.rows import Response, Row
from lightspan.protocols.learner import LoRA, PolicyLoss
from lightspan_testing.learner_suite import make_call_rows
from lightspan_testing.learner_suite.rows import random_row
from lightspan_testing.tiny import tiny_model
from lightspan_torch.engine.weights import load_model
from lightspan_torch.learner.call_index import number_calls
from lightspan_torch.learner.torch import TorchLearner

"""For each row, the log-probability of each trained token, by place."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("calls") / "model", seed=4, hidden=32, context=128)


# --- what is the torch learner's own ------------------------------------------------------------


def test_a_call_s_ratio_has_the_dropout_of_the_update(folder: Path) -> None:
    """Ratios of calls are computed with the same dropout draw as the update.

    Each call has one token, so "gspo" and "clip" must give equal metrics. They would not if the
    scores before the update were computed without dropout, or with another draw.
    """
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
    """The extra forward pass of a loss over calls leaves the learner's random state unchanged."""
    rows = make_call_rows(load_model(folder))
    hashes = []
    for first in (PolicyLoss(clip_low=0, clip_high=0), PolicyLoss(form="gspo")):
        learner = TorchLearner({"writer": folder}, lora=LoRA(rank=4, dropout=0.5))
        learner.update([replace(row, weights=[0.0] * len(row.ids)) for row in rows], first)
        learner.update(rows, PolicyLoss())
        hashes.append(learner.weight_hash("writer"))
    assert hashes[0] == hashes[1]


def row_of(responses: tuple[Response, ...], size: int = 8) -> Row:
    row = random_row(list(range(size)), random.Random(0), "ro-7", "writer")
    return replace(row, mask=[place >= 2 for place in range(size)], responses=responses)


def test_calls_are_numbered_over_rows() -> None:
    """Numbers go on in the second row; a call without a selected token still takes a number."""
    rows = [
        row_of((Response(2, 2), Response(4, 1), Response(6, 2))),
        row_of((Response(3, 3),)),
    ]
    assert number_calls(rows, [[2, 3, 6, 7], [3, 5]], "x") == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ((), r"has no call for its token 2 \(Row.responses\), which form='gspo' needs"),
        ((Response(2, 4), Response(5, 3)), "a call of 3 of them from place 5: outside the row, or"),
        ((Response(2, 7),), "has 8 ids and a call of 7 of them from place 2"),
    ],
)
def test_rows_that_are_wrong_about_calls(responses: tuple[Response, ...], message: str) -> None:
    with pytest.raises(DataError, match=f"rollout ro-7 .*{message}"):
        number_calls([row_of(responses)], [[2, 3, 4, 5, 6, 7]], "form='gspo'")

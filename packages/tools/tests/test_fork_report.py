"""Test the report of `lightspan fork` without a run."""

from __future__ import annotations

import json
import math

import pytest

from lightspan_tools.forking.report import (
    CallReport,
    Continuation,
    ForkReport,
    Loss,
    PointReport,
    interval_of,
    shortened,
)

ODD = "a\x07b\x7fc\x85\ud83d".encode("utf-8", "replace").decode() + "\n  d"


def point(number: int, rewards: list[float], *, again: bool = False) -> PointReport:
    rows = tuple(
        Continuation(
            rollout_id=f"f-{n}", reward=r, answer=ODD, sampled=2, repeated=3, tokens=8, tools=1
        )
        for n, r in enumerate(rewards)
    )
    call = CallReport(number=number, call_id=f"c{number}", agent="walker", answer=ODD)
    share = interval_of(rewards)
    return PointReport(
        call=call,
        continuations=rows,
        mean=share,
        successes=int(sum(rewards)),
        share=share,
        is_again=again,
    )


def report(points: list[PointReport], loss: Loss | None, **options: object) -> ForkReport:
    values: dict[str, object] = {
        "run": "runs/x",
        "rollout_id": "r",
        "task_id": "t",
        "mode": "train",
        "calls": 8,
        "reward": 0.0,
        "weights": "the starting weights",
        "is_exact": True,
        "count": 4,
        "success": 1.0,
        "success_from": "as given",
        "folder": "runs/x/forks/1",
        **options,
    }
    return ForkReport(points=tuple(points), loss=loss, **values)  # type: ignore[arg-type]


def test_json_is_ascii_and_exact() -> None:
    text = report([point(3, [1.0, 0.0, math.pi, 0.0])], None).json()
    assert text.isascii()
    assert text.isprintable()
    value = json.loads(text)
    [row, *_] = value["points"][0]["continuations"]
    assert row["answer"] == ODD
    assert value["totals"] == {
        "continuations": 4,
        "departed": 0,
        "sampled_calls": 8,
        "repeated_calls": 12,
        "generated_tokens": 32,
        "repeated_tool_calls": 4,
    }


@pytest.mark.parametrize("is_complete", [True, False])
def test_what_is_said_of_a_search(is_complete: bool) -> None:
    points = [point(4, [0.0, 1.0]), point(6, [0.0, 0.0]), point(6, [0.0, 1.0], again=True)]
    loss = Loss(
        calls=(points[1].call,),
        last_good=6,
        first_lost=7,
        failures=4,
        reversals=(6,),
        is_complete=is_complete,
    )
    text = report(points, loss).text()
    assert "     4     1 of 2  0.50 (0.01 to 0.99)" in text
    assert "not monotone: no continuation from call 6 succeeded at first" in text
    assert "(again)" in text
    assert ("stopped before the search ended" in text) is not is_complete
    assert "call 6 succeeded, and none of 4 continuations from call 7 did\n" in text
    assert "was not run" not in text
    assert f"  call 6, of walker: {shortened(ODD)}" in text


def test_what_is_said_of_no_success() -> None:
    loss = Loss(calls=(), last_good=None, first_lost=1, failures=4)
    text = report([point(1, [0.0, 0.0])], loss).text()
    assert "no continuation succeeded from the first call on" in text
    assert "lost after" not in text


def test_what_is_said_of_a_loss_at_the_end() -> None:
    call = point(8, []).call
    loss = Loss(calls=(call,), last_good=8, first_lost=None)
    text = report([point(8, [1.0, 0.0])], loss).text()
    assert "some continuations from call 8 succeeded, and the rollout itself did not" in text


def test_what_is_said_of_a_first_call_that_was_not_run() -> None:
    """Check that successes of the group are not called continuations."""
    call = point(1, []).call
    loss = Loss(calls=(call,), last_good=1, first_lost=2, failures=4, group=3)
    text = report([point(2, [0.0, 0.0]), point(2, [0.0, 0.0], again=True)], loss).text()
    assert "the first call was not run: 3 rollouts of the same group and weights succeeded" in text
    assert (
        "some rollouts of the group succeeded from call 1 on, and none of 4 continuations from "
        "call 2 did\n"
    ) in text

"""Test the report of `lightspan fork` without a run."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import ConfigError, LightspanError
from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.forks import ForkPoint, fork_points
from lightspan.progress import PlainReporter
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Mode, Rollout
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.token_records import CallOutcome
from lightspan_tools.commands import fork
from lightspan_tools.forking.report import (
    CallReport,
    Continuation,
    ForkReport,
    Loss,
    PointReport,
    continuation,
    interval_of,
    shortened,
)
from lightspan_tools.forking.run import ForkCommand, Success, _advice, _Subject

ODD = "a\x07b\x7fc\x85\ud83d".encode("utf-8", "replace").decode() + "\n  d"


def point(number: int, rewards: list[float], *, again: bool = False) -> PointReport:
    rows = tuple(
        Continuation(
            rollout_id=f"f-{n}",
            reward=r,
            answer=ODD,
            sampled=2,
            endpoint=1,
            repeated=3,
            tokens=8,
            tools=1,
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
        "endpoint_calls": 4,
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


@pytest.mark.parametrize(
    ("open_calls", "advice"),
    [(2, ". Calls that can: 1, 2"), (1, ". Calls that can: 1"), (0, ". No other call can")],
)
def test_which_call_is_advised_after_a_refused_one(open_calls: int, advice: str) -> None:
    refusals = ["" if number <= open_calls else "no answer" for number in range(1, 5)]
    points = [ForkPoint("r", "a", None, n, (), why) for n, why in enumerate(refusals, start=1)]
    assert _advice(points) == advice


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("none/x.png", "there is no folder "),
        ("x.txt", ".txt is no format of pictures; use one of ."),
        (".", " is a folder; name a file, such as "),
    ],
)
def test_the_plot_is_checked_before_anything_runs(name: str, error: str, tmp_path: Path) -> None:
    """Check that the error comes before that of a folder that holds no run."""
    parser = argparse.ArgumentParser()
    fork.add(parser.add_subparsers())
    arguments = ["fork", str(tmp_path / "run"), "r", "--plot", str(tmp_path / name)]
    options = parser.parse_args(arguments)
    with pytest.raises(ConfigError, match=re.escape(error)):
        options.run(options)


def span(number: int, kind: SpanKind = SpanKind.LLM, **attributes: Any) -> Span:
    """Return a span of the time `10 * number` to `10 * number + 5`."""
    start = 10 * number
    return Span(
        span_id=f"{number:016x}",
        trace_id="a" * 32,
        name="span",
        kind=kind,
        start_ns=start,
        end_ns=start + 5,
        attributes=attributes,
    )


def call(number: int, outcome: CallOutcome, **attributes: Any) -> Call:
    """Return a call with sequence numbers in the order of the spans' times."""
    at = span(number, **attributes)
    return Call(f"c{number}", 0, "app", outcome, 2 * number, 2 * number + 1, span=at)


def episode(calls: list[Call], tools: tuple[int, ...] = (), **values: Any) -> Episode:
    return Episode(
        rollout_id="r",
        attempt_id="a",
        task_id="t",
        group_id="g",
        mode=Mode.DEV,
        status=AttemptStatus.SUCCEEDED,
        outcome=None,
        calls=tuple(calls),
        spans=tuple(span(number, SpanKind.TOOL) for number in tools),
        **values,
    )


def test_rejected_calls_are_not_sampled() -> None:
    recorded = episode([call(1, CallOutcome.OK), call(2, CallOutcome.OK)])
    rejected = call(2, CallOutcome.ERROR, **{c.ERROR_TYPE: c.REPLAY_DEPARTED})
    departed = episode([call(1, CallOutcome.REPLAYED), rejected], departed="it asked otherwise")
    row = continuation(departed, recorded)
    assert (row.sampled, row.repeated, row.tokens) == (0, 1, 0)
    good = episode(
        [call(1, CallOutcome.REPLAYED), call(2, CallOutcome.OK, **{c.REPLAY_FORK: True})]
    )
    assert continuation(good, recorded).sampled == 1


@pytest.mark.parametrize("tools", [(), (5, 6), (5, 6, 15), (5, 6, 15, 25)])
def test_tool_spans_before_the_fork_are_counted(tools: tuple[int, ...]) -> None:
    """Check a rollout of calls 10, 20 and 30 that forks at call 20."""
    recorded = episode([call(n, CallOutcome.OK) for n in (10, 20, 30)], (5, 6, 15, 25))
    forked = call(20, CallOutcome.OK, **{c.REPLAY_FORK: True})
    calls = [call(10, CallOutcome.REPLAYED), forked, call(30, CallOutcome.OK)]
    row = continuation(episode(calls, tools), recorded)
    assert row.tools == len([number for number in tools if number < 20])


def test_tools_of_answers_are_counted_without_tool_spans() -> None:
    part = {"type": "tool_call", "id": "t1", "name": "look", "arguments": "{}"}
    output = json.dumps([{"role": "assistant", "parts": [part, part]}])
    recorded = episode([call(10, CallOutcome.OK, **{c.OUTPUT_MESSAGES: output})])
    forked = call(20, CallOutcome.OK, **{c.REPLAY_FORK: True})
    row = continuation(episode([call(10, CallOutcome.REPLAYED), forked]), recorded)
    assert row.tools == 2


class _Session:
    """Returns the rewards of each test of a search in their order; None for a departed one."""

    is_stopped = False

    def __init__(self, *tests: float | None) -> None:
        self.tests = iter(tests)

    async def run(self, at: ForkPoint, count: int, title: str) -> list[Episode]:
        reward = next(self.tests)
        why = "it asked otherwise" if reward is None else ""
        return [episode([], reward=reward, departed=why)] * count


def search_of(*tests: float | None) -> tuple[Loss, list[PointReport]]:
    calls = [call(n, CallOutcome.OK, **{c.ROUTE: "endpoint"}) for n in (1, 2, 3, 4)]
    recorded = episode(calls, reward=0.0)
    row = Rollout(rollout_id="r", task_id="t", task={}, mode=Mode.TRAIN)
    success = Success(1.0, "as given", same=0)
    subject = _Subject(row, recorded, fork_points(recorded), None, success, None)
    command = ForkCommand(Path("run"), "r", None, count=2, reporter=PlainReporter(io.StringIO()))
    reports: list[PointReport] = []
    loss = asyncio.run(command._search(_Session(*tests), subject, reports))  # type: ignore[arg-type]
    return loss, reports


def test_a_search_that_departs_keeps_its_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss, points = search_of(1.0, None)
    reason = "no continuation from call 3 has a reward: it asked otherwise. "
    assert loss.reason.startswith(reason)
    assert (loss.last_good, loss.first_lost, loss.is_complete) == (1, None, False)
    assert [point.successes for point in points] == [2, 0]
    text = report(points, loss).text()
    assert "     1     2 of 2  1.00 " in text
    assert f"what follows is only what is known so far\n{reason}" in text
    parser = argparse.ArgumentParser()
    fork.add(parser.add_subparsers())
    options = parser.parse_args(["fork", "run", "r"])
    monkeypatch.setattr(fork, "_report", lambda options: report(points, loss))
    with pytest.raises(LightspanError, match=f"the search could not go on: {reason}"):
        options.run(options)
    assert capsys.readouterr().out == f"{text}\n"


def test_a_search_without_any_test_has_no_report() -> None:
    with pytest.raises(LightspanError, match="no continuation from call 1 has a reward: it asked"):
        search_of(None)


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

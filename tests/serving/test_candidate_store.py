"""Tests of a comparison that is read from a store, whatever program recorded the attempts."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import lightspan
from lightspan.errors import ConfigError
from lightspan.production.store_writer import attempt_write, write_pending
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Outcome
from lightspan.schema.spans import Span, SpanKind, SpanStatus, new_span_id, new_trace_id, now_ns
from lightspan.stores import open_store
from lightspan_gateway import candidate_command
from lightspan_gateway.serving.candidate.comparison import (
    ComparisonResult,
    Conclusion,
    ServerRecord,
    read_comparison,
)
from lightspan_gateway.serving.candidate.sides import Mark, Side
from lightspan_gateway.serving.candidate.state import STATE_FILE, CandidateState, Weights

OLD, NEW = "0" * 12, "1" * 12
COMPARISON = "0000cafe"


def mark_of(side: Side | None, comparison: str = COMPARISON) -> str:
    digest = OLD if side is Side.CURRENT else NEW
    return str(Mark("policy", digest, side, comparison if side else ""))


def attempt_of(
    name: str,
    models: Sequence[str],
    *,
    user: str = "",
    failed: bool = False,
    trace_id: str = "",
    errors: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Return the write of an attempt with a call for each of `models`; "" is a call that failed."""
    attempt_id, rollout_id = f"at-{name}", f"ro-{name}"
    trace_id = trace_id or new_trace_id()
    spans = [
        Span(
            span_id=new_span_id(),
            trace_id=trace_id,
            name="chat policy",
            kind=SpanKind.LLM,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            start_ns=now_ns(),
            end_ns=now_ns(),
            status=SpanStatus.OK if model else SpanStatus.ERROR,
            attributes={
                c.CALL_ID: f"call-{name}-{number}",
                **(
                    {c.RESPONSE_ID: f"chatcmpl-{name}-{number}", c.RESPONSE_MODEL: model}
                    if model
                    else {c.CALL_OUTCOME: "error"}
                ),
                c.AGENT_PATH: "writer",
                **(
                    {("session.id" if user.startswith("chat") else "user.id"): user} if user else {}
                ),
            },
        )
        for number, model in enumerate(models)
    ]
    return attempt_write(
        attempt_id,
        rollout_id,
        "desk",
        {"q": name},
        spans,
        started_at=time.time(),
        status=AttemptStatus.FAILED if failed else AttemptStatus.SUCCEEDED,
        outcome=Outcome.APP_ERROR if failed else Outcome.OK,
        capture_errors=list(errors),
        **options,
    )


def written(url: str, attempts: Sequence[Any]) -> None:
    async def write() -> None:
        async with open_store(url) as store:
            for attempt in attempts:
                await write_pending(store, attempt)

    asyncio.run(write())


def read(url: str, comparison: str = COMPARISON) -> ComparisonResult | None:
    """Return a comparison by what is recorded; the server knows no further attempt."""
    digests = {Side.CURRENT: OLD, Side.CANDIDATE: NEW}
    server = ServerRecord(digests=digests, started_at=0.0, assigned=lambda keys: {})

    async def reading() -> ComparisonResult | None:
        async with open_store(url) as store:
            return await read_comparison(store, comparison, server)

    return asyncio.run(reading())


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'production.db'}"


def test_every_attempt_is_counted_once_and_on_its_side(store: str) -> None:
    new, old = mark_of(Side.CANDIDATE), mark_of(Side.CURRENT)
    written(
        store,
        [
            attempt_of("other-model", ["gpt-4o"]),
            attempt_of("earlier", [mark_of(Side.CANDIDATE, "0000beef")]),
            attempt_of("good", [new, "gpt-4o", new]),
            attempt_of("failed", [new], failed=True),
            attempt_of("damaged", [old], errors=["a span is missing"]),
            attempt_of("both", [new, old]),
            attempt_of("continued", [old, mark_of(None).replace(NEW, OLD)]),
            attempt_of("moved", [old, mark_of(None)]),
            attempt_of("after", [mark_of(None)]),
        ],
    )
    result = read(store)
    assert result is not None
    assert result.comparison_id == COMPARISON
    shown = {
        side: (each.digest, each.attempts, each.failed, each.damaged, each.rated)
        for side, each in result.sides.items()
    }
    assert shown == {Side.CANDIDATE: (NEW, 2, 1, 0, 0), Side.CURRENT: (OLD, 2, 0, 1, 0)}
    assert result.both_sides == 2
    earlier = read(store, "0000beef")
    assert earlier is not None
    assert earlier.sides[Side.CANDIDATE].attempts == 1
    assert read(store, "12345678") is None


def test_a_store_without_the_comparison_says_how_to_record(
    store: str, state: CandidateState, tmp_path: Path
) -> None:
    written(store, [attempt_of("other-model", ["gpt-4o"])])
    shown = command("status", str(tmp_path), "--store", store)
    comparison_id = state.latest().comparison_id
    assert f"no attempt of comparison {comparison_id}: apps must record to it" in shown
    with pytest.raises(ConfigError, match="the candidate is not compared: give --store URL"):
        command("promote", str(tmp_path), "--store", store)


def test_late_feedback_on_attempts_calls_and_responses_counts(store: str) -> None:
    new, old = mark_of(Side.CANDIDATE), mark_of(Side.CURRENT)
    sides = {"c": new, "o": old}
    written(
        store,
        [attempt_of(f"{key}{n}", [model]) for key, model in sides.items() for n in range(12)],
    )
    for number in range(12):
        lightspan.feedback(f"at-c{number}", 1.0, store=store)
        lightspan.feedback(f"chatcmpl-o{number}-0", 1.0, store=store)
        lightspan.feedback(f"call-o{number}-0", 0.0, store=store)  # the last one counts
    result = read(store)
    assert result is not None
    assert [result.sides[side].rated for side in Side] == [12, 12]
    assert result.difference is not None
    assert result.difference.mean == 1.0
    assert result.conclusion is Conclusion.BETTER


@pytest.mark.parametrize("kind", ["user", "chat"])
def test_users_and_chats_in_spans_are_clusters(store: str, kind: str) -> None:
    models = {"c": mark_of(Side.CANDIDATE), "o": mark_of(Side.CURRENT)}
    written(
        store,
        [
            attempt_of(f"{key}{n}", [model], user=f"{kind} {n % 3}")
            for key, model in models.items()
            for n in range(9)
        ],
    )
    for number in range(9):
        for key in models:
            lightspan.feedback(f"at-{key}{number}", number % 3 == 0, store=store)
    result = read(store)
    assert result is not None
    assert result.difference is not None
    assert (result.difference.n, result.difference.clusters) == (18, 6)


def test_more_attempts_than_a_page_of_a_search(store: str) -> None:
    models = (mark_of(Side.CANDIDATE), mark_of(Side.CURRENT))
    written(store, [attempt_of(f"{n:04}", [models[n % 2]]) for n in range(130)])
    result = read(store)
    assert result is not None
    assert [each.attempts for each in result.sides.values()] == [65, 65]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[CandidateState]:
    with closing(CandidateState(tmp_path / STATE_FILE)) as opened:
        opened.begin(Weights("old", OLD), Weights("new", NEW), 0.5)
        yield opened


def marks_of(state: CandidateState, keys: Sequence[str]) -> list[str]:
    """Assign attempts; return the model's name in the answers of each."""
    marks = []
    for key in keys:
        digest, comparison = state.assign(key)
        side = Side.CANDIDATE if digest == NEW else Side.CURRENT
        marks.append(str(Mark("policy", digest, side, comparison)))
    return marks


@pytest.mark.parametrize("key", ["attempt at-{}", "trace {:032x}"])
def test_a_candidate_whose_calls_all_fail_is_worse(
    store: str, state: CandidateState, tmp_path: Path, key: str
) -> None:
    """No answer names the side of such an attempt; the server's file does."""
    marks = marks_of(state, [key.format(number) for number in range(1, 41)])
    news = [NEW in mark for mark in marks]
    written(
        store,
        [
            attempt_of(str(number), ["" if is_new else mark], trace_id=f"{number:032x}")
            for number, (is_new, mark) in enumerate(zip(news, marks, strict=True), 1)
        ],
    )
    for number, is_new in enumerate(news, 1):
        if not is_new:
            lightspan.feedback(f"at-{number}", 0.0, store=store)
    with pytest.raises(ConfigError, match="not promoted: the candidate is worse: the share of"):
        command("promote", str(tmp_path), "--store", store)
    shown = json.loads(command("status", str(tmp_path), "--store", store, "--json"))
    counts = {
        side: (each["digest"], each["attempts"], each["failed"], each["unnamed"])
        for side, each in shown["result"]["sides"].items()
    }
    new = sum(news)
    assert counts == {"candidate": (NEW, new, new, new), "current": (OLD, 40 - new, 0, 0)}
    lines = command("status", str(tmp_path), "--store", store)
    assert f"candidate: {new} attempts without an answer that names the weights" in lines
    assert "not compared" not in lines


def test_attempts_that_no_answer_names_count_by_what_is_recorded(
    store: str, state: CandidateState, tmp_path: Path
) -> None:
    """Check a fallback to another model, calls of other models only, and what is not counted."""
    names = ["fallback", "other", "silent", "unrecorded"]
    marks_of(state, [f"attempt at-{name}" for name in names])
    written(
        store,
        [
            attempt_of("fallback", ["", "gpt-4o"]),
            attempt_of("other", ["gpt-4o"]),
            attempt_of("silent", [], failed=True),
            attempt_of("stranger", [""], failed=True),
            attempt_of("after", [mark_of(None)], failed=True),
        ],
    )
    shown = json.loads(command("status", str(tmp_path), "--store", store, "--json"))
    sides = shown["result"]["sides"].values()
    assert sum(each["attempts"] for each in sides) == 3
    assert sum(each["failed"] for each in sides) == 2
    assert "began are not compared" in command("status", str(tmp_path), "--store", store)


def command(*arguments: str) -> str:
    """Return what `lightspan candidate` prints."""
    parser = argparse.ArgumentParser()
    candidate_command.add(parser.add_subparsers())
    options = parser.parse_args(["candidate", *arguments])
    return str(options.run(options))

"""Decoded spans and token records to transitions: CPU time by number of turns.

Two shapes of an attempt, three spans a turn (the call, a tool, the agent's step):

- nested: each turn's spans lie inside those of the turn before, as deep as there are turns;
- flat: every span is a child of the attempt's.

Run: python benchmarks/transitions.py [--turns 16 256 1024] [--repeats 9] [--json]

Prints the CPU milliseconds of the fastest repeat, microseconds per turn, and how the time grew
against the number of turns (1.0 is linear) since the size before.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any

from lightspan import conventions
from lightspan.lightning import Selection, build_episode, cover, trained_transitions
from lightspan.records import (
    Attempt,
    AttemptStatus,
    Outcome,
    Reward,
    Rollout,
    TokenRecord,
)
from lightspan.routing import Routing
from lightspan.spans import Span, SpanKind, SpanStatus, decode_spans, encode_spans

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 128


def spans_of(turns: int, nested: bool) -> list[Span]:
    """Three spans a turn below one root."""
    spans = [Span(span_id=f"{0:016x}", trace_id="0" * 32, name="attempt", attempt_id="at")]
    parent = spans[0].span_id
    for turn in range(turns):
        step, call, tool = (f"{3 * turn + i + 1:016x}" for i in range(3))
        spans += [
            _span(step, parent, SpanKind.AGENT, turn),
            _span(call, step, SpanKind.LLM, turn),
            _span(tool, step, SpanKind.TOOL, turn),
        ]
        parent = tool if nested else parent
    return decode_spans(encode_spans(spans))


def _span(span_id: str, parent: str, kind: SpanKind, turn: int) -> Span:
    called: dict[str, Any] = {
        conventions.CALL_ID: f"call-{turn}",
        conventions.CALL_OUTCOME: "ok",
        conventions.REQUEST_MODEL: "model",
    }
    llm = kind is SpanKind.LLM
    return Span(
        span_id=span_id,
        trace_id="0" * 32,
        parent_id=parent,
        name=kind.value,
        kind=kind,
        rollout_id="ro",
        attempt_id="at",
        start_ns=1_000 * turn + 1,
        end_ns=1_000 * turn + 999,
        status=SpanStatus.OK,
        attributes={conventions.AGENT_PATH: "writer", **(called if llm else {})},
        sequence_start=2 * turn + 1 if llm else None,
        sequence_end=2 * turn + 2 if llm else None,
    )


def records_of(turns: int) -> list[TokenRecord]:
    """One record a turn."""
    prompt, response = list(range(PROMPT_TOKENS)), list(range(RESPONSE_TOKENS))
    return [
        TokenRecord.create(
            prompt_ids=prompt,
            response_ids=response,
            logprobs=[-1.0] * RESPONSE_TOKENS,
            versions=[(1, RESPONSE_TOKENS)],
            attempt_id="at",
            call_id=f"call-{turn}",
            choice=0,
            policy="policy",
            span_id=f"{3 * turn + 2:016x}",
            agent_path="writer",
            sequence_start=2 * turn + 1,
            sequence_end=2 * turn + 2,
        )
        for turn in range(turns)
    ]


def convert(spans: list[Span], records: list[TokenRecord], routing: Routing) -> int:
    """What is measured; returns how many transitions came out."""
    rollout = Rollout(rollout_id="ro", task=None, task_id="t", group_id="g")
    attempt = Attempt(
        attempt_id="at",
        rollout_id="ro",
        number=1,
        epoch=1,
        status=AttemptStatus.SUCCEEDED,
        outcome=Outcome.OK,
        reward=Reward(1.0),
    )
    episode = build_episode(attempt, rollout, spans, records)
    return len(trained_transitions(episode, cover(episode, routing)))


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """CPU milliseconds of the fastest of the repeats."""
    best = float("inf")
    for _ in range(repeats):
        gc.collect()
        start = time.process_time_ns()
        work()
        best = min(best, (time.process_time_ns() - start) / 1e6)
    return best


def measure(turns: int, nested: bool, repeats: int) -> float:
    """CPU milliseconds for an attempt of this shape."""
    spans, records = spans_of(turns, nested), records_of(turns)
    routing = Selection.of("*").routing
    found = convert(spans, records, routing)
    if found != turns:
        raise SystemExit(f"{found} transitions of {turns} turns")
    inner = max(1, 2_000 // turns)

    def work() -> None:
        for _ in range(inner):
            convert(spans, records, routing)

    return cpu_ms(work, repeats) / inner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    for shape in ("nested", "flat"):
        before: tuple[int, float] | None = None
        for turns in arguments.turns:
            spent = measure(turns, shape == "nested", arguments.repeats)
            growth = None
            if before is not None:
                growth = (spent / before[1]) / (turns / before[0])
            before = turns, spent
            report(shape, turns, spent, growth, arguments.json)


def report(shape: str, turns: int, spent: float, growth: float | None, as_json: bool) -> None:
    """Print one measurement."""
    per_turn = 1_000 * spent / turns
    if as_json:
        known = {"shape": shape, "turns": turns, "cpu_ms": spent, "us_per_turn": per_turn}
        print(json.dumps({**known, "growth_per_turn": growth}))
        return
    grew = "" if growth is None else f"  grew {growth:.2f}x per turn"
    print(f"{shape:6}  {turns:5} turns  {spent:9.3f} CPU ms  {per_turn:6.2f} us a turn{grew}")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()

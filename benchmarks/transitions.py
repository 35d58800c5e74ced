"""CPU time of converting decoded spans to transitions, compared with agentlightning 0.3.0.

    python benchmarks/transitions.py [--turns 16 256 1024] [--rounds 2] [--json PATH]

Both sides are given the same trace in their own decoded form: a root, three spans a turn (the
agent's step, its call, a tool), a reward at the end; 512 prompt and 128 sampled ids a call. Neither
carries messages, and 0.3.0 no log-probabilities, which it would have to parse. Three shapes:

- nested: each turn's call and tool lie in the turn's step, a child of the root;
- flat: every span is a child of the root, so that 0.3.0 must repair the hierarchy by times;
- deep: each turn's step lies in the tool of the turn before. 0.3.0 recurses and cannot read it at
  1,024 turns, so this one is ours alone.

Timed are `build_episode`, `classify_calls` and `trained_transitions` against
`TracerTraceToTriplet.adapt`; building the spans is not. Our transitions hold their ids packed until
they are asked for: "ids as lists" asks for all of them, "and rows" merges them into training rows
besides. Both sides must give as many transitions with the same token ids. A figure is the fastest
repeat of alternating rounds. "Growth" is the time per turn at the most turns over that at the
second most: 1 is linear.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from _peers import PeerError, run_peer
from _report import Figure, finish, options_of
from peer_transitions import RESPONSE_TOKENS, TURN_NS, digest, prompt_of, response_of, times_of

from lightspan.lightning import (
    Selection,
    Transition,
    build_episode,
    build_rows,
    classify_calls,
    trained_transitions,
)
from lightspan.schema import semconv
from lightspan.schema.records import Attempt, AttemptStatus, Outcome, Rollout
from lightspan.schema.routing import Routing
from lightspan.schema.spans import Span, SpanKind, SpanStatus, decode_span, encode_span
from lightspan.schema.token_records import TokenRecord

PEER: Final = "agentlightning-0.3.0"
TARGETS: Final = {16: 10.0, 256: 50.0, 1024: 300.0}
"""Number of turns → how many times faster than the peer we must be."""
GROWTH: Final = 2.0
"""Maximum factor by which the time per turn may grow from 256 to 1,024 turns. Caches and noise need
some room; quadratic growth would be 4."""

Key = tuple[str, int]
"""(shape, number of turns) of a trace."""


class Trace(NamedTuple):
    """An attempt's decoded data."""

    attempt: Attempt
    rollout: Rollout
    spans: list[Span]
    records: list[TokenRecord]
    routing: Routing


def trace_of(turns: int, shape: str) -> Trace:
    """Return the same trace as the one in `peer_transitions`, in our form."""
    rollout = Rollout(rollout_id="ro", task=None, task_id="t", group_id="g")
    attempt = Attempt(
        attempt_id="at",
        rollout_id="ro",
        number=1,
        epoch=1,
        status=AttemptStatus.SUCCEEDED,
        outcome=Outcome.OK,
    )
    spans = [decode_span(encode_span(span)) for span in _spans(turns, shape)]
    records = [_record(turn) for turn in range(turns)]
    return Trace(attempt, rollout, spans, records, Selection.of("*").routing)


def _spans(turns: int, shape: str) -> list[Span]:
    root, end = f"{0:016x}", TURN_NS * (turns + 1)
    spans = [_span(root, None, SpanKind.CHAIN, (0, end))]
    outside = root
    for turn in range(turns):
        step, call, tool = (f"{3 * turn + i + 1:016x}" for i in range(3))
        times = times_of(turn)
        inside = root if shape == "flat" else step
        path = {semconv.AGENT_PATH: "writer"}
        called: dict[str, Any] = {
            semconv.REQUEST_MODEL: "model",
            semconv.CALL_ID: f"call-{turn}",
            semconv.CALL_OUTCOME: "ok",
        }
        llm = _span(call, inside, SpanKind.LLM, times["call"], {**path, **called})
        spans += [
            _span(step, outside, SpanKind.AGENT, times["step"], path),
            llm.replace(sequence_start=2 * turn + 1, sequence_end=2 * turn + 2),
            _span(tool, inside, SpanKind.TOOL, times["tool"], path),
        ]
        outside = tool if shape == "deep" else root
    reward = {semconv.REWARD_VALUE: 1.0}
    at = (end - 20, end - 10)
    return [*spans, _span(f"{3 * turns + 1:016x}", root, SpanKind.REWARD, at, reward)]


def _span(
    span_id: str,
    parent: str | None,
    kind: SpanKind,
    at: tuple[int, int],
    attributes: dict[str, Any] | None = None,
) -> Span:
    return Span(
        span_id=span_id,
        trace_id="0" * 32,
        parent_id=parent,
        name=kind.value,
        kind=kind,
        rollout_id="ro",
        attempt_id="at",
        start_ns=at[0],
        end_ns=at[1],
        status=SpanStatus.OK,
        attributes=attributes or {},
    )


def _record(turn: int) -> TokenRecord:
    return TokenRecord.create(
        prompt_ids=prompt_of(turn),
        response_ids=response_of(turn),
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


# --- what is timed --------------------------------------------------------------------------
def transitions(trace: Trace) -> list[Transition]:
    """Convert a trace's spans and records to transitions."""
    episode = build_episode(trace.attempt, trace.rollout, trace.spans, trace.records)
    return trained_transitions(episode, classify_calls(episode, trace.routing))


def with_ids(trace: Trace) -> list[tuple[list[int], list[int]]]:
    """Convert a trace to transitions, and unpack all token ids into lists."""
    return [(one.record.prompt_ids, one.record.response_ids) for one in transitions(trace)]


def with_rows(trace: Trace) -> int:
    """Convert a trace to transitions, and merge them into rows; return the number of rows."""
    return len(build_rows(transitions(trace)).rows)


WORK: Final[dict[str, Callable[[Trace], object]]] = {
    "transitions": transitions,
    "ids as lists": with_ids,
    "and rows": with_rows,
}


def cpu_ms(work: Callable[[Trace], object], trace: Trace, turns: int) -> float:
    """Return the CPU milliseconds of the fastest of nine repeats."""
    inner = max(1, 2_000 // turns)
    best = float("inf")
    for _ in range(9):
        gc.collect()
        start = time.process_time_ns()
        for _ in range(inner):
            work(trace)
        best = min(best, (time.process_time_ns() - start) / inner / 1e6)
    return best


def check(trace: Trace, peer: dict[str, Any]) -> None:
    """Check that both sides produce the same transitions.

    Raises:
        PeerError: they do not.
    """
    found = transitions(trace)
    same = digest(with_ids(trace)) == peer["digest"]
    if len(found) != peer["turns"] or peer["transitions"] != peer["turns"] or not same:
        raise PeerError(
            f"{peer['shape']}, {peer['turns']} turns: {len(found)} transitions, the peer "
            f"{peer['transitions']}, {'the same' if same else 'differing'} token ids"
        )


# --- the table ------------------------------------------------------------------------------
def main() -> int:
    """Run the benchmark and print the table; return 1 if a target is missed, else 0."""
    parser = options_of(__doc__)
    parser.add_argument("--turns", type=int, nargs="+", default=sorted(TARGETS))
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    turns = sorted(options.turns)
    shapes = ("nested", "flat")
    keys = [(shape, count) for shape in (*shapes, "deep") for count in turns]
    ours: dict[tuple[Key, str], float] = {}
    theirs: dict[Key, float] = {}
    for _ in range(options.rounds):
        for key in keys:
            trace = trace_of(key[1], key[0])
            for name, work in WORK.items():
                spent = cpu_ms(work, trace, key[1])
                ours[key, name] = min(spent, ours.get((key, name), spent))
        peers = run_peer(
            PEER,
            "peer_transitions.py",
            *("--turns", *map(str, turns), "--shapes", *shapes, "--repeats", "6"),
        )
        for peer in peers:
            shape, count = peer["shape"], peer["turns"]
            check(trace_of(count, shape), peer)
            theirs[shape, count] = min(peer["cpu_ms"], theirs.get((shape, count), peer["cpu_ms"]))
    figures = [figure(name, key, ours[key, name], theirs.get(key)) for name in WORK for key in keys]
    return finish([*figures, *growth(ours, keys)], options.json)


def figure(name: str, key: Key, ours: float, theirs: float | None) -> Figure:
    """Return one row. The peer makes no rows, so it is not compared with our time for them."""
    shape, turns = key
    compared = theirs is not None and name != "and rows"
    return Figure(
        what=f"{name}, {shape}, {turns} turns",
        unit="CPU-ms",
        ours=ours,
        peer=PEER if compared else "",
        theirs=theirs if compared else None,
        at_least=TARGETS.get(turns) if compared and name == "transitions" else None,
    )


def growth(ours: dict[tuple[Key, str], float], keys: list[Key]) -> list[Figure]:
    """Return a row per shape: how the time per turn grows between its two largest sizes."""
    figures = []
    for shape in dict.fromkeys(shape for shape, _ in keys):
        counts = [count for name, count in keys if name == shape][-2:]
        if len(counts) < 2:
            continue
        less, more = (ours[(shape, count), "transitions"] / count for count in counts)
        what = f"growth per turn, {shape}, {counts[0]} to {counts[1]} turns"
        figures.append(Figure(what=what, unit="x", ours=more / less, at_most=GROWTH))
    return figures


if __name__ == "__main__":
    sys.exit(main())

"""agentlightning 0.3.0's side of `transitions.py`: run in its environment, prints JSON.

The trace is described once, in the functions above the line, for both sides.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from typing import Any

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 128
TURN_NS = 1_000


def prompt_of(turn: int) -> list[int]:
    """Return the prompt's token ids in a turn; no two turns have the same."""
    return [turn * 7, *range(PROMPT_TOKENS - 1)]


def response_of(turn: int) -> list[int]:
    """Return the sampled token ids in a turn."""
    return [*range(RESPONSE_TOKENS - 1), turn * 11]


def times_of(turn: int) -> dict[str, tuple[int, int]]:
    """Return (start, end), in ns, of a turn's step, and of the call and the tool in the step."""
    start = TURN_NS * turn + 10
    return {
        "step": (start, start + 900),
        "call": (start + 100, start + 400),
        "tool": (start + 500, start + 800),
    }


def digest(transitions: list[tuple[list[int], list[int]]]) -> str:
    """Return a hash of the token ids of all transitions, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(transitions)).encode()).hexdigest()


# --- in the peer's environment --------------------------------------------------------------
def spans_of(turns: int, shape: str) -> list[Any]:
    """Return the trace as the peer's own decoded spans: a root, three per turn, and a reward.

    They have no messages and no log-probabilities, which the peer would have to parse from text.
    """
    from agentlightning.types import Span

    def span(
        name: str, span_id: str, parent: str | None, at: tuple[int, int], **values: Any
    ) -> Any:
        return Span.from_attributes(
            rollout_id="ro",
            attempt_id="at",
            sequence_id=at[0],
            trace_id="0" * 32,
            span_id=span_id,
            parent_id=parent,
            name=name,
            start_time=at[0] / 1e9,
            end_time=at[1] / 1e9,
            attributes=values,
        )

    root, end = f"{0:016x}", TURN_NS * (turns + 1)
    spans = [span("attempt", root, None, (0, end))]
    for turn in range(turns):
        step, call, tool = (f"{3 * turn + i + 1:016x}" for i in range(3))
        times = times_of(turn)
        inside = step if shape == "nested" else root
        called = {
            "gen_ai.request.model": "model",
            "gen_ai.response.id": f"call-{turn}",
            "prompt_token_ids": prompt_of(turn),
            "response_token_ids": response_of(turn),
        }
        spans += [
            span("agent", step, root, times["step"], **{"agent.name": "writer"}),
            span("openai.chat.completion", call, inside, times["call"], **called),
            span("tool", tool, inside, times["tool"]),
        ]
    reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0}
    at = (end - 20, end - 10)
    spans.append(span("agentlightning.annotation", f"{3 * turns + 1:016x}", root, at, **reward))
    return spans


def measure(turns: int, shape: str, repeats: int) -> dict[str, Any]:
    """Return the CPU milliseconds of the fastest repeat, and the peer's transitions."""
    from agentlightning.adapter import TracerTraceToTriplet

    adapter = TracerTraceToTriplet()
    spans = spans_of(turns, shape)
    triplets = adapter.adapt(spans)
    inner = max(1, 64 // turns)
    best = float("inf")
    for _ in range(repeats):
        gc.collect()
        start = time.process_time_ns()
        for _ in range(inner):
            adapter.adapt(spans)
        best = min(best, (time.process_time_ns() - start) / inner / 1e6)
    found = [(t.prompt["token_ids"], t.response["token_ids"]) for t in triplets]
    return {
        "shape": shape,
        "turns": turns,
        "cpu_ms": best,
        "transitions": len(triplets),
        "rewards": [t.reward for t in triplets if t.reward is not None],
        "digest": digest(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, nargs="+", required=True)
    parser.add_argument("--shapes", nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = parser.parse_args()
    found = [
        measure(turns, shape, max(2, options.repeats if turns < 1000 else options.repeats // 3))
        for shape in options.shapes
        for turns in options.turns
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

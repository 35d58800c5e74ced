"""Build attempts from short texts, and compute potentials and advantages of AIR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightspan import AIR
from lightspan.lightning import (
    Batch,
    BatchConfig,
    Selection,
    build_episode,
    classify_calls,
    prepare_batch,
)
from lightspan.lightning.air import ToolSuccess, shape
from lightspan.lightning.credit import Credit, discounted
from lightspan.lightning.episode import Episode
from lightspan.lightning.history import History, Trace
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import dump
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import TokenRecord
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_record,
    make_rollout,
    make_span,
)

WRITER = Selection.of("writer").routing
EVERYONE = Selection.of("*").routing
Step = str
"""A text of one character per event of an attempt, in order.

`m` is a model call, `M` a model call of a frozen agent, `+` a tool call, `-` a failing tool call.
"""


def at(sequence: int) -> int:
    """Return the time in nanoseconds of a sequence number: one second each."""
    return 1_000_000_000 * sequence


def tool(span_id: str, start: int, end: int, *, fails: bool = False, **fields: Any) -> Span:
    named = {c.TOOL_NAME: fields.pop("name", "sql"), **fields.pop("attributes", {})}
    status = SpanStatus.ERROR if fails else SpanStatus.OK
    known = {"start_ns": start, "end_ns": end, "status": status, "attributes": named}
    return make_span(span_id, SpanKind.TOOL, **{**known, **fields})


def call(
    call_id: str, start: int, end: int, *, agent: str = "writer", attempt: str = "1", **fields: Any
) -> tuple[TokenRecord, Span]:
    """Return the token record and the span of a model call, with consistent times.

    Args:
        call_id: id of the call.
        start: sequence number of the start.
        end: sequence number of the end.
        agent: agent path.
        attempt: name of the attempt.
        fields: further fields of the span.
    """
    record = make_record(
        call_id, [1, 2], [3], (start, end), attempt, agent_path=agent, span_id=f"span-{call_id}"
    )
    times = {"start_ns": at(start), "end_ns": at(end), "attempt": attempt, **fields}
    return record, make_call_span(call_id, agent, (start, end), **times)


def answers(text: str | None = None, *calls: tuple[str, Any]) -> dict[str, Any]:
    """Return span attributes of a model's answer; `calls` are (id, arguments) of tool calls."""
    made = [{"id": i, "function": {"name": "sql", "arguments": a}} for i, a in calls]
    message = {"role": "assistant", "content": text, "tool_calls": made}
    return {c.OUTPUT_MESSAGES: dump([message])}


def built(
    calls: Sequence[tuple[TokenRecord, Span]],
    tools: Sequence[Span] = (),
    reward: float | None = 1.0,
    name: str = "1",
    **attempt: Any,
) -> Episode:
    spans = [span for _, span in calls] + list(tools)
    records = [record for record, _ in calls]
    return build_episode(make_attempt(name, reward, **attempt), make_rollout(name), spans, records)


def attempt(steps: str, reward: float | None = 1.0, name: str = "1", **facts: Any) -> Episode:
    """Build the episode of an attempt with the given steps, one after another (see `Step`)."""
    calls, tools = [], []
    for place, step in enumerate(steps):
        start, end = 2 * place + 1, 2 * place + 2
        if step in "mM":
            agent = "writer" if step == "m" else "checker"
            calls.append(call(f"c{place}", start, end, agent=agent, attempt=name))
        else:
            span = tool(f"t{place}", at(start), at(end), fails=step == "-", attempt=name)
            tools.append(span)
    return built(calls, tools, reward, name, **facts)


def see(episode: Episode, signal: Any) -> list[float]:
    return [each.value for each in signal.observe(Trace(episode))]


def raises(history: History) -> float:
    raise KeyError("query")


# --- shaping --------------------------------------------------------------------------------
def shaping(
    episode: Episode, air: AIR, credit: Credit | None = None, routing: Any = WRITER
) -> dict[str, float]:
    rule = credit or discounted(1)
    coverage = classify_calls(episode, routing, step_rewards=rule.step_rewards)
    return {key[0]: value for key, value in shape(air, rule, episode, coverage).credits.items()}


def phi(episode: Episode, *signals: Any, routing: Any = WRITER) -> list[float]:
    """Return AIR's potential before each call, with scale 1."""
    air = AIR(signals=signals or (ToolSuccess(),), scale=1)
    return [-value for value in shaping(episode, air, routing=routing).values()]


def batch(episodes: Sequence[Episode], **config: Any) -> Batch:
    chosen = BatchConfig(**{"credit": discounted(1), "estimator": "dr_grpo", **config})
    steps = chosen.credit.step_rewards
    return prepare_batch(
        episodes, [classify_calls(e, WRITER, step_rewards=steps) for e in episodes], chosen
    ).finish()


def weight_mass(found: Batch, policy: str | None = None) -> float:
    """Return the sum of all weights; with `policy`, only those of its rows."""
    rows = (row for row in found.rows if policy in (None, row.policy))
    return math.fsum(weight for row in rows for weight in row.weights)


def advantages(found: Batch) -> dict[tuple[str, str], float]:
    """Return (rollout id, call id) → advantage."""
    items = found.explanations.items()
    return {(why.rollout_id, key[1]): why.advantage for key, why in items}

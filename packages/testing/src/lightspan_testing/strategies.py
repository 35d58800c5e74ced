"""Hypothesis strategies for attempts and their records, with builders.

Needs `hypothesis`. `attempts()` also generates data that no gateway would write. Examples are spans
without a parent, cycles of parents, inconsistent clocks, late or repeated writes, and calls without
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, AttemptStatus, Mode, Outcome, Rollout
from lightspan.schema.reward import Reward
from lightspan.schema.spans import Attributes, Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome, FinishReason, Sampling, TokenRecord


class Drawn(NamedTuple):
    """A generated attempt with its rollout, spans and token records, to pass to `build_episode`."""

    attempt: Attempt
    rollout: Rollout
    spans: list[Span]
    records: list[TokenRecord]


def make_rollout(name: str = "1", group_id: str = "g", **fields: Any) -> Rollout:
    """Build the training rollout `ro-<name>`."""
    defaults: dict[str, Any] = {"task": {}, "task_id": f"task-{group_id}", "group_id": group_id}
    return Rollout(rollout_id=f"ro-{name}", **{**defaults, **fields})


def make_attempt(name: str = "1", reward: float | None = 1.0, **fields: Any) -> Attempt:
    """Build an attempt of the rollout `make_rollout(name)`, which has succeeded.

    Args:
        name: suffix of the ids.
        reward: reward of the attempt; None if the app returned none.
        fields: further fields of the attempt, which override the defaults.
    """
    defaults: dict[str, Any] = {
        "number": 1,
        "epoch": 1,
        "status": AttemptStatus.SUCCEEDED,
        "outcome": Outcome.OK,
        "reward": None if reward is None else Reward(reward),
    }
    return Attempt(attempt_id=f"at-{name}", rollout_id=f"ro-{name}", **{**defaults, **fields})


def make_span(
    span_id: str, kind: SpanKind = SpanKind.LLM, attempt: str = "1", **fields: Any
) -> Span:
    """Build a span of the attempt `make_attempt(attempt)`.

    Args:
        span_id: id of the span.
        kind: kind of the span.
        attempt: name of the attempt.
        fields: further fields of the span, which override the defaults.
    """
    defaults: dict[str, Any] = {"trace_id": "0" * 32, "name": kind.value, "kind": kind}
    ids = {"rollout_id": f"ro-{attempt}", "attempt_id": f"at-{attempt}"}
    return Span(span_id=span_id, **{**defaults, **ids, **fields})


def make_call_span(
    call_id: str,
    agent: str = "writer",
    sequence: tuple[int, int] | None = None,
    attributes: Attributes | None = None,
    **fields: Any,
) -> Span:
    """Build the span of a model call.

    Args:
        call_id: id of the call. The span's id is `span-<call id>` unless `fields` override it.
        agent: agent path of the call.
        sequence: sequence numbers of the call's start and end; None for none.
        attributes: further attributes, by full names.
        fields: further fields of the span, which override the defaults.
    """
    values: Attributes = {c.CALL_ID: call_id, c.AGENT_PATH: agent, **(attributes or {})}
    start, end = sequence if sequence is not None else (None, None)
    defaults: dict[str, Any] = {"sequence_start": start, "sequence_end": end, "attributes": values}
    return make_span(fields.pop("span_id", f"span-{call_id}"), **{**defaults, **fields})


def make_reward_span(
    span_id: str, value: float | None, attributes: Attributes | None = None, **fields: Any
) -> Span:
    """Build a span like the one that `emit_reward` writes.

    Args:
        span_id: id of the span.
        value: the reward; None for a span without a reward value.
        attributes: further attributes, by full names.
        fields: further fields of the span, which override the defaults.
    """
    values: Attributes = dict(attributes or {})
    if value is not None:
        values[c.REWARD_VALUE] = value
    return make_span(span_id, SpanKind.REWARD, attributes=values, **fields)


def make_record(
    call_id: str,
    prompt: Sequence[int] = (1, 2),
    response: Sequence[int] = (3,),
    sequence: tuple[int, int] = (1, 2),
    attempt: str = "1",
    **fields: Any,
) -> TokenRecord:
    """Build the token record of a model call, with the policy `policy`."""
    defaults: dict[str, Any] = {
        "attempt_id": f"at-{attempt}",
        "call_id": call_id,
        "choice": 0,
        "policy": "policy",
        "agent_path": "writer",
        "sequence_start": sequence[0],
        "sequence_end": sequence[1],
        "versions": [(1, len(response))] if response else [],
        "logprobs": [-0.5] * len(response),
    }
    return TokenRecord.create(
        prompt_ids=list(prompt), response_ids=list(response), **{**defaults, **fields}
    )


_agents = st.sampled_from(["writer", "checker", "team/writer", "team/sub/rewriter", "ü%2Fñ", "app"])
_floats = st.floats(-4, 4, allow_nan=False, width=32)
_tokens = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def records(draw: st.DrawFn, call_ids: Sequence[str], attempt: str = "1") -> list[TokenRecord]:
    """Generate token records for the calls with the ids `call_ids`.

    A call has up to three answers, each with a record. The sequence numbers of two calls may
    overlap.
    """
    drawn = []
    for call_id in call_ids:
        start = draw(st.integers(1, 30))
        end = start + draw(st.integers(1, 12))
        agent, outcome = draw(_agents), draw(st.sampled_from(CallOutcome))
        for choice in range(draw(st.integers(0, 3))):
            response = draw(_tokens)
            drawn.append(
                make_record(
                    call_id,
                    draw(_tokens),
                    response,
                    (start, end),
                    attempt,
                    choice=choice,
                    agent_path=agent,
                    outcome=outcome if draw(st.booleans()) else CallOutcome.OK,
                    policy=draw(st.sampled_from(["policy", "policy", "policy", "other", "base"])),
                    finish_reason=draw(st.sampled_from(FinishReason)),
                    sampling=Sampling(
                        temperature=draw(st.sampled_from([1.0, 1.0, 0.7, 0.0])),
                        top_p=draw(st.sampled_from([1.0, 1.0, 1.0, 0.9])),
                    ),
                    grammar=draw(st.sampled_from(["", "", "", 'start: "a"+'])),
                    late=draw(st.integers(0, 9)) == 0,
                )
            )
    return drawn


@st.composite
def spans(draw: st.DrawFn, call_ids: Sequence[str], attempt: str = "1") -> list[Span]:
    """Generate spans of every kind, with any parents and times.

    Some are late or repeated. Parents may be unknown or form cycles.
    """
    ids = [f"{number:016x}" for number in range(draw(st.integers(0, 12)))]
    drawn = [draw(_span(span_id, ids, call_ids, attempt)) for span_id in ids]
    repeated = draw(st.lists(st.sampled_from(drawn), max_size=2)) if drawn else []
    return drawn + repeated


@st.composite
def _span(
    draw: st.DrawFn, span_id: str, ids: Sequence[str], call_ids: Sequence[str], attempt: str
) -> Span:
    kind = draw(st.sampled_from([SpanKind.LLM, SpanKind.LLM, SpanKind.REWARD, *SpanKind]))
    attributes: Attributes = {}
    calls = st.sampled_from([*call_ids, "call-unknown"])
    if kind is SpanKind.LLM and draw(st.booleans()):
        attributes[c.CALL_ID] = draw(calls)
    if kind is SpanKind.LLM:
        attributes[c.AGENT_PATH] = draw(_agents)
        attributes[c.CALL_OUTCOME] = draw(st.sampled_from(["ok", "ok", "undelivered", "odd"]))
    if kind is SpanKind.REWARD:
        attributes[c.REWARD_VALUE] = draw(_floats)
        target = draw(st.sampled_from([None, c.REWARD_CALL_ID, c.REWARD_SPAN_ID]))
        if target is not None:
            on_call = target == c.REWARD_CALL_ID
            attributes[target] = draw(calls if on_call else st.sampled_from(ids))
    start = draw(st.none() | st.integers(1, 30)) if kind is SpanKind.LLM else None
    return make_span(
        span_id,
        kind,
        attempt,
        attributes=attributes,
        parent_id=draw(st.none() | st.sampled_from([*ids, "f" * 16])),
        start_ns=draw(st.integers(0, 50)),
        status=draw(st.sampled_from(SpanStatus)),
        sequence_start=start,
        sequence_end=None if start is None else start + draw(st.integers(0, 9)),
        late=draw(st.integers(0, 9)) == 0,
    )


@st.composite
def attempts(draw: st.DrawFn, name: str = "1", group_id: str = "g") -> Drawn:
    """Generate an attempt with its spans and token records."""
    call_ids = [f"call-{number}" for number in range(draw(st.integers(0, 5)))]
    ended = st.sampled_from([AttemptStatus.SUCCEEDED] * 6 + list(AttemptStatus))
    reward = st.sampled_from([None, float("nan"), 0.0, 1.0, 1.0, 0.25])
    attempt = make_attempt(
        name,
        draw(reward),
        status=draw(ended),
        outcome=draw(st.sampled_from([Outcome.OK] * 6 + list(Outcome))),
        capture_errors=["broken"] if draw(st.integers(0, 9)) == 0 else [],
    )
    rollout = make_rollout(
        name, group_id, mode=draw(st.sampled_from([Mode.TRAIN] * 4 + list(Mode)))
    )
    return Drawn(attempt, rollout, draw(spans(call_ids, name)), draw(records(call_ids, name)))

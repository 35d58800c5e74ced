"""Store spans received from other processes as production attempts.

A production attempt is a recorded run of an app outside of a training. All spans of a trace that
one service sent form one attempt. Its ids, and those of its rollout, are hashes of service and
trace. So spans may arrive in any order, repeatedly, and at several servers. The attempt ends when
the service's outermost span (entry span) arrives; later spans are added too. A span that names an
attempt is added to that attempt.

The input of an attempt, and the agents of its model calls, depend on all its spans. They are
computed when the attempt is read, by `gathered`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.errors import ConflictError, DataError, IllegalMoveError, NotFoundError
from lightspan.production.auto_attempts import task_of
from lightspan.production.options import SERVICE_NAME, UNNAMED_SERVICE
from lightspan.production.store_writer import attempt_write, write_pending
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.schema.records import (
    Attempt,
    AttemptRef,
    AttemptStatus,
    Outcome,
    Rollout,
    fingerprint,
)
from lightspan.schema.routing import join_path
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.stores.protocol import Store
from lightspan_otel.agent_names import Role, agent_name, role_of
from lightspan_otel.normalize import MESSAGES
from lightspan_otel.otlp import ReceivedSpan

SENDER: Final = "opentelemetry"
"""`Attempt.runner_id` of an attempt made from received spans."""


_MAX_CONCURRENT: Final = 16
"""Maximum number of traces written concurrently.

If they were written one by one, the sender of a large batch would run into its timeout.
"""
_ATTEMPTS_PER_QUERY: Final = 500
"""Attempts per request to the store."""
_MAX_DEPTH: Final = 64
"""Maximum number of nested agents in a path."""
_MAX_NAME_LENGTH: Final = 1_000
"""Maximum characters of a service's name: databases index it."""
_PERMANENT_ERRORS: Final = (ConflictError, DataError, IllegalMoveError, NotFoundError)
"""Errors that recur whenever the span is sent again."""


class RejectedSpan(NamedTuple):
    """A span that is not stored."""

    span: Span
    reason: str


async def store_spans(
    store: Store, arrivals: Sequence[ReceivedSpan], *, may_reward: bool
) -> list[RejectedSpan]:
    """Store received spans as production attempts. Idempotent.

    Args:
        store: an open store.
        arrivals: spans of any traces in any order, translated by `normalized`.
        may_reward: whether reward spans are stored; False rejects them.

    Returns:
        The rejected spans with reasons.

    Raises:
        StoreError: the store cannot be written; all spans may be sent again.
    """
    rejected: list[RejectedSpan] = []
    named: defaultdict[str, list[ReceivedSpan]] = defaultdict(list)
    traces: defaultdict[tuple[str, str], list[ReceivedSpan]] = defaultdict(list)
    for arrival in arrivals:
        span = arrival.span
        service = _service_of(span)
        if len(service) > _MAX_NAME_LENGTH:
            reason = f"service.name has {len(service):,} characters, more than {_MAX_NAME_LENGTH:,}"
            rejected.append(_rejected(span, reason))
        elif span.kind is SpanKind.REWARD and not may_reward:
            rejected.append(_rejected(span, "a reward needs a trainer's key"))
        elif span.attempt_id:
            named[span.attempt_id].append(arrival)
        else:
            traces[service, span.trace_id].append(arrival)
    jobs = [
        *((sent, partial(_join, store, attempt_id, sent)) for attempt_id, sent in named.items()),
        *(
            (sent, partial(_store_trace, store, service, trace_id, sent))
            for (service, trace_id), sent in traces.items()
        ),
    ]
    slots = asyncio.Semaphore(_MAX_CONCURRENT)
    results = await asyncio.gather(
        *(_with_slot(slots, job) for _, job in jobs), return_exceptions=True
    )
    store_error: BaseException | None = None
    for (sent, _), result in zip(jobs, results, strict=True):
        if isinstance(result, _PERMANENT_ERRORS):  # one bad trace must not block the others
            rejected += [_rejected(arrival.span, str(result)) for arrival in sent]
        elif isinstance(result, BaseException):
            store_error = result
    if store_error is not None:
        raise store_error
    return rejected


def _rejected(span: Span, reason: str) -> RejectedSpan:
    return RejectedSpan(span, f"span {span.name[:80]!r}: {reason}")


def trace_of(span: Span) -> tuple[str, str] | None:
    """Return the service name and the trace id of a span, which identify its attempt.

    The result is None if the span has an attempt's id itself.
    """
    return None if span.attempt_id else (_service_of(span), span.trace_id)


async def attempts_of(store: Store, traces: Sequence[tuple[str, str]]) -> list[Attempt]:
    """Return the attempts of traces that are in the store.

    An attempt is running as long as the outermost span (entry span) of its trace has not arrived.

    Args:
        store: an open store.
        traces: service and trace id of each trace, as `trace_of` returns them.
    """
    attempts: list[Attempt] = []
    for begin in range(0, len(traces), _ATTEMPTS_PER_QUERY):
        names = [_name_of(*trace) for trace in traces[begin : begin + _ATTEMPTS_PER_QUERY]]
        attempts += await store.attempts([f"ro-{name}" for name in names])
    return attempts


def _name_of(service: str, trace_id: str) -> str:
    """Return the common part of the ids of a trace's attempt and rollout."""
    return hashlib.sha256(f"{service}\0{trace_id}".encode()).hexdigest()[:32]


async def _with_slot(slots: asyncio.Semaphore, job: Callable[[], Awaitable[None]]) -> None:
    async with slots:
        await job()


async def _join(store: Store, attempt_id: str, arrivals: Sequence[ReceivedSpan]) -> None:
    """Add spans to an existing attempt, and mark them as late.

    Late spans are never trained on, because any process may have sent them.
    """
    try:
        attempt = await store.attempt(attempt_id)
    except NotFoundError:
        raise NotFoundError(
            f"this store has no attempt {attempt_id}: spans that lightspan recorded are added only "
            "where their attempt is; record to this store with LIGHTSPAN_STORE=URL instead"
        ) from None
    ref = AttemptRef(attempt_id, attempt.epoch)
    spans = [each.span.replace(rollout_id=attempt.rollout_id, late=True) for each in arrivals]
    if images := _images_of(arrivals):
        await store.add_images(ref, images)
    await store.add_spans(ref, spans)


def _images_of(arrivals: Sequence[ReceivedSpan]) -> list[Image]:
    return list({image.digest: image for each in arrivals for image in each.images}.values())


async def _store_trace(
    store: Store, service: str, trace_id: str, arrivals: Sequence[ReceivedSpan]
) -> None:
    name = _name_of(service, trace_id)
    attempt_id, rollout_id = f"at-{name}", f"ro-{name}"
    entry = next((arrival.span for arrival in arrivals if arrival.is_entry), None)
    failed = entry is not None and entry.status is SpanStatus.ERROR
    write = attempt_write(
        attempt_id,
        rollout_id,
        service,
        None,  # a rollout is immutable, and its input may come later
        [_in_attempt(arrival.span, name, attempt_id, rollout_id) for arrival in arrivals],
        started_at=min(arrival.span.start_ns for arrival in arrivals) / 1e9,
        status=AttemptStatus.FAILED if failed else AttemptStatus.SUCCEEDED,
        outcome=Outcome.APP_ERROR if failed else Outcome.OK,
    )
    assert write.claim is not None
    attempt = msgspec.structs.replace(write.claim.attempt, runner_id=SENDER)
    claim = msgspec.structs.replace(write.claim, attempt=attempt)
    report = None if entry is None else write.report
    images = _images_of(arrivals)
    await write_pending(store, write._replace(claim=claim, report=report, images=images))


def _in_attempt(span: Span, name: str, attempt_id: str, rollout_id: str) -> Span:
    span = span.replace(attempt_id=attempt_id, rollout_id=rollout_id, late=False)
    if span.kind is not SpanKind.LLM:
        return span
    call_id = f"call-{name}-{int(span.span_id, 16)}"  # feedback finds the attempt by this id
    return span.replace(attributes={**span.attributes, c.CALL_ID: call_id})


def _service_of(span: Span) -> str:
    name = str(span.resource.get(SERVICE_NAME) or UNNAMED_SERVICE)
    return name.replace("\0", "\N{REPLACEMENT CHARACTER}")


# --- reading stored attempts ----------------------------------------------------------------
def is_received(attempt: Attempt) -> bool:
    """Return whether an attempt was made from spans that another process sent."""
    return attempt.runner_id == SENDER


def gathered(
    rollout: Rollout, attempt: Attempt, spans: Sequence[Span]
) -> tuple[Rollout, list[Span]]:
    """Compute the input of an attempt, and the agents of its model calls, from all its spans.

    This is done only if another process sent the spans; any other attempt is returned unchanged.

    Args:
        rollout: the attempt's rollout.
        attempt: a production attempt.
        spans: all spans of the attempt received so far.

    Returns:
        The rollout, whose task is the input, and the spans. The spans of model calls have the
        agents.
    """
    if not is_received(attempt):
        return rollout, list(spans)
    by_id = {span.span_id: span for span in spans}
    calls = [span for span in spans if span.kind is SpanKind.LLM]
    around = {call.span_id: _ancestors(call, by_id) for call in calls}
    repeated = _nested(calls, around) | _repeated(calls)
    settled = [
        _settled(span, around.get(span.span_id, ()))
        for span in (s.replace(kind=SpanKind.CHAIN) if s.span_id in repeated else s for s in spans)
    ]
    entries = [span for span in spans if span.parent_id not in by_id]
    is_call = all(span.kind is SpanKind.LLM for span in entries)
    inputs = [span if span.parent_id in by_id else span.replace(parent_id=None) for span in settled]
    task = task_of(inputs, is_call=is_call)
    with_task = msgspec.structs.replace(rollout, task=task, task_id=fingerprint(task))
    return with_task, settled


def _ancestors(span: Span, by_id: Mapping[str, Span]) -> list[Span]:
    """Return the enclosing spans, innermost first; cycles are cut."""
    ancestors: list[Span] = []
    visited = {span.span_id}
    outer = by_id.get(span.parent_id or "")
    while outer is not None and outer.span_id not in visited:
        ancestors.append(outer)
        visited.add(outer.span_id)
        outer = by_id.get(outer.parent_id or "")
    return ancestors


def _nested(calls: Sequence[Span], around: Mapping[str, Sequence[Span]]) -> set[str]:
    """Return the ids of spans that repeat the call of a span inside or around them.

    Of nested spans the innermost is the call, because libraries wrap clients. A span without
    messages is the call only if none around it has some. A call in an agent or a tool is another
    call than the one around that agent or tool.

    Args:
        calls: the spans of model calls.
        around: id of such a span → the enclosing spans, innermost first.
    """
    nodes = (SpanKind.AGENT, SpanKind.TOOL)
    outer: dict[str, list[str]] = {}
    for call in calls:
        inner = takewhile(lambda span: span.kind not in nodes, around[call.span_id])
        outer[call.span_id] = [span.span_id for span in inner if span.kind is SpanKind.LLM]
    full = {call.span_id for call in calls if call.attributes.keys() & MESSAGES}
    repeated = {each for key in full for each in outer[key]}
    for key in outer.keys() - full:
        has_wrapper = any(each in full and each not in repeated for each in outer[key])
        repeated |= {key} if has_wrapper else set(outer[key])
    return repeated


def _repeated(calls: Sequence[Span]) -> set[str]:
    """Return the ids of spans that repeat the call of another span with the same parent.

    Some libraries make the span of a call after its answer, so that the span of another library is
    not inside it. Two spans are of one call if they are in different vocabularies, one lies within
    the times of the other, and model and token counts are equal. The span with the response id is
    kept.
    """
    repeated: set[str] = set()
    by_parent: defaultdict[tuple[Any, ...], list[Span]] = defaultdict(list)
    for call in calls:
        keys = (c.REQUEST_MODEL, c.INPUT_TOKENS, c.OUTPUT_TOKENS)
        by_parent[call.parent_id, *map(call.attributes.get, keys)].append(call)
    for siblings in by_parent.values():
        theirs = [call for call in siblings if c.OPENINFERENCE_KIND in call.attributes]
        for other in (call for call in siblings if c.OPENINFERENCE_KIND not in call.attributes):
            same = next((call for call in theirs if _lies_within(call, other)), None)
            if same is not None:
                theirs.remove(same)
                is_kept = c.RESPONSE_ID in same.attributes and c.RESPONSE_ID not in other.attributes
                repeated.add((other if is_kept else same).span_id)
    return repeated


def _lies_within(one: Span, other: Span) -> bool:
    inner, outer = sorted((one, other), key=lambda span: span.end_ns - span.start_ns)
    return outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns


def _agents(ancestors: Sequence[Span]) -> tuple[str, ...]:
    """Return the names of the agents among the enclosing spans, outermost first."""
    names: list[str] = []
    for span in reversed(ancestors):
        if role_of(span.name, span.attributes) is Role.AGENT:
            name = agent_name(span.name, span.attributes, may_guess=True)
            if name is not None and names[-1:] != [name]:
                names.append(name)
    return tuple(names[:_MAX_DEPTH])


def _settled(span: Span, ancestors: Sequence[Span]) -> Span:
    attributes = dict(span.attributes)
    if span.kind is SpanKind.LLM and c.AGENT_PATH not in attributes:
        names = _agents(ancestors)
        if names:
            attributes[c.AGENT_PATH] = join_path(names)
    return span.replace(attributes=attributes, late=False)

"""Spans that others send: kept as attempts of production, or beside the attempt that they name.

All of a trace that one service made is one attempt. Its ids come from the two names, and those of
spans from the spans, so that batches may come in any order, again, and by several servers at once.
It is over when the span arrives with which the service began; what comes later is kept all the
same, and counts: nothing of production waits for a seal. What an attempt's input was, and which
agent made a call, is read from all that has arrived (`gathered`), never from one batch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from lightspan.errors import ConflictError, DataError, IllegalMoveError, NotFoundError
from lightspan.production.auto_attempts import task_of
from lightspan.production.options import SERVICE_NAME, UNNAMED_SERVICE
from lightspan.production.store_writer import attempt_report, attempt_write, write_pending
from lightspan.schema import semconv as c
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
from lightspan_otel.otlp import ReceivedSpan

SENDER: Final = "opentelemetry"
"""Who ran such an attempt, as far as it is known (`Attempt.runner_id`)."""


_MAX_CONCURRENT: Final = 16
"""Traces that are written side by side: one after another a large batch outlasts its sender."""
_ASKED_AT_ONCE: Final = 500
"""Attempts."""
_MAX_DEPTH: Final = 64
"""Agents inside one another that a path names."""
_MAX_NAME_LENGTH: Final = 1_000
"""Characters of a service's name: databases index it."""
_REFUSALS: Final = (ConflictError, DataError, IllegalMoveError, NotFoundError)
"""What is refused again each time it is sent."""


class RejectedSpan(NamedTuple):
    """A span that is not kept."""

    span: Span
    reason: str


async def keep(
    store: Store, arrivals: Sequence[ReceivedSpan], *, may_reward: bool
) -> list[RejectedSpan]:
    """Keep spans; repeating one is a no-op.

    Args:
        store: an open one.
        arrivals: of any traces, in any order, in our words (`vocabulary.translated`).
        may_reward: whether rewards among them are kept.

    Returns:
        The spans that are not kept, and why.

    Raises:
        StoreError: the store cannot be written; all may be sent again.
    """
    refused: list[RejectedSpan] = []
    named: defaultdict[str, list[Span]] = defaultdict(list)
    traces: defaultdict[tuple[str, str], list[ReceivedSpan]] = defaultdict(list)
    for arrival in arrivals:
        span = arrival.span
        service = _service_of(span)
        if len(service) > _MAX_NAME_LENGTH:
            why = f"service.name has {len(service):,} characters, more than {_MAX_NAME_LENGTH:,}"
            refused.append(_refusal(span, why))
        elif span.kind is SpanKind.REWARD and not may_reward:
            refused.append(_refusal(span, "a reward needs a trainer's key"))
        elif span.attempt_id:
            named[span.attempt_id].append(span)
        else:
            traces[service, span.trace_id].append(arrival)
    works = [
        *((spans, partial(_join, store, attempt_id, spans)) for attempt_id, spans in named.items()),
        *(
            ([each.span for each in sent], partial(_keep_trace, store, service, trace_id, sent))
            for (service, trace_id), sent in traces.items()
        ),
    ]
    room = asyncio.Semaphore(_MAX_CONCURRENT)
    results = await asyncio.gather(
        *(_in_room(room, work) for _, work in works), return_exceptions=True
    )
    trouble: BaseException | None = None
    for (spans, _), result in zip(works, results, strict=True):
        if isinstance(result, _REFUSALS):  # one bad trace does not hold up the others
            refused += [_refusal(span, str(result)) for span in spans]
        elif isinstance(result, BaseException):
            trouble = result
    if trouble is not None:
        raise trouble
    return refused


def _refusal(span: Span, why: str) -> RejectedSpan:
    return RejectedSpan(span, f"span {span.name[:80]!r}: {why}")


def trace_of(span: Span) -> tuple[str, str] | None:
    """The service and the trace of which a span's attempt is; None where it names an attempt."""
    return None if span.attempt_id else (_service_of(span), span.trace_id)


async def running(store: Store, traces: Sequence[tuple[str, str]]) -> int:
    """How many of these traces (`trace_of`) lack the span that began them: their attempts have not
    ended."""
    count = 0
    for begin in range(0, len(traces), _ASKED_AT_ONCE):
        names = [_name_of(*trace) for trace in traces[begin : begin + _ASKED_AT_ONCE]]
        attempts = await store.attempts([f"ro-{name}" for name in names])
        count += sum(attempt.status is AttemptStatus.RUNNING for attempt in attempts)
    return count


def _name_of(service: str, trace_id: str) -> str:
    """What the ids of a trace's attempt and rollout are made of."""
    return hashlib.sha256(f"{service}\0{trace_id}".encode()).hexdigest()[:32]


async def _in_room(room: asyncio.Semaphore, work: Callable[[], Awaitable[None]]) -> None:
    async with room:
        await work()


async def _join(store: Store, attempt_id: str, spans: Sequence[Span]) -> None:
    """Keep spans beside an attempt, late: nobody knows that its runner sent them, so nothing is
    ever trained of them."""
    attempt = await store.attempt(attempt_id)
    kept = [span.replace(rollout_id=attempt.rollout_id, late=True) for span in spans]
    await store.add_spans(AttemptRef(attempt_id, attempt.epoch), kept)


async def _keep_trace(
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
        None,  # a rollout never changes, and what it was asked may come later
        [_own(arrival.span, name, attempt_id, rollout_id) for arrival in arrivals],
        started_at=min(arrival.span.start_ns for arrival in arrivals) / 1e9,
        report=attempt_report(
            attempt_id,
            AttemptStatus.FAILED if failed else AttemptStatus.SUCCEEDED,
            Outcome.APP_ERROR if failed else Outcome.OK,
        ),
    )
    assert write.claim is not None
    attempt = msgspec.structs.replace(write.claim.attempt, runner_id=SENDER)
    claim = msgspec.structs.replace(write.claim, attempt=attempt)
    report = None if entry is None else write.report
    await write_pending(store, write._replace(claim=claim, report=report))


def _own(span: Span, name: str, attempt_id: str, rollout_id: str) -> Span:
    span = span.replace(attempt_id=attempt_id, rollout_id=rollout_id, late=False)
    if span.kind is not SpanKind.LLM:
        return span
    call_id = f"call-{name}-{int(span.span_id, 16)}"  # feedback finds the attempt by it
    return span.replace(attributes={**span.attributes, c.CALL_ID: call_id})


def _service_of(span: Span) -> str:
    name = str(span.resource.get(SERVICE_NAME) or UNNAMED_SERVICE)
    return name.replace("\0", "\N{REPLACEMENT CHARACTER}")


# --- reading them ---------------------------------------------------------------------------
def was_sent(attempt: Attempt) -> bool:
    """Whether an attempt is a trace that somebody sent."""
    return attempt.runner_id == SENDER


def gathered(
    rollout: Rollout, attempt: Attempt, spans: Sequence[Span]
) -> tuple[Rollout, list[Span]]:
    """An attempt by all that has arrived of it: what it was asked, and its spans, with the agents
    that made the calls. One that nobody sent is returned as it is.

    Args:
        rollout: the attempt's.
        attempt: of production.
        spans: all of the attempt's.
    """
    if not was_sent(attempt):
        return rollout, list(spans)
    by_id = {span.span_id: span for span in spans}
    calls = [span for span in spans if span.kind is SpanKind.LLM]
    around = {call.span_id: _ancestors(call, by_id) for call in calls}
    # a call inside which there is a call is the same, seen from outside by another library
    wrapping = {outer.span_id for ancestors in around.values() for outer in ancestors}
    settled = [
        _settled(span, around.get(span.span_id, ()), is_wrapping=span.span_id in wrapping)
        for span in spans
    ]
    is_call = all(span.kind is SpanKind.LLM for span in settled if span.parent_id not in by_id)
    inputs = [span if span.parent_id in by_id else span.replace(parent_id=None) for span in settled]
    task = task_of(inputs, is_call=is_call)
    asked = msgspec.structs.replace(rollout, task=task, task_id=fingerprint(task))
    return asked, settled


def _ancestors(span: Span, by_id: Mapping[str, Span]) -> list[Span]:
    """Return the spans around a span, the innermost first; parents in a circle are left out."""
    ancestors: list[Span] = []
    passed = {span.span_id}
    outer = by_id.get(span.parent_id or "")
    while outer is not None and outer.span_id not in passed:
        ancestors.append(outer)
        passed.add(outer.span_id)
        outer = by_id.get(outer.parent_id or "")
    return ancestors


def _agents(ancestors: Sequence[Span]) -> tuple[str, ...]:
    """Return the names of the agents among the spans around, from the outermost on."""
    names: list[str] = []
    for span in reversed(ancestors):
        if role_of(span.name, span.attributes) is Role.AGENT:
            name = agent_name(span.name, span.attributes, may_guess=True)
            if name is not None and names[-1:] != [name]:
                names.append(name)
    return tuple(names[:_MAX_DEPTH])


def _settled(span: Span, ancestors: Sequence[Span], *, is_wrapping: bool) -> Span:
    attributes = dict(span.attributes)
    if is_wrapping:
        attributes.pop(c.CALL_ID, None)
    if span.kind is SpanKind.LLM and c.AGENT_PATH not in attributes:
        names = _agents(ancestors)
        if names:
            attributes[c.AGENT_PATH] = join_path(names)
    return span.replace(attributes=attributes, late=False)

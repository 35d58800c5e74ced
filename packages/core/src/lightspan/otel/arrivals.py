"""Spans that others send: kept as attempts of production, or beside the attempt that they name.

All of a trace that one service made is one attempt. Its ids come from the two names, and those of
spans from the spans, so that batches may come in any order, again, and by several servers at once.
It is over when the span arrives with which the service began; what comes later is kept all the
same, and counts: nothing of production waits for a seal. What an attempt's input was, and which
agent made a call, is read from all that has arrived (`gathered`), never from one batch.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from lightspan.errors import DataError, NotFoundError
from lightspan.otel.identity import Role, agent_name, role_of
from lightspan.otel.otlp import Arrival
from lightspan.otel.vocabulary import translated
from lightspan.production.attempt import SERVICE_NAME, task_of
from lightspan.production.journal import parcel_of, report_of, write_parcel
from lightspan.production.options import UNNAMED_SERVICE
from lightspan.schema import conventions as c
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

SENDER: Final = "opentelemetry"
"""Who ran such an attempt, as far as it is known (`Attempt.runner_id`)."""


async def keep(store: Store, arrivals: Sequence[Arrival], *, may_reward: bool) -> list[str]:
    """Keep spans; repeating one is a no-op.

    Args:
        store: an open one.
        arrivals: of any traces, in any order.
        may_reward: whether rewards among them are kept.

    Returns:
        Why, of each span that is not kept.

    Raises:
        StoreError: the store cannot be written; all may be sent again.
    """
    refused: list[str] = []
    named: defaultdict[str, list[Span]] = defaultdict(list)
    traces: defaultdict[tuple[str, str], list[Arrival]] = defaultdict(list)
    for arrival in arrivals:
        span = arrival.span
        if span.kind is SpanKind.REWARD and not may_reward:
            refused.append(f"span {span.name[:80]!r}: a reward needs a trainer's key")
        elif span.attempt_id:
            named[span.attempt_id].append(span)
        else:
            traces[_service_of(span), span.trace_id].append(arrival)
    for attempt_id, spans in named.items():
        try:
            await _join(store, attempt_id, spans)
        except (DataError, NotFoundError) as error:
            refused += [f"span {span.name[:80]!r}: {error}" for span in spans]
    for (service, trace_id), of_trace in traces.items():
        try:
            await _keep_trace(store, service, trace_id, of_trace)
        except DataError as error:
            refused += [f"span {arrival.span.name[:80]!r}: {error}" for arrival in of_trace]
    return refused


async def _join(store: Store, attempt_id: str, spans: Sequence[Span]) -> None:
    """Keep spans beside an attempt, late: nobody knows that its runner sent them, so nothing is
    ever trained of them."""
    attempt = await store.attempt(attempt_id)
    kept = [translated(span).replace(rollout_id=attempt.rollout_id, late=True) for span in spans]
    await store.add_spans(AttemptRef(attempt_id, attempt.epoch), kept)


async def _keep_trace(
    store: Store, service: str, trace_id: str, arrivals: Sequence[Arrival]
) -> None:
    name = hashlib.sha256(f"{service}\0{trace_id}".encode()).hexdigest()[:32]
    attempt_id, rollout_id = f"at-{name}", f"ro-{name}"
    entry = next((arrival.span for arrival in arrivals if arrival.is_entry), None)
    failed = entry is not None and entry.status is SpanStatus.ERROR
    parcel = parcel_of(
        attempt_id,
        rollout_id,
        service,
        None,  # a rollout never changes, and what it was asked may come later
        [_own(arrival.span, name, attempt_id, rollout_id) for arrival in arrivals],
        started_at=min(arrival.span.start_ns for arrival in arrivals) / 1e9,
        report=report_of(
            attempt_id,
            AttemptStatus.FAILED if failed else AttemptStatus.SUCCEEDED,
            Outcome.APP_ERROR if failed else Outcome.OK,
        ),
    )
    assert parcel.claim is not None
    attempt = msgspec.structs.replace(parcel.claim.attempt, runner_id=SENDER)
    claim = msgspec.structs.replace(parcel.claim, attempt=attempt)
    report = None if entry is None else parcel.report
    await write_parcel(store, parcel._replace(claim=claim, report=report))


def _own(span: Span, name: str, attempt_id: str, rollout_id: str) -> Span:
    span = translated(span).replace(attempt_id=attempt_id, rollout_id=rollout_id, late=False)
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
    around = {span.span_id: _around(span, by_id) for span in spans}
    llm = [span for span in spans if span.kind is SpanKind.LLM]
    wrapping = {
        outer.span_id
        for span in llm
        for outer in around[span.span_id]
        if outer.kind is SpanKind.LLM
    }
    settled = [
        _settled(span, around[span.span_id], is_wrapping=span.span_id in wrapping) for span in spans
    ]
    is_call = all(span.kind is SpanKind.LLM for span in settled if span.parent_id not in by_id)
    inputs = [
        span if span.parent_id in by_id else span.replace(parent_id=None) for span in settled
    ]
    task = task_of(inputs, is_call=is_call)
    asked = msgspec.structs.replace(rollout, task=task, task_id=fingerprint(task))
    return asked, settled


def _around(span: Span, by_id: dict[str, Span]) -> list[Span]:
    """The spans around it, the innermost first, as far as they have arrived."""
    found: list[Span] = []
    seen = {span.span_id}
    outer = by_id.get(span.parent_id or "")
    while outer is not None and outer.span_id not in seen:  # else a circle would never end
        found.append(outer)
        seen.add(outer.span_id)
        outer = by_id.get(outer.parent_id or "")
    return found


def _settled(span: Span, around: Sequence[Span], *, is_wrapping: bool) -> Span:
    attributes = dict(span.attributes)
    if is_wrapping:  # the same call, seen from outside by another library
        attributes.pop(c.CALL_ID, None)
    if span.kind is SpanKind.LLM and c.AGENT_PATH not in attributes:
        path = _path(around)
        if path:
            attributes[c.AGENT_PATH] = path
    return span.replace(attributes=attributes, late=False)


def _path(around: Iterable[Span]) -> str:
    names: list[str] = []
    for outer in reversed(list(around)):
        if role_of(outer.name, outer.attributes) is Role.AGENT:
            name = agent_name(outer.name, outer.attributes, may_guess=True)
            if name is not None and names[-1:] != [name]:
                names.append(name)
    return join_path(names) if names else ""

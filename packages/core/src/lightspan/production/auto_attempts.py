"""Attempts that begin by themselves, in an app that is recorded: open, under way, handed over.

One is over when its root has ended and nothing of it is under way; then the journal gets it. The
hook (`redact`) sees each of its spans when it is added, in the app's own thread.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import threading
from typing import Any, Final

import msgspec

from lightspan.capture import context
from lightspan.capture.context import AgentContext, AttemptContext, AttemptHandle, make_span
from lightspan.capture.recorder import NullRecorder, Recorder
from lightspan.production import span_exporter
from lightspan.production.options import SERVICE_NAME, RecordOptions
from lightspan.production.redact import Redactor
from lightspan.production.store_writer import (
    PendingWrite,
    StoreWriter,
    more_of,
    parcel_of,
    report_of,
    text_size,
)
from lightspan.schema import clock, genai_messages, semconv as c
from lightspan.schema.records import AttemptStatus, Json, Mode, Outcome
from lightspan.schema.semconv import exception_attributes
from lightspan.schema.spans import (
    Span,
    SpanKind,
    SpanStatus,
    new_span_id,
    new_trace_id,
    now_ns,
    text_of,
)

log = logging.getLogger(__name__)

MAX_SPANS: Final = 10_000
"""Of one attempt; what comes after is counted, and damages it."""
MAX_OPEN: Final = 10_000
"""Attempts that are under way at once."""
MAX_INPUT_LENGTH: Final = 262_144
"""Characters of an attempt's input, as JSON."""


# --- one of them ----------------------------------------------------------------------------
class OpenAttempt(Recorder):
    """The spans of one attempt; it is over when its root has ended and nothing is under way."""

    def __init__(self, owner: OpenAttempts, *, is_call: bool) -> None:
        super().__init__(MAX_SPANS)
        self._owner = owner
        unique = f"{clock.now_ns():016x}{secrets.token_hex(8)}"
        self.attempt_id: Final = f"at-{unique}"
        self.rollout_id: Final = f"ro-{unique}"
        self._call_stem = f"call-{unique}-"
        self.is_call: Final = is_call
        self._calls = 0
        self._started_at = clock.now()
        self._ended = self._failed = self._cut = False
        self._handed_over = self._taken = self._is_forgotten = False
        self._left_out = 0
        self._failures: dict[str, int] = {}
        """Kind of error → how many spans the hook failed on."""
        self.size = 0

    def new_call_id(self) -> str:
        """It holds the attempt's: feedback finds the call by it."""
        with self._lock:
            self._calls += 1
            return f"{self._call_stem}{self._calls}"

    def add(self, span: Span) -> None:
        if self._owner.journal.is_parents:  # the parent records the attempt, and ends it
            if span.kind is SpanKind.LLM:
                log.warning("lightspan: a call of an attempt that began before a fork is lost")
            return
        kept, failure = self._owner.redacted(span)
        with self._lock:
            if failure:
                self._failures[failure] = self._failures.get(failure, 0) + 1
            if kept is None:
                self._left_out += 1
            else:
                size = text_size(kept)
                self.size += size
        if kept is not None:
            super().add(kept)
        if self._taken:
            self._owner.journal.put(self.take, self.size)
        elif self._is_forgotten:
            self.end(failed=False)

    def add_capture_error(self, reason: str) -> None:
        """A reason may quote the app's data; with a hook only its head is kept."""
        super().add_capture_error(reason.partition(": ")[0] if self._owner.redactor.on else reason)

    def settle(self, key: str) -> bool:
        settled = super().settle(key)
        if settled:
            self._hand_over_if_over()
        return settled

    def end(self, *, failed: bool) -> None:
        """The root has ended."""
        self._ended, self._failed = True, self._failed or failed
        self._hand_over_if_over()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has begun in it."""
        with self._lock:
            begun = self._spans or self._pending or self._damage or self._left_out or self._calls
            return not begun and not self._ended

    def forget(self) -> None:
        """It was none; what comes late would be lost, so it would be an attempt after all."""
        self._owner.forget(self)
        self._is_forgotten = True

    def cut(self) -> None:
        """The process ends before the attempt does."""
        self._cut = not self._ended
        self.give_up()
        self.end(failed=False)

    def _hand_over_if_over(self) -> None:
        with self._lock:
            if not self._ended or self._pending or self._handed_over:
                return
            self._handed_over = True
        self._owner.over(self)

    # --- in the journal's thread ----------------------------------------------------------
    def take(self) -> PendingWrite:
        with self._lock:
            spans, self._spans = self._spans, []
            first, self._taken = not self._taken, True
            self.size = 0
        span_exporter.enqueue(spans)
        if not first:
            return more_of(self.attempt_id, spans)
        return parcel_of(
            self.attempt_id,
            self.rollout_id,
            self._owner.options.service,
            task_of(spans, is_call=self.is_call),
            spans,
            started_at=min([self._started_at, *(span.start_ns / 1e9 for span in spans)]),
            report=report_of(
                self.attempt_id,
                *self._outcome(spans),
                message=f"{self._left_out} spans were left out by redact" * bool(self._left_out),
                capture_errors=self._all_capture_errors(),
            ),
        )

    def _outcome(self, spans: list[Span]) -> tuple[AttemptStatus, Outcome]:
        if self._cut:
            return AttemptStatus.CANCELLED, Outcome.CANCELLED
        failed = self._failed or (self.is_call and any(s.status is _ERROR for s in spans))
        if failed:
            return AttemptStatus.FAILED, Outcome.APP_ERROR
        return AttemptStatus.SUCCEEDED, Outcome.OK

    def _all_capture_errors(self) -> list[str]:
        failed = [
            f"redact failed on {count} spans ({kind}): their content was dropped"
            for kind, count in self._failures.items()
        ]
        return [
            *self.capture_errors(),
            *failed,
            *(["the process ended first"] if self._cut else []),
        ]


_ERROR: Final = SpanStatus.ERROR


def task_of(spans: list[Span], *, is_call: bool) -> Json:
    """The input of an attempt: what its root was given, else the messages of its first call.

    Those are `{"messages": […]}`, without the app's own instructions unless the attempt is one bare
    call; None where nothing is known.
    """
    for span in spans:
        if c.OPERATION_INPUT in span.attributes and span.parent_id is None:
            return _loaded(span.attributes[c.OPERATION_INPUT])
    calls = (span for span in spans if c.INPUT_MESSAGES in span.attributes)
    first = min(calls, key=lambda span: span.start_ns, default=None)
    if first is None:
        return None
    try:
        asked = genai_messages.input_messages_of(first.attributes)
    except (ValueError, KeyError, TypeError, AttributeError):  # a hook made something else of it
        return None
    own = () if is_call else ("system", "developer")
    return {"messages": [message for message in asked if message["role"] not in own]}


def _loaded(text: Any) -> Json:
    try:
        value = json.loads(str(text))
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError):  # no JSON, or numbers beyond 64 bits
        return str(text)
    return value


class _Root:
    """An attempt that is kept (`scope.AttemptHandle`)."""

    def __init__(
        self, attempt: OpenAttempt, current: AttemptContext, name: str | None, given: str
    ) -> None:
        self._attempt = attempt
        self._name = name
        self._given = given
        self._start_ns = now_ns()
        self._lock = threading.RLock()
        self._closed = False
        self.acting = AgentContext(current, parent_span_id=current.root_span_id)

    def close(self, error: BaseException | str | None = None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._name is not None:
                self._attempt.add(self._span(error))
        except Exception as failure:
            self._attempt.add_capture_error(f"the root could not be recorded: {failure!r}")
        is_left = isinstance(error, GeneratorExit)
        self._attempt.end(failed=error is not None and not is_left)

    def close_unless_empty(self) -> None:
        with self._lock:
            if self._closed or not self._attempt.is_empty:
                self.close()
                return
            self._closed = True
        self._attempt.forget()

    def _span(self, error: BaseException | str | None) -> Span:
        is_ok = error is None
        attributes: dict[str, Any] = {
            c.OPERATION_NAME: "invoke_workflow",
            c.OPENINFERENCE_KIND: "CHAIN",
            **({c.OPERATION_INPUT: self._given} if self._given else {}),
            **(exception_attributes(error) if isinstance(error, BaseException) else {}),
        }
        return make_span(
            AgentContext(self.acting.scope),
            f"invoke_workflow {self._name}",
            SpanKind.CHAIN,
            attributes,
            span_id=self.acting.scope.root_span_id,
            start_ns=self._start_ns,
            status=SpanStatus.OK if is_ok else _ERROR,
            status_message=text_of(error) if isinstance(error, BaseException) else error or "",
        )


class NullAttempt:
    """An attempt that is not kept (`scope.AttemptHandle`)."""

    def __init__(self, outer: AttemptContext, trace_id: str) -> None:
        self.acting = AgentContext(_scope_in(outer, trace_id, NullRecorder()))

    def close(self, error: BaseException | str | None = None) -> None:
        """Nothing was recorded."""

    def close_unless_empty(self) -> None:
        """Nothing was recorded."""


# --- those of a process ---------------------------------------------------------------------
class OpenAttempts:
    """What opens attempts in one process, and keeps those that are under way."""

    def __init__(self, options: RecordOptions) -> None:
        self.options = options
        self.redactor = Redactor(options.redact)
        self.journal = StoreWriter(options.store, options.service)
        self._resource = {SERVICE_NAME: options.service}
        self._under_way: dict[str, OpenAttempt] = {}
        self._warned = False

    def open(self, current: AgentContext, name: str | None, given: Any) -> AttemptHandle:
        """See `scope.start_attempt`."""
        trace_id = current_trace_id() or new_trace_id()
        if not sampled(trace_id, self.options.sample):
            return NullAttempt(current.scope, trace_id)
        if len(self._under_way) >= MAX_OPEN:
            self.journal.record_drop(1, f"more than {MAX_OPEN} attempts were under way at once")
            return NullAttempt(current.scope, trace_id)
        self.journal.begin()
        attempt = OpenAttempt(self, is_call=name is None)
        self._under_way[attempt.attempt_id] = attempt
        return _Root(
            attempt, _scope_in(current.scope, trace_id, attempt), name, self._input(attempt, given)
        )

    def _input(self, attempt: OpenAttempt, given: Any) -> str:
        if given is None:
            return ""
        text = _input_json(given)
        if len(text) <= MAX_INPUT_LENGTH:
            return text
        attempt.add_capture_error(f"an input of {len(text)} characters was not kept")
        return ""

    def redacted(self, span: Span) -> tuple[Span | None, str]:
        """What is kept of the span; of which service it is, the hook sees too.

        What the hook itself does (it may ask a model) is not recorded.
        """
        span = span.replace(resource={**span.resource, **self._resource})
        if not self.redactor.on:
            return span, ""
        outer = context.current_context()
        unkept = None if outer is None else NullAttempt(outer.scope, span.trace_id).acting
        token = context.set_agent(unkept)
        try:
            kept, failure = self.redactor(span)
        finally:
            context.reset_agent(token)
        if failure and not self._warned:
            self._warned = True
            log.warning(
                "lightspan: redact failed (%s); the content of such spans is dropped, and their "
                "attempts are marked as damaged",
                failure,
            )
        return kept, failure

    def forget(self, attempt: OpenAttempt) -> None:
        """An attempt was none."""
        self._under_way.pop(attempt.attempt_id, None)

    def over(self, attempt: OpenAttempt) -> None:
        """An attempt has ended."""
        self._under_way.pop(attempt.attempt_id, None)
        self.journal.put(attempt.take, attempt.size)

    def close(self, timeout_s: float) -> None:
        """Write what there is."""
        for attempt in list(self._under_way.values()):
            attempt.cut()
        self.journal.close(timeout_s)


def _scope_in(outer: AttemptContext, trace_id: str, recorder: Recorder) -> AttemptContext:
    """The scope of a new attempt; calls go where they go outside of it."""
    attempt = recorder if isinstance(recorder, OpenAttempt) else None
    return AttemptContext(
        rollout_id="" if attempt is None else attempt.rollout_id,
        attempt_id="" if attempt is None else attempt.attempt_id,
        mode=Mode.PRODUCTION,
        gateway_url=outer.gateway_url,
        call_token=outer.call_token,
        routing=outer.routing,
        trace_id=trace_id,
        root_span_id=None if attempt is None or attempt.is_call else new_span_id(),
        recorder=recorder,
    )


def current_trace_id() -> str | None:
    """The trace that the app's own OpenTelemetry is in, if it uses that."""
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return None
    span_context = opentelemetry.get_current_span().get_span_context()
    return f"{span_context.trace_id:032x}" if span_context.is_valid else None


def _input_json(given: Any) -> str:
    """An input as JSON; models of pydantic and their like as what they dump, the rest as text."""
    try:
        return _input_encoder.encode(given).decode()
    except Exception:  # a circle, a lone surrogate, a key that is no text
        return genai_messages.dump_json(given)


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json", exclude_none=True) if callable(dump) else str(value)


_input_encoder: Final = msgspec.json.Encoder(enc_hook=_plain)


def sampled(trace_id: str, ratio: float) -> bool:
    """Whether a trace is among the `ratio` that is kept: the same answer for the same trace in
    every process, as OpenTelemetry's TraceIdRatioBased sampler gives it."""
    return int(trace_id[16:], 16) < round(ratio * 2**64)

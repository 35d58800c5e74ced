"""Open attempts of a recorded app automatically, and write them when they end.

The root of an attempt is the agent, function or model call for which the attempt was opened. When
the root has ended and no model's answer is pending, the attempt is complete. It is then queued for
the store writer. The user's hook (`redact`) is called with each span that is added, in the thread
that adds it.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from lightspan.capture import context
from lightspan.capture.context import AgentContext, AttemptContext, AttemptHandle, make_span
from lightspan.capture.recorder import NullRecorder, Recorder
from lightspan.production import exporters, store_writer
from lightspan.production.options import SERVICE_NAME, RecordOptions
from lightspan.production.redact import Redactor
from lightspan.schema import clock, genai_messages, semconv as c
from lightspan.schema.records import AttemptRef, AttemptStatus, Json, Mode, Outcome, task_json
from lightspan.schema.semconv import exception_attributes
from lightspan.schema.spans import Span, SpanKind, SpanStatus, new_span_id, new_trace_id, text_of
from lightspan.schema.token_records import CallOutcome

log = logging.getLogger(__name__)

MAX_SPANS: Final = 10_000
"""Maximum number of unwritten spans of an attempt. Further spans are counted as dropped, which is a
capture error."""
MAX_OPEN: Final = 10_000
"""Maximum number of open attempts."""
MAX_INPUT_LENGTH: Final = 262_144
"""Maximum number of characters of an attempt's input, as JSON. A longer input is no task."""


# --- one attempt ----------------------------------------------------------------------------
class OpenAttempt(Recorder):
    """The recorder of one attempt, which queues the attempt once it is complete."""

    def __init__(self, owner: OpenAttempts, *, is_call: bool) -> None:
        super().__init__(MAX_SPANS)
        self._owner = owner
        self.images = {} if owner.options.images else None
        unique = f"{clock.now_ns():016x}{secrets.token_hex(8)}"
        self.attempt_id: Final = f"at-{unique}"
        self.rollout_id: Final = f"ro-{unique}"
        self._call_prefix = f"call-{unique}-"
        self.is_call: Final = is_call
        self._calls = 0
        self._started_at = clock.now()
        self.input: str | None = None
        """The input that the app gave, as JSON; `null` if it is no task, None without an input."""
        self.input_problem = ""
        """Why the input is no task; empty if it is one, or if there is none."""
        self._has_ended = self._has_failed = self.is_interrupted = False
        self._is_written = self._is_discarded = self.is_closed_early = False
        self._omitted = 0
        """Number of spans for which the hook returned None."""
        self._hook_failures: dict[str, int] = {}
        """Kind of error → number of spans on which the hook failed."""
        self.size = 0
        """Approximate number of characters of text in the unwritten spans."""

    def new_call_id(self) -> str:
        """Return a new call id that contains the attempt's id.

        Feedback on the call finds the attempt by this id.
        """
        with self._lock:
            self._calls += 1
            return f"{self._call_prefix}{self._calls}"

    def add(self, span: Span) -> None:
        writer = self._owner.writer
        if writer.is_forked:  # the parent records the attempt
            if span.kind is SpanKind.LLM:
                log.warning("lightspan: a call of an attempt that began before a fork is lost")
            return
        redacted, failure = self._owner.redact(span)
        with self._lock:
            if failure:
                self._hook_failures[failure] = self._hook_failures.get(failure, 0) + 1
            if redacted is None:
                self._omitted += 1
            else:
                self.size += store_writer.text_size(redacted.attributes)
        if redacted is not None:
            super().add(redacted)
        if self._is_written:
            self._queue()
        elif self._is_discarded:
            self.end(failed=False)

    def add_capture_error(self, reason: str) -> None:
        """Record a capture error. With a `redact` hook of the user, keep only the error's kind.

        The details of an error may quote the app's data, which the hook has not seen.
        """
        super().add_capture_error(reason.partition(": ")[0] if self._owner.redactor else reason)

    def resolve_pending(self, key: str) -> bool:
        is_resolved = super().resolve_pending(key)
        if is_resolved:
            self._queue_if_complete()
        return is_resolved

    def end(self, *, failed: bool) -> None:
        """Record that the attempt's root has ended. Queue the attempt if nothing in it is pending.

        Args:
            failed: whether the root ended with an error.
        """
        self._has_ended, self._has_failed = True, self._has_failed or failed
        self._queue_if_complete()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been recorded, and nothing has begun, in the attempt."""
        with self._lock:
            content = (self._spans, self._pending, self._capture_errors, self._omitted, self._calls)
            return not any(content) and not self._has_ended

    def discard(self) -> None:
        """Discard the attempt, which must be empty.

        If a span is added later, the attempt ends and is queued after all.
        """
        self._owner.remove(self)
        self._is_discarded = True

    def _queue_if_complete(self) -> None:
        with self._lock:
            if not self._has_ended or self._pending or self.is_over:
                return
            self.is_over = True
        self._owner.remove(self)
        self._queue()

    def _queue(self) -> None:
        images = sum(len(image.data) for image in list((self.images or {}).values()))
        self._owner.writer.put(self.take, self.size + images)

    # --- in the writer's thread -----------------------------------------------------------
    def take(self) -> store_writer.PendingWrite:
        """Remove the spans that are not written yet, and return the write that stores them.

        The first write also stores the attempt.
        """
        with self._lock:
            spans, self._spans = self._spans, []
            is_late, self._is_written = self._is_written, True
            self.size = 0
        images = self.images_of(spans)
        exporters.export(spans, images)
        if is_late:
            ref = AttemptRef(self.attempt_id, store_writer.EPOCH)
            return store_writer.PendingWrite(ref, spans, images=images)
        errors = self.capture_errors()
        errors += [
            f"redact failed on {count} spans ({kind}): their content was dropped"
            for kind, count in self._hook_failures.items()
        ]
        if self.is_interrupted:
            errors.append("the process ended first")
        omitted = f"{self._omitted} spans were left out by redact" * bool(self._omitted)
        has_input = self.input is not None or bool(self._hook_failures)
        status, outcome = self._outcome(spans)
        write = store_writer.attempt_write(
            self.attempt_id,
            self.rollout_id,
            self._owner.options.service,
            task_of(spans, is_call=self.is_call, has_input=has_input),
            spans,
            started_at=min([self._started_at, *(span.start_ns / 1e9 for span in spans)]),
            status=status,
            outcome=outcome,
            message="; ".join(filter(None, (self.input_problem, omitted))),
            capture_errors=errors,
        )
        return write._replace(images=images)

    def _outcome(self, spans: list[Span]) -> tuple[AttemptStatus, Outcome]:
        if self.is_interrupted:
            return AttemptStatus.CANCELLED, Outcome.CANCELLED
        call_failed = self.is_call and any(span.status is SpanStatus.ERROR for span in spans)
        # a reader that stops after the last answer, or between two, has what it wanted
        ends = [span.attributes.get(c.CALL_OUTCOME) for span in spans if self.is_closed_early]
        if self._has_failed or call_failed or CallOutcome.CANCELLED in ends:
            return AttemptStatus.FAILED, Outcome.APP_ERROR
        return AttemptStatus.SUCCEEDED, Outcome.OK


def task_of(spans: list[Span], *, is_call: bool, has_input: bool = False) -> Json:
    """Return the task of an attempt: the input of the agent or function that it began with.

    If no input was given, the task is `{"messages": […]}` with the messages of the first model
    call, without the app's own instructions. For a lone model call (`is_call`) the instructions are
    kept. None if neither the input nor a model call was recorded, or if the provider keeps a part
    of the prompt.

    Args:
        spans: the recorded spans of the attempt.
        is_call: whether the attempt is a lone model call.
        has_input: whether the app gave an input, as JSON. If a hook left it out or made it another
            text, the task is None.
    """
    for span in spans:
        if c.OPERATION_INPUT in span.attributes and span.parent_id is None:
            text = str(span.attributes[c.OPERATION_INPUT])
            try:
                value = json.loads(text)
                msgspec.msgpack.encode(value)
            except (ValueError, OverflowError, RecursionError):  # not JSON, beyond 64 bits
                return None if has_input else text
            return value
    if has_input:
        return None
    calls = (span for span in spans if c.INPUT_MESSAGES in span.attributes)
    first = min(calls, key=lambda span: span.start_ns, default=None)
    if first is None or c.CALL_CONTEXT in first.attributes:
        return None
    try:
        messages = genai_messages.input_messages_of(first.attributes)
    except (ValueError, KeyError, TypeError, AttributeError):  # a hook changed the structure
        return None
    own_roles = () if is_call else ("system", "developer")
    return {"messages": [message for message in messages if message["role"] not in own_roles]}


class _Handle:
    """The object by which a recorded attempt is ended (`AttemptHandle`)."""

    def __init__(self, attempt: OpenAttempt, scope: AttemptContext, name: str | None) -> None:
        self._attempt = attempt
        self._name = name
        self._start_ns = clock.now_ns()
        self._lock = threading.RLock()
        self._is_closed = False
        self.context = AgentContext(scope, parent_span_id=scope.root_span_id)

    def close(self, error: BaseException | str | None = None) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            if self._name is not None:
                self._attempt.add(self._root_span(error))
        except Exception as failure:
            self._attempt.add_capture_error(f"the root could not be recorded: {failure!r}")
        self._attempt.is_closed_early = isinstance(error, GeneratorExit)
        self._attempt.end(failed=error is not None and not self._attempt.is_closed_early)

    def interrupt(self) -> None:
        """End the attempt as interrupted, because the process ends."""
        self._attempt.is_interrupted = not self._is_closed
        self._attempt.cancel_pending()
        self.close()
        self._attempt.end(failed=False)

    def close_unless_empty(self) -> None:
        with self._lock:
            if self._is_closed or not self._attempt.is_empty:
                self.close()
                return
            self._is_closed = True
        self._attempt.discard()

    def _root_span(self, error: BaseException | str | None) -> Span:
        attributes: dict[str, Any] = {
            c.OPERATION_NAME: "invoke_workflow",
            c.OPENINFERENCE_KIND: "CHAIN",
            c.OPERATION_INPUT: self._attempt.input,
            **(exception_attributes(error) if isinstance(error, BaseException) else {}),
        }
        status = SpanStatus.OK if error is None else SpanStatus.ERROR
        scope = self.context.scope
        return make_span(
            AgentContext(scope),
            f"invoke_workflow {self._name}",
            SpanKind.CHAIN,
            attributes,
            span_id=scope.root_span_id,
            start_ns=self._start_ns,
            status=SpanStatus.UNSET if self._attempt.is_interrupted else status,
            status_message=text_of(error) if isinstance(error, BaseException) else error or "",
        )


class NullAttempt:
    """The object by which an attempt that is not recorded is ended (`AttemptHandle`)."""

    def __init__(self, outer: AttemptContext, trace_id: str) -> None:
        self.context = AgentContext(_attempt_context(outer, trace_id, NullRecorder()))

    def close(self, error: BaseException | str | None = None) -> None:
        """Do nothing."""

    def close_unless_empty(self) -> None:
        """Do nothing."""


def unrecorded_attempt(current: AgentContext, name: str | None, input: Any) -> AttemptHandle:
    """Open an attempt of a connected app that is not recorded (an `AttemptFactory`).

    Its calls have one trace id, by which `lightspan serve` answers them with the same weights.
    """
    return NullAttempt(current.scope, current_trace_id() or new_trace_id())


# --- the attempts of a process --------------------------------------------------------------
class OpenAttempts:
    """The open attempts of a process, with the functions that open, redact and write attempts."""

    def __init__(self, options: RecordOptions) -> None:
        self.options = options
        self.redactor = None if options.redact is None else Redactor(options.redact)
        self.writer = store_writer.StoreWriter(options.store, options.service)
        self._resource = {SERVICE_NAME: options.service}
        self._open: dict[str, _Handle] = {}
        self._has_warned = self._has_warned_of_input = False

    def open(self, current: AgentContext, name: str | None, input: Any) -> AttemptHandle:
        """Open an attempt for an agent, function or model call that begins outside every attempt.

        Args:
            current: the context outside every attempt.
            name: name of the agent or function; None for a lone model call.
            input: its input; None if unknown.
        """
        trace_id = current_trace_id() or new_trace_id()
        if not sampled(trace_id, self.options.sample):
            return NullAttempt(current.scope, trace_id)
        if len(self._open) >= MAX_OPEN:
            self.writer.record_drop(1, f"more than {MAX_OPEN} attempts were open at once")
            return NullAttempt(current.scope, trace_id)
        self.writer.begin()
        attempt = OpenAttempt(self, is_call=name is None)
        scope = _attempt_context(current.scope, trace_id, attempt)
        if name is not None and input is not None:
            self._take_input(attempt, input)
        handle = self._open[attempt.attempt_id] = _Handle(attempt, scope, name)
        return handle

    def _take_input(self, attempt: OpenAttempt, input: Any) -> None:
        """Set the input of an attempt, or why it is no task."""
        try:
            attempt.input = task_json(input, _dump)
            if (size := len(attempt.input)) <= MAX_INPUT_LENGTH:
                return
            problem = f"the input has {size:,} characters, more than {MAX_INPUT_LENGTH:,}"
        except Exception as error:  # also of the app's own model_dump
            problem = f"the input is not JSON: {text_of(error)}"
            if self.redactor:  # the details may quote what the hook hides
                problem = problem.partition(": ")[0]
        attempt.input, attempt.input_problem = "null", f"no task: {problem}"
        if not self._has_warned_of_input:
            self._has_warned_of_input = True
            log.warning("lightspan: such attempts are recorded, but are no tasks: %s", problem)

    def redact(self, span: Span) -> tuple[Span | None, str]:
        """Return the span that the user's hook returns, and the kind of its error if it fails.

        The span is None if the hook returns None, which drops the span. The kind is empty if the
        hook did not fail. The hook gets the span with the name of the service. Model calls of the
        hook are not recorded.
        """
        span = span.replace(resource={**span.resource, **self._resource})
        if self.redactor is None:
            return span, ""
        outer = context.current_context()
        unrecorded = None if outer is None else NullAttempt(outer.scope, span.trace_id).context
        leave = context.set_agent(unrecorded)
        try:
            redacted, failure = self.redactor(span)
        finally:
            leave()
        if failure and not self._has_warned:
            self._has_warned = True
            log.warning(
                "lightspan: redact failed (%s); the content and the names of such spans are "
                "dropped, and their attempts get a capture error",
                failure,
            )
        return redacted, failure

    def remove(self, attempt: OpenAttempt) -> None:
        """Remove an attempt from the open attempts."""
        self._open.pop(attempt.attempt_id, None)

    def close(self, timeout_s: float) -> None:
        """Interrupt the open attempts, and write them and the queued attempts.

        Args:
            timeout_s: maximum seconds to wait for the writes.
        """
        for handle in list(self._open.values()):
            handle.interrupt()
        self.writer.close(timeout_s)


def _attempt_context(outer: AttemptContext, trace_id: str, recorder: Recorder) -> AttemptContext:
    """Return the context of a new attempt, whose calls are routed as in the context `outer`."""
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
    """Return the trace id of the app's current OpenTelemetry span; None if there is no span."""
    opentelemetry = sys.modules.get("opentelemetry.trace")
    if opentelemetry is None:
        return None
    span_context = opentelemetry.get_current_span().get_span_context()
    return f"{span_context.trace_id:032x}" if span_context.is_valid else None


def _dump(value: Any) -> Any:
    """Return a Pydantic model, another mapping or a subclass of a JSON type as JSON values."""
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(mode="json", exclude_none=True)
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds an object of type {type(value).__qualname__}")


def sampled(trace_id: str, ratio: float) -> bool:
    """Return whether to record a trace, given the share `ratio` (0 to 1) of traces to record.

    The result depends on the trace id alone, as with OpenTelemetry's TraceIdRatioBased sampler.
    """
    return int(trace_id[16:], 16) < round(ratio * 2**64)

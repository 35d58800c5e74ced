"""Hears of the spans of an app's own tracer provider, and reads their names, ids and kinds.

What was said in them is read where the user asked for it, and not here (`Reader`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from opentelemetry import trace
from opentelemetry.environment_variables import OTEL_PYTHON_TRACER_PROVIDER
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from lightspan.capture.adapter import is_claimed
from lightspan_otel.open_spans import OpenSpan, keep, note_by_ids, note_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span as LiveSpan


class Reader(Protocol):
    """Reads what spans say beside identity (`hearsay`)."""

    def given(self, span: ReadableSpan) -> Any:
        """What the run was given that a span is; None if it does not say so yet."""
        ...

    def begin(self, note: OpenSpan, span: ReadableSpan) -> None:
        """A span has begun."""
        ...

    def read(self, note: OpenSpan, span: ReadableSpan) -> None:
        """It ends."""
        ...


class AgentSpanProcessor(SpanProcessor):
    """Knows which spans are open, and changes none. What was said in them it does not read.

    `otel.instrument(provider)` adds one to a provider; there it stays, as OpenTelemetry has no way
    to take it out, and hears nothing while it is not `on`.
    """

    def __init__(self) -> None:
        self.on = True
        self.is_asked_for = False
        """The app said that its agents are told of there."""
        self.reader: Reader | None = None
        """Of what was said, where that is wanted."""

    def on_start(self, span: LiveSpan, parent_context: Context | None = None) -> None:
        """A span begins; it is not the current one yet."""
        if not self.on:
            return
        with contextlib.suppress(Exception):  # never into the app; a span unknown is noticed later
            context, library = span.get_span_context(), span.instrumentation_scope
            name = "" if library is None else library.name
            # What tells of the same as an adapter or a hook is passed over, and may name parents by
            # a reckoning of its own (LlamaIndex's), in which what we know of is left out.
            inside = None if is_claimed(name) else parent_context
            above = note_of(trace.get_current_span(inside))
            note = OpenSpan(span, above, f"{context.span_id:016x}", name)
            keep(span, note)
            reader = self.reader
            if reader is not None:
                note.given = reader.given(span)
            note.begin()
            if reader is not None:
                reader.begin(note, span)

    def on_end(self, span: ReadableSpan) -> None:
        """It has ended."""
        with contextlib.suppress(Exception):  # never into the app
            context = span.get_span_context()
            note = None if context is None else note_by_ids(context.trace_id, context.span_id)
            if note is not None:
                if self.reader is not None:
                    self.reader.read(note, span)
                note.end(span)

    def shutdown(self) -> None:
        """Nothing is kept."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept."""
        return True


# --- whom we hear ---------------------------------------------------------------------------
_heard: Final[list[tuple[weakref.ref[Any], AgentSpanProcessor]]] = []
"""The app's own providers with our processor in them. (Some cannot be the key of a dictionary.)"""
_lock: Final = threading.Lock()


def processors() -> Sequence[AgentSpanProcessor]:
    """Ours, one for each provider that is or was heard."""
    return [processor for _, processor in list(_heard)]


def _found(provider: object) -> AgentSpanProcessor | None:
    return next((found for known, found in list(_heard) if known() is provider), None)


def hear(provider: Any) -> AgentSpanProcessor:
    """Hear of this provider's spans, as long as what is returned is `on`; nothing else is changed
    there, and its exporters get what they got."""
    processor = _found(provider)
    if processor is None or not processor.on:
        with _lock:
            processor = _switched_on(provider)
    return processor


def _switched_on(provider: Any) -> AgentSpanProcessor:
    processor = _found(provider)
    if processor is None:
        processor = AgentSpanProcessor()
        _add(provider, processor)
        _heard[:] = [known for known in _heard if known[0]() is not None]
        _heard.append((weakref.ref(provider), processor))
    processor.on = True
    return processor


def _add(provider: Any, processor: AgentSpanProcessor) -> None:
    """A subclass may do more when the app adds one: Phoenix's takes its own exporter out then."""
    if isinstance(provider, TracerProvider):
        TracerProvider.add_span_processor(provider, processor)
    else:
        provider.add_span_processor(processor)


_UNSET: Final = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
"""What is in the global provider's place until one is set, or none is wanted."""


def global_provider() -> Any:
    """The global provider, if the app has set one by now. To ask sets none, which it does
    otherwise where `OTEL_PYTHON_TRACER_PROVIDER` is in the environment."""
    if OTEL_PYTHON_TRACER_PROVIDER in os.environ and trace._TRACER_PROVIDER is None:
        return None
    provider = trace.get_tracer_provider()
    return None if type(provider) in _UNSET else provider


def can_be_heard(provider: object) -> bool:
    """Whether a provider takes processors, as the SDK's do."""
    return callable(getattr(provider, "add_span_processor", None))


class _Global:
    """Whether the global one is heard, whichever that is."""

    is_wanted = False


def hear_global() -> None:
    """Hear of the global provider's spans, if that is wanted and the app has set one by now."""
    provider = global_provider() if _Global.is_wanted else None
    if provider is None or not can_be_heard(provider):
        return
    processor = _found(provider)
    if processor is None or not processor.on:
        with _lock:
            if _Global.is_wanted:  # still: this may be a span of a run that goes on after the undo
                _switched_on(provider)


def hear_what_is_asked_for(*, and_global: bool) -> None:
    """Hear nothing but the providers that are asked for.

    Args:
        and_global: and the global one, whenever it is set.
    """
    with _lock:
        _Global.is_wanted = and_global
        kept = _found(global_provider()) if and_global else None
        for processor in processors():
            processor.on = processor.is_asked_for or processor is kept
    hear_global()


def is_of_a_heard_provider(span: Any) -> bool:
    """Whether a span was made by a provider that is heard now; False where that cannot be seen."""
    processor = getattr(span, "_span_processor", None)
    if processor is None:
        return False
    providers = [known() for known, ours in list(_heard) if ours.on]
    return any(getattr(each, "_active_span_processor", None) is processor for each in providers)

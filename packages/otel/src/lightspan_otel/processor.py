"""A span processor that is added to an app's tracer provider and tracks its open spans.

It reads names, ids and kinds of spans. It reads their content only if the user opts in
(`llm_spans`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry.environment_variables import OTEL_PYTHON_TRACER_PROVIDER
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from lightspan_otel import llm_spans
from lightspan_otel.open_spans import OpenSpan, is_claimed, open_span_by_ids, open_span_in, register

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span as LiveSpan


class AgentSpanProcessor(SpanProcessor):
    """Track the open spans of a provider, without changing them.

    `otel.instrument(provider)` adds such a processor. OpenTelemetry cannot remove processors, so it
    stays in the provider and ignores spans while `on` is False.
    """

    def __init__(self) -> None:
        self.on = True
        self.is_requested = False
        """Whether the user passed the provider to `otel.instrument`."""
        self.records_content = False
        """Whether content is recorded too (`llm_spans`)."""

    def on_start(self, span: LiveSpan, parent_context: Context | None = None) -> None:
        """Start tracking a span that begins; it is not the current span yet."""
        if not self.on:
            return
        # never raise into the app; `resolver` reports an unknown span later
        with contextlib.suppress(Exception):
            context, library = span.get_span_context(), span.instrumentation_scope
            name = "" if library is None else library.name
            # A span that an adapter or a patch covers is skipped. Its library may compute parents
            # its own way (LlamaIndex's does), which would leave out the spans that we know.
            inside = None if is_claimed(name) else parent_context
            above = open_span_in(inside)
            open_span = OpenSpan(span, above, f"{context.span_id:016x}", name)
            register(span, open_span)
            if not self.records_content:
                open_span.begin()
                return
            open_span.input = llm_spans.input_of(span)
            open_span.begin()
            llm_spans.begin(open_span, span.start_time or open_span.start_ns)

    def on_end(self, span: ReadableSpan) -> None:
        """Stop tracking a span that has ended, and record it."""
        with contextlib.suppress(Exception):  # never raise into the app
            context = span.get_span_context()
            open_span = (
                None if context is None else open_span_by_ids(context.trace_id, context.span_id)
            )
            if open_span is not None:
                if self.records_content:
                    llm_spans.read(open_span, span)
                open_span.end(span)

    def shutdown(self) -> None:
        """Do nothing: there is no buffer."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: there is no buffer."""
        return True


# --- observed providers ---------------------------------------------------------------------
_observed: Final[list[tuple[weakref.ref[Any], AgentSpanProcessor]]] = []
"""The app's providers that have our processor. (A list, because some are not hashable.)"""
_lock: Final = threading.Lock()


def processors() -> Sequence[AgentSpanProcessor]:
    """Return our processors, one per provider observed now or earlier."""
    return [processor for _, processor in list(_observed)]


def _processor_of(provider: object) -> AgentSpanProcessor | None:
    return next((ours for ref, ours in list(_observed) if ref() is provider), None)


def observe(provider: Any) -> AgentSpanProcessor:
    """Read the spans of `provider` from now on, and return our processor in it.

    The processor is added, or switched on if the provider has it already. Exporters get the same
    spans as before.
    """
    with _lock:
        return _switched_on(provider)


def _switched_on(provider: Any) -> AgentSpanProcessor:
    processor = _processor_of(provider)
    if processor is None:
        processor = AgentSpanProcessor()
        _add(provider, processor)
        _observed[:] = [entry for entry in _observed if entry[0]() is not None]
        _observed.append((weakref.ref(provider), processor))
    processor.on = True
    return processor


def _add(provider: Any, processor: AgentSpanProcessor) -> None:
    """Add a processor by the method of the SDK's class, even if a subclass overrides it.

    Phoenix overrides `add_span_processor` with a method that removes an exporter.
    """
    if isinstance(provider, TracerProvider):
        TracerProvider.add_span_processor(provider, processor)
    else:
        provider.add_span_processor(processor)


_UNSET: Final = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
"""Types of the global provider while none is set or tracing is off."""


def global_provider() -> Any:
    """Return the global provider if the app has set one, else None.

    `trace.get_tracer_provider()` would create one if `OTEL_PYTHON_TRACER_PROVIDER` is set.
    """
    if OTEL_PYTHON_TRACER_PROVIDER in os.environ and trace._TRACER_PROVIDER is None:
        return None
    provider = trace.get_tracer_provider()
    return None if type(provider) in _UNSET else provider


def accepts_processors(provider: object) -> bool:
    """Return whether a provider has a method to add a span processor.

    The SDK's provider has one.
    """
    return callable(getattr(provider, "add_span_processor", None))


class _Global:
    """Hold whether the spans of the global tracer provider are read (`is_wanted`).

    The app may set that provider later.
    """

    is_wanted = False


def observe_global() -> None:
    """Read the global provider's spans from now on, if this is wanted and the app has set it."""
    provider = global_provider() if _Global.is_wanted else None
    if provider is None or not accepts_processors(provider):
        return
    processor = _processor_of(provider)
    if processor is None or not processor.on:
        with _lock:
            if _Global.is_wanted:  # Checked again under the lock: an undo may have come in between.
                _switched_on(provider)


def observe_requested(*, with_global: bool) -> None:
    """Switch our processors on in the providers that the user named, and off in all others.

    Args:
        with_global: whether to read the spans of the global provider too, also if it is set later.
    """
    with _lock:
        _Global.is_wanted = with_global
        wanted = _processor_of(global_provider()) if with_global else None
        for processor in processors():
            processor.on = processor.is_requested or processor is wanted
    observe_global()


def is_from_observed_provider(span: Any) -> bool:
    """Return whether the spans of a span's provider are read now; False for an unknown provider."""
    processor = getattr(span, "_span_processor", None)
    if processor is None:
        return False
    providers = [ref() for ref, ours in list(_observed) if ours.on]
    return any(getattr(each, "_active_span_processor", None) is processor for each in providers)

"""A private tracer provider for frameworks whose spans must not reach the app's exporters.

Its spans show which agent is current in this process. They keep only the attributes in
`agent_names.READ`, and are never exported.

Spans that the app creates inside such a span must keep their real parents, or the app's traces
would have gaps. So such a span has the `SpanContext` (ids) of its parent, or an invalid one if it
has none. The provider does not use OpenTelemetry's SDK, and works where the SDK is disabled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from opentelemetry.trace import Span, SpanContext, Status, StatusCode, Tracer, TracerProvider

from lightspan.schema import semconv as c
from lightspan.schema.spans import new_span_id
from lightspan_otel.agent_names import READ
from lightspan_otel.open_spans import OpenSpan, open_span_in
from lightspan_otel.processor import observe_global

if TYPE_CHECKING:
    from opentelemetry.context import Context


class IdentityTracerProvider(TracerProvider):
    """A tracer provider whose spans are `IdentitySpan`s."""

    def get_tracer(self, instrumenting_module_name: str, *args: Any, **kwargs: Any) -> Tracer:
        """Return a tracer whose instrumentation scope is `instrumenting_module_name`."""
        return _Tracer(instrumenting_module_name)


class _Tracer(Tracer):
    def __init__(self, library: str) -> None:
        self._library = library

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        attributes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Span:
        with contextlib.suppress(Exception):  # the app's provider may reject processors
            # a span of the app may come between an agent and its call, and be the current one
            observe_global()
        parent, above = trace.get_current_span(context), open_span_in(context)
        return IdentitySpan(name, attributes, parent, above, self._library)

    def start_as_current_span(  # type: ignore[override]
        self,
        name: str,
        *args: Any,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
        **kwargs: Any,
    ) -> AbstractContextManager[Span]:
        span = self.start_span(name, *args, **kwargs)
        return trace.use_span(span, end_on_exit, record_exception, set_status_on_exception)


class _IdentityContext(SpanContext):
    """The ids of the parent span, with the state (`OpenSpan`) of one of our spans attached.

    If a library makes a no-op span inside our span, it copies this object from it. The copy keeps
    `open_span`, so our span is found from the no-op span too.
    """

    open_span: OpenSpan

    @classmethod
    def of(cls, parent: SpanContext, open_span: OpenSpan) -> _IdentityContext:
        """Return a context with the ids and flags of `parent`, to which `open_span` is attached."""
        copy = cls(*parent[:5])
        vars(copy)["open_span"] = open_span  # SpanContext forbids setattr
        return copy

    def __reduce__(self) -> Any:
        """Pickle as a plain `SpanContext`, which other processes can load without lightspan."""
        return SpanContext, self[:5]


class IdentitySpan(Span):
    """A span of our private provider, which identifies an agent or a tool.

    Args:
        name: the span's name.
        attributes: initial attributes.
        parent: the enclosing span, whose ids this span takes.
        above: state of the enclosing span; None if it is not tracked, or there is none.
        library: name of the instrumentation scope.
    """

    def __init__(
        self, name: str, attributes: Any, parent: Span, above: OpenSpan | None, library: str
    ) -> None:
        self.name = name
        self._attributes: dict[str, Any] = {}
        self._has_ended = False
        self.status = Status()
        self.events: Sequence[Any] = ()
        self.set_attributes(attributes or {})
        self.open_span = OpenSpan(self, above, new_span_id(), library)
        self._context = _IdentityContext.of(parent.get_span_context(), self.open_span)
        self.open_span.begin()

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Return the attributes that name the agent or the tool."""
        return self._attributes

    def get_span_context(self) -> SpanContext:
        return self._context

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        identity = {key: value for key, value in attributes.items() if key in READ}
        self._attributes = {**self._attributes, **identity}

    def set_attribute(self, key: str, value: Any) -> None:
        self.set_attributes({key: value})

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """Drop the event."""

    def update_name(self, name: str) -> None:
        self.name = name

    def is_recording(self) -> bool:
        return not self._has_ended

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        # The description may quote message content.
        self.status = Status(status.status_code if isinstance(status, Status) else status)
        if not self._has_ended:
            self.open_span.end_if_failed()

    def record_exception(self, exception: BaseException, *args: Any, **kwargs: Any) -> None:
        self.set_attribute(c.ERROR_TYPE, type(exception).__qualname__)  # without the message

    def end(self, end_time: int | None = None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self.open_span.end(self)


PROVIDER: Final = IdentityTracerProvider()
"""The only `IdentityTracerProvider`; it has no state."""

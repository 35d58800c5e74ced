"""A tracer provider of ours, for a framework whose spans nobody else is to get.

Its spans say who acts, in this process, and nothing more: what is not in `identity.READ` is
forgotten at once, nothing is sampled and nothing is exported. Each has the context of the span
around it, none if there is none: spans that the app makes inside have the parents that they would
have without it, so no trace of the app's has a hole. It is none of the SDK's, and works where that
is switched off.
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
from lightspan_otel.open_spans import OpenSpan, note_of
from lightspan_otel.processor import hear_global

if TYPE_CHECKING:
    from opentelemetry.context import Context


class IdentityTracerProvider(TracerProvider):
    """See the module."""

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Any = None,
    ) -> Tracer:
        """A tracer of the instrumentation of this name."""
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
        links: Any = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        with contextlib.suppress(Exception):  # a provider of the app's that takes no processor
            # a span of the app's may come between an agent and its call, and is the current one
            hear_global()
        return IdentitySpan(name, attributes, trace.get_current_span(context), self._library)

    def start_as_current_span(  # type: ignore[override]
        self,
        name: str,
        context: Context | None = None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
        attributes: Any = None,
        links: Any = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> AbstractContextManager[Span]:
        span = self.start_span(name, context, kind, attributes)
        return trace.use_span(
            span,
            end_on_exit=end_on_exit,
            record_exception=record_exception,
            set_status_on_exception=set_status_on_exception,
        )


class _IdentityContext(SpanContext):
    """The context of the span around one of ours, and the note of ours: a library's no-op span
    takes its parent's context over, and would hide ours if that were not in it."""

    note: OpenSpan

    @classmethod
    def of(cls, around: SpanContext, note: OpenSpan) -> _IdentityContext:
        """The same ids and flags."""
        made = cls(*around[:5])
        vars(made)["note"] = note  # it takes no attributes otherwise
        return made

    def __reduce__(self) -> Any:
        """What goes to another process is what the app would have sent."""
        return SpanContext, self[:5]


class IdentitySpan(Span):
    """Who acts, from its beginning to its end.

    Args:
        name: of the span.
        attributes: those that it begins with.
        parent: the span around it.
        library: the name of its instrumentation scope.
    """

    def __init__(self, name: str, attributes: Any, parent: Span, library: str) -> None:
        self.name = name
        self._attributes: dict[str, Any] = {}
        self._has_ended = False
        self.status = Status()
        self.events: Sequence[Any] = ()
        self.set_attributes(attributes or {})
        self.note = OpenSpan(self, note_of(parent), new_span_id(), library)
        self._context = _IdentityContext.of(parent.get_span_context(), self.note)
        self.note.begin()

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Those of identity, by now."""
        return self._attributes

    def get_span_context(self) -> SpanContext:
        return self._context

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        known = {key: value for key, value in attributes.items() if key in READ}
        self._attributes = {**self._attributes, **known}

    def set_attribute(self, key: str, value: Any) -> None:
        self.set_attributes({key: value})

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """What happens in it is not kept."""

    def update_name(self, name: str) -> None:
        self.name = name

    def is_recording(self) -> bool:
        return not self._has_ended

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        # Its description may quote what was said.
        self.status = Status(status.status_code if isinstance(status, Status) else status)
        if not self._has_ended:
            self.note.end_if_left()

    def record_exception(
        self,
        exception: BaseException,
        attributes: Any = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        self.set_attribute(c.ERROR_TYPE, type(exception).__qualname__)  # not its words

    def end(self, end_time: int | None = None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self.note.end(self)


PROVIDER: Final = IdentityTracerProvider()
"""The only one: it keeps nothing."""

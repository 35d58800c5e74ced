"""The API for adapters of agent frameworks. docs/adapters.md explains how to write an adapter.

An adapter sets the acting agent while the framework's code runs, and records AGENT and TOOL spans.
It imports only this module, `lightspan` itself and `lightspan.errors`, nothing else of lightspan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass

from lightspan.capture import adapter, context
from lightspan.capture.adapter import (
    AdapterInstrumentor,
    FrameworkCall,
    Instrumentation,
    SpanEnd,
    end_span,
    patch_subclasses,
    require_framework,
    truncated_json,
)
from lightspan.capture.agent_discovery import AgentSearch, Location
from lightspan.capture.context import (
    AgentContext,
    AttemptContext,
    AttemptHandle,
    CallEnd,
    Place,
    current_agent,
    current_context,
    set_agent,
    start_attempt,
)
from lightspan.capture.context_types import Resolver
from lightspan.capture.emit import agent_span
from lightspan.capture.other_clients import record_call
from lightspan.capture.patch import Patch
from lightspan.capture.recorder import Recorder
from lightspan.production import record
from lightspan.schema import semconv
from lightspan.schema.genai_attributes import StreamedAnswer
from lightspan.schema.routing import AgentPaths
from lightspan.schema.spans import Span, SpanKind, SpanStatus


@dataclass(eq=False)
class Adapter:
    """The functions and names by which an adapter takes part in recording.

    Args:
        name: name of the adapter's module.
        scopes: OpenTelemetry's instrumentation scopes whose spans describe the same agents. These
            spans are ignored while the adapter is enabled.
        resolver: function that returns the context of the acting agent, given the context with the
            pushed frames. It is for a framework whose callbacks cannot push frames; None for other
            frameworks.
        open_calls: function that returns the framework's model calls that are open in a context;
            None if the adapter records none.
    """

    name: str
    scopes: Iterable[str] = ()
    _: KW_ONLY
    resolver: Resolver | None = None
    open_calls: Callable[[AgentContext], Iterable[FrameworkCall]] | None = None

    def call_listener(self, context: AgentContext) -> CallEnd | None:
        """Note that a model call begins, which may be inside an open call of the framework.

        The caller records the new call, so the adapter must not record the open call around it.

        Args:
            context: context of the new call.

        Returns:
            A function to call when the new call ends; None if no call of the framework is open.
        """
        calls = () if self.open_calls is None else self.open_calls(context)
        ends = [call.start_inner() for call in calls]

        def notify_end(is_answered: bool) -> None:
            for end in ends:
                end(is_answered)

        return notify_end if ends else None

    def listen(self) -> None:
        """Register the resolver and the listener for model calls. Idempotent."""
        if self.resolver is not None:
            context.register_resolver(self.resolver)
        if self.open_calls is not None:
            context.add_call_listener(self.call_listener)

    def enable(self) -> None:
        """Register the adapter, and start recording in production if `LIGHTSPAN_STORE` is set.

        `LIGHTSPAN_PROMPTS` applies learned prompts too.
        """
        self.listen()
        adapter.claim_scope(self.name, self.scopes)
        record.hold(self.name)

    def disable(self) -> None:
        """Undo `enable`: unregister the adapter and stop its recording in production."""
        if self.resolver is not None:
            context.unregister_resolver(self.resolver)
        context.remove_call_listener(self.call_listener)
        adapter.release_scope(self.name)
        record.release(self.name)

    def start_call(
        self, context: AgentContext, around: Iterable[FrameworkCall] | None = None
    ) -> FrameworkCall:
        """Begin a model call of the framework, notify the listeners and return the call.

        Args:
            context: context of the calling agent.
            around: calls of the framework that contain this call. If they are given, the adapter's
                own listener is not notified. None lets that listener find them by `open_calls`.
        """
        if around is None:
            return FrameworkCall(context)
        return FrameworkCall(context, around, besides=self.call_listener)

    def add_capture_error(self, recorder: Recorder, error: Exception) -> None:
        """Record an error of the adapter, which excludes the attempt from training."""
        adapter.add_capture_error(recorder, self.name, error)


__all__ = [
    "Adapter",
    "AdapterInstrumentor",
    "AgentContext",
    "AgentPaths",
    "AgentSearch",
    "AttemptContext",
    "AttemptHandle",
    "FrameworkCall",
    "Instrumentation",
    "Location",
    "Patch",
    "Place",
    "Recorder",
    "Span",
    "SpanEnd",
    "SpanKind",
    "SpanStatus",
    "StreamedAnswer",
    "agent_span",
    "current_agent",
    "current_context",
    "end_span",
    "patch_subclasses",
    "record_call",
    "require_framework",
    "semconv",
    "set_agent",
    "start_attempt",
    "truncated_json",
]

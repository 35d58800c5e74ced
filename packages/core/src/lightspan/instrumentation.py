"""The API for adapters of agent frameworks.

docs/guides/write-an-adapter.md explains how to write an adapter. An adapter sets the acting agent
while the framework's code runs, and records AGENT and TOOL spans. It imports only this module,
`lightspan` itself and `lightspan.errors`, nothing else of lightspan.
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
from lightspan.schema.routing import AgentPaths, join_path, matches
from lightspan.schema.spans import Span, SpanKind, SpanStatus


@dataclass(eq=False)
class Adapter:
    """The names and functions that connect a framework's adapter to lightspan's recording.

    Args:
        name: name of the adapter's module.
        scopes: OpenTelemetry's instrumentation scopes whose spans describe the same agents. These
            spans are ignored while the adapter is enabled.
        resolver: function that takes the current context and returns the context of the acting
            agent. It is for a framework whose callbacks cannot set the acting agent; None for other
            frameworks.
        open_calls: function that takes a context and returns the framework's model calls in it that
            have not ended yet; None if the adapter records no model calls.
    """

    name: str
    scopes: Iterable[str] = ()
    _: KW_ONLY
    resolver: Resolver | None = None
    open_calls: Callable[[AgentContext], Iterable[FrameworkCall]] | None = None

    def call_listener(self, context: AgentContext) -> CallEnd | None:
        """Note that a model call begins, and add it to the framework's calls that contain it.

        The caller records the new call. So the adapter must not also record a framework's call that
        contains it.

        Args:
            context: context of the new call.

        Returns:
            A function to call when the new call ends; None if no call of the framework contains it.
        """
        calls = () if self.open_calls is None else self.open_calls(context)
        ends = [call.start_inner() for call in calls]

        def notify_end(is_answered: bool) -> None:
            for end in ends:
                end(is_answered)

        return notify_end if ends else None

    def listen(self) -> None:
        """Register the adapter's `resolver` and `call_listener` with lightspan. Idempotent.

        `resolver` is registered if it is not None, `call_listener` if `open_calls` is not None.
        """
        if self.resolver is not None:
            context.register_resolver(self.resolver)
        if self.open_calls is not None:
            context.add_call_listener(self.call_listener)

    def enable(self) -> None:
        """Register the adapter, and start recording in production if `LIGHTSPAN_STORE` is set.

        If the environment variable `LIGHTSPAN_PROMPTS` is set, learned prompts are applied too.
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
            around: calls of the framework that contain this call. They are notified in place of the
                adapter's own listener. None lets that listener find them by `open_calls`.
        """
        if around is None:
            return FrameworkCall(context)
        return FrameworkCall(context, around, besides=self.call_listener)

    def add_capture_error(self, recorder: Recorder, error: Exception) -> None:
        """Record an error of the adapter, which excludes the attempt from training."""
        adapter.add_capture_error(recorder, self.name, error)


__all__ = ["Adapter", "AdapterInstrumentor", "AgentContext", "AgentPaths", "AgentSearch"]
__all__ += ["AttemptContext", "AttemptHandle", "FrameworkCall", "Instrumentation", "Location"]
__all__ += ["Patch", "Place", "Recorder", "Span", "SpanEnd", "SpanKind", "SpanStatus"]
__all__ += ["StreamedAnswer", "agent_span", "current_agent", "current_context", "end_span"]
__all__ += ["join_path", "matches", "patch_subclasses", "record_call", "require_framework"]
__all__ += ["semconv", "set_agent", "start_attempt", "truncated_json"]

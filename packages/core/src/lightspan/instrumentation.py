"""What an adapter of an agent framework uses; docs/adapters.md says how to write one.

An adapter keeps the acting agent right while the framework's code runs, and records AGENT and TOOL
spans. It imports nothing else of lightspan but the names of `lightspan` itself and
`lightspan.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightspan.capture.adapter import (
    AdapterInstrumentor,
    Instrumentation,
    SpanEnd,
    add_capture_error,
    claim_scope,
    end_span,
    patch_subclasses,
    release_scope,
    require_framework,
    truncated_json,
)
from lightspan.capture.agent_discovery import AgentSearch, Location
from lightspan.capture.context import (
    AgentContext,
    AttemptContext,
    AttemptHandle,
    CallEnd,
    Frame,
    add_call_listener,
    current_agent,
    current_context,
    notify_call_start,
    register_resolver,
    remove_call_listener,
    reset_agent,
    resolve_agent,
    set_agent,
    start_attempt,
    unregister_resolver,
)
from lightspan.capture.emit import agent_span, tool_span
from lightspan.capture.other_clients import NestedCalls, record_call
from lightspan.capture.patch import Patch
from lightspan.capture.recorder import NullRecorder, Recorder
from lightspan.production import record
from lightspan.schema import semconv
from lightspan.schema.genai_attributes import StreamedAnswer
from lightspan.schema.routing import AgentPaths
from lightspan.schema.spans import Span, SpanKind, SpanStatus, new_span_id


def enable_adapter(adapter: str, scopes: Iterable[str] = ()) -> None:
    """Record in production while the adapter is on, if the environment asks for it.

    Args:
        adapter: name of the adapter's module.
        scopes: OpenTelemetry's instrumentation scopes whose spans describe the same agents; they
            are ignored.
    """
    claim_scope(adapter, scopes)
    record.hold(adapter)


def disable_adapter(adapter: str) -> None:
    """Undo `enable_adapter`."""
    release_scope(adapter)
    record.release(adapter)


__all__ = [
    "AdapterInstrumentor",
    "AgentContext",
    "AgentPaths",
    "AgentSearch",
    "AttemptContext",
    "AttemptHandle",
    "CallEnd",
    "Frame",
    "Instrumentation",
    "Location",
    "NestedCalls",
    "NullRecorder",
    "Patch",
    "Recorder",
    "Span",
    "SpanEnd",
    "SpanKind",
    "SpanStatus",
    "StreamedAnswer",
    "add_call_listener",
    "add_capture_error",
    "agent_span",
    "current_agent",
    "current_context",
    "disable_adapter",
    "enable_adapter",
    "end_span",
    "new_span_id",
    "notify_call_start",
    "patch_subclasses",
    "record_call",
    "register_resolver",
    "remove_call_listener",
    "require_framework",
    "reset_agent",
    "resolve_agent",
    "semconv",
    "set_agent",
    "start_attempt",
    "tool_span",
    "truncated_json",
    "unregister_resolver",
]

"""Derive agent paths and spans from the Agents SDK's spans, without importing the SDK.

The SDK reports the begin and end of a run, an agent, a tool, a handoff and a guardrail. Each of
these is an *operation*, and so is a model call. An operation begins in a context, which has the
agent path and the open span, and which another framework may have set. From it, the context for the
work inside is derived:

| operation | adds to the path | becomes |
|---|---|---|
| agent | its name | an AGENT span |
| function (a tool, including an agent as a tool) | nothing | a TOOL span |
| handoff, guardrail | nothing | a span |
| run | nothing | nothing |
| model call | nothing | an LLM span, if it bypassed the OpenAI SDK |

If an agent hands over to another agent, the paths of both have the same length. Otherwise the path
would grow without end if two agents hand over back and forth. The new agent's span has a link to
the old agent's span.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from lightspan.instrumentation import (
    AgentContext,
    FrameworkCall,
    Span,
    SpanEnd,
    SpanKind,
    end_span,
    semconv,
)

NAME: Final = "lightspan_openai_agents"
"""Name of the adapter; its note in a context is the innermost operation."""
HANDOFF_FROM: Final = "lightspan.handoff.from"
"""Attribute of a handoff's span, and of the link to the agent that hands over: that agent's
name.
"""
HANDOFF_TO: Final = "lightspan.handoff.to"
GUARDRAIL_TRIGGERED: Final = "lightspan.guardrail.triggered"


class OperationKind(StrEnum):
    """The kinds of operations; the values are the SDK's own, except for a model call."""

    RUN = "task"
    AGENT = "agent"
    TOOL = "function"
    HANDOFF = "handoff"
    GUARDRAIL = "guardrail"
    MODEL = "model call"


WITHOUT_SPAN: Final = (OperationKind.RUN, OperationKind.MODEL)


class Origin(NamedTuple):
    """An agent that has handed over to another agent: its name and the id of its span."""

    name: str
    span_id: str


@dataclass(slots=True, eq=False)
class Operation:
    """A run, agent, tool, handoff, guardrail or model call that has begun."""

    kind: OperationKind
    name: str
    around: AgentContext
    """Context in which the operation begins."""
    inside: AgentContext
    """Context inside the operation."""
    parent: Operation | None = None
    origin: Origin | None = None
    tool_call_id: str = ""
    arguments: str = ""
    call: FrameworkCall | None = None
    """Announced call of a model client; None for operations that are no model calls."""
    start_ns: int = field(default_factory=time.time_ns)
    handoffs: dict[str, Origin] = field(default_factory=dict)
    """Name of the next agent → the agent that handed over. An entry is removed when the next agent
    begins.
    """
    watched: Any = None
    """Wrapper of the SDK's span; None if there is none."""

    @property
    def key(self) -> str:
        """Id of the operation's span, by which the recorder finds the open span."""
        return str(self.inside.parent_span_id)


def begin(
    kind: OperationKind,
    name: str,
    around: AgentContext,
    parent: Operation | None = None,
    handoffs: dict[str, Origin] | None = None,
) -> Operation:
    """Return an operation that begins, with the context for the work inside it.

    Args:
        kind: kind of the operation.
        name: name of the agent, tool or guardrail; empty if there is none.
        around: context in which the operation begins.
        parent: enclosing operation; None if there is none.
        handoffs: name of an agent → the agent that handed over to it; its entry is removed. Used
            only if `parent` is None; otherwise the parent has the handoffs. None for no handoffs.
    """
    operation = Operation(kind, name, around, around, parent)
    is_agent = kind is OperationKind.AGENT
    if kind in WITHOUT_SPAN or (is_agent and not name):
        return operation
    if is_agent:
        operation.inside = around.enter_agent(name)
        origins = handoffs if parent is None else parent.handoffs
        operation.origin = (origins or {}).pop(name, None)
    else:
        operation.inside = around.enter_tool()
    return operation


def open_calls(operation: Operation | None) -> list[FrameworkCall]:
    """Return the model calls around the current work, innermost first.

    Only `operation` and the operations around it are searched. The search ends at the first one
    that is not a model call, such as a tool.

    Args:
        operation: the innermost operation; None if there is none.
    """
    calls: list[FrameworkCall] = []
    while operation is not None and operation.call is not None:
        calls.append(operation.call)
        operation = operation.parent
    return calls


def hand_over(
    operation: Operation, source: str, target: str, handoffs: dict[str, Origin] | None = None
) -> None:
    """Store a handoff, so that the next agent's span gets a link to the span of this agent.

    Args:
        operation: the handoff.
        source: name of the agent that hands over.
        target: name of the next agent. If it is empty, nothing is stored.
        handoffs: where the handoff is stored if no operation encloses the agent that hands over.
            None to store nothing in this case.
    """
    agent = operation.parent
    while agent is not None and agent.kind is not OperationKind.AGENT:
        agent = agent.parent
    if agent is None or not target:
        return
    origins = handoffs if agent.parent is None else agent.parent.handoffs
    if origins is not None:
        origins[target] = Origin(source, str(agent.inside.parent_span_id))


def span_of(operation: Operation, end: SpanEnd) -> Span | None:
    """Return the span of an operation that has ended; None if the operation has no span."""
    span_id = operation.inside.parent_span_id
    if operation.inside is operation.around or span_id is None:
        return None
    name, kind, attributes = _DESCRIBED[operation.kind](operation)
    origin = operation.origin
    return end_span(
        operation.around,
        kind,
        name,
        end,
        span_id=span_id,
        start_ns=operation.start_ns,
        attributes=attributes,
        links=[] if origin is None else [(origin.span_id, {HANDOFF_FROM: origin.name})],
    )


_Described = tuple[str, SpanKind, dict[str, Any]]


def _agent(operation: Operation) -> _Described:
    return operation.name, SpanKind.AGENT, {}


def _tool(operation: Operation) -> _Described:
    attributes = {
        semconv.TOOL_CALL_ID: operation.tool_call_id or None,
        semconv.TOOL_CALL_ARGUMENTS: operation.arguments or None,
    }
    return operation.name, SpanKind.TOOL, attributes


def _handoff(operation: Operation) -> _Described:
    return "handoff", SpanKind.OTHER, {semconv.OPENINFERENCE_KIND: "CHAIN"}


def _guardrail(operation: Operation) -> _Described:
    attributes = {semconv.OPENINFERENCE_KIND: "GUARDRAIL"}
    return f"guardrail {operation.name}".rstrip(), SpanKind.OTHER, attributes


_DESCRIBED: Final = {
    OperationKind.AGENT: _agent,
    OperationKind.TOOL: _tool,
    OperationKind.HANDOFF: _handoff,
    OperationKind.GUARDRAIL: _guardrail,
}

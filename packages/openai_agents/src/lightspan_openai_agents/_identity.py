"""From the SDK's spans to agent paths and spans: pure, without the SDK.

The SDK tells of *operations* in the context in which they happen: a run (`task`), an agent, a tool,
a handoff, a guardrail. A call of a model is one more. So an operation knows what is around it by
who is acting when it begins, whatever framework said so, and decides who acts inside it:

| operation | adds to the path | becomes |
|---|---|---|
| agent | its name | an AGENT span |
| function (a tool; of an agent as a tool, too) | nothing | a TOOL span |
| handoff, guardrail | nothing | a span |
| run | nothing | nothing |
| model call | nothing | an LLM span, if it bypassed the OpenAI SDK: core records the others |

An agent that is handed to is no child of the one that hands over: both stand side by side (a path
would grow without end where two agents hand back and forth). Its span has a link to the one it
came from.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from lightspan.instrumentation import (
    AgentContext,
    CallEnd,
    NestedCalls,
    Span,
    SpanEnd,
    SpanKind,
    end_span,
    semconv,
)

NAME: Final = "lightspan_openai_agents"
"""Of the adapter: its note is the innermost operation of a context."""
HANDOFF_FROM: Final = "lightspan.handoff.from"
"""The agent that hands over: on the span of the handoff, and on the link of its heir."""
HANDOFF_TO: Final = "lightspan.handoff.to"
GUARDRAIL_TRIGGERED: Final = "lightspan.guardrail.triggered"


class OperationKind(StrEnum):
    """What an operation is; the values are the SDK's own, but for a model that is asked."""

    RUN = "task"
    AGENT = "agent"
    TOOL = "function"
    HANDOFF = "handoff"
    GUARDRAIL = "guardrail"
    MODEL = "a model is asked"


WITHOUT_SPAN: Final = (OperationKind.RUN, OperationKind.MODEL)


class Origin(NamedTuple):
    """The agent that handed over."""

    name: str
    span_id: str


@dataclass(slots=True, eq=False)
class Operation:
    """An operation under way."""

    kind: OperationKind
    name: str
    around: AgentContext
    """Who acted when it began."""
    inside: AgentContext
    """Who acts in it."""
    parent: Operation | None = None
    origin: Origin | None = None
    tool_call_id: str = ""
    arguments: str = ""
    calls: NestedCalls | None = None
    """Of a model call: those inside it that somebody else records."""
    start_ns: int = field(default_factory=time.time_ns)
    handed: dict[str, Origin] = field(default_factory=dict)
    """Name of an agent that was handed to → who handed over; until it begins."""
    watched: Any = None
    """What stands for the SDK's span of it, if something does."""

    @property
    def key(self) -> str:
        """Of its span, while that is not made."""
        return str(self.inside.parent_span_id)


def begin(
    kind: OperationKind,
    name: str,
    around: AgentContext,
    parent: Operation | None = None,
    handed: dict[str, Origin] | None = None,
) -> Operation:
    """An operation begins.

    Args:
        kind: what it is.
        name: of the agent, tool or guardrail; empty where there is none.
        around: who is acting.
        parent: the operation that it is in, if any is known.
        handed: who was handed to, and by whom, where no operation is around.
    """
    operation = Operation(kind, name, around, around, parent)
    if kind is OperationKind.MODEL:
        operation.calls = NestedCalls()
    is_agent = kind is OperationKind.AGENT
    if kind in WITHOUT_SPAN or (is_agent and not name):
        return operation
    if is_agent:
        operation.inside = around.enter_agent(name)
        waiting = handed if parent is None else parent.handed
        operation.origin = (waiting or {}).pop(name, None)
    else:
        operation.inside = around.enter_tool()
    return operation


def note_asked(operation: Operation | None) -> CallEnd | None:
    """Somebody who knows more of it asks a model in this operation, and tells how that ended."""
    calls: list[NestedCalls] = []
    while operation is not None and operation.calls is not None:
        calls.append(operation.calls)
        operation = operation.parent
    return NestedCalls.start_in(calls)


def hand_over(
    operation: Operation, source: str, target: str, handed: dict[str, Origin] | None = None
) -> None:
    """A handoff ended: the next agent of that name, beside the one that hands over, is its heir.

    Args:
        operation: the handoff.
        source: the agent that hands over.
        target: the agent that is handed to.
        handed: where to note it if nothing is around that agent.
    """
    agent = operation.parent
    while agent is not None and agent.kind is not OperationKind.AGENT:
        agent = agent.parent
    if agent is None or not target:
        return
    known = handed if agent.parent is None else agent.parent.handed
    if known is not None:
        known[target] = Origin(source, str(agent.inside.parent_span_id))


def span_of(operation: Operation, end: SpanEnd) -> Span | None:
    """The span of an operation that has ended; None for one that makes none."""
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

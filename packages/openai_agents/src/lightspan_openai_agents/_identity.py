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

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from lightspan.capture import bypass
from lightspan.capture.scope import (
    Acting,
    CallEnd,
    Frame,
    agent_attributes,
    all_ends,
    make_span,
)
from lightspan.schema import conventions
from lightspan.schema.spans import (
    Attributes,
    Span,
    SpanKind,
    SpanLink,
    SpanStatus,
    new_span_id,
    now_ns,
)
from lightspan.schema.tokens import CallOutcome

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


class End(NamedTuple):
    """How an operation ended."""

    status: SpanStatus = SpanStatus.OK
    """UNSET for one that was abandoned: that is no error."""
    message: str = ""
    attributes: Mapping[str, Any] = {}


class Origin(NamedTuple):
    """The agent that handed over."""

    name: str
    span_id: str


@dataclass(slots=True, eq=False)
class Operation:
    """An operation under way."""

    kind: OperationKind
    name: str
    around: Acting
    """Who acted when it began."""
    inside: Acting
    """Who acts in it."""
    parent: Operation | None = None
    origin: Origin | None = None
    tool_call_id: str = ""
    arguments: str = ""
    calls: bypass.CallsInside | None = None
    """Of a model call: those inside it that somebody else records."""
    start_ns: int = field(default_factory=now_ns)
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
    around: Acting,
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
        operation.calls = bypass.CallsInside()
    is_agent = kind is OperationKind.AGENT
    if kind in WITHOUT_SPAN or (is_agent and not name):
        return operation
    span_id, frames = new_span_id(), around.frames
    if is_agent:
        frames = (*frames, Frame(name, span_id))
        waiting = handed if parent is None else parent.handed
        operation.origin = (waiting or {}).pop(name, None)
    operation.inside = around.within(span_id, frames)
    return operation


def note_asked(operation: Operation | None) -> CallEnd | None:
    """Somebody who knows more of it asks a model in this operation, and tells how that ended."""
    ends: list[CallEnd] = []
    while operation is not None and operation.calls is not None:
        ends.append(operation.calls.begins())
        operation = operation.parent
    return all_ends(ends)


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


def span_of(operation: Operation, end: End) -> Span | None:
    """The span of an operation that has ended; None for one that makes none."""
    span_id = operation.inside.parent_span_id
    if operation.inside is operation.around or span_id is None:
        return None
    name, kind, attributes = _DESCRIBED[operation.kind](operation)
    attributes |= end.attributes
    return make_span(
        operation.around,
        name,
        kind,
        attributes,
        span_id=span_id,
        start_ns=operation.start_ns,
        end_ns=now_ns(),
        status=end.status,
        status_message=end.message,
        links=_links(operation),
    )


def bypassing_call(
    operation: Operation,
    request: Mapping[str, Any],
    answer: Mapping[str, Any],
    end: End,
    model: Any,
) -> Span | None:
    """Return the LLM span of a model call that core could not see; None if the gateway records it.

    Args:
        operation: the call, which has ended.
        request: as the body of an OpenAI request.
        answer: as an OpenAI completion or response.
        end: how it ended.
        model: the SDK's object that asked.
    """
    client = bypass.client_of(model, "agents.OpenAIChatCompletionsModel")
    if bypass.is_at_gateway(client, operation.around.scope.gateway_url):
        return None
    is_cancelled = end.attributes.get(conventions.ERROR_TYPE) == "CancelledError"
    return bypass.bypassing_call(
        operation.around,
        request,
        answer,
        start_ns=operation.start_ns,
        status=end.status,
        message=end.message,
        attributes=end.attributes,
        outcome=CallOutcome.CANCELLED if is_cancelled else None,
        client=client,
    )


def _links(operation: Operation) -> list[SpanLink]:
    if operation.origin is None:
        return []
    told: Attributes = {HANDOFF_FROM: operation.origin.name}
    return [SpanLink(operation.around.scope.trace_id, operation.origin.span_id, told)]


_Described = tuple[str, SpanKind, dict[str, Any]]


def _agent(operation: Operation) -> _Described:
    attributes = agent_attributes(operation.name, operation.around.frames)
    attributes[conventions.AGENT_PATH] = operation.inside.path
    return f"invoke_agent {operation.name}", SpanKind.AGENT, attributes


def _tool(operation: Operation) -> _Described:
    attributes = {
        conventions.OPERATION_NAME: "execute_tool",
        conventions.TOOL_NAME: operation.name,
        conventions.TOOL_CALL_ID: operation.tool_call_id or None,
        conventions.TOOL_CALL_ARGUMENTS: operation.arguments or None,
        conventions.OPENINFERENCE_KIND: "TOOL",
    }
    return f"execute_tool {operation.name}", SpanKind.TOOL, attributes


def _handoff(operation: Operation) -> _Described:
    return "handoff", SpanKind.OTHER, {conventions.OPENINFERENCE_KIND: "CHAIN"}


def _guardrail(operation: Operation) -> _Described:
    attributes = {conventions.OPENINFERENCE_KIND: "GUARDRAIL"}
    return f"guardrail {operation.name}".rstrip(), SpanKind.OTHER, attributes


_DESCRIBED: Final = {
    OperationKind.AGENT: _agent,
    OperationKind.TOOL: _tool,
    OperationKind.HANDOFF: _handoff,
    OperationKind.GUARDRAIL: _guardrail,
}

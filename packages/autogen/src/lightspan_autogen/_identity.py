"""From AutoGen's invocations to agent paths and spans: pure, without AutoGen.

A team, an agent and a tool call each open a span; teams and agents also add one frame to the path:

    path = path around + team name + (name of a nested team …) + agent name

Nobody opens anything twice: an agent's `run` goes through its `on_messages`, which goes through its
`on_messages_stream`, and all three are one invocation. An agent that an agent of the same name
wraps (a `MessageFilterAgent`) is that agent. What happens inside a tool is a new invocation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightspan.capture.adapter import shortened
from lightspan.capture.scope import Acting, Frame, agent_attributes, make_span
from lightspan.schema import conventions
from lightspan.schema.spans import (
    Attributes,
    Span,
    SpanKind,
    SpanStatus,
    new_span_id,
    now_ns,
)


class Role(NamedTuple):
    """Who or what is invoked."""

    name: str
    owner: Any
    """The team's or agent's object; a tool call's id."""
    kind: SpanKind = SpanKind.AGENT
    is_team: bool = False
    arguments: str = ""
    """Of a tool call, JSON."""


@dataclass(slots=True, eq=False)
class Opened:
    """An invocation under way."""

    role: Role
    around: Acting
    inside: Acting
    start_ns: int = field(default_factory=now_ns)

    @property
    def span_id(self) -> str:
        return self.inside.parent_span_id or ""


class End(NamedTuple):
    """How an invocation ended."""

    status: SpanStatus = SpanStatus.OK
    """UNSET where it was abandoned, which is no error."""
    message: str = ""
    attributes: Mapping[str, Any] = {}


def enter(around: Acting, role: Role, innermost: Opened | None) -> Opened | None:
    """The invocation that begins; None if it goes on with the innermost one.

    Args:
        around: who is acting so far.
        role: who is invoked.
        innermost: the invocation whose span is the innermost open one, if it is one of ours.
    """
    if innermost is not None and _goes_on(innermost.role, role):
        return None
    span_id = new_span_id()
    frames = around.frames
    if role.kind is SpanKind.AGENT:
        frames = (*frames, Frame(role.name, span_id))
    return Opened(role, around, around.within(span_id, frames))


def _goes_on(innermost: Role, role: Role) -> bool:
    if role.kind is not innermost.kind or role.is_team is not innermost.is_team:
        return False
    if role.kind is SpanKind.TOOL:
        return role.name == innermost.name and role.owner == innermost.owner
    return role.owner is innermost.owner or (role.name == innermost.name and not role.is_team)


def span_of(opened: Opened, end: End) -> Span:
    """The span of an invocation that has ended now."""
    role = opened.role
    attributes = _agent(opened) if role.kind is SpanKind.AGENT else _tool(opened)
    attributes |= end.attributes
    return make_span(
        opened.around,
        f"{attributes[conventions.OPERATION_NAME]} {role.name}",
        role.kind,
        attributes,
        span_id=opened.span_id,
        start_ns=opened.start_ns,
        end_ns=now_ns(),
        status=end.status,
        status_message=end.message,
    )


def _agent(opened: Opened) -> Attributes:
    attributes = agent_attributes(opened.role.name, opened.around.frames)
    attributes[conventions.AGENT_PATH] = opened.inside.path
    return attributes


def _tool(opened: Opened) -> Attributes:
    role = opened.role
    attributes: Attributes = {
        conventions.OPERATION_NAME: "execute_tool",
        conventions.TOOL_NAME: role.name,
        conventions.AGENT_PATH: opened.inside.path,
        conventions.OPENINFERENCE_KIND: "TOOL",
        conventions.TOOL_CALL_ARGUMENTS: shortened(role.arguments),
    }
    if role.owner:
        attributes[conventions.TOOL_CALL_ID] = str(role.owner)
    return attributes

"""From AutoGen's invocations to agent paths and spans: pure, without AutoGen.

A team, an agent and a tool call each open a span; teams and agents also add one frame to the path:

    path = path around + team name + (name of a nested team …) + agent name

Nobody opens anything twice: an agent's `run` goes through its `on_messages`, which goes through its
`on_messages_stream`, and all three are one invocation. An agent that an agent of the same name
wraps (a `MessageFilterAgent`) is that agent. What happens inside a tool is a new invocation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightspan.instrumentation import (
    AgentContext,
    Span,
    SpanEnd,
    SpanKind,
    end_span,
    semconv,
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
    around: AgentContext
    inside: AgentContext
    start_ns: int = field(default_factory=time.time_ns)

    @property
    def span_id(self) -> str:
        return self.inside.parent_span_id or ""


def enter(around: AgentContext, role: Role, innermost: Opened | None) -> Opened | None:
    """The invocation that begins; None if it goes on with the innermost one.

    Args:
        around: who is acting so far.
        role: who is invoked.
        innermost: the invocation whose span is the innermost open one, if it is one of ours.
    """
    if innermost is not None and _goes_on(innermost.role, role):
        return None
    is_agent = role.kind is SpanKind.AGENT
    return Opened(role, around, around.enter_agent(role.name) if is_agent else around.enter_tool())


def _goes_on(innermost: Role, role: Role) -> bool:
    if role.kind is not innermost.kind or role.is_team is not innermost.is_team:
        return False
    if role.kind is SpanKind.TOOL:
        return role.name == innermost.name and role.owner == innermost.owner
    return role.owner is innermost.owner or (role.name == innermost.name and not role.is_team)


def span_of(opened: Opened, end: SpanEnd) -> Span:
    """The span of an invocation that has ended now."""
    role = opened.role
    return end_span(
        opened.around,
        role.kind,
        role.name,
        end,
        span_id=opened.span_id,
        start_ns=opened.start_ns,
        attributes=None if role.kind is SpanKind.AGENT else _tool(role),
    )


def _tool(role: Role) -> dict[str, Any]:
    attributes = {semconv.TOOL_CALL_ARGUMENTS: role.arguments}
    return {**attributes, semconv.TOOL_CALL_ID: str(role.owner)} if role.owner else attributes

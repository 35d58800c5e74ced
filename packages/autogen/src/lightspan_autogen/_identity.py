"""Derive agent paths and spans from the runs of AutoGen's teams, agents and tools.

This module does not import AutoGen. Each run of a team, an agent or a tool has a span. A run of a
team or an agent also adds a name to the agent path:

    path = path around + team name + (name of a nested team …) + agent name

Several method calls may be one run: an agent's `run` calls its `on_messages`, which calls its
`on_messages_stream`. A `MessageFilterAgent` wraps an agent of the same name; both count as one
agent. Everything that is called inside a tool is a new run.
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
    """The team, agent or tool that runs."""

    name: str
    owner: Any
    """The object of the team or agent; the id of the call for a tool."""
    kind: SpanKind = SpanKind.AGENT
    is_team: bool = False
    arguments: str = ""
    """Arguments of a tool call, as JSON."""


@dataclass(slots=True, eq=False)
class Invocation:
    """A run of a team, agent or tool that has begun and not ended."""

    role: Role
    around: AgentContext
    inside: AgentContext
    start_ns: int = field(default_factory=time.time_ns)

    @property
    def span_id(self) -> str:
        return self.inside.parent_span_id or ""


def enter(around: AgentContext, role: Role, innermost: Invocation | None) -> Invocation | None:
    """Begin a run of a team, agent or tool; return None if the call belongs to the run `innermost`.

    Args:
        around: context in which the call is made.
        role: the team, agent or tool that is called.
        innermost: the run around the call; None if no run of AutoGen is open.
    """
    if innermost is not None and _is_continuation(innermost.role, role):
        return None
    is_agent = role.kind is SpanKind.AGENT
    return Invocation(
        role, around, around.enter_agent(role.name) if is_agent else around.enter_tool()
    )


def _is_continuation(innermost: Role, role: Role) -> bool:
    if role.kind is not innermost.kind or role.is_team is not innermost.is_team:
        return False
    if role.kind is SpanKind.TOOL:
        return role.name == innermost.name and role.owner == innermost.owner
    return role.owner is innermost.owner or (role.name == innermost.name and not role.is_team)


def span_of(invocation: Invocation, end: SpanEnd) -> Span:
    """Return the span of an invocation that has ended now."""
    role = invocation.role
    return end_span(
        invocation.around,
        role.kind,
        role.name,
        end,
        span_id=invocation.span_id,
        start_ns=invocation.start_ns,
        attributes=None if role.kind is SpanKind.AGENT else _tool(role),
    )


def _tool(role: Role) -> dict[str, Any]:
    attributes = {semconv.TOOL_CALL_ARGUMENTS: role.arguments}
    return {**attributes, semconv.TOOL_CALL_ID: str(role.owner)} if role.owner else attributes

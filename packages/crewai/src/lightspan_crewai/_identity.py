"""Derive agent paths and spans from CrewAI's events, without importing CrewAI.

CrewAI emits an event whenever something begins or ends, in the context in which it happens. An
*entry* is what has begun: a crew, flow, task, agent, tool or model call. The entries of a context
that have not ended are its *trail*, the outermost first. Each of these adds one frame to the path:

- a crew with a name, a flow, a method of a flow;
- a task, which is one turn of its agent: the frame is the agent's role;
- an agent that runs alone (`Agent.kickoff`) or is called by a tool (delegation), and an agent for
  which a model is called outside its turn, such as a plan before a delegated task.

The executions of a task's agent inside the task (a retry, another try after a guardrail) add none.

CrewAI has a stack of its own, which removes its top entry at any end event. Some end events come
twice, for example after a failed model call, and the second one removes a task or a crew. So this
module finds the entry of an end event by kind and key. The entries above it were abandoned. An end
event without an entry is ignored.

A role may be a template. The agent's name is the template, which is the same for all inputs. It is
the role with the inputs filled in only if a pattern of `optimize=` or `frozen=` matches that form
and not the template.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from lightspan.instrumentation import (
    AttemptContext,
    FrameworkCall,
    Place,
    Span,
    SpanEnd,
    SpanKind,
    SpanStatus,
    end_span,
    join_path,
    matches,
    semconv,
)


class Kind(StrEnum):
    """The kinds of entries: crews, flows, tasks, agents, tools and model calls."""

    CREW = "crew"
    FLOW = "flow"
    METHOD = "method"
    TASK = "task"
    AGENT = "agent"
    TOOL = "tool"
    CALL = "call"


_TURNS: Final = (Kind.TASK, Kind.AGENT)
"""Kinds of entries that are turns: work of one agent.

A turn is never inside itself: if it begins again, its previous entry was abandoned.
"""


class Name(NamedTuple):
    """The name of an entry in two forms: as a template, and with the inputs filled in.

    The forms may differ only if the name is an agent's role.
    """

    template: str
    filled: str
    agent_id: str | None = None
    """Id of the agent whose role the name is; None if it is unknown or the name is no role."""


class Start(NamedTuple):
    """The start of an entry: a crew, flow, task, agent, tool or model call."""

    kind: Kind
    key: Hashable
    """Key that the matching `End` also has."""
    name: Name | None = None
    """Name of the entry; None if the entry adds no frame to the path, as for a tool."""
    attributes: Mapping[str, Any] = {}
    """Arguments of a tool, or the OpenAI request of a model call; empty for other entries."""
    input: Any = None
    """Input of a crew, a flow or an agent that runs alone; None if there is none."""
    client: Any = None
    """Client of a model call; None for other entries."""


class End(NamedTuple):
    """The end of an entry: a crew, flow, task, agent, tool or model call."""

    kind: Kind
    key: Hashable
    status: SpanStatus = SpanStatus.OK
    """Status of the span; UNSET if the entry was abandoned or paused."""
    message: str = ""
    attributes: Mapping[str, Any] = {}
    """Attributes of the error, a tool's result, or the OpenAI completion of a model call."""


@dataclass(slots=True, eq=False)
class Entry:
    """A crew, flow, task, agent, tool or model call that has begun."""

    start: Start
    around: Place
    inside: Place
    """Agent path and span id of everything that happens in the entry."""
    start_ns: int = field(default_factory=time.time_ns)
    call: FrameworkCall | None = None
    """Announced call of a model client; None for entries that are no model calls."""

    @property
    def name(self) -> str:
        """Name of the agent that acts in the entry."""
        return self.inside.frames[-1].name

    @property
    def has_span(self) -> bool:
        """Whether a span is recorded at the entry's end."""
        return self.inside.span_id != self.around.span_id

    def end_call(self, event: End) -> bool:
        """End a model call; return whether the adapter has to record it.

        It may be called repeatedly. The result is False for an entry of another kind.
        """
        if self.call is None:
            return False
        is_ok = event.status is SpanStatus.OK
        self.call.end(is_answered=is_ok)
        return self.call.needs_record(is_ok=is_ok)

    def is_of(self, event: Start | End) -> bool:
        """Return whether an event has the kind and the key of this entry."""
        return self.start.kind is event.kind and self.start.key == event.key


Trail = tuple[Entry, ...]


# --- names ----------------------------------------------------------------------------------
def clean(name: Any) -> str:
    """Return a name as one line; roles from YAML files end with a line feed."""
    return " ".join(str(name or "").split())


def choose_name(patterns: Iterable[str], names: Sequence[str]) -> str:
    """Return that one of `names` which `patterns` use.

    All of `names` are names of one agent. They are compared with each level of each pattern (the
    text between two `/`), in order. The first level that matches some of the names but not all
    decides: the result is the first name that it matches. If no level does, the result is the first
    name.

    Args:
        patterns: the patterns of the routing's rules.
        names: the forms of the name: the template, and the text with the inputs filled in.
    """
    for segment in (part for pattern in patterns for part in pattern.split("/")):
        matching = [name for name in names if matches(segment, join_path([name]))]
        if matching and len(matching) < len(names):
            return matching[0]
    return names[0]


# --- what begins and ends -------------------------------------------------------------------
def begin(
    trail: Trail,
    start: Start,
    place: Place,
    choose: Callable[[Sequence[str]], str] = operator.itemgetter(0),
    start_call: Callable[[Iterable[FrameworkCall]], FrameworkCall] | None = None,
) -> tuple[Trail, list[Entry]]:
    """Add an entry that begins to `trail`.

    Args:
        trail: open entries of the current context, outermost first.
        start: start of the entry; an empty name adds no frame.
        place: place (agent path and span) of the acting agent.
        choose: function that returns one of the forms of a name (the template, or the text with the
            inputs filled in).
        start_call: function that announces a model call. Its argument is the list of the model
            calls that are open around it. None to announce nothing.

    Returns:
        The new trail, whose last entry is the new one, and the abandoned entries, innermost first.
            If the task or agent is in `trail` already, it begins again. Its old entry and the
            entries inside that were abandoned.
    """
    trail, abandoned = _restarted(trail, start)
    around = abandoned[-1].around if abandoned else place
    inside, call = around, None
    if start.kind is Kind.TOOL:
        inside = around.enter_tool()
    elif start.name is not None and start.name.filled and not _is_acting(trail, start):
        inside = around.enter_agent(choose(start.name[:2]))
    if start.kind is Kind.CALL and start_call is not None:
        call = start_call([entry.call for entry in trail if entry.call is not None])
    return (*trail, Entry(start, around, inside, call=call)), abandoned


def end(trail: Trail, event: End) -> tuple[Trail, Entry | None, list[Entry]]:
    """Remove an entry that ends, and the entries inside it, from `trail`.

    Returns:
        The remaining trail; the entry that ends, None if it is not in `trail`; and the entries
        inside it, which were abandoned, innermost first.
    """
    for index in range(len(trail) - 1, -1, -1):
        if trail[index].is_of(event):
            return trail[:index], trail[index], list(reversed(trail[index + 1 :]))
    return trail, None, []


def _restarted(trail: Trail, start: Start) -> tuple[Trail, list[Entry]]:
    if start.kind in _TURNS:
        for index, entry in enumerate(trail):
            if entry.is_of(start):
                return trail[:index], list(reversed(trail[index:]))
    return trail, []


def _is_acting(trail: Trail, start: Start) -> bool:
    """Return whether the agent that `start` names is acting already, so that no frame is added."""
    if start.kind not in (Kind.AGENT, Kind.CALL) or start.name is None or not trail:
        return False
    innermost = trail[-1].start.kind
    if start.kind is Kind.CALL and innermost in _TURNS:
        return True  # the event may name the task's agent although the manager acts
    names = [entry.start.name for entry in trail if entry.start.name is not None]
    agents = [name.agent_id for name in names if name.agent_id is not None]
    if not agents or agents[-1] != start.name.agent_id:
        return False
    return start.kind is Kind.CALL or innermost in (*_TURNS, Kind.CALL)


# --- spans ----------------------------------------------------------------------------------
def span_of(entry: Entry, event: End, attempt: AttemptContext) -> Span:
    """Return the span of an entry that has ended."""
    is_tool = entry.start.kind is Kind.TOOL
    attributes = dict(entry.start.attributes) if is_tool else {}
    name = str(attributes.get(semconv.TOOL_NAME) or "") if is_tool else entry.name
    return end_span(
        entry.around.within(attempt),
        SpanKind.TOOL if is_tool else SpanKind.AGENT,
        name,
        SpanEnd(event.status, event.message, event.attributes),
        span_id=entry.inside.span_id,
        start_ns=entry.start_ns,
        attributes=attributes,
    )


def abandoned_end(entry: Entry) -> End:
    """Return an `End` for an entry that was abandoned."""
    return End(entry.start.kind, entry.start.key, SpanStatus.UNSET)

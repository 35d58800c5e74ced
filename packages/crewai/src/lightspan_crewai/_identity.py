"""From CrewAI's events to agent paths and spans: pure, without CrewAI.

CrewAI emits an event whenever something begins or ends, in the context in which it happens. What
has begun and not yet ended in a context is its *trail*, outermost first. Each of these adds one
frame to the path:

- a crew that has a name of its own, a flow, a method of a flow;
- a task, which is one turn of its agent: the frame is the agent's role;
- an agent that runs alone (`Agent.kickoff`) or is asked by a tool (delegation), and an agent for
  which a model is asked outside its turn, such as a plan before a delegated task.

The executions of a task's agent inside the task (a retry, another try after a guardrail) add none.

CrewAI's own stack pops whatever is on top: an event that comes twice (a failed model call does)
takes away a task or a crew. So an end is matched with what it ends, by kind and key; what lies
above it was abandoned, and what matches nothing is no news.

A role may be a template. Its name is the template, the same for all inputs, unless a rule of the
attempt's routing matches the filled role only: so `optimize=` may say either.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from lightspan.instrumentation import (
    AgentContext,
    AttemptContext,
    CallEnd,
    Frame,
    NestedCalls,
    Span,
    SpanEnd,
    SpanKind,
    SpanStatus,
    end_span,
    new_span_id,
    semconv,
)


class Kind(StrEnum):
    """What begins and ends."""

    CREW = "crew"
    FLOW = "flow"
    METHOD = "method"
    TASK = "task"
    AGENT = "agent"
    TOOL = "tool"
    CALL = "call"


_TURNS: Final = (Kind.TASK, Kind.AGENT)
_RESTARTABLE: Final = (Kind.TASK, Kind.AGENT)
"""One that begins again has ended: nothing of these is ever inside itself."""


class Name(NamedTuple):
    """What something is called; only roles of agents have two forms."""

    template: str
    filled: str
    agent_id: str | None = None
    """Of a role."""


class Start(NamedTuple):
    """Something begins."""

    kind: Kind
    key: Hashable
    """Ends carry the same."""
    name: Name | None = None
    """None: it adds no frame (a tool never does)."""
    attributes: Mapping[str, Any] = {}
    """A tool's arguments; the request of a model call, as an OpenAI client would send it."""
    given: Any = None
    """The input of a crew, a flow or a lone agent."""
    client: Any = None
    """Of a model call."""


class End(NamedTuple):
    """Something ends."""

    kind: Kind
    key: Hashable
    status: SpanStatus = SpanStatus.OK
    """UNSET for what was abandoned or paused."""
    message: str = ""
    attributes: Mapping[str, Any] = {}
    """Of the error; a tool's result; the answer of a model call, as an OpenAI client gets it."""


class Place(NamedTuple):
    """A context without its attempt."""

    frames: tuple[Frame, ...] = ()
    span_id: str | None = None

    @classmethod
    def of(cls, context: AgentContext) -> Place:
        """Return the place of a context."""
        return cls(context.frames, context.parent_span_id)


@dataclass(slots=True, eq=False)
class Entry:
    """What has begun."""

    start: Start
    around: Place
    inside: Place
    """What is around whatever happens in it."""
    start_ns: int = field(default_factory=time.time_ns)
    calls: NestedCalls = field(default_factory=NestedCalls)
    """Of a model call: those of clients that lightspan watches."""
    told: Sequence[CallEnd] = ()
    """Of a model call: who hears of its end."""

    @property
    def name(self) -> str:
        """Of the agent that it is the turn of."""
        return self.inside.frames[-1].name

    @property
    def records(self) -> bool:
        """Whether a span is due at its end, whatever the end is."""
        return self.inside.span_id != self.around.span_id

    def tell(self, event: End) -> None:
        """It ends, perhaps once more."""
        for told in self.told:
            told(event.status is SpanStatus.OK)

    def needs_record(self, event: End) -> bool:
        """Return whether it is a model call that nobody else records."""
        is_call = self.start.kind is Kind.CALL
        return is_call and self.calls.needs_record(is_ok=event.status is SpanStatus.OK)

    def is_of(self, event: Start | End) -> bool:
        """Whether the event is about this."""
        return self.start.kind is event.kind and self.start.key == event.key


Trail = tuple[Entry, ...]


# --- names ----------------------------------------------------------------------------------
def clean(name: Any) -> str:
    """The text of a name; roles from YAML files end in a line feed."""
    return " ".join(str(name or "").split())


# --- what begins and ends -------------------------------------------------------------------
def begin(
    trail: Trail,
    start: Start,
    given: Place,
    choose: Callable[[Sequence[str]], str] = operator.itemgetter(0),
    told: Sequence[CallEnd] = (),
) -> tuple[Trail, list[Entry]]:
    """Note that something begins.

    A name that is empty adds no frame.

    Args:
        trail: what has begun before in this context.
        given: where it begins, by everything that is known of this context.
        choose: picks one of the forms of a name, by the attempt's routing.
        told: who hears of its end.

    Returns:
        The new trail, whose last entry is the new one; and what turns out to have been abandoned,
        innermost first.
    """
    trail, abandoned = _restarted(trail, start)
    around = abandoned[-1].around if abandoned else given
    inside = around
    if start.kind is Kind.TOOL:
        inside = Place(around.frames, new_span_id())
    elif start.name is not None and start.name.filled and not _is_acting(trail, start):
        frame = Frame(choose(start.name[:2]), new_span_id())
        inside = Place((*around.frames, frame), frame.span_id)
    if start.kind is Kind.CALL:
        outer = [entry for entry in trail if entry.start.kind is Kind.CALL]
        told = (*told, *(entry.calls.start() for entry in outer))
    return (*trail, Entry(start, around, inside, told=told)), abandoned


def end(trail: Trail, event: End) -> tuple[Trail, Entry | None, list[Entry]]:
    """Note that something ends.

    Returns:
        The trail without it; the entry, None if it is not known or has ended; and what had begun
        inside it and was abandoned, innermost first.
    """
    for index in range(len(trail) - 1, -1, -1):
        if trail[index].is_of(event):
            return trail[:index], trail[index], list(reversed(trail[index + 1 :]))
    return trail, None, []


def _restarted(trail: Trail, start: Start) -> tuple[Trail, list[Entry]]:
    if start.kind in _RESTARTABLE:
        for index, entry in enumerate(trail):
            if entry.is_of(start):
                return trail[:index], list(reversed(trail[index:]))
    return trail, []


def _is_acting(trail: Trail, start: Start) -> bool:
    """Whether the agent that something names is at its turn already."""
    if start.kind not in (Kind.AGENT, Kind.CALL) or start.name is None or not trail:
        return False
    innermost = trail[-1].start.kind
    if start.kind is Kind.CALL and innermost in _TURNS:
        return True  # its event may name the task's agent where the manager acts
    named = [entry.start.name for entry in trail if entry.start.name is not None]
    agents = [name.agent_id for name in named if name.agent_id is not None]
    if not agents or agents[-1] != start.name.agent_id:
        return False
    return start.kind is Kind.CALL or innermost in (*_TURNS, Kind.CALL)


# --- spans ----------------------------------------------------------------------------------
def span_of(entry: Entry, event: End, attempt: AttemptContext) -> Span:
    """Return the span of an agent or a tool that ended."""
    around, is_tool = entry.around, entry.start.kind is Kind.TOOL
    attributes = dict(entry.start.attributes) if is_tool else {}
    name = str(attributes.get(semconv.TOOL_NAME) or "") if is_tool else entry.name
    return end_span(
        AgentContext(attempt, around.frames, around.span_id),
        SpanKind.TOOL if is_tool else SpanKind.AGENT,
        name,
        SpanEnd(event.status, event.message, event.attributes),
        span_id=entry.inside.span_id,
        start_ns=entry.start_ns,
        attributes=attributes,
    )


def given_up(entry: Entry) -> End:
    """The end of what was abandoned."""
    return End(entry.start.kind, entry.start.key, SpanStatus.UNSET)

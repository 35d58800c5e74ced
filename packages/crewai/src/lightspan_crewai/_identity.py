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

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from lightspan.capture.adapter import Place, error_attributes
from lightspan.capture.bypass import (
    CallsInside,
    Client,
    bypassing_attributes,
    client_of,
    is_at_gateway,
    outcome_of,
)
from lightspan.capture.scope import CallEnd, Frame, agent_attributes
from lightspan.schema import conventions
from lightspan.schema.routing import Rule, join_path, matches
from lightspan.schema.spans import (
    Attributes,
    Span,
    SpanKind,
    SpanStatus,
    clean_attributes,
    new_span_id,
    now_ns,
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


class Ids(NamedTuple):
    """Of the attempt."""

    rollout_id: str
    attempt_id: str
    trace_id: str
    gateway_url: str | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """What has begun."""

    start: Start
    around: Place
    inside: Place
    """What is around whatever happens in it."""
    start_ns: int = field(default_factory=now_ns)
    calls: CallsInside = field(default_factory=CallsInside)
    """Of a model call: those of clients that lightspan watches."""
    told: Sequence[CallEnd] = ()
    """Of a model call: who hears of its end."""

    @property
    def records(self) -> bool:
        """Whether a span is due at its end, whatever the end is."""
        return self.inside.span_id != self.around.span_id

    def tell(self, event: End) -> None:
        """It ends, perhaps once more."""
        for told in self.told:
            told(event.status is SpanStatus.OK)

    def is_of(self, event: Start | End) -> bool:
        """Whether the event is about this."""
        return self.start.kind is event.kind and self.start.key == event.key


Trail = tuple[Entry, ...]


# --- names ----------------------------------------------------------------------------------
def clean(name: Any) -> str:
    """The text of a name; roles from YAML files end in a line feed."""
    return " ".join(str(name or "").split())


def choose_name(name: Name, rules: Sequence[Rule] = ()) -> str:
    """The form of a name that the rules know, the template if they make no difference."""
    if name.template != name.filled:
        for rule in rules:
            for segment in rule.pattern.split("/"):
                is_template, is_filled = (matches(segment, join_path([n])) for n in name[:2])
                if is_template is not is_filled:
                    return name.template if is_template else name.filled
    return name.template


# --- what begins and ends -------------------------------------------------------------------
def begin(
    trail: Trail,
    start: Start,
    given: Place,
    rules: Sequence[Rule] = (),
    told: Sequence[CallEnd] = (),
) -> tuple[Trail, list[Entry]]:
    """Note that something begins.

    A name that is empty adds no frame.

    Args:
        trail: what has begun before in this context.
        given: where it begins, by everything that is known of this context.
        rules: of the attempt's routing.
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
        frame = Frame(choose_name(start.name, rules), new_span_id())
        inside = Place((*around.frames, frame), frame.span_id)
    if start.kind is Kind.CALL:
        outer = [entry for entry in trail if entry.start.kind is Kind.CALL]
        told = (*told, *(entry.calls.begins() for entry in outer))
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
def spans(entry: Entry, event: End, ids: Ids) -> list[Span]:
    """What is recorded of something that ended: of an agent, a tool, a call that nobody saw."""
    found = []
    is_call = entry.start.kind is Kind.CALL
    is_unseen = is_call and entry.calls.leave(is_ok=event.status is SpanStatus.OK)
    if is_unseen and not is_at_gateway(_client(entry), ids.gateway_url):
        found.append(_span(entry, SpanKind.LLM, entry.inside, new_span_id(), event, ids))
    if entry.records:
        is_tool = entry.start.kind is Kind.TOOL
        kind = SpanKind.TOOL if is_tool else SpanKind.AGENT
        found.append(_span(entry, kind, entry.around, str(entry.inside.span_id), event, ids))
    return found


def _span(entry: Entry, kind: SpanKind, around: Place, span_id: str, event: End, ids: Ids) -> Span:
    attributes = clean_attributes(_ATTRIBUTES[kind](entry, event))
    return Span(
        span_id=span_id,
        name=f"{attributes[conventions.OPERATION_NAME]} {_subject(entry, kind)}".rstrip(),
        kind=kind,
        parent_id=around.span_id,
        start_ns=entry.start_ns,
        end_ns=now_ns(),
        status=event.status,
        status_message=event.message,
        attributes=attributes,
        rollout_id=ids.rollout_id,
        attempt_id=ids.attempt_id,
        trace_id=ids.trace_id,
    )


def _subject(entry: Entry, kind: SpanKind) -> str:
    if kind is SpanKind.AGENT:
        return entry.inside.frames[-1].name
    key = conventions.TOOL_NAME if kind is SpanKind.TOOL else "model"
    return str(entry.start.attributes.get(key) or "")


def _agent_attributes(entry: Entry, event: End) -> Attributes:
    return {
        **agent_attributes(entry.inside.frames[-1].name, entry.around.frames),
        conventions.AGENT_PATH: entry.inside.path,
        **error_attributes(event.attributes),
    }


def _tool_attributes(entry: Entry, event: End) -> Attributes:
    return {
        conventions.OPERATION_NAME: "execute_tool",
        conventions.AGENT_PATH: entry.inside.path,
        conventions.OPENINFERENCE_KIND: "TOOL",
        **entry.start.attributes,
        **event.attributes,
    }


def _call_attributes(entry: Entry, event: End) -> Attributes:
    """Of a model call that bypassed the OpenAI SDK: its structure, and no tokens."""
    outcome, client = outcome_of(event.status), _client(entry)
    return {
        conventions.AGENT_PATH: entry.inside.path,
        **bypassing_attributes(entry.start.attributes, event.attributes, outcome),
        **({} if client is None else client.attributes()),
        **error_attributes(event.attributes),
    }


_ATTRIBUTES: Final = {
    SpanKind.AGENT: _agent_attributes,
    SpanKind.TOOL: _tool_attributes,
    SpanKind.LLM: _call_attributes,
}


def _client(entry: Entry) -> Client | None:
    if entry.start.client is None:
        return None
    native = 'crewai.LLM(model="openai/…")'
    return client_of(entry.start.client, native)


def given_up(entry: Entry) -> End:
    """The end of what was abandoned."""
    return End(entry.start.kind, entry.start.key, SpanStatus.UNSET)

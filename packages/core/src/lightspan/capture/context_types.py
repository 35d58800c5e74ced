"""The attempt and the stack of agents in it, as data: immutable, so that contexts may be copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

from lightspan.capture.recorder import Recorder
from lightspan.schema.records import Mode
from lightspan.schema.routing import Route, Routing, join_path
from lightspan.schema.spans import new_span_id, new_trace_id
from lightspan.schema.system_prompts import Instructions


class Frame(NamedTuple):
    """One agent on the stack."""

    name: str
    span_id: str


_NAME: Final = itemgetter(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """One attempt, as the app's process knows it."""

    rollout_id: str
    attempt_id: str
    mode: Mode = Mode.TRAIN
    gateway_url: str | None = None
    """The gateway's origin, such as `http://127.0.0.1:8123`; None records without redirecting."""
    call_token: str = field(default="", repr=False)
    routing: Routing = field(default_factory=Routing)
    trace_id: str = field(default_factory=new_trace_id)
    root_span_id: str | None = None
    """The span of the attempt itself, parent of the outermost agents."""
    instructions: Instructions | None = None
    """What agents are told; None: what the app says."""
    recorder: Recorder = field(default_factory=Recorder, repr=False)
    follows_urls: bool = False
    """Only calls that the app points at the gateway go there, whichever agent makes them."""
    is_outside: bool = False
    """It stands for the process, outside every attempt: what begins in it may be one of its own."""

    @property
    def is_rollout(self) -> bool:
        """Whether a runner opened it, not the app itself in production."""
        return not self.is_outside and self.mode is not Mode.PRODUCTION

    def new_call_id(self) -> str:
        """The id of a call that is made now."""
        return self.recorder.new_call_id()


@dataclass(slots=True, unsafe_hash=True)
class AgentContext:
    """The scope with the frames pushed so far. Nobody changes one; it is not `frozen` because then
    it takes three times as long to make, and each call makes a dozen."""

    scope: AttemptContext
    frames: tuple[Frame, ...] = ()
    parent_span_id: str | None = None
    """The innermost open span (agent or tool): parent of what comes next."""
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What adapters keep of this context, under their names: it comes and goes with the frames, as
    it would not in ContextVars of their own."""

    @property
    def path(self) -> str:
        return join_path(map(_NAME, self.frames))

    def within(self, span_id: str | None, frames: tuple[Frame, ...]) -> AgentContext:
        """The same in another span, with these frames."""
        return AgentContext(self.scope, frames, span_id, self.notes)  # as in `noting`

    def enter_agent(self, name: str) -> AgentContext:
        """Return the context inside an agent that begins here, with a new span id."""
        frame = Frame(name, new_span_id())
        return self.within(frame.span_id, (*self.frames, frame))

    def enter_tool(self) -> AgentContext:
        """Return the context inside a tool call that begins here, with a new span id."""
        return self.within(new_span_id(), self.frames)

    @property
    def is_routed(self) -> bool:
        """Whether a model call made now is a sample of the policy, or of learned instructions.

        No cache of the app's may answer such a call: its answer would be one of another policy.
        """
        scope = self.scope
        if scope.mode is Mode.PRODUCTION:
            return False
        if scope.instructions is not None and scope.instructions.concerns(self.path):
            return True
        if scope.gateway_url is None:
            return False
        return scope.routing.target(self.path).route is not Route.APP

    def noting(self, adapter: str, note: Any) -> AgentContext:
        """The same with an adapter's note."""
        notes = {**self.notes, adapter: note}  # not `replace`, which takes much longer
        return AgentContext(self.scope, self.frames, self.parent_span_id, notes)


Resolver = Callable[[AgentContext], AgentContext | None]
"""Given who is acting by the pushed frames alone, says who really is; None if it does not know."""

CallEnd = Callable[[bool], None]
"""Told, once, whether a call brought an answer. It has if it was left in the middle of one."""

CallListener = Callable[[AgentContext], CallEnd | None]
"""Told who asks a model now, in a call that somebody records; what it returns is told of the end.
"""


class AttemptHandle(Protocol):
    """An attempt that began by itself; whoever opened it closes it, once."""

    @property
    def acting(self) -> AgentContext:
        """Who acts in it."""
        ...

    def close(self, error: BaseException | str | None = None) -> None:
        """It has ended, by this error (or what is told of one) if there is one. Never raises."""
        ...

    def close_unless_empty(self) -> None:
        """It has ended, or was none: with nothing in it, it is not kept. Never raises."""
        ...


AttemptFactory = Callable[[AgentContext, str | None, Any], AttemptHandle]
"""See `scope.start_attempt`. Never raises."""

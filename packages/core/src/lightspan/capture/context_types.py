"""Immutable types of the current attempt and agent, so that contexts may be copied."""

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
    """The data of an attempt in the app's process."""

    rollout_id: str = ""
    """Empty outside every attempt."""
    attempt_id: str = ""
    """Empty outside every attempt."""
    mode: Mode = Mode.TRAIN
    gateway_url: str | None = None
    """Origin of the gateway, such as `http://127.0.0.1:8123`; None records without redirecting."""
    call_token: str = field(default="", repr=False)
    routing: Routing = field(default_factory=Routing)
    trace_id: str = field(default_factory=new_trace_id)
    root_span_id: str | None = None
    """Id of the attempt's own span, the parent of the outermost agents."""
    instructions: Instructions | None = None
    """Instructions that replace the app's own; None keeps the app's."""
    recorder: Recorder = field(default_factory=Recorder, repr=False)
    follows_urls: bool = False
    """Whether a call is redirected only if its client's base URL is the gateway's."""
    is_outside: bool = False
    """Whether this is no attempt, but the context of the process outside every attempt."""

    @property
    def is_rollout(self) -> bool:
        """Whether this is an attempt that a runner opened, not the app in production."""
        return not self.is_outside and self.mode is not Mode.PRODUCTION


@dataclass(slots=True, unsafe_hash=True)
class AgentContext:
    """The attempt with the frames that are pushed.

    Instances are never changed. The class is not `frozen` because that triples the time to create
    an instance, and each model call creates a dozen.
    """

    scope: AttemptContext
    frames: tuple[Frame, ...] = ()
    parent_span_id: str | None = None
    """Id of the innermost open span (agent or tool), the parent of the next span."""
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Adapter → data that the adapter keeps with this context."""

    @property
    def path(self) -> str:
        return join_path(map(_NAME, self.frames))

    def within(self, span_id: str | None, frames: tuple[Frame, ...]) -> AgentContext:
        """Return this context with the given parent span and frames."""
        return AgentContext(self.scope, frames, span_id, self.notes)  # `replace` is much slower

    def enter_agent(self, name: str) -> AgentContext:
        """Return the context inside an agent that begins here, with a new span id."""
        frame = Frame(name, new_span_id())
        return self.within(frame.span_id, (*self.frames, frame))

    def enter_tool(self) -> AgentContext:
        """Return the context inside a tool call that begins here, with a new span id."""
        return self.within(new_span_id(), self.frames)

    @property
    def is_routed(self) -> bool:
        """Whether a model call made now samples the policy or uses learned instructions.

        The app's caches must not answer such a call, because a cached answer is from another
        policy.
        """
        scope = self.scope
        if scope.mode is Mode.PRODUCTION:
            return False
        if scope.instructions is not None and scope.instructions.concerns(self.path):
            return True
        if scope.gateway_url is None:
            return False
        return scope.routing.target(self.path).route is not Route.APP

    def add_capture_error(self, problem: str, error: Exception) -> None:
        """Record an error of lightspan, which excludes the attempt from training."""
        self.scope.recorder.add_capture_error(f"{problem}: {error!r}")

    def with_note(self, adapter: str, note: Any) -> AgentContext:
        """Return this context with `note` as the data of `adapter` (`notes`)."""
        notes = {**self.notes, adapter: note}
        return AgentContext(self.scope, self.frames, self.parent_span_id, notes)


class Place(NamedTuple):
    """A context without its attempt, for objects that must not keep the attempt alive."""

    frames: tuple[Frame, ...] = ()
    span_id: str | None = None

    @classmethod
    def of(cls, context: AgentContext) -> Place:
        """Return the place of a context."""
        return cls(context.frames, context.parent_span_id)

    def enter_agent(self, name: str) -> Place:
        """Return the place inside an agent that begins here, with a new span id."""
        frame = Frame(name, new_span_id())
        return Place((*self.frames, frame), frame.span_id)

    def enter_tool(self) -> Place:
        """Return the place inside a tool call that begins here, with a new span id."""
        return Place(self.frames, new_span_id())

    def within(self, scope: AttemptContext) -> AgentContext:
        """Return the context at this place of an attempt."""
        return AgentContext(scope, self.frames, self.span_id)


Resolver = Callable[[AgentContext], AgentContext | None]
"""Returns the context of the acting agent, given that of the pushed frames; None if unknown."""

CallEnd = Callable[[bool], None]
"""Called once when a model call ends, with whether it brought an answer.

A call that the app left in the middle of its answer counts as answered.
"""

CallListener = Callable[[AgentContext], CallEnd | None]
"""Called with the acting agent when a model call begins that is going to be recorded."""


class AttemptHandle(Protocol):
    """An attempt that was opened automatically, and that the function which opened it closes."""

    @property
    def context(self) -> AgentContext:
        """The context inside the attempt."""

    def close(self, error: BaseException | str | None = None) -> None:
        """End the attempt; it has failed if `error` is given. Never raises."""

    def close_unless_empty(self) -> None:
        """End the attempt, or discard it if nothing was recorded in it. Never raises."""


AttemptFactory = Callable[[AgentContext, str | None, Any], AttemptHandle]
"""Opens an attempt from context, name and input (`context.start_attempt`). Never raises."""

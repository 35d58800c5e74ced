"""Immutable types for the current attempt and agent, because contexts may be copied."""

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
    """An agent that has begun and not ended, with the id of its span."""

    name: str
    span_id: str


_NAME: Final = itemgetter(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """The data of the current attempt in the app's process."""

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
    """Whether only calls of clients whose base URL is the gateway's are redirected to the
    gateway."""
    is_outside: bool = False
    """Whether this is no attempt, but the context that applies outside every attempt."""
    attempt_factory: AttemptFactory | None = None
    """Opens an attempt outside every attempt if the process does not record; None opens none."""

    @property
    def is_rollout(self) -> bool:
        """Whether a runner opened this attempt. False for an app in production."""
        return not self.is_outside and self.mode is not Mode.PRODUCTION

    @property
    def is_over(self) -> bool:
        """Whether this is an attempt in production that has ended. False for a rollout's."""
        return self.recorder.is_over and self.mode is Mode.PRODUCTION


@dataclass(slots=True, unsafe_hash=True)
class AgentContext:
    """The current attempt, with the frames of the agents that are active.

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
        """Return a context of the same attempt, with the given parent span and frames."""
        return AgentContext(self.scope, frames, span_id, self.notes)  # `replace` is much slower

    def enter_agent(self, name: str) -> AgentContext:
        """Return the context inside an agent that begins in this context, with a new span id."""
        frame = Frame(name, new_span_id())
        return self.within(frame.span_id, (*self.frames, frame))

    def enter_tool(self) -> AgentContext:
        """Return the context inside a tool call that begins in this context, with a new span id."""
        return self.within(new_span_id(), self.frames)

    @property
    def is_routed(self) -> bool:
        """Whether a model call made now goes to the gateway or has learned instructions.

        If so, the app's caches must not answer it: the cached answer may be from other weights or
        instructions.
        """
        scope = self.scope
        if scope.instructions is not None and scope.instructions.concerns(self.path):
            return True
        return bool(scope.gateway_url) and scope.routing.target(self.path).route is not Route.APP

    def add_capture_error(self, problem: str, error: Exception) -> None:
        """Record an error of lightspan, which excludes the attempt from training.

        Args:
            problem: what failed.
            error: the error.
        """
        self.scope.recorder.add_capture_error(f"{problem}: {error!r}")

    def with_note(self, adapter: str, note: Any) -> AgentContext:
        """Return a copy of this context in which an adapter keeps data for itself (`notes`).

        Args:
            adapter: name of the adapter.
            note: the data; it replaces the adapter's earlier data.
        """
        notes = {**self.notes, adapter: note}
        return AgentContext(self.scope, self.frames, self.parent_span_id, notes)


class Place(NamedTuple):
    """The active agents and the parent span of a context, without its attempt.

    Objects that must not keep the attempt alive hold a place instead of a context.
    """

    frames: tuple[Frame, ...] = ()
    span_id: str | None = None

    @classmethod
    def of(cls, context: AgentContext) -> Place:
        """Return the place of a context: its frames and the id of its innermost open span."""
        return cls(context.frames, context.parent_span_id)

    def enter_agent(self, name: str) -> Place:
        """Return the place inside an agent that begins at this place, with a new span id."""
        frame = Frame(name, new_span_id())
        return Place((*self.frames, frame), frame.span_id)

    def enter_tool(self) -> Place:
        """Return the place inside a tool call that begins at this place, with a new span id."""
        return Place(self.frames, new_span_id())

    def within(self, scope: AttemptContext) -> AgentContext:
        """Return the context at this place in the attempt `scope`."""
        return AgentContext(scope, self.frames, self.span_id)


Resolver = Callable[[AgentContext], AgentContext | None]
"""A function that returns the context of the acting agent, given the context of the pushed frames.
None if it does not know the agent."""

CallEnd = Callable[[bool], object]
"""A function that is called once when a model call ends. Its argument is whether the call was
answered. A call that the app abandoned in the middle of its answer counts as answered."""

CallListener = Callable[[AgentContext], CallEnd | None]
"""A function that is called with the context of the acting agent when a model call begins that will
be recorded. It returns a function to call at the end of the model call, or None."""


class AttemptHandle(Protocol):
    """An attempt that lightspan opened by itself, in production.

    The code that opened it has to close it.
    """

    @property
    def context(self) -> AgentContext:
        """The context in which the code of the attempt runs."""

    def close(self, error: BaseException | str | None = None) -> None:
        """End the attempt. If `error` is given, the attempt has failed. Never raises."""

    def close_unless_empty(self) -> None:
        """End the attempt, or discard it if nothing was recorded in it. Never raises."""


AttemptFactory = Callable[[AgentContext, str | None, Any], AttemptHandle]
"""A function that opens an attempt, given a context, name and input as in `context.start_attempt`.
Never raises."""

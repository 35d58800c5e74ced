"""Who is acting: the rollout, the attempt and the agents, in one ContextVar.

A runner opens a *scope* around the app. Adapters (and `lightspan.agent`) push *frames*, one per
agent; the innermost frame is the acting agent and the names of all frames are its path. A framework
whose hooks cannot push reliably registers a *resolver* instead, which is asked when the model is
called. Everything here is immutable, so a context may be copied to threads and tasks freely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from lightspan.records import Mode
from lightspan.routing import Routing, join_path
from lightspan.spans import Span, new_trace_id


class Frame(NamedTuple):
    """One agent on the stack."""

    name: str
    span_id: str


class Recorder:
    """Collects the spans of one attempt in the app's process; thread-safe.

    It holds at most `limit` spans between two drains. What does not fit is counted in `dropped`,
    and the runner then marks the attempt damaged: nothing is dropped silently.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._spans: list[Span] = []
        self._damage: list[str] = []
        self._dropped = 0
        self._pending: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        with self._lock:
            if len(self._spans) < self._limit:
                self._spans.append(span)
            else:
                self._dropped += 1

    def damage(self, reason: str) -> None:
        """Note a capture error: the attempt will not be trained."""
        with self._lock:
            self._damage.append(reason)

    def expect(self, key: str, give_up: Callable[[], None]) -> None:
        """Something is under way that will be recorded; `give_up` records that it never ended."""
        with self._lock:
            self._pending[key] = give_up

    def settle(self, key: str) -> bool:
        """It ended; False if it was settled already."""
        with self._lock:
            return self._pending.pop(key, None) is not None

    def give_up(self) -> None:
        """Record what is still under way, such as streams that the app let go of."""
        for note in list(self._pending.values()):
            note()

    def drain(self) -> list[Span]:
        """The spans added since the last drain."""
        with self._lock:
            spans, self._spans = self._spans, []
            return spans

    def damages(self) -> list[str]:
        """Every capture error so far, dropped spans included."""
        with self._lock:
            lost = [f"{self._dropped} spans dropped"] if self._dropped else []
            return [*self._damage, *lost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
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
    recorder: Recorder = field(default_factory=Recorder, repr=False)


@dataclass(frozen=True, slots=True)
class Acting:
    """The scope with the frames pushed so far."""

    scope: Scope
    frames: tuple[Frame, ...] = ()
    parent_span_id: str | None = None
    """The innermost open span (agent or tool): parent of what comes next."""

    @property
    def path(self) -> str:
        return join_path(frame.name for frame in self.frames)


Resolver = Callable[[Acting], Acting | None]
"""Given who is acting by the pushed frames alone, says who really is; None if it does not know."""

_acting: Final[ContextVar[Acting | None]] = ContextVar("lightspan_acting", default=None)
_resolvers: list[Resolver] = []


def pushed() -> Acting | None:
    """Who is acting by the pushed frames alone; None outside a scope."""
    return _acting.get()


def acting() -> Acting | None:
    """Who is acting now, resolvers asked; None outside a scope."""
    current = _acting.get()
    if current is None:
        return None
    for resolver in _resolvers:
        try:
            current = resolver(current) or current
        except Exception as error:  # an adapter's; it must not reach the app
            current.scope.recorder.damage(f"who is acting could not be resolved: {error!r}")
    return current


def current_scope() -> Scope | None:
    """The scope, None outside of one."""
    current = _acting.get()
    return None if current is None else current.scope


def set_acting(value: Acting | None) -> Token[Acting | None]:
    """Set who is acting; undo with `reset_acting`."""
    return _acting.set(value)


def reset_acting(token: Token[Acting | None]) -> None:
    """Undo `set_acting`, also from another context (then there is nothing to undo)."""
    try:
        _acting.reset(token)
    except ValueError:  # the token's context is gone: an abandoned generator, another task
        return


@contextmanager
def open_scope(scope: Scope) -> Iterator[Scope]:
    """Make the scope current. The wire shim is installed on the first call in a process."""
    from lightspan import wire

    try:
        wire.install()
    except Exception as error:  # such as an SDK that cannot be imported, which the app may not need
        scope.recorder.damage(f"the OpenAI SDK could not be wrapped: {error!r}")
    token = set_acting(Acting(scope, parent_span_id=scope.root_span_id))
    try:
        yield scope
    finally:
        reset_acting(token)


@contextmanager
def push(frame: Frame) -> Iterator[Acting | None]:
    """Push an agent frame for the duration of the block; a no-op outside a scope."""
    current = _acting.get()
    if current is None:
        yield None
        return
    deeper = replace(current, frames=(*current.frames, frame), parent_span_id=frame.span_id)
    token = set_acting(deeper)
    try:
        yield deeper
    finally:
        reset_acting(token)


def register_resolver(resolver: Resolver) -> None:
    """Ask `resolver` whenever a model is called. Registering twice is a no-op."""
    if resolver not in _resolvers:
        _resolvers.append(resolver)


def unregister_resolver(resolver: Resolver) -> None:
    """Undo `register_resolver`."""
    if resolver in _resolvers:
        _resolvers.remove(resolver)


def resolvers() -> Sequence[Resolver]:
    """The registered resolvers, in the order of registration."""
    return tuple(_resolvers)

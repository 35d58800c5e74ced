"""Who is acting: the rollout, the attempt and the agents, in one ContextVar.

A runner opens a *scope* around the app. Adapters (and `lightspan.agent`) push *frames*, one per
agent; the innermost frame is the acting agent and the names of all frames are its path. A framework
whose hooks cannot push reliably registers a *resolver* instead, which is asked when the model is
called. Everything here is immutable, so a context may be copied to threads and tasks freely.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

from lightspan.records import Mode, new_id
from lightspan.routing import Routing, join_path
from lightspan.spans import Span, SpanKind, clean_text, new_trace_id

log = logging.getLogger(__name__)


class Frame(NamedTuple):
    """One agent on the stack."""

    name: str
    span_id: str


class Recorder:
    """Collects the spans of one attempt in the app's process; thread-safe.

    It holds at most `limit` spans between two drains. What does not fit is counted in `dropped`,
    and the runner then marks the attempt damaged: nothing is dropped silently.
    """

    keeps = True
    """False: whatever is added is forgotten."""

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._spans: list[Span] = []
        self._damage: list[str] = []
        self._dropped = 0
        self._pending: dict[str, Callable[[], None]] = {}
        # The garbage collector may run inside a locked block and end a stream that the app dropped,
        # which is recorded by the same thread.
        self._lock = threading.RLock()

    def new_call_id(self) -> str:
        """The id of a call that is made now."""
        return new_id("call")

    def add(self, span: Span) -> None:
        if not (span.name.isascii() and span.status_message.isascii()):
            name, message = clean_text(span.name), clean_text(span.status_message)
            span = span.replace(name=name, status_message=message)
        with self._lock:
            if len(self._spans) < self._limit:
                self._spans.append(span)
            else:
                self._dropped += 1

    def damage(self, reason: str) -> None:
        """Note a capture error: the attempt will not be trained."""
        with self._lock:
            self._damage.append(clean_text(reason))

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


class Unrecorded(Recorder):
    """Of calls to served policies outside any attempt: keeps nothing."""

    keeps = False

    def add(self, span: Span) -> None:
        """Forget it."""

    def damage(self, reason: str) -> None:
        """Nothing is trained, so nothing is damaged; a person may want to know."""
        log.warning("%s", reason)

    def expect(self, key: str, give_up: Callable[[], None]) -> None:
        """Nobody asks how it ended."""

    def settle(self, key: str) -> bool:
        """Nothing is left to record."""
        return False


class _Nowhere(Unrecorded):
    """Of a process that records, outside every attempt."""

    def add(self, span: Span) -> None:
        """Forget it; a reward that is lost this way is worth a word."""
        if span.kind is SpanKind.REWARD:
            log.warning(
                "a reward was emitted outside every attempt and is lost: call emit_reward() while "
                "the agent runs, or lightspan.feedback(attempt_id, reward) later"
            )


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

    def new_call_id(self) -> str:
        """The id of a call that is made now."""
        return self.recorder.new_call_id()


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
_ambient: Acting | None = None
"""Of the whole process, where no scope is open (`lightspan.connect`)."""
_opener: Opener | None = None
"""Makes attempts of what begins where no scope is open (`lightspan.record`)."""
_outside: Acting | None = None
"""While there is an opener: who acts where no scope is open and nothing is connected."""


def ambient() -> Acting | None:
    """Who is acting where no scope is open; None unless the process is connected to a server or
    records."""
    return _ambient or _outside


def set_ambient(value: Acting | None) -> Acting | None:
    """Set who is acting where no scope is open; returns who was before."""
    global _ambient
    before, _ambient = _ambient, value
    return before


def pushed() -> Acting | None:
    """Who is acting by the pushed frames alone; None outside a scope."""
    return _acting.get() or _ambient or _outside


def acting() -> Acting | None:
    """Who is acting now, resolvers asked; None outside a scope."""
    current = pushed()
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
    current = pushed()
    return None if current is None else current.scope


def set_acting(value: Acting | None) -> Token[Acting | None]:
    """Set who is acting; undo with `reset_acting`. Who acts outside every scope is nobody."""
    if value is not None and value is (_ambient or _outside):
        value = None
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


# --- what begins outside every scope --------------------------------------------------------
class Root(Protocol):
    """An attempt that began by itself; whoever opened it closes it, once."""

    @property
    def acting(self) -> Acting:
        """Who acts in it."""
        ...

    def close(self, error: BaseException | str | None = None) -> None:
        """It has ended, by this error (or what is told of one) if there is one. Never raises."""
        ...


Opener = Callable[[Acting, str | None, Any], Root]
"""See `open_root`. Never raises."""


def set_opener(opener: Opener | None) -> None:
    """Make attempts of what begins where no scope is open; None: no more."""
    global _opener, _outside
    _opener = opener
    _outside = None if opener is None else _NOWHERE


def open_root(current: Acting | None, name: str | None, given: Any = None) -> Root | None:
    """An attempt of its own for what begins now, if no scope is open and calls are recorded.

    Args:
        current: who is acting, as `acting` or `pushed` said.
        name: of what begins; None for a model call that nothing is around.
        given: its input, if it is known.
    """
    if _opener is None or current is None or not is_outside(current):
        return None
    return _opener(current, name, given)


@contextmanager
def entered(root: Root) -> Iterator[None]:
    """Act in the attempt for the duration of the block, which ends it."""
    token = set_acting(root.acting)
    try:
        yield
    except BaseException as error:
        reset_acting(token)
        root.close(error)
        raise
    reset_acting(token)
    root.close()


def is_outside(current: Acting) -> bool:
    """Whether no scope is open: a connection to a server is none."""
    base = _ambient or _outside
    return base is not None and current.scope is base.scope


@contextmanager
def push(frame: Frame) -> Iterator[Acting | None]:
    """Push an agent frame for the duration of the block; a no-op outside a scope."""
    current = pushed()
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


_NOWHERE: Final = Acting(
    Scope(rollout_id="", attempt_id="", mode=Mode.PRODUCTION, recorder=_Nowhere())
)

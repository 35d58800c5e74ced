"""Listens to CrewAI and tells core who is acting.

CrewAI's event bus hands its events to handlers in a thread pool, a millisecond late: too late to
label a request. So `emit` itself is watched, which runs in the context in which the thing happens.
There the frame of a crew, flow, task or agent is pushed when it begins and taken off when it ends;
CrewAI copies contexts to all threads and tasks that it starts.

A coroutine that is cancelled emits no end. The asynchronous `kickoff`s are watched for that.

Errors never reach the app: they mark the attempt as damaged.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, cast

from crewai import Agent, Crew
from crewai.events import BaseEventListener, crewai_event_bus
from crewai.flow.flow import Flow
from crewai.llms.base_llm import BaseLLM

from lightspan import conventions, recording, scope
from lightspan.emit import exception_attributes, text_of
from lightspan.instrumentation import AdapterInstrumentor, Instrumentation, as_json, shown
from lightspan.spans import SpanStatus
from lightspan_crewai._identity import (
    End,
    Entry,
    Ids,
    Kind,
    Name,
    Place,
    Start,
    Trail,
    begin,
    clean,
    end,
    given_up,
    spans,
)


class _Open(NamedTuple):
    """What has begun in this context and not ended, with what was pushed before each."""

    current: scope.Scope
    """A trail that an earlier attempt left behind is none of this one's."""
    trail: Trail
    before: tuple[scope.Acting, ...]


_open: ContextVar[_Open | None] = ContextVar("lightspan_crewai_open", default=None)
_roots: Final[dict[int, scope.Root]] = {}
"""Identity of a scope → the attempt that began with a trail's outermost, in production."""
_lock = threading.RLock()


# --- events ---------------------------------------------------------------------------------
def observe(source: Any, event: Any) -> None:
    """Take note of an event of CrewAI's, in the context in which it is emitted."""
    current = scope.pushed()
    if current is None:
        return
    read = _READERS.get(event.type)
    if read is None:
        return
    try:
        note(read(source, event))
    except Exception as error:
        _damage(current, error)


def note(event: Start | End | None) -> None:
    """Take note that something begins or ends in this context."""
    current = scope.pushed()
    if current is None or event is None:
        return
    try:
        if isinstance(event, Start):
            _begin(_attempted(current, event), event)
        else:
            _end(current, event)
    except Exception as error:
        _damage(current, error)


def _attempted(current: scope.Acting, start: Start) -> scope.Acting:
    """Who is acting; in production, outside every attempt, in one of its own."""
    name = start.name.filled if start.name is not None else str(start.kind)
    root = scope.open_root(current, name, start.given)
    if root is None:
        return current
    _roots[id(root.acting.scope)] = root
    scope.set_acting(root.acting)
    return root.acting


def _left(current: scope.Scope, error: BaseException | str | None) -> None:
    """The outermost of an attempt's trail has ended."""
    root = _roots.pop(id(current), None)
    if root is not None:
        scope.set_acting(None)
        root.close(error)


def _begin(current: scope.Acting, start: Start) -> None:
    scope.register_resolver(resolve)
    known = _known(current)
    given = _given(current)
    trail, abandoned = begin(known.trail, start, _place(given), current.scope.routing.rules)
    for entry in abandoned:
        _record(current.scope, entry, given_up(entry))
    before = known.before[: len(trail) - 1]
    base = known.before[len(trail) - 1] if abandoned else current
    inside = trail[-1].inside
    scope.set_acting(replace(given, frames=inside.frames, parent_span_id=inside.span_id))
    _open.set(_Open(current.scope, trail, (*before, base)))
    _expect(current.scope, trail[-1])


def _end(current: scope.Acting, event: End) -> None:
    known = _known(current)
    trail, entry, abandoned = end(known.trail, event)
    if entry is None:
        return
    for inner in abandoned:
        _record(current.scope, inner, given_up(inner))
    _record(current.scope, entry, event)
    _go_back(known, trail, event.message if event.status is SpanStatus.ERROR else None)


def _go_back(known: _Open, trail: Trail, error: BaseException | str | None) -> None:
    """This context is where it was before what followed `trail` began."""
    depth = len(trail)
    scope.set_acting(known.before[depth])
    _open.set(_Open(known.current, trail, known.before[:depth]) if trail else None)
    if not trail:
        _left(known.current, error)


def _known(current: scope.Acting) -> _Open:
    known = _open.get()
    return (
        known
        if known is not None and known.current is current.scope
        else _Open(current.scope, (), ())
    )


def _expect(current: scope.Scope, entry: Entry) -> None:
    """What never ends, such as a task that was cancelled, is recorded when the attempt ends."""
    if entry.records:
        current.recorder.expect(_token(entry), lambda: _record(current, entry, given_up(entry)))


def _record(current: scope.Scope, entry: Entry, event: End) -> None:
    if entry.records and not current.recorder.settle(_token(entry)):
        return
    ids = Ids(current.rollout_id, current.attempt_id, current.trace_id)
    for span in spans(entry, event, ids):
        current.recorder.add(span)


def _token(entry: Entry) -> str:
    return f"lightspan_crewai {entry.inside.span_id}"


def _damage(current: scope.Acting, error: Exception) -> None:
    """Errors of ours damage the attempt; they never reach the app."""
    reason = f"lightspan_crewai: {type(error).__name__}: {text_of(error)}"
    current.scope.recorder.damage(reason)


# --- what events say ------------------------------------------------------------------------
def _crew_started(source: Any, event: Any) -> Start:
    _watch_clients()
    name = crew_name(source)
    plain = None if name is None else _plain(name)
    return Start(Kind.CREW, id(source), plain, given=getattr(event, "inputs", None))


def _flow_started(source: Any, event: Any) -> Start | None:
    if _is_internal(source):
        return None
    _watch_clients()
    given = getattr(event, "inputs", None)
    return Start(Kind.FLOW, id(source), _plain(event.flow_name), given=given)


def _method_started(source: Any, event: Any) -> Start | None:
    if _is_internal(source):
        return None
    return Start(Kind.METHOD, (id(source), event.method_name), _plain(event.method_name))


def _task_started(source: Any, event: Any) -> Start:
    return Start(Kind.TASK, id(source), role_of(getattr(source, "agent", None)))


def _agent_started(source: Any, event: Any) -> Start:
    return Start(Kind.AGENT, _agent_key(source, event), role_of(event.agent))


def _lone_agent_started(source: Any, event: Any) -> Start:
    _watch_clients()
    name, given = role_of(source, event.agent_info), getattr(event, "messages", None)
    return Start(Kind.AGENT, _agent_key(source, event), name, given=given)


def _tool_started(source: Any, event: Any) -> Start:
    attributes = {
        conventions.TOOL_NAME: event.tool_name,
        conventions.TOOL_CALL_ARGUMENTS: _arguments(event.tool_args),
    }
    return Start(Kind.TOOL, _tool_key(event), attributes=attributes)


def _call_started(source: Any, event: Any) -> Start:
    role = clean(event.agent_role)
    name = Name(role, role, event.agent_id) if role else None
    body = {"model": event.model, "messages": event.messages, "tools": event.tools}
    for key in ("temperature", "top_p", "max_tokens", "stream", "seed", "n"):
        body[key] = getattr(event, key, None)
    return Start(Kind.CALL, event.call_id, name, body)


def _succeeded(kind: Kind, key: Callable[[Any, Any], Hashable]) -> Callable[[Any, Any], End]:
    return lambda source, event: End(kind, key(source, event))


def _failed(kind: Kind, key: Callable[[Any, Any], Hashable]) -> Callable[[Any, Any], End]:
    def read(source: Any, event: Any) -> End:
        error = getattr(event, "error", None)
        return End(kind, key(source, event), SpanStatus.ERROR, _text(error), _error(event, error))

    return read


def _paused(kind: Kind, key: Callable[[Any, Any], Hashable]) -> Callable[[Any, Any], End]:
    return lambda source, event: End(kind, key(source, event), SpanStatus.UNSET)


def _tool_finished(source: Any, event: Any) -> End:
    result: dict[str, Any] = {conventions.TOOL_CALL_RESULT: shown(event.output)}
    failure = getattr(event, "failure", None)  # it ran, and says that it did not succeed
    if failure is None:
        return End(Kind.TOOL, _tool_key(event), attributes=result)
    result[conventions.ERROR_TYPE] = "ToolFailure"
    message = _text(getattr(failure, "message", failure))
    return End(Kind.TOOL, _tool_key(event), SpanStatus.ERROR, message, result)


def _call_completed(source: Any, event: Any) -> End:
    answer = _answer(event.response, getattr(event, "finish_reason", None))
    usage = getattr(event, "usage", None)
    answer["usage"] = usage if isinstance(usage, Mapping) else {}
    answer["id"] = getattr(event, "response_id", None)
    return End(Kind.CALL, event.call_id, attributes=answer)


def _answer(said: Any, finish_reason: str | None = None) -> dict[str, Any]:
    """What a model said, as an OpenAI client would hand it out."""
    content = said if isinstance(said, str) else as_json(said)
    message = {"role": "assistant", "content": content}
    return {"choices": [{"message": message, "finish_reason": finish_reason or "stop"}]}


def _own(source: Any, event: Any) -> Hashable:
    return id(source)


def _method_key(source: Any, event: Any) -> Hashable:
    return (id(source), event.method_name)


def _agent_key(source: Any, event: Any) -> Hashable:
    agent, task = getattr(event, "agent", source), getattr(event, "task", None)
    return (id(agent), None if task is None else id(task))


def _tool_key(event: Any) -> Hashable:
    """The same for `Search the web` and `search_the_web`: both are in use."""
    return "".join(c for c in str(event.tool_name).lower() if c.isalnum())


def _call_key(source: Any, event: Any) -> Hashable:
    return cast("Hashable", event.call_id)


_READERS: Final[Mapping[str, Callable[[Any, Any], Start | End | None]]] = {
    "crew_kickoff_started": _crew_started,
    "crew_kickoff_completed": _succeeded(Kind.CREW, _own),
    "crew_kickoff_failed": _failed(Kind.CREW, _own),
    "flow_started": _flow_started,
    "flow_finished": _succeeded(Kind.FLOW, _own),
    "flow_failed": _failed(Kind.FLOW, _own),
    "flow_paused": _paused(Kind.FLOW, _own),
    "method_execution_started": _method_started,
    "method_execution_finished": _succeeded(Kind.METHOD, _method_key),
    "method_execution_failed": _failed(Kind.METHOD, _method_key),
    "method_execution_paused": _paused(Kind.METHOD, _method_key),
    "task_started": _task_started,
    "task_completed": _succeeded(Kind.TASK, _own),
    "task_failed": _failed(Kind.TASK, _own),
    "agent_execution_started": _agent_started,
    "agent_execution_completed": _succeeded(Kind.AGENT, _agent_key),
    "agent_execution_error": _failed(Kind.AGENT, _agent_key),
    "lite_agent_execution_started": _lone_agent_started,
    "lite_agent_execution_completed": _succeeded(Kind.AGENT, _agent_key),
    "lite_agent_execution_error": _failed(Kind.AGENT, _agent_key),
    "tool_usage_started": _tool_started,
    "tool_usage_finished": _tool_finished,
    "tool_usage_error": _failed(Kind.TOOL, lambda source, event: _tool_key(event)),
    "llm_call_started": _call_started,
    "llm_call_completed": _call_completed,
    "llm_call_failed": _failed(Kind.CALL, _call_key),
}


def crew_name(crew: Any) -> str | None:
    """The name that a crew's author gave it, None if it has CrewAI's own."""
    name = clean(getattr(crew, "name", None))
    return name if name not in ("", "crew") else None


def _plain(name: Any) -> Name:
    return Name(clean(name), clean(name))


def role_of(agent: Any, told: Mapping[str, Any] | None = None) -> Name | None:
    """The role of an agent, as it was written and as it is filled in."""
    filled = clean(getattr(agent, "role", None) or (told or {}).get("role"))
    template = clean(getattr(agent, "_original_role", None)) or filled
    return Name(template, filled, str(getattr(agent, "id", id(agent)))) if filled else None


_INTERNAL: Final = ("crewai.agents.", "crewai.experimental.", "crewai.memory.")


def _is_internal(flow: Any) -> bool:
    """CrewAI's agents and memory are flows themselves, which are no business of the user's."""
    is_internal = getattr(flow, "is_crewai_internal", False)
    return bool(is_internal) or type(flow).__module__.startswith(_INTERNAL)


def _error(event: Any, error: Any) -> dict[str, Any]:
    if isinstance(error, BaseException):
        return exception_attributes(error)
    kind = getattr(event, "error_type", None)
    name = kind.__qualname__ if isinstance(kind, type) else "Exception"
    return {
        conventions.ERROR_TYPE: name,
        conventions.EXCEPTION_TYPE: name,
        conventions.EXCEPTION_MESSAGE: _text(error),
    }


def _text(error: Any) -> str:
    return text_of(error) if isinstance(error, BaseException) else shown(error)


def _arguments(arguments: Any) -> str:
    return shown(arguments)


# --- who is acting --------------------------------------------------------------------------
def resolve(acting: scope.Acting) -> None:
    """Frames are pushed, so there is nothing to add: it notes that a client asks (`Resolver`)."""
    known = _open.get()
    if known is None or known.current is not acting.scope:
        return
    for entry in reversed(known.trail):
        if entry.start.kind is not Kind.CALL:
            return
        entry.asked = True


def _given(acting: scope.Acting) -> scope.Acting:
    """Who is acting, by all other resolvers."""
    for resolver in scope.resolvers():
        if resolver is not resolve:
            acting = resolver(acting) or acting
    return acting


def _place(acting: scope.Acting) -> Place:
    return Place(acting.frames, acting.parent_span_id)


# --- what is watched ------------------------------------------------------------------------
class _Watch:
    """One attribute of a class of CrewAI's, wrapped while `on`."""

    def __init__(self, owner: type, name: str, make: Callable[[Any, _Watch], Any]) -> None:
        self.on = True
        self._owner, self._name = owner, name
        self._had = name in vars(owner)
        self._original = vars(owner).get(name)
        self._ours = make(getattr(owner, name), self)
        setattr(owner, name, self._ours)

    def undo(self) -> None:
        """Leave the class as it was. What somebody wrapped since stays, and does nothing."""
        self.on = False
        if vars(self._owner).get(self._name) is not self._ours:
            return
        if self._had:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)


_watches: list[_Watch] = []


def _emitting(original: Any, watch: _Watch) -> Any:
    @functools.wraps(original)
    def emit(self: Any, source: Any, event: Any) -> Any:
        try:
            return original(self, source, event)
        finally:
            if watch.on:
                observe(source, event)

    return emit


def _kicking_off(original: Any, watch: _Watch) -> Any:
    @functools.wraps(original)
    async def kickoff(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = scope.pushed()
        if current is None or not watch.on:
            return await original(self, *args, **kwargs)
        depth = len(_known(current).trail)
        try:
            return await original(self, *args, **kwargs)
        except BaseException as error:
            _unwind(scope.pushed() or current, depth, error)
            raise

    return kickoff


def _unwind(current: scope.Acting, depth: int, error: BaseException) -> None:
    """A coroutine was left: whatever began in it and has not ended was abandoned."""
    try:
        known = _known(current)
        if len(known.trail) <= depth:
            return
        for entry in reversed(known.trail[depth:]):
            _record(current.scope, entry, given_up(entry))
        _go_back(known, known.trail[:depth], error)
    except Exception as error:
        _damage(current, error)


# --- clients of the user's own --------------------------------------------------------------
_clients: weakref.WeakSet[type] = weakref.WeakSet()
"""Subclasses of BaseLLM that are watched, or CrewAI's own."""


def _watch_clients() -> None:
    """Watch the model clients that users wrote: they need not emit any event."""
    for kind in _subclasses(BaseLLM):
        if kind in _clients:
            continue
        with _lock:
            if kind in _clients or not _watches:
                continue
            _clients.add(kind)
            if not kind.__module__.startswith("crewai."):
                own = [name for name in ("call", "acall") if name in vars(kind)]
                _watches.extend(_Watch(kind, name, _calling) for name in own)


def _subclasses(kind: Any) -> Iterator[type]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _calling(original: Any, watch: _Watch) -> Any:
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def acall(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _Call(self, args, kwargs, watch) as call:
                return call.answered(await original(self, *args, **kwargs))

        return acall

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Call(self, args, kwargs, watch) as call:
            return call.answered(original(self, *args, **kwargs))

    return call


class _Call:
    """One call of a client of the user's own."""

    def __init__(
        self, client: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: _Watch
    ) -> None:
        self._current = scope.pushed() if watch.on else None
        self._key = object()
        messages = args[0] if args else kwargs.get("messages")
        self._start = Start(
            Kind.CALL,
            self._key,
            role_of(kwargs.get("from_agent")),
            {"model": getattr(client, "model", None), "messages": messages},
        )
        self._answer: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._told(self._start)
        return self

    def answered(self, answer: Any) -> Any:
        if self._current is not None:
            self._answer = _answer(answer)
        return answer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._told(End(Kind.CALL, self._key, attributes=self._answer))
        elif isinstance(error, Exception):
            told = exception_attributes(error)
            self._told(End(Kind.CALL, self._key, SpanStatus.ERROR, text_of(error), told))
        else:
            self._told(End(Kind.CALL, self._key, SpanStatus.UNSET))

    def _told(self, event: Start | End) -> None:
        if self._current is not None:
            note(event)


# --- installing -----------------------------------------------------------------------------
class LightspanListener(BaseEventListener):
    """Tells lightspan which agent is acting: `LightspanListener()` is `instrument()`.

    It is made as CrewAI's own listeners are, anywhere before the crew starts.
    """

    def setup_listeners(self, crewai_event_bus: Any) -> None:
        """Called by CrewAI."""
        instrument()


def instrument() -> Instrumentation:
    """Listen to every crew, flow and agent of this process.

    It may be called before or after crews and models are built; twice is once. As a context
    manager (`with instrument():`) it is undone at the end of the block.
    """
    with _lock:
        if _watches:
            return Instrumentation(None)
        _watches.append(_Watch(type(crewai_event_bus), "emit", _emitting))
        for owner, name in ((Crew, "akickoff"), (Agent, "kickoff_async"), (Flow, "kickoff_async")):
            _watches.append(_Watch(owner, name, _kicking_off))
        scope.register_resolver(resolve)
        recording.hold(__name__)
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument`; CrewAI is left as it was."""
    with _lock:
        for watch in reversed(_watches):
            watch.undo()
        _watches.clear()
        _clients.clear()
        scope.unregister_resolver(resolve)
    recording.release(__name__)


class Instrumentor(AdapterInstrumentor):
    """What `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)

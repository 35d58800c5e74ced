"""Listens to CrewAI and tells core who is acting.

CrewAI's event bus hands its events to handlers in a thread pool, a millisecond late: too late to
label a request. So `emit` itself is watched, which runs in the context in which the thing happens.
There the frame of a crew, flow, task or agent is pushed when it begins and taken off when it ends;
CrewAI copies contexts to all threads and tasks that it starts.

A coroutine that is cancelled emits no end. The asynchronous `kickoff`s are watched for that. And a
crew emits its beginning after the callbacks before it and its end before the callbacks after it: so
its `kickoff`s say themselves when it begins and ends.

Errors never reach the app: they mark the attempt as damaged.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, cast

from crewai import Agent, Crew
from crewai.events import BaseEventListener, crewai_event_bus
from crewai.flow.flow import Flow
from crewai.llms.base_llm import BaseLLM

from lightspan.instrumentation import (
    AdapterInstrumentor,
    AgentContext,
    AttemptContext,
    AttemptHandle,
    CallEnd,
    Instrumentation,
    NestedCalls,
    Patch,
    SpanEnd,
    SpanStatus,
    add_call_listener,
    add_capture_error,
    current_context,
    disable_adapter,
    enable_adapter,
    notify_call_start,
    record_call,
    remove_call_listener,
    semconv,
    set_agent,
    start_attempt,
    truncated_json,
)
from lightspan_crewai._identity import (
    End,
    Entry,
    Kind,
    Name,
    Place,
    Start,
    Trail,
    begin,
    clean,
    end,
    given_up,
    span_of,
)


class _Open(NamedTuple):
    """What has begun in this context and not ended, with who acted before each."""

    trail: Trail = ()
    before: tuple[AgentContext, ...] = ()


_NOTHING: Final = _Open()


_SCOPES: Final = (
    *("crewai", "crewai.telemetry"),
    *("openinference.instrumentation.crewai", "opentelemetry.instrumentation.crewai"),
)
"""OpenTelemetry's instrumentation scopes whose spans describe the same agents."""


@dataclass(slots=True)
class _State:
    """Of this process."""

    watches: list[Patch] = field(default_factory=list)
    """What is wrapped of CrewAI's, and of the clients that users wrote."""
    clients: weakref.WeakSet[type] = field(default_factory=weakref.WeakSet)
    """Subclasses of BaseLLM that are watched, or CrewAI's own."""
    roots: dict[int, AttemptHandle] = field(default_factory=dict)
    """Identity of a scope → the attempt that began with a trail's outermost, in production."""
    lock: Any = field(default_factory=threading.RLock)


_state: Final = _State()
_NAME: Final = "lightspan_crewai"


# --- events ---------------------------------------------------------------------------------
def observe(source: Any, event: Any) -> None:
    """Take note of an event of CrewAI's, in the context in which it is emitted."""
    current = current_context()
    if current is None:
        return
    read = _READERS.get(event.type)
    if read is None:
        return
    try:
        told = read(source, event)
    except Exception as error:
        add_capture_error(current.scope.recorder, _NAME, error)
        return
    if told is not None:
        _note(current, told)


def note(event: Start | End | None) -> None:
    """Take note that something begins or ends in this context."""
    current = current_context()
    if current is not None and event is not None:
        _note(current, event)


def _note(current: AgentContext, event: Start | End) -> None:
    root = None
    try:
        if isinstance(event, Start):
            add_call_listener(note_call)
            name = event.name.filled if event.name is not None else str(event.kind)
            around, root = start_attempt(current, name, event.given)
            told = []
            if event.kind is Kind.CALL:
                told.append(notify_call_start(around, besides=note_call))
            if root is not None:
                _state.roots[id(root.acting.scope)] = root
                current = root.acting
            _begin(around, event, current, told)
        else:
            _end(current, event)
    except Exception as error:
        add_capture_error(current.scope.recorder, _NAME, error)
        if root is not None:  # its end would not be told
            _state.roots.pop(id(root.acting.scope), None)
            root.close()


def _left(current: AttemptContext, error: BaseException | str | None) -> None:
    """The outermost of an attempt's trail has ended."""
    root = _state.roots.pop(id(current), None)
    if root is not None:
        set_agent(None)
        root.close(error)


def _begin(
    around: AgentContext, start: Start, pushed: AgentContext, told: Sequence[CallEnd]
) -> None:
    """Something begins, with this acting around it; as pushed, for when it has ended."""
    opened: _Open = around.notes.get(_NAME, _NOTHING)
    choose = around.scope.routing.choose_name
    trail, abandoned = begin(opened.trail, start, Place.of(around), choose, told)
    for entry in abandoned:
        _record(around.scope, entry, given_up(entry))
    before = opened.before[: len(trail) - 1]
    base = opened.before[len(trail) - 1] if abandoned else pushed
    inside, notes = trail[-1].inside, {**around.notes, _NAME: _Open(trail, (*before, base))}
    set_agent(AgentContext(around.scope, inside.frames, inside.span_id, notes))
    _expect(around.scope, trail[-1])


def _end(current: AgentContext, event: End) -> None:
    opened: _Open = current.notes.get(_NAME, _NOTHING)
    trail, entry, abandoned = end(opened.trail, event)
    if entry is None:
        return
    for inner in abandoned:
        _record(current.scope, inner, given_up(inner))
    _record(current.scope, entry, event)
    error = event.message if event.status is SpanStatus.ERROR else None
    _go_back(current, opened, len(trail), error)


def _go_back(
    current: AgentContext, opened: _Open, depth: int, error: BaseException | str | None
) -> None:
    """This context is where it was when its trail was of this depth."""
    set_agent(opened.before[depth])
    if not depth:
        _left(current.scope, error)


def _opened(current: AgentContext) -> _Open:
    opened: _Open = current.notes.get(_NAME, _NOTHING)
    return opened


def _expect(current: AttemptContext, entry: Entry) -> None:
    """What never ends, such as a task that was cancelled, is recorded when the attempt ends."""
    if entry.records:
        current.recorder.expect(_token(entry), lambda: _record(current, entry, given_up(entry)))


def _record(current: AttemptContext, entry: Entry, event: End) -> None:
    entry.tell(event)
    if entry.records:
        if not current.recorder.settle(_token(entry)):
            return
    elif entry.start.kind is not Kind.CALL:
        return  # most of what begins: no span is due
    if entry.needs_record(event):
        inside = entry.inside
        record_call(
            AgentContext(current, inside.frames, inside.span_id),
            entry.start.attributes,
            event.attributes,
            SpanEnd(event.status, event.message, event.attributes),
            start_ns=entry.start_ns,
            client=entry.start.client,
            native='crewai.LLM(model="openai/…")',
        )
    if entry.records:
        current.recorder.add(span_of(entry, event, current))


def _token(entry: Entry) -> str:
    return f"lightspan_crewai {entry.inside.span_id}"


# --- what events say ------------------------------------------------------------------------
def _crew_started(source: Any, event: Any) -> Start | None:
    current = current_context()
    trail = () if current is None else _opened(current).trail
    if any(entry.start.key == _kickoff_key(source) for entry in trail):
        return None  # its kickoff said so
    return _crew(source, id(source), getattr(event, "inputs", None))


def _crew(crew: Any, key: Hashable, given: Any) -> Start:
    _watch_clients()
    name = crew_name(crew)
    return Start(Kind.CREW, key, None if name is None else _plain(name), given=given)


def _kickoff_key(crew: Any) -> Hashable:
    return ("kickoff", id(crew))


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
        semconv.TOOL_NAME: event.tool_name,
        semconv.TOOL_CALL_ARGUMENTS: _arguments(event.tool_args),
    }
    return Start(Kind.TOOL, _tool_key(event), attributes=attributes)


def _call_started(source: Any, event: Any) -> Start:
    role = clean(event.agent_role)
    name = Name(role, role, event.agent_id) if role else None
    body = {"model": event.model, "messages": event.messages, "tools": event.tools}
    for key in ("temperature", "top_p", "max_tokens", "stream", "seed", "n"):
        body[key] = getattr(event, key, None)
    return Start(Kind.CALL, event.call_id, name, body, client=source)


def _succeeded(kind: Kind, key: Callable[[Any, Any], Hashable]) -> Callable[[Any, Any], End]:
    return lambda source, event: End(kind, key(source, event))


def _failed(kind: Kind, key: Callable[[Any, Any], Hashable]) -> Callable[[Any, Any], End]:
    def read(source: Any, event: Any) -> End:
        error = getattr(event, "error", None)
        return End(kind, key(source, event), *_error(event, error))

    return read


def _paused(kind: Kind, key: Callable[[Any, Any], Hashable]) -> Callable[[Any, Any], End]:
    return lambda source, event: End(kind, key(source, event), SpanStatus.UNSET)


def _tool_finished(source: Any, event: Any) -> End:
    result: dict[str, Any] = {semconv.TOOL_CALL_RESULT: truncated_json(event.output)}
    failure = getattr(event, "failure", None)  # it ran, and says that it did not succeed
    if failure is None:
        return End(Kind.TOOL, _tool_key(event), attributes=result)
    result[semconv.ERROR_TYPE] = "ToolFailure"
    message = truncated_json(getattr(failure, "message", failure))
    return End(Kind.TOOL, _tool_key(event), SpanStatus.ERROR, message, result)


def _call_completed(source: Any, event: Any) -> End:
    answer = _answer(event.response, getattr(event, "finish_reason", None))
    usage = getattr(event, "usage", None)
    answer["usage"] = usage if isinstance(usage, Mapping) else {}
    answer["id"] = getattr(event, "response_id", None)
    return End(Kind.CALL, event.call_id, attributes=answer)


def _answer(said: Any, finish_reason: str | None = None) -> dict[str, Any]:
    """What a model said, as an OpenAI client would hand it out."""
    content = said if isinstance(said, str) else truncated_json(said, None)
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
    template = clean(_original_role(agent)) or filled
    return Name(template, filled, str(getattr(agent, "id", id(agent)))) if filled else None


def _original_role(agent: Any) -> Any:
    """The role as it was written, None if nothing was filled in.

    Asked for by its name, a private attribute that was set costs more than all else that is asked
    of an agent: pydantic first raises and catches an error in search of a descriptor.
    """
    private = getattr(agent, "__pydantic_private__", None)
    if isinstance(private, dict):
        return private.get("_original_role")
    return getattr(agent, "_original_role", None)


_INTERNAL: Final = ("crewai.agents.", "crewai.experimental.", "crewai.memory.")


def _is_internal(flow: Any) -> bool:
    """CrewAI's agents and memory are flows themselves, which are no business of the user's."""
    is_internal = getattr(flow, "is_crewai_internal", False)
    return bool(is_internal) or type(flow).__module__.startswith(_INTERNAL)


def _error(event: Any, error: Any) -> SpanEnd:
    if isinstance(error, BaseException):
        return SpanEnd.from_error(error)._replace(status=SpanStatus.ERROR)
    kind, message = getattr(event, "error_type", None), truncated_json(error)
    name = kind.__qualname__ if isinstance(kind, type) else "Exception"
    attributes = {
        semconv.ERROR_TYPE: name,
        semconv.EXCEPTION_TYPE: name,
        semconv.EXCEPTION_MESSAGE: message,
    }
    return SpanEnd(SpanStatus.ERROR, message, attributes)


def _arguments(arguments: Any) -> str:
    return truncated_json(arguments)


# --- calls that somebody records --------------------------------------------------------------
def note_call(acting: AgentContext) -> CallEnd | None:
    """Somebody records the call that is under way in this context (`add_call_listener`)."""
    open_calls = itertools.takewhile(
        lambda entry: entry.start.kind is Kind.CALL, reversed(_opened(acting).trail)
    )
    return NestedCalls.start_in(entry.calls for entry in open_calls)


# --- what is watched ------------------------------------------------------------------------
def _watch(owner: type, name: str, make: Callable[[Any, Patch], Any]) -> Patch:
    return Patch(owner, name, functools.partial(make, getattr(owner, name)))


def _emitting(original: Any, watch: Patch) -> Any:
    @functools.wraps(original)
    def emit(self: Any, source: Any, event: Any) -> Any:
        try:
            return original(self, source, event)
        finally:
            if watch.on:
                observe(source, event)

    return emit


def _kicking_off(original: Any, watch: Patch) -> Any:
    @functools.wraps(original)
    async def kickoff(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = current_context()
        if current is None or not watch.on:
            return await original(self, *args, **kwargs)
        depth = len(_opened(current).trail)
        try:
            return await original(self, *args, **kwargs)
        except BaseException as error:
            _unwind(current_context() or current, depth, error)
            raise

    return kickoff


def _crew_kicking_off(original: Any, watch: Patch) -> Any:
    @functools.wraps(original)
    def kickoff(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Kickoff(self, args, kwargs, watch):
            return original(self, *args, **kwargs)

    return kickoff


def _crew_kicking_off_async(original: Any, watch: Patch) -> Any:
    @functools.wraps(original)
    async def akickoff(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Kickoff(self, args, kwargs, watch):
            return await original(self, *args, **kwargs)

    return akickoff


class _Kickoff:
    """A crew from before its first callback until after its last."""

    def __init__(
        self, crew: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Patch
    ) -> None:
        checkpoint = args[2] if len(args) > 2 else kwargs.get("from_checkpoint")
        is_restored = getattr(checkpoint, "restore_from", None) is not None
        is_told_of = crew.stream or is_restored  # by another kickoff, which does the work
        self._current = None if is_told_of or not watch.on else current_context()
        self._crew = crew
        self._given = args[0] if args else kwargs.get("inputs")

    def __enter__(self) -> None:
        if self._current is not None:
            note(_crew(self._crew, _kickoff_key(self._crew), self._given))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._current is None:
            return
        key = _kickoff_key(self._crew)
        if error is None:
            note(End(Kind.CREW, key))
        elif isinstance(error, Exception):
            note(End(Kind.CREW, key, *SpanEnd.from_error(error)))
        else:
            depth = len(_opened(self._current).trail)
            _unwind(current_context() or self._current, depth, error)


def _unwind(current: AgentContext, depth: int, error: BaseException) -> None:
    """A coroutine was left: whatever began in it and has not ended was abandoned."""
    try:
        opened = _opened(current)
        if len(opened.trail) <= depth:
            return
        for entry in reversed(opened.trail[depth:]):
            _record(current.scope, entry, given_up(entry))
        _go_back(current, opened, depth, error)
    except Exception as error:
        add_capture_error(current.scope.recorder, _NAME, error)


# --- clients of the user's own --------------------------------------------------------------
def _watch_clients() -> None:
    """Watch the model clients that users wrote: they need not emit any event."""
    for kind in _subclasses(BaseLLM):
        if kind in _state.clients:
            continue
        with _state.lock:
            if kind in _state.clients or not _state.watches:
                continue
            _state.clients.add(kind)
            if not kind.__module__.startswith("crewai."):
                own = [name for name in ("call", "acall") if name in vars(kind)]
                _state.watches += [_watch(kind, name, _calling) for name in own]


def _subclasses(base: type) -> Iterator[type]:
    below: list[type] = type.__subclasses__(base)
    for cls in below:
        yield cls
        yield from _subclasses(cls)


def _calling(original: Any, watch: Patch) -> Any:
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def acall(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _ModelCall(self, args, kwargs, watch) as call:
                return call.answered(await original(self, *args, **kwargs))

        return acall

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _ModelCall(self, args, kwargs, watch) as call:
            return call.answered(original(self, *args, **kwargs))

    return call


class _ModelCall:
    """One call of a client of the user's own."""

    def __init__(
        self, client: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Patch
    ) -> None:
        self._current = current_context() if watch.on else None
        self._key = object()
        messages = args[0] if args else kwargs.get("messages")
        self._start = Start(
            Kind.CALL,
            self._key,
            role_of(kwargs.get("from_agent")),
            {"model": getattr(client, "model", None), "messages": messages},
            client=client,
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
            self._told(End(Kind.CALL, self._key, *SpanEnd.from_error(error)))
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
    with _state.lock:
        if _state.watches:
            return Instrumentation(None)
        _state.watches.append(_watch(type(crewai_event_bus), "emit", _emitting))
        _state.watches.append(_watch(Crew, "kickoff", _crew_kicking_off))
        _state.watches.append(_watch(Crew, "akickoff", _crew_kicking_off_async))
        for owner in (Agent, Flow):
            _state.watches.append(_watch(owner, "kickoff_async", _kicking_off))
        add_call_listener(note_call)
        enable_adapter(__name__, _SCOPES)
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument`; CrewAI is left as it was."""
    with _state.lock:
        for watch in reversed(_state.watches):
            watch.undo()
        _state.watches.clear()
        _state.clients.clear()
        remove_call_listener(note_call)
    disable_adapter(__name__)


class Instrumentor(AdapterInstrumentor):
    """What `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)

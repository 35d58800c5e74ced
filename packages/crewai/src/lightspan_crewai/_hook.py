"""Find out the acting agent by observing CrewAI's events.

CrewAI's event bus calls its handlers in a thread pool, about a millisecond late. A model request
would be sent before its agent is known. So the bus's method `emit` is wrapped, which runs in the
context of the event. When a crew, flow, task or agent begins, its frame (one part of the agent
path) is added to this context. It is removed at the end. CrewAI copies contexts to all threads and
tasks that it starts.

A coroutine that is cancelled emits no end event, so the asynchronous `kickoff`s are wrapped too. A
crew's events do not enclose its callbacks `before_kickoff` and `after_kickoff`, so all `kickoff`s
of crews are wrapped, and a crew begins and ends there.

Errors of the adapter never reach the app: they are recorded as capture errors of the attempt.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self, cast

from crewai import Agent, Crew
from crewai.events import BaseEventListener, crewai_event_bus
from crewai.flow.flow import Flow
from crewai.llms.base_llm import BaseLLM

from lightspan.instrumentation import (
    Adapter,
    AdapterInstrumentor,
    AgentContext,
    AttemptContext,
    AttemptHandle,
    FrameworkCall,
    Instrumentation,
    Patch,
    Place,
    SpanEnd,
    SpanStatus,
    current_context,
    record_call,
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
    Start,
    Trail,
    abandoned_end,
    begin,
    choose_name,
    clean,
    end,
    span_of,
)

_NAME: Final = "lightspan_crewai"


class _Open(NamedTuple):
    """The open entries of a context: crews, tasks, tools and others that have begun and not ended.

    They are ordered from the outermost to the innermost. They are stored in the context's `notes`,
    which hold the data of adapters.
    """

    trail: Trail = ()
    before: tuple[AgentContext, ...] = ()
    """Context before each entry of the trail, in the same order."""


_NOTHING: Final = _Open()


@dataclass(slots=True)
class _State:
    """The state of the adapter. A process has only one."""

    watches: list[Patch] = field(default_factory=list)
    """Patches of CrewAI, and of model clients that the user defines."""
    clients: weakref.WeakSet[type] = field(default_factory=weakref.WeakSet)
    """Subclasses of `BaseLLM` that need no patch: those already patched, and CrewAI's own."""
    attempts: dict[int, AttemptHandle] = field(default_factory=dict)
    """`id` of an attempt's scope → the attempt. Only for attempts in production that began with the
    first entry of a trail.
    """
    lock: Any = field(default_factory=threading.RLock)


_state: Final = _State()


def _open_calls(context: AgentContext) -> list[FrameworkCall]:
    """Return CrewAI's running model calls in `context`, innermost first.

    Only calls inside the innermost running tool, agent, task or crew are returned.
    """
    calls = itertools.takewhile(
        lambda entry: entry.start.kind is Kind.CALL, reversed(_opened(context).trail)
    )
    return [entry.call for entry in calls if entry.call is not None]


_adapter: Final = Adapter(
    _NAME,
    (
        *("crewai", "crewai.telemetry"),
        *("openinference.instrumentation.crewai", "opentelemetry.instrumentation.crewai"),
    ),
    open_calls=_open_calls,
)


# --- events ---------------------------------------------------------------------------------
def observe(source: Any, event: Any) -> None:
    """Record an event of CrewAI in the context in which it is emitted."""
    current = current_context()
    if current is None:
        return
    read = _READERS.get(event.type)
    if read is None:
        return
    try:
        change = read(source, event)
    except Exception as error:
        _adapter.add_capture_error(current.scope.recorder, error)
        return
    if change is not None:
        _record_change(current, change)


def record_change(change: Start | End) -> None:
    """Record in the current context that an entry (a crew, task, tool, …) begins or ends."""
    current = current_context()
    if current is not None:
        _record_change(current, change)


def _record_change(current: AgentContext, change: Start | End) -> None:
    attempt = None
    try:
        if isinstance(change, Start):
            _adapter.listen()
            name = change.name.filled if change.name is not None else str(change.kind)
            around, attempt = start_attempt(current, name, change.input)
            if attempt is not None:
                _state.attempts[id(attempt.context.scope)] = attempt
                current = attempt.context
            _begin(around, change, current)
        else:
            _end(current, change)
    except Exception as error:
        _adapter.add_capture_error(current.scope.recorder, error)
        if attempt is not None:  # its end would not be recorded
            _state.attempts.pop(id(attempt.context.scope), None)
            attempt.close()


def _begin(around: AgentContext, start: Start, pushed: AgentContext) -> None:
    """Add an entry to the open entries of the current context, and its frame to the agent path.

    Args:
        around: context of the acting agent.
        start: start of the entry.
        pushed: context to restore when the entry ends.
    """
    opened = _opened(around)
    patterns = [rule.pattern for rule in around.scope.routing.rules]
    choose = functools.partial(choose_name, patterns)
    start_call = functools.partial(_adapter.start_call, around)
    trail, abandoned = begin(opened.trail, start, Place.of(around), choose, start_call)
    for entry in abandoned:
        _record(around.scope, entry, abandoned_end(entry))
    before = opened.before[: len(trail) - 1]
    base = opened.before[len(trail) - 1] if abandoned else pushed
    inside, notes = trail[-1].inside, {**around.notes, _NAME: _Open(trail, (*before, base))}
    set_agent(AgentContext(around.scope, inside.frames, inside.span_id, notes))
    _register_pending(around.scope, trail[-1])


def _end(current: AgentContext, event: End) -> None:
    opened = _opened(current)
    trail, entry, abandoned = end(opened.trail, event)
    if entry is None:
        return
    for inner in abandoned:
        _record(current.scope, inner, abandoned_end(inner))
    _record(current.scope, entry, event)
    error = event.message if event.status is SpanStatus.ERROR else None
    _restore(current, opened, len(trail), error)


def _restore(
    current: AgentContext, opened: _Open, depth: int, error: BaseException | str | None
) -> None:
    """Restore the context from before an entry; close the attempt if no entry is left.

    Args:
        current: the current context.
        opened: the open entries of the current context.
        depth: index of the entry that ends. At 0 no entry is left, so the attempt that began with
            the first entry is closed.
        error: error of the attempt; None if it succeeded.
    """
    set_agent(opened.before[depth])
    if depth:
        return
    attempt = _state.attempts.pop(id(current.scope), None)
    if attempt is not None:
        set_agent(None)
        attempt.close(error)


def _opened(current: AgentContext) -> _Open:
    opened: _Open = current.notes.get(_NAME, _NOTHING)
    return opened


def _register_pending(scope: AttemptContext, entry: Entry) -> None:
    """Register an open entry, so that it is recorded even if CrewAI never reports its end."""
    if _is_recorded(entry):
        scope.recorder.register_pending(
            _pending_key(entry), lambda: _record(scope, entry, abandoned_end(entry))
        )


def _record(scope: AttemptContext, entry: Entry, event: End) -> None:
    needs_record = entry.end_call(event)
    if not (_is_recorded(entry) and scope.recorder.resolve_pending(_pending_key(entry))):
        return
    if needs_record:
        record_call(
            entry.inside.within(scope),
            entry.start.attributes,
            event.attributes,
            SpanEnd(event.status, event.message, event.attributes),
            start_ns=entry.start_ns,
            client=entry.start.client,
            native='crewai.LLM(model="openai/…")',
        )
    if entry.has_span:
        scope.recorder.add(span_of(entry, event, scope))


def _is_recorded(entry: Entry) -> bool:
    return entry.has_span or entry.start.kind is Kind.CALL


def _pending_key(entry: Entry) -> str:
    return f"{_NAME} {id(entry)}"


# --- readers of events ----------------------------------------------------------------------
def _crew_started(source: Any, event: Any) -> Start | None:
    current = current_context()
    trail = () if current is None else _opened(current).trail
    if any(entry.start.key == _kickoff_key(source) for entry in trail):
        return None  # its kickoff began the entry
    return _crew(source, id(source), getattr(event, "inputs", None))


def _crew(crew: Any, key: Hashable, input: Any) -> Start:
    _watch_clients()
    name = crew_name(crew)
    return Start(Kind.CREW, key, None if name is None else _plain(name), input=input)


def _kickoff_key(crew: Any) -> Hashable:
    return ("kickoff", id(crew))


def _flow_started(source: Any, event: Any) -> Start | None:
    if _is_internal(source):
        return None
    _watch_clients()
    inputs = getattr(event, "inputs", None)
    return Start(Kind.FLOW, id(source), _plain(event.flow_name), input=inputs)


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
    name, messages = role_of(source, event.agent_info), getattr(event, "messages", None)
    return Start(Kind.AGENT, _agent_key(source, event), name, input=messages)


def _tool_started(source: Any, event: Any) -> Start:
    attributes = {
        semconv.TOOL_NAME: event.tool_name,
        semconv.TOOL_CALL_ARGUMENTS: truncated_json(event.tool_args),
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
    failure = getattr(event, "failure", None)  # the tool ran and reported a failure
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


def _answer(response: Any, finish_reason: str | None = None) -> dict[str, Any]:
    """Return a model's response as an OpenAI chat completion."""
    message = {"role": "assistant", "content": truncated_json(response, None)}
    return {"choices": [{"message": message, "finish_reason": finish_reason or "stop"}]}


def _own(source: Any, event: Any) -> Hashable:
    return id(source)


def _method_key(source: Any, event: Any) -> Hashable:
    return (id(source), event.method_name)


def _agent_key(source: Any, event: Any) -> Hashable:
    agent, task = getattr(event, "agent", source), getattr(event, "task", None)
    return (id(agent), None if task is None else id(task))


def _tool_key(event: Any) -> Hashable:
    """Return the key of the event's tool: the letters and digits of its name, in lower case.

    CrewAI names the same tool `Search the web` in one event and `search_the_web` in another.
    """
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
    """Return the name that a crew's author gave it; None for CrewAI's default."""
    name = clean(getattr(crew, "name", None))
    return name if name not in ("", "crew") else None


def _plain(name: Any) -> Name:
    return Name(clean(name), clean(name))


def role_of(agent: Any, info: Mapping[str, Any] | None = None) -> Name | None:
    """Return the role of an agent; None if it has none.

    The result has two forms of the role: the template, and the text with the inputs filled in.

    Args:
        agent: the agent; None to use `info` only.
        info: data of the agent from an event, used if `agent` has no role; None if there is none.
    """
    filled = clean(getattr(agent, "role", None) or (info or {}).get("role"))
    template = clean(_original_role(agent)) or filled
    return Name(template, filled, str(getattr(agent, "id", id(agent)))) if filled else None


def _original_role(agent: Any) -> Any:
    """Return the role of an agent before inputs were filled in; None if no inputs were filled in.

    The role is read from pydantic's private attributes, because `getattr` for a private attribute
    is slow: pydantic first raises and catches an error in search of a descriptor.
    """
    private = getattr(agent, "__pydantic_private__", None)
    if isinstance(private, dict):
        return private.get("_original_role")
    return getattr(agent, "_original_role", None)


_INTERNAL: Final = ("crewai.agents.", "crewai.experimental.", "crewai.memory.")


def _is_internal(flow: Any) -> bool:
    """Return whether a flow is CrewAI's own; CrewAI implements agents and memory as flows."""
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


# --- wrappers of CrewAI's methods -------------------------------------------------------------
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
    """Record that a crew begins before its kickoff and ends after its callbacks."""

    def __init__(
        self, crew: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], watch: Patch
    ) -> None:
        checkpoint = args[2] if len(args) > 2 else kwargs.get("from_checkpoint")
        is_restored = getattr(checkpoint, "restore_from", None) is not None
        is_delegated = crew.stream or is_restored  # to another kickoff, which is recorded
        self._current = None if is_delegated or not watch.on else current_context()
        self._crew = crew
        self._inputs = args[0] if args else kwargs.get("inputs")

    def __enter__(self) -> None:
        if self._current is not None:
            record_change(_crew(self._crew, _kickoff_key(self._crew), self._inputs))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._current is None:
            return
        key = _kickoff_key(self._crew)
        if error is None:
            record_change(End(Kind.CREW, key))
        elif isinstance(error, Exception):
            record_change(End(Kind.CREW, key, *SpanEnd.from_error(error)))
        else:
            depth = len(_opened(self._current).trail)
            _unwind(current_context() or self._current, depth, error)


def _unwind(current: AgentContext, depth: int, error: BaseException) -> None:
    """End the spans that an ended coroutine left open, and restore the context.

    These spans are marked as abandoned.

    Args:
        current: the current context.
        depth: number of spans that were open when the coroutine began.
        error: exception that ended the coroutine.
    """
    try:
        opened = _opened(current)
        if len(opened.trail) <= depth:
            return
        for entry in reversed(opened.trail[depth:]):
            _record(current.scope, entry, abandoned_end(entry))
        _restore(current, opened, depth, error)
    except Exception as failure:
        _adapter.add_capture_error(current.scope.recorder, failure)


# --- the users' model clients ---------------------------------------------------------------
def _watch_clients() -> None:
    """Patch the subclasses of `BaseLLM` that users wrote, to record their model calls. Idempotent.

    Such a class may emit no events for its model calls.
    """
    for cls in _subclasses(BaseLLM):
        if cls in _state.clients:
            continue
        with _state.lock:
            if cls in _state.clients or not _state.watches:
                continue
            _state.clients.add(cls)
            if not cls.__module__.startswith("crewai."):
                own = [name for name in ("call", "acall") if name in vars(cls)]
                _state.watches += [_watch(cls, name, _calling) for name in own]


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
    """Record a call of a user's model client as open while the `with` block runs."""

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
        self._record(self._start)
        return self

    def answered(self, answer: Any) -> Any:
        if self._current is not None:
            self._answer = _answer(answer)
        return answer

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._record(End(Kind.CALL, self._key, attributes=self._answer))
        elif isinstance(error, Exception):
            self._record(End(Kind.CALL, self._key, *SpanEnd.from_error(error)))
        else:
            self._record(End(Kind.CALL, self._key, SpanStatus.UNSET))

    def _record(self, change: Start | End) -> None:
        if self._current is not None:
            record_change(change)


# --- installing -----------------------------------------------------------------------------
class LightspanListener(BaseEventListener):
    """A CrewAI event listener that records agents: `LightspanListener()` calls `instrument()`.

    Create it anywhere before the crew starts, like CrewAI's own listeners.
    """

    def setup_listeners(self, crewai_event_bus: Any) -> None:
        """Install the adapter; called by CrewAI."""
        instrument()


def instrument() -> Instrumentation:
    """Record every crew, flow and agent of this process.

    It may be called before or after crews and models are built, and repeatedly. As a context
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
        _adapter.enable()
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument` and restore CrewAI."""
    with _state.lock:
        for watch in reversed(_state.watches):
            watch.undo()
        _state.watches.clear()
        _state.clients.clear()
    _adapter.disable()


class Instrumentor(AdapterInstrumentor):
    """The instrumentor that `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)

"""Find out the acting agent by wrapping AutoGen's methods.

AutoGen has no hook that runs for every agent *before* its model call. Its telemetry does nothing if
OpenTelemetry is switched off, and opens no span for direct calls of `on_messages`. Its log names
the caller of an `AgentTool` instead of the agent inside. So the methods that invoke teams, agents
and tools are wrapped, in the classes that define them and in those that are defined later.

A team's agents run in tasks of its runtime, which may have been started anywhere. So the acting
agent is looked up by the team's id whenever a message is handled. Agents of autogen-core itself,
without a team, act in the context from which the message was sent (`_messages`).

Errors of the adapter never reach the app. They are recorded as capture errors of the attempt.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Final, NamedTuple

from autogen_agentchat.base import ChatAgent, Response, TaskResult, Team
from autogen_agentchat.teams._group_chat._sequential_routed_agent import SequentialRoutedAgent
from autogen_core import BaseAgent, SingleThreadedAgentRuntime
from autogen_core.models import ChatCompletionClient
from autogen_core.tools import BaseTool, StaticWorkbench, ToolResult, Workbench

from lightspan.instrumentation import (
    AdapterInstrumentor,
    AgentContext,
    AttemptHandle,
    Instrumentation,
    Patch,
    SpanEnd,
    SpanKind,
    SpanStatus,
    current_agent,
    current_context,
    patch_subclasses,
    semconv,
    set_agent,
    start_attempt,
    truncated_json,
)
from lightspan_autogen import _bypass, _messages
from lightspan_autogen._bypass import adapter
from lightspan_autogen._identity import Invocation, Role, enter, span_of


@dataclass(slots=True)
class _State:
    """The adapter's state in this process: open invocations, attempts and patches."""

    open: dict[str, Invocation] = field(default_factory=dict)
    """Span id → open invocation."""
    attempts: dict[str, AttemptHandle] = field(default_factory=dict)
    """Span id of an open invocation → attempt that began with the invocation, in production."""
    runs: dict[str, AgentContext] = field(default_factory=dict)
    """Id of a running team → context in which the team's messages are handled."""
    patches: list[Patch] = field(default_factory=list)
    is_everywhere: bool = False
    """Whether all of AutoGen is recorded; False if only the teams of a `LightspanRuntime` are."""
    lock: Any = field(default_factory=threading.RLock)


_state: Final = _State()


# --- who is invoked -------------------------------------------------------------------------
def _agent(agent: Any, args: Any, kwargs: Any) -> Role:
    return Role(str(agent.name), agent)


def _registered(agent: Any, args: Any, kwargs: Any) -> Role:
    return Role(str(agent.id.type), agent)


def _team(team: Any, args: Any, kwargs: Any) -> Role:
    return Role(str(team.name), team, is_team=True)


def _tool(tool: Any, args: Any, kwargs: Any) -> Role:
    arguments = kwargs["args"] if "args" in kwargs else args[0]
    return _tool_call(str(tool.name), arguments, args[2:], kwargs)


def _workbench_tool(workbench: Any, args: Any, kwargs: Any) -> Role:
    name = kwargs["name"] if "name" in kwargs else args[0]
    arguments = kwargs["arguments"] if "arguments" in kwargs else (*args[1:], None)[0]
    return _tool_call(str(name), arguments or {}, args[3:], kwargs)


def _tool_call(name: str, arguments: Any, rest: Any, kwargs: Any) -> Role:
    call_id = kwargs["call_id"] if "call_id" in kwargs else (*rest, None)[0]
    return Role(name, call_id, SpanKind.TOOL, arguments=truncated_json(arguments))


# --- how it ended ---------------------------------------------------------------------------
def _returned(owner: Any, value: Any) -> SpanEnd:
    if isinstance(value, ToolResult):
        return _tool_result(value)
    if not isinstance(owner, BaseTool):
        return SpanEnd()
    try:
        text = owner.return_value_as_string(value)
    except Exception:  # an error of the app's tool, which AutoGen will raise too
        text = f"<{type(value).__name__}>"
    return SpanEnd(attributes={semconv.TOOL_CALL_RESULT: truncated_json(text)})


def _tool_result(result: ToolResult) -> SpanEnd:
    attributes = {semconv.TOOL_CALL_RESULT: truncated_json(result.to_text())}
    if not result.is_error:
        return SpanEnd(attributes=attributes)
    return SpanEnd(SpanStatus.ERROR, attributes={**attributes, semconv.ERROR_TYPE: "tool_error"})


def _raised(error: BaseException, last: Any) -> SpanEnd:
    if isinstance(error, GeneratorExit):  # the reader stopped, perhaps after the last item
        is_complete = isinstance(last, Response | TaskResult)
        return SpanEnd(SpanStatus.OK if is_complete else SpanStatus.UNSET)
    return SpanEnd.from_error(error)


# --- opening and closing --------------------------------------------------------------------
RoleOf = Callable[[Any, Any, Any], Role]


def _begin(role_of: RoleOf, owner: Any, args: Any, kwargs: Any) -> Invocation | None:
    """Begin to record the run of a team, agent or tool. Never raises.

    Args:
        role_of: function that describes the team, agent or tool, given `owner`, `args` and
            `kwargs`.
        owner: object whose method is called.
        args: positional arguments of the method.
        kwargs: keyword arguments of the method.

    Returns:
        The run. None if nothing is recorded, if the call is part of a run that is already open, or
        after an error of the adapter.
    """
    around, attempt = current_agent(), None
    if around is None:
        return None
    try:
        innermost = _state.open.get(around.parent_span_id or "")
        if innermost is None:
            if not _is_watched(owner):
                return None
        elif innermost.role.owner is owner:  # a continuation: see `enter`
            return None
        role = role_of(owner, args, kwargs)
        if innermost is None:
            around, attempt = _start_attempt(around, role, args, kwargs)
        invocation = enter(around, role, innermost)
        if invocation is not None:
            _register(invocation, attempt)
        return invocation
    except Exception as error:
        adapter.add_capture_error(around.scope.recorder, error)
        if attempt is not None:
            attempt.close()
        return None


def _start_attempt(
    around: AgentContext, role: Role, args: Any, kwargs: Any
) -> tuple[AgentContext, AttemptHandle | None]:
    """Return the context in which the run of a team, agent or tool begins.

    In production, an attempt is opened first if none is open.

    Args:
        around: context in which the team, agent or tool is called.
        role: the team, agent or tool.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        The context, and the attempt that was opened; None if none was opened.
    """
    conversation = _messages.conversation_of(around)
    if conversation is not None and around.scope.is_outside:
        around = conversation.context
    around, attempt = start_attempt(around, role.name, _task_in(args, kwargs))
    if attempt is not None and conversation is not None:
        around = conversation.begin(attempt)
    return around, attempt


def _task_in(args: Any, kwargs: Any) -> Any:
    """Return the task of a team's or agent's run.

    It is the argument `task`, else the first argument; None if there are no arguments.
    """
    return kwargs.get("task", kwargs.get("messages", args[0] if args else None))


def _register(invocation: Invocation, attempt: AttemptHandle | None) -> None:
    span_id = invocation.span_id
    _state.open[span_id] = invocation
    if attempt is not None:
        _state.attempts[span_id] = attempt
    recorder = invocation.inside.scope.recorder
    recorder.register_pending(span_id, lambda: _end(invocation, lambda: SpanEnd(SpanStatus.UNSET)))
    if invocation.role.is_team:
        _state.runs.setdefault(_team_id(invocation.role.owner), invocation.inside)


def _end(
    invocation: Invocation, describe: Callable[[], SpanEnd], error: BaseException | None = None
) -> None:
    """End the run of a team, agent or tool.

    Record its span, and close the attempt if one was opened for the run.

    Args:
        invocation: the run.
        describe: function that returns the status and the attributes of the span.
        error: exception that ended the run; None if it succeeded.
    """
    role, span_id, recorder = (
        invocation.role,
        invocation.span_id,
        invocation.inside.scope.recorder,
    )
    _state.open.pop(span_id, None)
    attempt = _state.attempts.pop(span_id, None)
    if role.is_team and _state.runs.get(_team_id(role.owner)) is invocation.inside:
        del _state.runs[_team_id(role.owner)]
    if recorder.resolve_pending(span_id):
        try:
            recorder.add(span_of(invocation, describe()))
        except Exception as failure:
            adapter.add_capture_error(recorder, failure)
    if attempt is not None:
        attempt.close(error)


def _team_id(team: Any) -> str:
    return str(getattr(team, "_team_id", id(team)))


# --- the wrappers ---------------------------------------------------------------------------
def _coroutine(original: Callable[..., Awaitable[Any]], role_of: RoleOf) -> Callable[..., Any]:
    @functools.wraps(original)
    async def invoke(self: Any, *args: Any, **kwargs: Any) -> Any:
        invocation, bound = _begin(role_of, self, args, kwargs), _bound(original, self)
        if invocation is None:
            return await bound(*args, **kwargs)
        leave = set_agent(invocation.inside)
        try:
            value = await bound(*args, **kwargs)
        except BaseException as error:
            failure = error
            _end(invocation, lambda: _raised(failure, None), failure)
            raise
        finally:
            leave()
        _end(invocation, lambda: _returned(self, value))
        return value

    return invoke


def _stream(
    original: Callable[..., AsyncGenerator[Any, None]], role_of: RoleOf
) -> Callable[..., Any]:
    """Wrap a method of a team or agent that yields a stream of items.

    The team or agent counts as acting only while it computes an item, not while the app uses the
    item.
    """

    @functools.wraps(original)
    async def invoke(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        invocation = _begin(role_of, self, args, kwargs)
        inside = None if invocation is None else invocation.inside
        items, last = _bound(original, self)(*args, **kwargs), None
        try:
            while True:
                try:
                    last = await _step(inside, items.__anext__())
                except StopAsyncIteration:
                    break
                yield last
        except BaseException as error:
            failure, final = error, last
            await _step(inside, items.aclose())
            if invocation is not None:
                _end(invocation, lambda: _raised(failure, final), failure)
            raise
        if invocation is not None:
            _end(invocation, lambda: _returned(self, last))

    return invoke


async def _step(inside: AgentContext | None, step: Awaitable[Any]) -> Any:
    """Await `step` in the context `inside`; for None, in the current context."""
    if inside is None:
        return await step
    leave = set_agent(inside)
    try:
        return await step
    finally:
        leave()


def _handler(original: Callable[..., Awaitable[Any]], _: RoleOf) -> Callable[..., Any]:
    """Wrap the method that handles a message for an agent of a team or for the team's manager."""

    @functools.wraps(original)
    async def on_message_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside = _state.runs.get(self.id.key)
        return await _step(inside, _bound(original, self)(*args, **kwargs))

    return on_message_impl


def _on_message(original: Callable[..., Awaitable[Any]], role_of: RoleOf) -> Callable[..., Any]:
    """Wrap `on_message`, which handles a message for an agent of autogen-core."""
    invoke = _coroutine(original, role_of)

    @functools.wraps(original)
    async def on_message(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, _messages.NO_AGENTS):
            return await _bound(original, self)(*args, **kwargs)
        return await invoke(self, *args, **kwargs)

    return on_message


def _bound(original: Any, owner: Any) -> Any:
    """Bind the method `original` to `owner`.

    Instrumentations that wrap the same method expect a bound method.
    """
    return original.__get__(owner, type(owner))


def _create(original: Callable[..., Any], _: RoleOf) -> Callable[..., Any]:
    """Wrap `create` of a model client."""

    @functools.wraps(original)
    async def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound, call = _bound(original, self), _begin_call(self, args, kwargs)
        if call is None:
            return await bound(*args, **kwargs)
        if call.bypasses_cache:
            bound = self.client.create
        try:
            result = await _step(call.inside, bound(*args, **kwargs))
        except BaseException as error:
            _bypass.guarded(_bypass.end, call.context, call, None, error)
            raise
        _bypass.guarded(_bypass.end, call.context, call, result, None)
        return result

    return create


def _create_stream(original: Callable[..., Any], _: RoleOf) -> Callable[..., Any]:
    """Wrap `create_stream` of a model client; the last item of the stream is the result."""

    @functools.wraps(original)
    async def create_stream(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        bound, call, last = _bound(original, self), _begin_call(self, args, kwargs), None
        if call is not None and call.bypasses_cache:
            bound = self.client.create_stream
        items = bound(*args, **kwargs)
        inside = None if call is None else call.inside
        try:
            while True:
                try:
                    last = await _step(inside, items.__anext__())
                except StopAsyncIteration:
                    break
                yield last
        except BaseException as error:
            await items.aclose()
            if call is not None:
                _bypass.guarded(_bypass.end, call.context, call, None, error)
            raise
        if call is not None:
            _bypass.guarded(_bypass.end, call.context, call, last, None)

    return create_stream


def _begin_call(client: Any, args: Any, kwargs: Any) -> _bypass.ModelCall | None:
    current = current_context()
    if current is None or not (_state.is_everywhere or current.parent_span_id in _state.open):
        return None
    call: _bypass.ModelCall | None = _bypass.guarded(
        _bypass.begin, current, current, client, args, kwargs
    )
    return call


# --- installing -----------------------------------------------------------------------------
class _Wrapping(NamedTuple):
    """Which methods of a class and its subclasses are wrapped, and by which functions.

    Args:
        base: the class.
        names: names of the methods.
        role_of: function that describes the team, agent or tool that a method runs.
        coroutine: function that wraps a coroutine method.
        stream: function that wraps a method that yields items.
    """

    base: type
    names: Collection[str]
    role_of: RoleOf
    coroutine: Callable[..., Any] = _coroutine
    stream: Callable[..., Any] = _stream


_WRAPPINGS: Final = (
    _Wrapping(ChatAgent, ("run", "run_stream", "on_messages", "on_messages_stream"), _agent),
    _Wrapping(Team, ("run", "run_stream"), _team),
    _Wrapping(BaseTool, ("run_json", "run_json_stream"), _tool),
    _Wrapping(Workbench, ("call_tool", "call_tool_stream"), _workbench_tool),
    _Wrapping(ChatCompletionClient, ("create", "create_stream"), _agent, _create, _create_stream),
)


class LightspanRuntime(SingleThreadedAgentRuntime):
    """A runtime of AutoGen; only its own teams and agents are recorded.

    Create teams with `runtime=LightspanRuntime()`, or register agents with it. Start and stop it
    like any AutoGen runtime. After `instrument()`, which records all teams and agents, it has no
    further effect.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _install()


def instrument() -> Instrumentation:
    """Record every team, agent and tool of AutoGen in this process.

    It may be called before or after teams and clients are built, and repeatedly. As a context
    manager (`with instrument():`) it is undone at the end of the block.
    """
    with _state.lock:
        if _state.is_everywhere:
            return Instrumentation(None)
        _install()
        _state.is_everywhere = True
        adapter.enable()
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument`, and restore AutoGen's methods.

    The agents of a `LightspanRuntime` are no longer recorded either.
    """
    with _state.lock:
        _state.is_everywhere = False
        while _state.patches:
            _state.patches.pop().undo()
    adapter.disable()


class Instrumentor(AdapterInstrumentor):
    """Calls `instrument` for the command `opentelemetry-instrument python app.py`."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)


def _is_watched(owner: Any) -> bool:
    """Return whether to record an outermost method call of `owner`.

    A call is outermost if it is made inside no call that is recorded.

    It is recorded if `instrument` was called, or if `owner` has a `LightspanRuntime`.
    """
    return _state.is_everywhere or isinstance(getattr(owner, "_runtime", None), LightspanRuntime)


def _install() -> None:
    with _state.lock:
        if _state.patches:
            return
        _wrap(SequentialRoutedAgent, "on_message_impl", _handler, _team)
        _wrap(BaseAgent, "on_message", _on_message, _registered)
        for envelope in _messages.ENVELOPES:
            _wrap(envelope, "__init__", _messages.envelope_init)
        for name in _messages.PROCESSING:
            _wrap(SingleThreadedAgentRuntime, name, _messages.processing)
        for wrapping in _WRAPPINGS:
            patch = patch_subclasses(wrapping.base, partial(_wrap_class, wrapping))
            _state.patches.append(patch)
        adapter.listen()


def _wrap_class(wrapping: _Wrapping, cls: type) -> None:
    if issubclass(cls, StaticWorkbench):  # its tools are wrapped themselves
        return
    for name in wrapping.names:
        function = vars(cls).get(name)
        if not isinstance(function, FunctionType) or hasattr(function, "__isabstractmethod__"):
            continue
        is_coroutine = inspect.iscoroutinefunction(function)
        # A plain function may return a generator, as in AutoGen's cache.
        is_stream = not is_coroutine and name.endswith("_stream")
        if is_stream or is_coroutine:
            make = wrapping.stream if is_stream else wrapping.coroutine
            _wrap(cls, name, make, wrapping.role_of)


def _wrap(owner: type, name: str, make: Callable[..., Any], *role_of: RoleOf) -> None:
    original = vars(owner)[name]
    _state.patches.append(Patch(owner, name, lambda patch: make(original, *role_of)))

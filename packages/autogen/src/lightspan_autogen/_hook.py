"""Listens to AutoGen and tells core who is acting.

AutoGen has no place where a listener hears of every agent *before* it asks its model: its
telemetry is silent where OpenTelemetry is switched off, opens no span for direct calls of
`on_messages`, and its log names the caller of an `AgentTool` instead of the agent inside. So the
methods through which teams, agents and tools are invoked are wrapped, in the classes that define
them and in those that are defined later.

A team's agents run in tasks of its runtime, which may have been started anywhere: what is acting is
looked up by the team's id whenever a message is handled. Agents of autogen-core itself, without a
team, act where the message was sent (`_messages`).

Errors of ours never reach the app: they mark the attempt as damaged.
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
    add_call_listener,
    add_capture_error,
    current_context,
    disable_adapter,
    enable_adapter,
    patch_subclasses,
    remove_call_listener,
    reset_agent,
    resolve_agent,
    semconv,
    set_agent,
    start_attempt,
    truncated_json,
)
from lightspan_autogen import _bypass, _messages
from lightspan_autogen._identity import Opened, Role, enter, span_of

_SCOPES: Final = ("autogen-core", "openinference.instrumentation.autogen_agentchat")
"""OpenTelemetry's instrumentation scopes whose spans describe the same agents."""


@dataclass(slots=True)
class _State:
    """Of this process."""

    open: dict[str, Opened] = field(default_factory=dict)
    """Span id → the invocation under way."""
    roots: dict[str, AttemptHandle] = field(default_factory=dict)
    """Span id of an invocation under way → the attempt that began with it, in production."""
    runs: dict[str, AgentContext] = field(default_factory=dict)
    """Team id → who is acting for everything that its runtime does."""
    patches: list[Patch] = field(default_factory=list)
    is_everywhere: bool = False
    """Whether all of AutoGen is watched, or the teams of a `LightspanRuntime` alone."""
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
    except Exception:  # the app's own; it will see for itself
        text = f"<{type(value).__name__}>"
    return SpanEnd(attributes={semconv.TOOL_CALL_RESULT: truncated_json(text)})


def _tool_result(result: ToolResult) -> SpanEnd:
    attributes = {semconv.TOOL_CALL_RESULT: truncated_json(result.to_text())}
    if not result.is_error:
        return SpanEnd(attributes=attributes)
    return SpanEnd(SpanStatus.ERROR, attributes={**attributes, semconv.ERROR_TYPE: "tool_error"})


def _raised(error: BaseException, last: Any) -> SpanEnd:
    if isinstance(error, GeneratorExit):  # left by whoever read it, perhaps after the last item
        is_over = isinstance(last, Response | TaskResult)
        return SpanEnd(SpanStatus.OK if is_over else SpanStatus.UNSET)
    return SpanEnd.from_error(error)


# --- opening and closing --------------------------------------------------------------------
RoleOf = Callable[[Any, Any, Any], Role]


def _begin(role_of: RoleOf, owner: Any, args: Any, kwargs: Any) -> Opened | None:
    """The invocation that begins; None outside a scope, or where it is under way already."""
    current = current_context()
    if current is None:
        return None
    around, root = resolve_agent(current), None
    try:
        innermost = _state.open.get(around.parent_span_id or "")
        if innermost is None:
            if not _is_watched(owner):
                return None
        elif innermost.role.owner is owner:  # it goes on: see `enter`
            return None
        role = role_of(owner, args, kwargs)
        if innermost is None:
            around, root = _rooted(around, role, args, kwargs)
        opened = enter(around, role, innermost)
        if opened is not None:
            _note(opened, root)
        return opened
    except Exception as error:
        add_capture_error(around.scope.recorder, _bypass.NAME, error)
        if root is not None:
            root.close()
        return None


def _rooted(
    around: AgentContext, role: Role, args: Any, kwargs: Any
) -> tuple[AgentContext, AttemptHandle | None]:
    """Who is acting; in production, in the conversation's attempt, or in one that begins."""
    conversation = _messages.conversation_of(around)
    if conversation is not None and around.scope.is_outside:
        around = conversation.acting
    around, root = start_attempt(around, role.name, _task_in(args, kwargs))
    if root is not None and conversation is not None:
        around = conversation.begin(root)
    return around, root


def _task_in(args: Any, kwargs: Any) -> Any:
    """What a team or an agent is asked; of a tool call or a message, its first argument."""
    return kwargs.get("task", kwargs.get("messages", args[0] if args else None))


def _note(opened: Opened, root: AttemptHandle | None) -> None:
    _state.open[opened.span_id] = opened
    if root is not None:
        _state.roots[opened.span_id] = root
    recorder = opened.inside.scope.recorder
    recorder.expect(opened.span_id, lambda: _end(opened, lambda: SpanEnd(SpanStatus.UNSET)))
    if opened.role.is_team:
        _state.runs.setdefault(_team_id(opened.role.owner), opened.inside)


def _end(opened: Opened, how: Callable[[], SpanEnd], raised: BaseException | None = None) -> None:
    """The invocation has ended; what is told twice counts once."""
    _state.open.pop(opened.span_id, None)
    root = _state.roots.pop(opened.span_id, None)
    if opened.role.is_team and _state.runs.get(_team_id(opened.role.owner)) is opened.inside:
        del _state.runs[_team_id(opened.role.owner)]
    recorder = opened.inside.scope.recorder
    if recorder.settle(opened.span_id):
        try:
            span = span_of(opened, how())
            recorder.add(span)
        except Exception as error:
            add_capture_error(recorder, _bypass.NAME, error)
    if root is not None:
        root.close(raised)


def _team_id(team: Any) -> str:
    return str(getattr(team, "_team_id", id(team)))


# --- the wrappers ---------------------------------------------------------------------------
def _coroutine(original: Callable[..., Awaitable[Any]], role_of: RoleOf) -> Callable[..., Any]:
    @functools.wraps(original)
    async def invoke(self: Any, *args: Any, **kwargs: Any) -> Any:
        opened, bound = _begin(role_of, self, args, kwargs), _bound(original, self)
        if opened is None:
            return await bound(*args, **kwargs)
        token = set_agent(opened.inside)
        try:
            value = await bound(*args, **kwargs)
        except BaseException as error:
            failure = error
            _end(opened, lambda: _raised(failure, None), failure)
            raise
        finally:
            reset_agent(token)
        _end(opened, lambda: _returned(self, value))
        return value

    return invoke


def _stream(
    original: Callable[..., AsyncGenerator[Any, None]], role_of: RoleOf
) -> Callable[..., Any]:
    """Its body runs in its consumer's context: who is acting is put there for each step alone."""

    @functools.wraps(original)
    async def invoke(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        opened = _begin(role_of, self, args, kwargs)
        inside = None if opened is None else opened.inside
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
            if opened is not None:
                _end(opened, lambda: _raised(failure, final), failure)
            raise
        if opened is not None:
            _end(opened, lambda: _returned(self, last))

    return invoke


async def _step(inside: AgentContext | None, step: Awaitable[Any]) -> Any:
    """Take it with this acting; None: with whoever acts."""
    if inside is None:
        return await step
    token = set_agent(inside)
    try:
        return await step
    finally:
        reset_agent(token)


def _handler(original: Callable[..., Awaitable[Any]], _: RoleOf) -> Callable[..., Any]:
    """A message to a team's manager or to one of its agents."""

    @functools.wraps(original)
    async def on_message_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside = _state.runs.get(self.id.key)
        return await _step(inside, _bound(original, self)(*args, **kwargs))

    return on_message_impl


def _on_message(original: Callable[..., Awaitable[Any]], role_of: RoleOf) -> Callable[..., Any]:
    """A message to an agent of autogen-core."""
    invoke = _coroutine(original, role_of)

    @functools.wraps(original)
    async def on_message(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, _messages.NO_AGENTS):
            return await _bound(original, self)(*args, **kwargs)
        return await invoke(self, *args, **kwargs)

    return on_message


def _bound(original: Any, owner: Any) -> Any:
    """The method as its owner has it: another instrumentation's wrapper tells the two apart."""
    return original.__get__(owner, type(owner))


def _create(original: Callable[..., Any], _: RoleOf) -> Callable[..., Any]:
    """A model client's call."""

    @functools.wraps(original)
    async def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound, ask = _bound(original, self), _ask(self, args, kwargs)
        if ask is None:
            return await bound(*args, **kwargs)
        if ask.is_uncached:
            bound = self.client.create
        try:
            result = await _step(ask.acting_inside, bound(*args, **kwargs))
        except BaseException as error:
            _bypass.guarded(_bypass.end, ask.acting, ask, None, error)
            raise
        _bypass.guarded(_bypass.end, ask.acting, ask, result, None)
        return result

    return create


def _create_stream(original: Callable[..., Any], _: RoleOf) -> Callable[..., Any]:
    """A model client's streamed call; its last item is the result."""

    @functools.wraps(original)
    async def create_stream(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        bound, ask, last = _bound(original, self), _ask(self, args, kwargs), None
        if ask is not None and ask.is_uncached:
            bound = self.client.create_stream
        items = bound(*args, **kwargs)
        inside = None if ask is None else ask.acting_inside
        try:
            while True:
                try:
                    last = await _step(inside, items.__anext__())
                except StopAsyncIteration:
                    break
                yield last
        except BaseException as error:
            await items.aclose()
            if ask is not None:
                _bypass.guarded(_bypass.end, ask.acting, ask, None, error)
            raise
        if ask is not None:
            _bypass.guarded(_bypass.end, ask.acting, ask, last, None)

    return create_stream


def _ask(client: Any, args: Any, kwargs: Any) -> _bypass.Ask | None:
    current = current_context()
    if current is None or not (_state.is_everywhere or current.parent_span_id in _state.open):
        return None
    ask: _bypass.Ask | None = _bypass.guarded(_bypass.begin, current, current, client, args, kwargs)
    return ask


# --- installing -----------------------------------------------------------------------------
class _Wrapping(NamedTuple):
    """The methods of a class, and of all below it, that are wrapped."""

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
    """AutoGen's runtime, which tells lightspan who is acting in its teams, and in no others.

    For agents registered with it and teams made with `runtime=LightspanRuntime()`; started and
    stopped as any other. With `instrument()` it is not needed, and changes nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _install()


def instrument() -> Instrumentation:
    """Tell lightspan of every team, agent and tool of AutoGen in this process.

    It may be called before or after teams and clients are built; twice is once. As a context
    manager (`with instrument():`) it is undone at the end of the block.
    """
    with _state.lock:
        if _state.is_everywhere:
            return Instrumentation(None)
        _install()
        _state.is_everywhere = True
        enable_adapter(__name__, _SCOPES)
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument`, and silence every `LightspanRuntime`; AutoGen is left as it was."""
    with _state.lock:
        _state.is_everywhere = False
        remove_call_listener(_bypass.note_call)
        while _state.patches:
            _state.patches.pop().undo()
    disable_adapter(__name__)


class Instrumentor(AdapterInstrumentor):
    """What `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)


def _is_watched(owner: Any) -> bool:
    """Whether an invocation that is not inside another counts."""
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
        add_call_listener(_bypass.note_call)


def _wrap_class(wrapping: _Wrapping, known: type) -> None:
    if issubclass(known, StaticWorkbench):  # its tools are told of themselves
        return
    for name in wrapping.names:
        function = vars(known).get(name)
        if not isinstance(function, FunctionType) or hasattr(function, "__isabstractmethod__"):
            continue
        is_coroutine = inspect.iscoroutinefunction(function)
        # one that is no generator itself may return one, as that of AutoGen's cache does
        is_stream = not is_coroutine and name.endswith("_stream")
        if is_stream or is_coroutine:
            make = wrapping.stream if is_stream else wrapping.coroutine
            _wrap(known, name, make, wrapping.role_of)


def _wrap(owner: type, name: str, make: Callable[..., Any], *role_of: RoleOf) -> None:
    original = vars(owner)[name]
    _state.patches.append(Patch(owner, name, lambda patch: make(original, *role_of)))

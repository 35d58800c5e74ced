"""Listens to AutoGen and tells core who is acting.

AutoGen has no place where a listener hears of every agent *before* it asks its model: its
telemetry is silent where OpenTelemetry is switched off, opens no span for direct calls of
`on_messages`, and its log names the caller of an `AgentTool` instead of the agent inside. So the
methods through which teams, agents and tools are invoked are wrapped, in the classes that define
them and in those that are defined later.

A team's agents run in tasks of its runtime, which may have been started anywhere: what is acting is
looked up by the team's id whenever a message is handled.

Errors of ours never reach the app: they mark the attempt as damaged.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from types import FunctionType
from typing import Any, Final, NamedTuple

from autogen_agentchat.base import ChatAgent, Response, TaskResult, Team
from autogen_agentchat.teams._group_chat._sequential_routed_agent import SequentialRoutedAgent
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.models import ChatCompletionClient
from autogen_core.tools import BaseTool, StaticWorkbench, ToolResult, Workbench

from lightspan import conventions, recording, scope
from lightspan.emit import exception_attributes, text_of
from lightspan.instrumentation import AdapterInstrumentor, Instrumentation, shortened
from lightspan.messages import dump_json
from lightspan.scope import Acting
from lightspan.spans import SpanKind, SpanStatus
from lightspan_autogen import _models
from lightspan_autogen._identity import End, Opened, Role, enter, span_of

_open: Final[dict[str, Opened]] = {}
"""Span id → the invocation under way."""
_roots: Final[dict[str, scope.Root]] = {}
"""Span id of an invocation under way → the attempt that began with it, in production."""
_runs: Final[dict[str, Acting]] = {}
"""Team id → who is acting for everything that its runtime does."""


# --- who is invoked -------------------------------------------------------------------------
def _agent(agent: Any, args: Any, kwargs: Any) -> Role:
    return Role(str(agent.name), agent)


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
    return Role(name, call_id, SpanKind.TOOL, arguments=dump_json(arguments))


# --- how it ended ---------------------------------------------------------------------------
def _returned(owner: Any, value: Any) -> End:
    if isinstance(value, ToolResult):
        return _tool_result(value)
    if not isinstance(owner, BaseTool):
        return End()
    try:
        text = owner.return_value_as_string(value)
    except Exception:  # the app's own; it will see for itself
        text = f"<{type(value).__name__}>"
    return End(attributes={conventions.TOOL_CALL_RESULT: shortened(text)})


def _tool_result(result: ToolResult) -> End:
    attributes = {conventions.TOOL_CALL_RESULT: shortened(result.to_text())}
    if not result.is_error:
        return End(attributes=attributes)
    return End(SpanStatus.ERROR, attributes={**attributes, conventions.ERROR_TYPE: "tool_error"})


def _raised(error: BaseException, last: Any) -> End:
    if isinstance(error, GeneratorExit):  # left by whoever read it, perhaps after the last item
        is_over = isinstance(last, Response | TaskResult)
        return End(SpanStatus.OK if is_over else SpanStatus.UNSET)
    return End(SpanStatus.ERROR, text_of(error), exception_attributes(error))


# --- opening and closing --------------------------------------------------------------------
RoleOf = Callable[[Any, Any, Any], Role]


def _begin(role_of: RoleOf, owner: Any, args: Any, kwargs: Any) -> Opened | None:
    """The invocation that begins; None outside a scope, or where it is under way already."""
    if scope.pushed() is None:
        return None
    around = scope.acting()
    if around is None:
        return None
    try:
        innermost = _open.get(around.parent_span_id or "")
        if innermost is None and not _is_watched(owner):
            return None
        role = role_of(owner, args, kwargs)
        root = scope.open_root(around, role.name, _task_in(args, kwargs))
        opened = enter(around if root is None else root.acting, role, innermost)
        if opened is not None:
            _note(opened, root)
        return opened
    except Exception as error:
        _damage(around, error)
        return None


def _task_in(args: Any, kwargs: Any) -> Any:
    """What a team or an agent is asked; of a tool call, its first argument."""
    return kwargs.get("task", kwargs.get("messages", args[0] if args else None))


def _note(opened: Opened, root: scope.Root | None) -> None:
    _open[opened.span_id] = opened
    if root is not None:
        _roots[opened.span_id] = root
    recorder = opened.inside.scope.recorder
    recorder.expect(opened.span_id, lambda: _end(opened, lambda: End(SpanStatus.UNSET)))
    if opened.role.is_team:
        _runs.setdefault(_team_id(opened.role.owner), opened.inside)


def _end(opened: Opened, how: Callable[[], End], raised: BaseException | None = None) -> None:
    """The invocation has ended; what is told twice counts once."""
    _open.pop(opened.span_id, None)
    root = _roots.pop(opened.span_id, None)
    if opened.role.is_team and _runs.get(_team_id(opened.role.owner)) is opened.inside:
        del _runs[_team_id(opened.role.owner)]
    recorder = opened.inside.scope.recorder
    if recorder.settle(opened.span_id):
        try:
            recorder.add(span_of(opened, how()))
        except Exception as error:
            _damage(opened.inside, error)
    if root is not None:
        root.close(raised)


def _team_id(team: Any) -> str:
    return str(getattr(team, "_team_id", id(team)))


def _damage(acting: Acting, error: Exception) -> None:
    """Errors of ours damage the attempt; they never reach the app."""
    acting.scope.recorder.damage(f"lightspan_autogen: {type(error).__name__}: {error}")


# --- the wrappers ---------------------------------------------------------------------------
def _coroutine(original: Callable[..., Awaitable[Any]], role_of: RoleOf) -> Callable[..., Any]:
    @functools.wraps(original)
    async def invoke(self: Any, *args: Any, **kwargs: Any) -> Any:
        opened, bound = _begin(role_of, self, args, kwargs), _bound(original, self)
        if opened is None:
            return await bound(*args, **kwargs)
        token = scope.set_acting(opened.inside)
        try:
            value = await bound(*args, **kwargs)
        except BaseException as error:
            failure = error
            _end(opened, lambda: _raised(failure, None), failure)
            raise
        finally:
            scope.reset_acting(token)
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
        items, last = _bound(original, self)(*args, **kwargs), None
        try:
            while True:
                try:
                    last = await _step(opened, items.__anext__())
                except StopAsyncIteration:
                    break
                yield last
        except BaseException as error:
            failure, final = error, last
            await _step(opened, items.aclose())
            if opened is not None:
                _end(opened, lambda: _raised(failure, final), failure)
            raise
        if opened is not None:
            _end(opened, lambda: _returned(self, last))

    return invoke


async def _step(opened: Opened | None, step: Awaitable[Any]) -> Any:
    if opened is None:
        return await step
    token = scope.set_acting(opened.inside)
    try:
        return await step
    finally:
        scope.reset_acting(token)


def _handler(original: Callable[..., Awaitable[Any]], _: RoleOf) -> Callable[..., Any]:
    """A message to a team's manager or to one of its agents."""

    @functools.wraps(original)
    async def on_message_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        acting = _runs.get(self.id.key)
        if acting is None:
            return await _bound(original, self)(*args, **kwargs)
        token = scope.set_acting(acting)
        try:
            return await _bound(original, self)(*args, **kwargs)
        finally:
            scope.reset_acting(token)

    return on_message_impl


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
        token = _models.asking.set(ask)
        try:
            result = await bound(*args, **kwargs)
        except BaseException as error:
            _models.guarded(_models.end, ask.acting, ask, None, error)
            raise
        finally:
            _models.asking.reset(token)
        _models.guarded(_models.end, ask.acting, ask, result, None)
        return result

    return create


def _create_stream(original: Callable[..., Any], _: RoleOf) -> Callable[..., Any]:
    """A model client's streamed call; its last item is the result."""

    @functools.wraps(original)
    async def create_stream(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        items, ask, last = _bound(original, self)(*args, **kwargs), _ask(self, args, kwargs), None
        try:
            while True:
                token = _models.asking.set(ask)
                try:
                    last = await items.__anext__()
                except StopAsyncIteration:
                    break
                finally:
                    _reset_asking(token)
                yield last
        except BaseException as error:
            await items.aclose()
            if ask is not None:
                _models.guarded(_models.end, ask.acting, ask, None, error)
            raise
        if ask is not None:
            _models.guarded(_models.end, ask.acting, ask, last, None)

    return create_stream


def _ask(client: Any, args: Any, kwargs: Any) -> _models.Ask | None:
    current = scope.pushed()
    if current is None or not (_is_everywhere or current.parent_span_id in _open):
        return None
    ask: _models.Ask | None = _models.guarded(_models.begin, current, client, args, kwargs)
    return ask


def _reset_asking(token: Any) -> None:
    try:
        _models.asking.reset(token)
    except ValueError:  # closed from another context
        return


# --- installing -----------------------------------------------------------------------------
_lock = threading.RLock()
_wrapped: Final[list[tuple[type, str, Any, Any]]] = []
"""Class, attribute, what it was (`_INHERITED` for none of its own), and what it is."""
_INHERITED: Final = object()
_is_everywhere = False


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

    For teams made with `runtime=LightspanRuntime()`, started and stopped as any other. With
    `instrument()` it is not needed, and changes nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _install()


def instrument() -> Instrumentation:
    """Tell lightspan of every team, agent and tool of AutoGen in this process.

    It may be called before or after teams and clients are built; twice is once. As a context
    manager (`with instrument():`) it is undone at the end of the block.
    """
    global _is_everywhere
    with _lock:
        if _is_everywhere:
            return Instrumentation(None)
        _install()
        _is_everywhere = True
        recording.hold(__name__)
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument`, and silence every `LightspanRuntime`; AutoGen is left as it was."""
    global _is_everywhere
    with _lock:
        _is_everywhere = False
        scope.unregister_resolver(_models.notice)
        while _wrapped:
            owner, name, before, ours = _wrapped.pop()
            if vars(owner).get(name) is not ours:
                continue  # somebody wrapped it, and keeps it; it does nothing any more
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
    recording.release(__name__)


class Instrumentor(AdapterInstrumentor):
    """What `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)


def _is_watched(owner: Any) -> bool:
    """Whether an invocation that is not inside another counts."""
    return _is_everywhere or isinstance(getattr(owner, "_runtime", None), LightspanRuntime)


def _install() -> None:
    with _lock:
        if _wrapped:
            return
        _wrap(SequentialRoutedAgent, "on_message_impl", _handler, _team)
        for wrapping in _WRAPPINGS:
            for known in [wrapping.base, *_subclasses(wrapping.base)]:
                _wrap_class(known, wrapping)
            _follow(wrapping)
        scope.register_resolver(_models.notice)


def _subclasses(base: type) -> list[type]:
    found: dict[type, None] = {}
    queue: list[type] = list(type.__subclasses__(base))
    while queue:
        known = queue.pop()
        if known not in found:
            found[known] = None
            queue += type.__subclasses__(known)
    return list(found)


def _wrap_class(known: type, wrapping: _Wrapping) -> None:
    if issubclass(known, StaticWorkbench):  # its tools are told of themselves
        return
    for name in wrapping.names:
        function = vars(known).get(name)
        if not isinstance(function, FunctionType) or hasattr(function, "__isabstractmethod__"):
            continue
        is_stream = inspect.isasyncgenfunction(function)
        if is_stream or inspect.iscoroutinefunction(function):
            make = wrapping.stream if is_stream else wrapping.coroutine
            _wrap(known, name, make, wrapping.role_of)


def _wrap(owner: type, name: str, make: Callable[..., Any], role_of: RoleOf) -> None:
    before = vars(owner)[name]
    ours = make(before, role_of)
    _wrapped.append((owner, name, before, ours))
    setattr(owner, name, ours)


def _follow(wrapping: _Wrapping) -> None:
    """Wrap the classes that are defined from now on."""
    base: Any = wrapping.base
    own = vars(base).get("__init_subclass__", _INHERITED)

    def init_subclass(cls: type, **kwargs: Any) -> None:
        if own is _INHERITED:
            super(base, cls).__init_subclass__(**kwargs)
        else:
            own.__func__(cls, **kwargs)
        with _lock:
            _wrap_class(cls, wrapping)

    ours: Any = classmethod(init_subclass)  # type: ignore[arg-type]
    _wrapped.append((base, "__init_subclass__", own, ours))
    base.__init_subclass__ = ours

"""Who is acting: the rollout, the attempt and the agents, in one ContextVar.

A runner opens a *scope* around the app. Adapters (and `lightspan.agent`) push *frames*, one per
agent; the innermost frame is the acting agent and the names of all frames are its path. A framework
whose hooks cannot push reliably registers a *resolver* instead, which is asked whenever somebody
wants to know. What they are, `stack` says; it is offered here too.

`current_agent` returns who acts now: `resolve_agent` of `current_context`. Code that pushes or pops
a frame must not count what a resolver adds, and code that runs at every call of a thread pool must
not ask resolvers: both use `current_context`. Asking changes nothing. Code that begins to record a
model call calls `notify_call_start`: an adapter that hears of the same call from its framework
leaves it to that code, and records only what nobody else saw answered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, Token
from functools import partial
from types import FrameType
from typing import Any, Final

from lightspan.capture import generator_context
from lightspan.capture._globals import ActivePrompts, state
from lightspan.capture.context_types import (
    AgentContext as AgentContext,
    AttemptContext as AttemptContext,
    AttemptFactory as AttemptFactory,
    AttemptHandle as AttemptHandle,
    CallEnd as CallEnd,
    CallListener as CallListener,
    Frame as Frame,
    Resolver as Resolver,
)
from lightspan.capture.recorder import LostRewardRecorder, NullRecorder
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.spans import (
    Attributes,
    Span,
    SpanKind,
    clean_attributes,
    new_span_id,
    now_ns,
)

_acting: Final[ContextVar[generator_context.Set]] = ContextVar("lightspan_acting", default=None)

Acted = Token[generator_context.Set]
"""See `set_agent`."""


def current_context() -> AgentContext | None:
    """Who is acting by the pushed frames alone; None outside a scope."""
    found = _acting.get()
    if state.steps or isinstance(found, generator_context.GeneratorEntry):
        found = _in_this_step(found)
    return found or state.outside


def _in_this_step(found: generator_context.Set) -> AgentContext | None:
    """Who acts where a generator may be running, or may have left something behind."""
    running = generator_context.running(state.steps)
    now = generator_context.current_entries(found, running)
    if running and not generator_context.is_of(now, running[0]):
        now = generator_context.inside(running[0].blocks[-1], running[0], now)
    if now is not found:
        _acting.set(now)  # for the tasks and threads that begin here
    return now.acting if isinstance(now, generator_context.GeneratorEntry) else now


def pushed_in(context: Context) -> AgentContext | None:
    """Who is acting in that context by the pushed frames alone; None outside every scope."""
    found = context.get(_acting)
    return found.acting if isinstance(found, generator_context.GeneratorEntry) else found


def current_agent() -> AgentContext | None:
    """Who is acting now, resolvers asked; None outside a scope."""
    current = current_context()
    return None if current is None else resolve_agent(current)


def resolve_agent(current: AgentContext, *, before: Resolver | None = None) -> AgentContext:
    """Who is really acting where the pushed frames say `current`.

    Args:
        current: see `current_context`.
        before: ask only the resolvers that were registered before this one: what it will be given.
    """
    for resolver in state.resolvers:
        if resolver is before:
            break
        try:
            current = resolver(current) or current
        except Exception as error:  # an adapter's; it must not reach the app
            current.scope.recorder.add_capture_error(
                f"who is acting could not be resolved: {error!r}"
            )
    return current


def set_agent(value: AgentContext | None) -> Acted:
    """Set who is acting; undo with `reset_agent`. Who acts outside every scope is nobody."""
    value = None if value is state.outside else value
    running = generator_context.running(state.steps) if state.steps else ()
    if not running:
        return _acting.set(value)
    return _acting.set(generator_context.inside(value, running[0], _outer(running)))


def _outer(running: Sequence[generator_context.GeneratorSteps]) -> generator_context.Set:
    return generator_context.current_entries(_acting.get(), running)


def reset_agent(token: Acted) -> None:
    """Undo `set_agent`, also from another context (then there is nothing to undo)."""
    try:
        _acting.reset(token)
    except ValueError:  # the token's context is gone: an abandoned generator, another task
        return


def act(value: AgentContext, entering: FrameType) -> Callable[[], None]:
    """Set who acts in a `with` block; in a generator, in its own steps alone (`steps`).

    Args:
        value: who acts.
        entering: the frame that enters the block.

    Returns:
        What undoes it, in any context.
    """
    generator = generator_context.generator_of(entering)
    if generator is None:
        return partial(reset_agent, set_agent(value))
    opened = state.steps.setdefault(generator, generator_context.GeneratorSteps())
    before = _outer(generator_context.running(state.steps))
    opened.blocks.append(value)
    _acting.set(generator_context.inside(value, opened, before))

    def leave() -> None:
        opened.blocks[:] = [block for block in opened.blocks if block is not value]
        if not opened.blocks:
            state.steps.pop(generator, None)
        _acting.set(_outer(generator_context.running(state.steps)))

    return leave


# --- outside every scope --------------------------------------------------------------------
_NOWHERE: Final = AgentContext(
    AttemptContext(
        rollout_id="",
        attempt_id="",
        mode=Mode.PRODUCTION,
        recorder=LostRewardRecorder(),
        is_outside=True,
    )
)
_QUIET: Final = AgentContext(
    AttemptContext(
        rollout_id="", attempt_id="", mode=Mode.PRODUCTION, recorder=NullRecorder(), is_outside=True
    )
)


def connect(connection: AgentContext) -> None:
    """Have it act where no scope is open, until `disconnect`; its scope is `is_outside`."""
    state.connections.append(connection)
    _settle()


def disconnect(connection: AgentContext) -> None:
    """Undo `connect`."""
    state.connections[:] = [one for one in state.connections if one is not connection]
    _settle()


def set_opener(opener: AttemptFactory | None) -> None:
    """Make attempts of what begins where no scope is open; None: no more."""
    state.opener = opener
    _settle()


def push_prompts(active: ActivePrompts) -> None:
    """Apply prompts outside rollouts, until `pop_prompts`."""
    state.active_prompts.append(active)
    _settle()


def pop_prompts(active: ActivePrompts) -> None:
    """Undo `push_prompts`."""
    state.active_prompts[:] = [one for one in state.active_prompts if one is not active]
    _settle()


def _settle() -> None:
    quiet = _QUIET if state.active_prompts else None
    recorded = quiet if state.opener is None else _NOWHERE
    state.outside = state.connections[-1] if state.connections else recorded


def start_attempt(
    current: AgentContext,
    name: str | None,
    given: Any = None,
    *,
    before: Resolver | None = None,
) -> tuple[AgentContext, AttemptHandle | None]:
    """Who is around what begins now; in production, in an attempt of its own unless it is in one.

    Resolvers are asked first, whoever begins: of a framework that cannot push, its resolver alone
    knows that an attempt is open.

    Args:
        current: who is acting, as `current_context` said.
        name: of what begins; None for a model call that nothing is around.
        given: its input, if it is known.
        before: see `resolve_agent`.

    Returns:
        Who is acting; and the attempt that began, None if it is in one or nothing is recorded.
    """
    around = resolve_agent(current, before=before) if state.resolvers else current
    if state.opener is None or not around.scope.is_outside:
        return around, None
    root = state.opener(around, name, given)
    return root.acting, root


@contextmanager
def entered(root: AttemptHandle) -> Iterator[None]:
    """Act in the attempt for the duration of the block, which ends it."""
    token = set_agent(root.acting)
    try:
        yield
    except BaseException as error:
        reset_agent(token)
        root.close(error)
        raise
    reset_agent(token)
    root.close()


def end_step(generator: FrameType) -> None:
    """A step of a generator ends: nothing of its blocks stays with whoever takes its items."""
    opened, found = state.steps.get(generator), _acting.get()
    if opened is not None:
        _acting.set(generator_context.without(opened, found))


@contextmanager
def push(frame: Frame) -> Iterator[AgentContext | None]:
    """Push an agent frame for the duration of the block; a no-op outside a scope."""
    current = current_context()
    if current is None:
        yield None
        return
    deeper = current.within(frame.span_id, (*current.frames, frame))
    token = set_agent(deeper)
    try:
        yield deeper
    finally:
        reset_agent(token)


def register_resolver(resolver: Resolver, *, first: bool = False) -> None:
    """Ask `resolver` who is acting, too. Registering twice is a no-op.

    Args:
        resolver: see there.
        first: ask it before those that are registered, whenever they are.
    """
    if resolver not in state.resolvers:
        state.resolvers.insert(0 if first else len(state.resolvers), resolver)


def unregister_resolver(resolver: Resolver) -> None:
    """Undo `register_resolver`."""
    if resolver in state.resolvers:
        state.resolvers.remove(resolver)


def resolvers() -> Sequence[Resolver]:
    """The registered resolvers, in the order in which they are asked."""
    return tuple(state.resolvers)


# --- model calls ----------------------------------------------------------------------------
def notify_call_start(asking: AgentContext, *, besides: CallListener | None = None) -> CallEnd:
    """Say that a model call begins which the caller records, unless a call inside it is.

    Args:
        asking: who asks.
        besides: tell all listeners but this one, the caller's own.

    Returns:
        What the caller tells of the end. Neither raises.
    """
    told: list[CallEnd] = []
    for listener in state.call_listeners:
        if listener is besides:
            continue
        try:
            end = listener(asking)
            if end is not None:
                told.append(end)
        except Exception as error:  # an adapter's; it must not reach the app
            asking.scope.recorder.add_capture_error(f"a model call could not be told of: {error!r}")
    if not told:
        return _nothing_to_tell
    recorder = weakref.ref(asking.scope.recorder)  # an end may never come

    def ended(is_answered: bool) -> None:
        while told:
            try:
                told.pop()(is_answered)
            except Exception as error:
                attempt = recorder()
                if attempt is not None:
                    attempt.add_capture_error(f"a call's end could not be told of: {error!r}")

    return ended


def _nothing_to_tell(is_answered: bool) -> None:
    """Tell nobody of a call's end."""


def add_call_listener(listener: CallListener) -> None:
    """Tell `listener` of every model call that begins and is recorded. Twice is once."""
    if listener not in state.call_listeners:
        state.call_listeners.append(listener)


def remove_call_listener(listener: CallListener) -> None:
    """Undo `add_call_listener`."""
    if listener in state.call_listeners:
        state.call_listeners.remove(listener)


def call_listeners() -> Sequence[CallListener]:
    """Who is told, in the order in which they were added."""
    return tuple(state.call_listeners)


# --- spans ----------------------------------------------------------------------------------
def make_span(
    current: AgentContext,
    name: str,
    kind: SpanKind,
    attributes: Attributes,
    *,
    span_id: str | None = None,
    start_ns: int | None = None,
    end_ns: int | None = None,
    **fields: Any,
) -> Span:
    """A span of the current attempt, child of the innermost open span.

    Args:
        current: who acts.
        name: of the span.
        kind: of the span.
        attributes: of the span; the agent's path is added if it is not there.
        span_id: None for a new one.
        start_ns: when it began; None for when it ended.
        end_ns: when it ended; None for now.
        fields: more of them.
    """
    scope, ended = current.scope, now_ns() if end_ns is None else end_ns
    if c.AGENT_PATH not in attributes:
        attributes = {c.AGENT_PATH: current.path, **attributes}
    return Span(
        span_id=new_span_id() if span_id is None else span_id,
        trace_id=scope.trace_id,
        name=name,
        rollout_id=scope.rollout_id,
        attempt_id=scope.attempt_id,
        kind=kind,
        parent_id=current.parent_span_id,
        start_ns=ended if start_ns is None else start_ns,
        end_ns=ended,
        attributes=clean_attributes(attributes),
        **fields,
    )


def agent_attributes(name: str, around: Sequence[Frame] = ()) -> Attributes:
    """What every agent's span says, whoever writes it; not its path.

    Args:
        name: of the agent.
        around: the frames of the agents around it.
    """
    attributes: Attributes = {
        c.OPERATION_NAME: "invoke_agent",
        c.AGENT_NAME: name,
        c.OPENINFERENCE_KIND: "AGENT",
        c.OPENINFERENCE_AGENT: name,
        c.OPENINFERENCE_NODE: name,
    }
    if around:
        attributes[c.OPENINFERENCE_PARENT] = around[-1].name
    return attributes

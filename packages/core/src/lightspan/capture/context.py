"""Hold the current rollout, attempt and agents in one ContextVar.

A runner opens an attempt around the app (`entry.open_scope`). Adapters and `lightspan.agent` push a
*frame* for each agent that begins. The innermost frame is the acting agent, and the names of all
frames are its path. The callbacks of some frameworks cannot push reliably. Their adapters register
a *resolver* instead: a function that finds the acting agent whenever it is needed.

`current_context` returns the frames that were pushed. `current_agent` also calls the resolvers.
Code that pushes or pops a frame uses `current_context`, because it must not include agents that
resolvers found. Neither function changes anything.

Code that begins to record a model call calls `notify_call_start`. If the call was made inside a
framework's model call, the framework's adapter is thereby notified, and does not record it again.
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
    Place as Place,
    Resolver as Resolver,
)
from lightspan.capture.recorder import LostRewardRecorder, NullRecorder
from lightspan.schema import semconv as c, spans
from lightspan.schema.records import Mode

_agent: Final[ContextVar[generator_context.Entry]] = ContextVar("lightspan_acting", default=None)


def current_context() -> AgentContext | None:
    """Return the current attempt with its frames; None outside every attempt.

    A frame stands for an agent that an adapter or `lightspan.agent` has begun. Resolvers are not
    called. In production, code that runs in the context of an attempt that has ended, such as a
    background task, is outside every attempt.
    """
    entry = _agent.get()
    if state.steps or isinstance(entry, generator_context.GeneratorEntry):
        entry = _current_in_generators(entry)
    return state.ambient if entry is None or entry.scope.is_over else entry


def _current_in_generators(entry: generator_context.Entry) -> AgentContext | None:
    """Return the current context while some generator has an open `with` block that sets an agent.

    Return None outside every attempt.

    Args:
        entry: value of the ContextVar.
    """
    running = generator_context.running(state.steps)
    current = generator_context.current_entries(entry, running)
    if running and not generator_context.is_set_in(current, running[0]):
        current = generator_context.inside(running[0].blocks[-1], running[0], current)
    if current is not entry:
        _agent.set(current)  # tasks and threads that begin here copy it
    return _agent_of(current)


def _agent_of(entry: generator_context.Entry) -> AgentContext | None:
    return entry.agent if isinstance(entry, generator_context.GeneratorEntry) else entry


def pushed_in(context: Context) -> AgentContext | None:
    """Return the attempt and the active agents that are set in `context`, such as another task's.

    None outside every attempt.
    """
    return _agent_of(context.get(_agent))


def lacks_agent(context: Context) -> bool:
    """Return whether `context`, copied by the app, lacks the agent of the generator that runs.

    The app then copied it in a later item (`generator_context`), before `current_context` was
    called there.
    """
    entry, copied = _agent.get(), context.get(_agent)
    return isinstance(entry, generator_context.GeneratorEntry) and copied is entry.outer


def current_agent() -> AgentContext | None:
    """Return the context of the acting agent, which is the agent whose code runs now.

    None outside every attempt. Agents that a framework's adapter cannot push are found by the
    resolver of the adapter.
    """
    current = current_context()
    return None if current is None else resolve_agent(current)


def resolve_agent(current: AgentContext, *, before: Resolver | None = None) -> AgentContext:
    """Find the acting agent by calling the resolvers, and return its context.

    A resolver is a function that finds the acting agent of one framework.

    Args:
        current: the current context (`current_context`).
        before: resolver at which to stop: neither it nor the resolvers after it are called. None
            calls all resolvers.
    """
    for resolver in state.resolvers:
        if resolver is before:
            break
        try:
            current = resolver(current) or current
        except Exception as error:  # an adapter's error must not reach the app
            current.add_capture_error("the acting agent could not be resolved", error)
    return current


def set_agent(agent: AgentContext | None) -> Callable[[], None]:
    """Make another agent the acting agent.

    Args:
        agent: context whose innermost agent is meant; None for code outside every attempt.

    Returns:
        A function that restores the earlier context. In another task or thread it does nothing.
    """
    entry: generator_context.Entry = None if agent is state.ambient else agent
    running = generator_context.running(state.steps) if state.steps else ()
    if running:
        entry = generator_context.inside(_agent_of(entry), running[0], _outer(running))
    return partial(_reset, _agent.set(entry))


def _outer(running: Sequence[generator_context.GeneratorSteps]) -> generator_context.Entry:
    return generator_context.current_entries(_agent.get(), running)


def _reset(token: Token[generator_context.Entry]) -> None:
    try:
        _agent.reset(token)
    except ValueError:  # the token's context is gone: an abandoned generator, another task
        return


def set_agent_in_block(agent: AgentContext, entering: FrameType) -> Callable[[], None]:
    """Make another agent the acting agent in a `with` block.

    If the block is in a generator, the agent acts only while the generator runs, not while it is
    suspended.

    Args:
        agent: context whose innermost agent is meant.
        entering: the stack frame that enters the block.

    Returns:
        A function that restores the earlier context. If the block is in a generator, the function
        works in any task or thread.
    """
    generator = generator_context.generator_of(entering)
    if generator is None:
        return set_agent(agent)
    steps = state.steps.setdefault(generator, generator_context.GeneratorSteps())
    before = _outer(generator_context.running(state.steps))
    steps.blocks.append(agent)
    _agent.set(generator_context.inside(agent, steps, before))

    def leave() -> None:
        steps.blocks[:] = [block for block in steps.blocks if block is not agent]
        if not steps.blocks:
            state.steps.pop(generator, None)
        _agent.set(_outer(generator_context.running(state.steps)))

    return leave


# --- outside every attempt ------------------------------------------------------------------
def _ambient(recorder: NullRecorder) -> AgentContext:
    return AgentContext(AttemptContext(mode=Mode.PRODUCTION, recorder=recorder, is_outside=True))


_RECORDING: Final = _ambient(LostRewardRecorder())
_SILENT: Final = _ambient(NullRecorder())


def connect(connection: AgentContext) -> None:
    """Use `connection` as the context of all code in this process that runs outside every attempt.

    Its `scope` has `is_outside`.
    """
    state.connections.append(connection)
    _update_ambient()


def disconnect(connection: AgentContext) -> None:
    """Undo `connect`."""
    state.connections[:] = [other for other in state.connections if other is not connection]
    _update_ambient()


def set_attempt_factory(factory: AttemptFactory | None) -> None:
    """Set the function that opens an attempt, in production, for what begins outside every attempt.

    Args:
        factory: the function; None to open no further attempts.
    """
    state.attempt_factory = factory
    _update_ambient()


def push_prompts(prompts: ActivePrompts) -> None:
    """Apply prompts outside rollouts, until `pop_prompts`."""
    state.active_prompts.append(prompts)
    _update_ambient()


def pop_prompts(prompts: ActivePrompts) -> None:
    """Undo `push_prompts`."""
    state.active_prompts[:] = [other for other in state.active_prompts if other is not prompts]
    _update_ambient()


def _update_ambient() -> None:
    silent = _SILENT if state.active_prompts else None
    unconnected = silent if state.attempt_factory is None else _RECORDING
    state.ambient = state.connections[-1] if state.connections else unconnected


def start_attempt(
    current: AgentContext, name: str | None, input: Any = None, *, before: Resolver | None = None
) -> tuple[AgentContext, AttemptHandle | None]:
    """Open an attempt in production if none is open, and return the context of the acting agent.

    Resolvers are called first: for some frameworks, only the resolver of the adapter finds an
    attempt that is open.

    Args:
        current: the context without the agents that resolvers find.
        name: name of the agent, team or function that begins; None for a model call outside these.
        input: input of the agent, team or function; None if it is not known.
        before: resolver at which to stop (`resolve_agent`).

    Returns:
        The context of the acting agent, and the opened attempt. The attempt is None if one was open
        already, or if the process neither records nor is connected.
    """
    around = resolve_agent(current, before=before) if state.resolvers else current
    factory = state.attempt_factory or around.scope.attempt_factory
    if factory is None or not around.scope.is_outside:
        return around, None
    attempt = factory(around, name, input)
    return attempt.context, attempt


@contextmanager
def attempt_scope(attempt: AttemptHandle) -> Iterator[None]:
    """Make an automatically opened attempt current in a block, and close the attempt at its end."""
    leave = set_agent(attempt.context)
    try:
        yield
    except BaseException as error:
        leave()
        attempt.close(error)
        raise
    leave()
    attempt.close()


def leave_step(generator: FrameType) -> None:
    """Remove the agents of `generator` from the context, just before the generator yields."""
    steps = state.steps.get(generator)
    if steps is not None:
        _agent.set(generator_context.without(steps, _agent.get()))


def register_resolver(resolver: Resolver, *, first: bool = False) -> None:
    """Register a resolver. Do nothing if it is registered already.

    Args:
        resolver: function that returns the context of the acting agent.
        first: whether to call it before the resolvers that are registered already.
    """
    if resolver not in state.resolvers:
        state.resolvers.insert(0 if first else len(state.resolvers), resolver)


def unregister_resolver(resolver: Resolver) -> None:
    """Undo `register_resolver`."""
    if resolver in state.resolvers:
        state.resolvers.remove(resolver)


def resolvers() -> Sequence[Resolver]:
    """Return the registered resolvers, in the order in which they are called."""
    return tuple(state.resolvers)


# --- model calls ----------------------------------------------------------------------------
def notify_call_start(context: AgentContext, *, besides: CallListener | None = None) -> CallEnd:
    """Notify the call listeners of a model call that begins and that the caller records.

    A call listener is a function of an adapter (`add_call_listener`). No error of a listener is
    raised.

    Args:
        context: the context of the calling agent.
        besides: the caller's own listener, which is not notified; None notifies all.

    Returns:
        A function that the caller calls once at the end of the model call. Its argument is whether
        the call was answered.
    """
    ends: list[CallEnd] = []
    for listener in state.call_listeners:
        if listener == besides:  # `==`, since each access to a bound method is another object
            continue
        try:
            end = listener(context)
            if end is not None:
                ends.append(end)
        except Exception as error:  # an adapter's error must not reach the app
            context.add_capture_error("a listener failed at the start of a model call", error)
    if not ends:
        return lambda is_answered: None  # no listener waits for the end
    recorder = weakref.ref(context.scope.recorder)  # the call may never end

    def notify_end(is_answered: bool) -> None:
        while ends:
            try:
                ends.pop()(is_answered)
            except Exception as error:
                attempt = recorder()
                if attempt is not None:
                    attempt.add_capture_error(f"a listener failed at the end of a call: {error!r}")

    return notify_end


def add_call_listener(listener: CallListener) -> None:
    """Call `listener` whenever a recorded model call begins. A listener is added only once."""
    if listener not in state.call_listeners:
        state.call_listeners.append(listener)


def remove_call_listener(listener: CallListener) -> None:
    """Undo `add_call_listener`."""
    if listener in state.call_listeners:
        state.call_listeners.remove(listener)


def call_listeners() -> Sequence[CallListener]:
    """Return the registered call listeners, in the order in which they are called."""
    return tuple(state.call_listeners)


# --- spans ----------------------------------------------------------------------------------
def make_span(
    current: AgentContext,
    name: str,
    kind: spans.SpanKind,
    attributes: spans.Attributes,
    *,
    span_id: str | None = None,
    start_ns: int | None = None,
    end_ns: int | None = None,
    **fields: Any,
) -> spans.Span:
    """Return a span of the current attempt, a child of the innermost open span.

    Args:
        current: the context of the acting agent.
        name: name of the span.
        kind: kind of the span.
        attributes: attributes of the span; the agent's path is added if it is missing.
        span_id: id of the span; None for a new id.
        start_ns: start, nanoseconds since the epoch; None for the end.
        end_ns: end, nanoseconds since the epoch; None for now.
        fields: more fields of the span.
    """
    scope, ended = current.scope, spans.now_ns() if end_ns is None else end_ns
    if c.AGENT_PATH not in attributes:
        attributes = {c.AGENT_PATH: current.path, **attributes}
    return spans.Span(
        span_id=spans.new_span_id() if span_id is None else span_id,
        trace_id=scope.trace_id,
        name=name,
        rollout_id=scope.rollout_id,
        attempt_id=scope.attempt_id,
        kind=kind,
        parent_id=current.parent_span_id,
        start_ns=ended if start_ns is None else start_ns,
        end_ns=ended,
        attributes=spans.clean_attributes(attributes),
        **fields,
    )


def agent_attributes(name: str, around: Sequence[Frame] = ()) -> spans.Attributes:
    """Return the attributes of every AGENT span, except the path.

    Args:
        name: name of the agent.
        around: frames of the agents around it.
    """
    attributes: spans.Attributes = {
        c.OPERATION_NAME: "invoke_agent",
        c.AGENT_NAME: name,
        c.OPENINFERENCE_KIND: "AGENT",
        c.OPENINFERENCE_AGENT: name,
        c.OPENINFERENCE_NODE: name,
    }
    if around:
        attributes[c.OPENINFERENCE_PARENT] = around[-1].name
    return attributes

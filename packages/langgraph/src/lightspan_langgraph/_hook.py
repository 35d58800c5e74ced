"""Find out the acting agent by callbacks from LangChain.

The acting agent is the one in whose code a model call is made. LangChain calls the handler whenever
a run begins or ends, and `RunTree` stores the agent path and span of every run. `with
lightspan.agent(…)` and the patches of SDKs then ask the resolver, which returns the path and span
of the innermost run around the caller. The handler cannot set the agent in a context variable:
asynchronous callbacks may run in their own task, where the change would be lost.

Errors never reach the app: they are recorded as capture errors of the attempt.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import ToolMessage
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers import context as langchain_context
from langgraph.errors import GraphBubbleUp

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
    Recorder,
    SpanEnd,
    SpanStatus,
    current_agent,
    current_context,
    record_call,
    semconv,
    start_attempt,
    truncated_json,
)
from lightspan_langgraph import _bypass, _cache
from lightspan_langgraph._identity import End, RunKind, RunTree, Start
from lightspan_langgraph._prebuilt import StartingGraph, is_running_prebuilt, starting_graph

_NO_ERRORS: Final = (GraphBubbleUp, GeneratorExit)
"""Exceptions that interrupt or abandon a run; they do not count as errors."""


class _AttemptRuns:
    """The runs of one attempt, without a strong reference to the attempt's recorder."""

    def __init__(self, current: AttemptContext) -> None:
        self.tree = RunTree(replace(current, recorder=Recorder()))
        self.recorder = weakref.ref(current.recorder)
        self.calls: dict[UUID, _bypass.ModelCall] = {}
        """Id of an open model run → its model call."""
        self.handle: Callable[[], AttemptHandle | None] = lambda: None
        """Function that returns the handle of the open attempt in production, and None in
        rollouts.
        """


@dataclass(slots=True)
class _State:
    """The state of the adapter. A process has only one."""

    attempts: weakref.WeakKeyDictionary[Recorder, _AttemptRuns] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Recorder of an attempt → runs of the attempt. An entry is removed with its recorder."""
    owners: weakref.WeakValueDictionary[UUID, _AttemptRuns] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """Id of an open run → runs of its attempt.

    A context variable cannot replace this table: a run may end in a different context from the one
    in which it began.
    """
    ended: weakref.WeakValueDictionary[UUID, _AttemptRuns] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """Id of an ended run → runs of its open attempt in production, to which the run's background
    work belongs.
    """
    handles: dict[UUID, AttemptHandle] = field(default_factory=dict)
    """Id of an open run → handle of the production attempt that began with the run."""
    patches: list[Patch] = field(default_factory=list)
    """Patches of the frameworks' caches."""
    lock: Any = field(default_factory=threading.RLock)


_state: Final = _State()


# --- the handler ----------------------------------------------------------------------------
class LightspanCallback(BaseCallbackHandler):
    """A callback handler that records agents; add it to `config={"callbacks": [...]}`.

    `instrument()` adds it to every run. If both are used, nothing is recorded twice.
    """

    run_inline = True
    raise_error = False
    ignore_retry = True
    ignore_custom_event = True

    def on_chain_start(self, serialized: Any, inputs: Any, **event: Any) -> None:
        if (current := current_context()) is not None:
            _start(current, RunKind.CHAIN, serialized, event, inputs)

    def on_retriever_start(self, serialized: Any, query: Any, **event: Any) -> None:
        if (current := current_context()) is not None:
            _start(current, RunKind.RETRIEVER, serialized, event, query)

    def on_tool_start(self, serialized: Any, input_str: str, **event: Any) -> None:
        if (current := current_context()) is not None:
            _start(current, RunKind.TOOL, serialized, event, input_str)

    def on_chat_model_start(self, serialized: Any, messages: Any, **event: Any) -> None:
        if (current := current_context()) is not None:
            _start(current, RunKind.MODEL, serialized, event, messages[0] if messages else [])

    def on_llm_start(self, serialized: Any, prompts: Any, **event: Any) -> None:
        if (current := current_context()) is not None:
            _start(current, RunKind.MODEL, serialized, event, prompts[0] if prompts else "")

    def on_llm_new_token(self, token: Any, **event: Any) -> None:
        if _bypass.current_call.get() is not None:
            _bypass.current_call.set(None)  # later calls are not the model's request

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _succeeded, None)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _succeeded, None)

    def on_llm_end(self, response: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _succeeded, response)

    def on_tool_end(self, output: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _tool_ended, output)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _failed, error)

    on_retriever_error = on_llm_error = on_tool_error = on_chain_error


# --- events ---------------------------------------------------------------------------------
def _start(
    current: AgentContext,
    kind: RunKind,
    serialized: Any,
    event: Mapping[str, Any],
    input: Any = "",
) -> None:
    try:
        name = _name(serialized, event)
        current = _in_attempt(current, kind, name, event, input)
        _record_start(current, kind, name, event, input)
    except Exception as error:
        _adapter.add_capture_error(current.scope.recorder, error)
        handle = _state.handles.pop(event["run_id"], None)  # its end would not be recorded
        if handle is not None:
            handle.close()


def _in_attempt(
    current: AgentContext, kind: RunKind, name: str, event: Mapping[str, Any], input: Any
) -> AgentContext:
    """Return the context in which a run begins: the attempt and the acting agent.

    In production the attempt is that of the enclosing runs. If they have none, a new attempt is
    opened. In a rollout the context is `current`.

    Args:
        current: the current context.
        kind: kind of the run.
        name: name of the run.
        event: remaining keyword arguments of LangChain's callback.
        input: input of the run.
    """
    if current.scope.is_outside:
        around = _handle_of(event.get("parent_run_id") or _current_run())
        current = current if around is None else around.context
    label = None if kind is RunKind.MODEL else name
    current, handle = start_attempt(current, label, input, before=resolve)
    if handle is not None:
        _state.handles[event["run_id"]] = handle
        _attempt(handle.context.scope).handle = weakref.ref(handle)
    return current


def _handle_of(run_id: UUID | None) -> AttemptHandle | None:
    """Return the handle that can close the production attempt to which a run belongs.

    The result is None if the run belongs to a rollout, or if the attempt has ended.
    """
    if run_id is None:
        return None
    attempt = _state.owners.get(run_id) or _state.ended.get(run_id)
    handle = None if attempt is None else attempt.handle()
    return None if handle is None or handle.context.scope.is_over else handle


def _record_start(
    current: AgentContext, kind: RunKind, name: str, event: Mapping[str, Any], input: Any
) -> None:
    run_id, attempt = event["run_id"], _attempt(current.scope)
    graph = starting_graph() if kind is RunKind.CHAIN else StartingGraph()
    attempt.tree.start(
        Start(
            run_id=run_id,
            parent_id=event.get("parent_run_id") or _current_run(),  # `generate` passes no parent
            kind=kind,
            name=name,
            pushed=Place.of(current),
            metadata=event.get("metadata") or {},
            attributes=_tool_arguments(event, input) if kind is RunKind.TOOL else {},
            runs_prebuilt=is_running_prebuilt(name) if kind is RunKind.CHAIN else None,
            agent=graph.agent,
            is_resumed=graph.is_resumed,
        )
    )
    _state.owners[run_id] = attempt
    if kind is RunKind.MODEL:
        start_call = partial(_adapter.start_call, current)
        attempt.calls[run_id] = _bypass.begin(run_id, input, name, event, start_call, attempt.calls)
        manager = _bypass.running_manager()
        if manager is not None:
            current.scope.recorder.register_pending(f"{run_id}", partial(_stop, run_id))
            # LangChain reports no end of a cancelled `ainvoke`, which then frees the manager
            cancel = partial(_end, run_id, _failed, asyncio.CancelledError())
            weakref.finalize(manager, cancel).atexit = False


def _end(run_id: UUID, describe: Callable[[UUID, Any], End], result: Any) -> None:
    handle, attempt = _state.handles.pop(run_id, None), _state.owners.pop(run_id, None)
    recorder = attempt.recorder() if attempt is not None else None
    if attempt is not None and recorder is not None:
        if attempt.handle() is not None:  # else this would grow as long as the process lives
            _state.ended[run_id] = attempt
        _record_end(attempt, recorder, run_id, describe, result)
    if handle is not None:
        is_error = isinstance(result, BaseException) and not isinstance(result, _NO_ERRORS)
        handle.close(result if is_error else None)


def _stop(run_id: UUID) -> None:
    """Record, at the end of an attempt, a model run that is open, and the runs around it."""
    attempt = _state.owners.get(run_id)
    recorder = attempt.recorder() if attempt is not None else None
    if attempt is not None and recorder is not None:
        for open_run in attempt.tree.around(run_id):
            _state.owners.pop(open_run, None)  # what LangChain reports of it later is ignored
            _record_end(attempt, recorder, open_run, _failed, GeneratorExit())


def _record_end(
    attempt: _AttemptRuns,
    recorder: Recorder,
    run_id: UUID,
    describe: Callable[[UUID, Any], End],
    result: Any,
) -> None:
    try:
        end, call = describe(run_id, result), attempt.calls.pop(run_id, None)
        if call is not None:
            run, is_ok = call.runs[run_id], end.status is SpanStatus.OK
            run.end(is_answered=is_ok or isinstance(result, GeneratorExit))
            if run.call.needs_record(is_ok=is_ok):
                _record_bypassing(attempt, recorder, call, end, result)
        for span in attempt.tree.end(end):
            recorder.add(span)
    except Exception as error:
        _adapter.add_capture_error(recorder, error)
    recorder.resolve_pending(f"{run_id}")


def _record_bypassing(
    attempt: _AttemptRuns, recorder: Recorder, call: _bypass.ModelCall, end: End, result: Any
) -> None:
    """Record a model call that did not use the OpenAI SDK.

    Args:
        attempt: runs of the attempt.
        recorder: recorder of the attempt.
        call: the model call.
        end: end of the run of the model.
        result: LangChain's result; it may come from a cache.
    """
    is_cached = _bypass.is_cached(result)
    record_call(
        attempt.tree.inside(end.run_id).within(replace(attempt.tree.attempt, recorder=recorder)),
        _bypass.request(call, end.run_id),
        _bypass.answer(result),
        SpanEnd(end.status, end.message, end.attributes),
        start_ns=call.start_ns,
        client=None if is_cached else call.model,
        native="langchain_openai.ChatOpenAI",
        is_cached=is_cached,
    )


def _succeeded(run_id: UUID, _: Any) -> End:
    return End(run_id)


def _failed(run_id: UUID, error: BaseException) -> End:
    if isinstance(error, _NO_ERRORS):
        return End(run_id, SpanStatus.UNSET)
    return End(run_id, *SpanEnd.from_error(error))


def _tool_ended(run_id: UUID, output: Any) -> End:
    attributes = {semconv.TOOL_CALL_RESULT: _text_of(output)}
    if not isinstance(output, ToolMessage):
        return End(run_id, attributes=attributes)
    attributes[semconv.TOOL_CALL_ID] = output.tool_call_id
    if output.status != "error":
        return End(run_id, attributes=attributes)
    attributes[semconv.ERROR_TYPE] = "ToolException"
    return End(run_id, SpanStatus.ERROR, attributes=attributes)


def _tool_arguments(event: Mapping[str, Any], text: str) -> dict[str, Any]:
    inputs = event.get("inputs")
    return {
        semconv.TOOL_CALL_ARGUMENTS: _text_of(text if inputs is None else inputs),
        semconv.TOOL_CALL_ID: event.get("tool_call_id"),
    }


def _name(serialized: Any, event: Mapping[str, Any]) -> str:
    name = event.get("name")
    if not name and isinstance(serialized, Mapping):
        name = serialized.get("name") or (serialized.get("id") or [None])[-1]
    return str(name or "")


def _text_of(value: Any) -> str:
    return truncated_json(value.content if isinstance(value, ToolMessage) else value)


def _attempt(current: AttemptContext) -> _AttemptRuns:
    attempt = _state.attempts.get(current.recorder)
    if attempt is not None:
        return attempt
    _listen()
    with _state.lock:
        return _state.attempts.setdefault(current.recorder, _AttemptRuns(current))


# --- who is acting --------------------------------------------------------------------------
def resolve(pushed: AgentContext) -> AgentContext | None:
    """Return `pushed` with the agents of LangChain's runs around the caller.

    The result is None if no run is around the caller.

    Args:
        pushed: context with the agents that the app itself named by `lightspan.agent`.
    """
    handle = _handle_around() if pushed.scope.is_outside else None
    if handle is not None:
        inside = replace(handle.context, notes=pushed.notes)  # for the resolvers of other adapters
        return resolve(inside) or inside
    attempt = _state.attempts.get(pushed.scope.recorder)
    if attempt is None:
        return None
    try:
        place = attempt.tree.place(Place.of(pushed), _current_run(), _current_model_run())
    except Exception as error:
        _adapter.add_capture_error(pushed.scope.recorder, error)
        return None
    if place is None:
        return None
    return pushed.within(place.span_id, place.frames)


def _handle_around() -> AttemptHandle | None:
    """Return the handle that can close the production attempt of the run around the caller.

    The result is None if there is no such attempt.
    """
    return _handle_of(_current_model_run()) or _handle_of(_current_run())


def _current_model_run() -> UUID | None:
    call = _bypass.current_call.get()
    return None if call is None else call.last_run


def _current_run() -> UUID | None:
    """Return the id of the chain or tool run of the current context; None if there is none."""
    config = var_child_runnable_config.get()
    return getattr((config or {}).get("callbacks"), "parent_run_id", None)


def _open_calls(context: AgentContext) -> list[FrameworkCall]:
    """Return the innermost open model call around the caller.

    Several are returned if it is unclear which one is innermost; the list is empty if none is open.

    Args:
        context: any context of the attempt.
    """
    attempt = _state.attempts.get(context.scope.recorder)
    return [] if attempt is None else [run.call for run in _bypass.innermost(attempt.calls)]


# --- installing -----------------------------------------------------------------------------
_callback: Final = LightspanCallback()
_adapter: Final = Adapter(
    "lightspan_langgraph",
    ("openinference.instrumentation.langchain", "opentelemetry.instrumentation.langchain"),
    resolver=resolve,
    open_calls=_open_calls,
)


class _InAttempts:
    """A replacement for a ContextVar. Its value is the handler inside attempts, and None outside.

    LangChain reads the variable when it configures a run. If its value were always the handler,
    LangChain would call the handler for every run of an app that is not recorded.
    """

    @staticmethod
    def get() -> LightspanCallback | None:
        return None if current_context() is None else _callback


_hook: Final = cast("ContextVar[Any | None]", _InAttempts())


def instrument() -> Instrumentation:
    """Add `LightspanCallback` to every LangChain and LangGraph run of this process.

    It may be called before or after graphs and models are built, and repeatedly. As a context
    manager (`with instrument():`) it is undone at the end of the block.
    """
    with _state.lock:
        if any(hook[0] is _hook for hook in langchain_context._configure_hooks):
            return Instrumentation(None)
        langchain_context.register_configure_hook(
            _hook, inheritable=True, handle_class=LightspanCallback
        )
        _listen()
        _adapter.enable()
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument` and restore LangChain."""
    with _state.lock:
        hooks = langchain_context._configure_hooks
        hooks[:] = [hook for hook in hooks if hook[0] is not _hook]
        while _state.patches:
            _state.patches.pop().undo()
    _adapter.disable()


class Instrumentor(AdapterInstrumentor):
    """The instrumentor that `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)


def _listen() -> None:
    """Listen for model calls, and patch the caches of LangChain and LangGraph. Idempotent.

    A `LightspanCallback` that is used without `instrument()` needs this too.
    """
    _adapter.listen()
    if not _state.patches:
        with _state.lock:
            _state.patches = _state.patches or [
                *_cache.switch_models(_is_cache_off),
                *_cache.switch_nodes(_is_in_rollout),
            ]


def _is_in_rollout() -> bool:
    """Return whether the current code runs in a rollout.

    The results of nodes are then not taken from a cache: any node may call an agent whose weights
    or prompts change, and the keys of the cache do not contain these.
    """
    current = current_context()
    return current is not None and current.scope.is_rollout


def _is_cache_off() -> bool:
    current = current_context()
    if current is None:
        return False
    try:
        agent = current_agent()
        return agent is not None and agent.is_routed
    except Exception as error:
        _adapter.add_capture_error(current.scope.recorder, error)
        return False

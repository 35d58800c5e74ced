"""Listens to LangChain and tells core who is acting.

LangChain calls the handler whenever a run begins or ends. From that `RunTree` knows every run's
place; when the wire shim (or a person's `with lightspan.agent(…)`) asks who is acting, the resolver
finds the innermost run of the calling context and answers with its place. The handler pushes
nothing: asynchronous callbacks may run in a task of their own, where a push would be lost.

Errors never reach the app: they mark the attempt as damaged.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import ToolMessage
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers import context as langchain_context
from langgraph.errors import GraphBubbleUp

from lightspan.instrumentation import (
    AdapterInstrumentor,
    AgentContext,
    AttemptContext,
    AttemptHandle,
    CallEnd,
    Instrumentation,
    NestedCalls,
    NullRecorder,
    Patch,
    Recorder,
    SpanEnd,
    SpanStatus,
    add_call_listener,
    add_capture_error,
    current_context,
    disable_adapter,
    enable_adapter,
    notify_call_start,
    record_call,
    register_resolver,
    remove_call_listener,
    resolve_agent,
    semconv,
    start_attempt,
    truncated_json,
    unregister_resolver,
)
from lightspan_langgraph import _bypass, _cache
from lightspan_langgraph._identity import End, Place, RunKind, RunTree, Start
from lightspan_langgraph._prebuilt import is_running_prebuilt

_NAME: Final = "lightspan_langgraph"
_NO_ERRORS: Final = (GraphBubbleUp, GeneratorExit)
"""Interrupted, abandoned."""


_SCOPES: Final = (
    "openinference.instrumentation.langchain",
    "opentelemetry.instrumentation.langchain",
)
"""OpenTelemetry's instrumentation scopes whose spans describe the same agents."""


class _AttemptRuns:
    """The runs of one attempt and where its spans go; it does not keep the recorder alive."""

    def __init__(self, current: AttemptContext) -> None:
        self.tree = RunTree(replace(current, recorder=NullRecorder()))
        self.recorder = weakref.ref(current.recorder)
        self.asks: dict[UUID, _bypass.Asking] = {}
        """Open model run → the call that it is of."""
        self.root: Callable[[], AttemptHandle | None] = lambda: None
        """In production: what the runs are in, while it is open."""


@dataclass(slots=True)
class _State:
    """Of this process."""

    attempts: weakref.WeakKeyDictionary[Recorder, _AttemptRuns] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """An attempt's runs are forgotten as soon as nobody holds its recorder."""
    owners: weakref.WeakValueDictionary[UUID, _AttemptRuns] = field(
        default_factory=weakref.WeakValueDictionary
    )
    """The attempt of each open run: a run may end in another context than it began in."""
    roots: dict[UUID, AttemptHandle] = field(default_factory=dict)
    """Open run → the attempt that began with it, in production."""
    patches: list[Patch] = field(default_factory=list)
    """Of LangChain's caches."""
    lock: Any = field(default_factory=threading.RLock)


_state: Final = _State()


# --- the handler ----------------------------------------------------------------------------
class LightspanCallback(BaseCallbackHandler):
    """Tells lightspan which agent is acting; add it to `config={"callbacks": [...]}`.

    With `instrument()` it is added to every run by itself; giving both records nothing twice.
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
        if _bypass.asking.get() is not None:
            _bypass.asking.set(None)  # the request is out: what is called now is not the model's

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _succeeded, None)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _succeeded, None)

    def on_llm_end(self, response: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _succeeded, response)

    def on_tool_end(self, output: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _tool_returned, output)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _failed, error)

    on_retriever_error = on_llm_error = on_tool_error = on_chain_error


# --- events ---------------------------------------------------------------------------------
def _start(
    current: AgentContext,
    kind: RunKind,
    serialized: Any,
    event: Mapping[str, Any],
    given: Any = "",
) -> None:
    try:
        name = _name(serialized, event)
        current = _attempted(current, kind, name, event, given)
        _note_start(current, kind, name, event, given)
    except Exception as error:
        add_capture_error(current.scope.recorder, _NAME, error)
        root = _state.roots.pop(event["run_id"], None)  # nobody would tell of its end
        if root is not None:
            root.close()


def _attempted(
    current: AgentContext, kind: RunKind, name: str, event: Mapping[str, Any], given: Any
) -> AgentContext:
    """Who is acting; in production, in the attempt of the runs around, or in one of its own."""
    if current.scope.is_outside:
        around = _root_of(event.get("parent_run_id") or _current_run())
        current = current if around is None else around.acting
    label = None if kind is RunKind.MODEL else name
    current, root = start_attempt(current, label, given, before=resolve)
    if root is not None:
        _state.roots[event["run_id"]] = root
        _attempt(root.acting.scope).root = weakref.ref(root)
    return current


def _root_of(run_id: UUID | None) -> AttemptHandle | None:
    """In production: the open attempt of a run."""
    attempt = None if run_id is None else _state.owners.get(run_id)
    return None if attempt is None else attempt.root()


def _note_start(
    current: AgentContext, kind: RunKind, name: str, event: Mapping[str, Any], given: Any
) -> None:
    run_id, attempt = event["run_id"], _attempt(current.scope)
    attempt.tree.start(
        Start(
            run_id=run_id,
            parent_id=event.get("parent_run_id") or _current_run(),  # `generate` does not inherit
            kind=kind,
            name=name,
            pushed=Place.of(current),
            metadata=event.get("metadata") or {},
            attributes=_tool_called(event, given) if kind is RunKind.TOOL else {},
            runs_prebuilt=is_running_prebuilt(name) if kind is RunKind.CHAIN else None,
        )
    )
    _state.owners[run_id] = attempt
    if kind is RunKind.MODEL:
        told = notify_call_start(current, besides=_note_call)
        attempt.asks[run_id] = _bypass.begin(run_id, given, name, event, told, attempt.asks)


def _end(run_id: UUID, describe: Callable[[UUID, Any], End], what: Any) -> None:
    root, attempt = _state.roots.pop(run_id, None), _state.owners.pop(run_id, None)
    recorder = attempt.recorder() if attempt is not None else None
    if attempt is not None and recorder is not None:
        _note_end(attempt, recorder, run_id, describe, what)
    if root is not None:
        is_error = isinstance(what, BaseException) and not isinstance(what, _NO_ERRORS)
        root.close(what if is_error else None)


def _note_end(
    attempt: _AttemptRuns,
    recorder: Recorder,
    run_id: UUID,
    describe: Callable[[UUID, Any], End],
    what: Any,
) -> None:
    try:
        end, ask = describe(run_id, what), attempt.asks.pop(run_id, None)
        if ask is not None:
            run, is_ok = ask.runs[run_id], end.status is SpanStatus.OK
            run.ended(is_answered=is_ok or isinstance(what, GeneratorExit))
            if run.inside.needs_record(is_ok=is_ok):
                _record_bypassing(attempt, recorder, ask, end, what)
        for span in attempt.tree.end(end):
            recorder.add(span)
    except Exception as error:
        add_capture_error(recorder, _NAME, error)


def _record_bypassing(
    attempt: _AttemptRuns, recorder: Recorder, ask: _bypass.Asking, end: End, said: Any
) -> None:
    """Add the call of a model client that did not use the OpenAI SDK."""
    place = attempt.tree.inside(end.run_id)
    scope = replace(attempt.tree.attempt, recorder=recorder)
    record_call(
        AgentContext(scope, place.frames, place.span_id),
        _bypass.request(ask, end.run_id),
        _bypass.answer(said),
        SpanEnd(end.status, end.message, end.attributes),
        start_ns=ask.start_ns,
        client=None if _bypass.is_cached(said) else ask.model,
        native="langchain_openai.ChatOpenAI",
    )


def _succeeded(run_id: UUID, _: Any) -> End:
    return End(run_id)


def _failed(run_id: UUID, error: BaseException) -> End:
    if isinstance(error, _NO_ERRORS):
        return End(run_id, SpanStatus.UNSET)
    return End(run_id, *SpanEnd.from_error(error))


def _tool_returned(run_id: UUID, output: Any) -> End:
    attributes = {semconv.TOOL_CALL_RESULT: _shown(output)}
    if not isinstance(output, ToolMessage):
        return End(run_id, attributes=attributes)
    attributes[semconv.TOOL_CALL_ID] = output.tool_call_id
    if output.status != "error":
        return End(run_id, attributes=attributes)
    attributes[semconv.ERROR_TYPE] = "ToolException"
    return End(run_id, SpanStatus.ERROR, attributes=attributes)


def _tool_called(event: Mapping[str, Any], text: str) -> dict[str, Any]:
    inputs = event.get("inputs")
    return {
        semconv.TOOL_CALL_ARGUMENTS: _shown(text if inputs is None else inputs),
        semconv.TOOL_CALL_ID: event.get("tool_call_id"),
    }


def _name(serialized: Any, event: Mapping[str, Any]) -> str:
    name = event.get("name")
    if not name and isinstance(serialized, Mapping):
        name = serialized.get("name") or (serialized.get("id") or [None])[-1]
    return str(name or "")


def _shown(value: Any) -> str:
    return truncated_json(value.content if isinstance(value, ToolMessage) else value)


def _attempt(current: AttemptContext) -> _AttemptRuns:
    attempt = _state.attempts.get(current.recorder)
    if attempt is not None:
        return attempt
    _watch()
    with _state.lock:
        return _state.attempts.setdefault(current.recorder, _AttemptRuns(current))


# --- who is acting --------------------------------------------------------------------------
def resolve(acting: AgentContext) -> AgentContext | None:
    """Who really acts, by LangChain's runs; None where no run is known (`register_resolver`)."""
    root = _root_around() if acting.scope.is_outside else None
    if root is not None:
        inside = replace(root.acting, notes=acting.notes)  # which other adapters' resolvers read
        return resolve(inside) or inside
    attempt = _state.attempts.get(acting.scope.recorder)
    if attempt is None:
        return None
    try:
        ask = _bypass.asking.get()
        model = None if ask is None else ask.last
        place = attempt.tree.place(Place.of(acting), _current_run(), model)
    except Exception as error:
        add_capture_error(acting.scope.recorder, _NAME, error)
        return None
    if place is None:
        return None
    return acting.within(place.span_id, place.frames)


def _root_around() -> AttemptHandle | None:
    """In production: the attempt of the calling context's run, which pushed nothing."""
    ask = _bypass.asking.get()
    return _root_of(None if ask is None else ask.last) or _root_of(_current_run())


def _current_run() -> UUID | None:
    """The chain or tool run of the calling context."""
    config = var_child_runnable_config.get()
    return getattr((config or {}).get("callbacks"), "parent_run_id", None)


def _note_call(acting: AgentContext) -> CallEnd | None:
    """Somebody records a model call: the one that LangChain told of (`add_call_listener`)."""
    attempt = _state.attempts.get(acting.scope.recorder)
    runs = () if attempt is None else _bypass.innermost(attempt.asks)
    return NestedCalls.start_in(run.inside for run in runs)


# --- installing -----------------------------------------------------------------------------
_callback: Final = LightspanCallback()


class _InScopes:
    """The handler inside a scope, nothing outside: what LangChain reads where a run is configured.

    It asks as it would a ContextVar. With a handler that is there but silent, LangChain would tell
    it of every run of an app that nobody records.
    """

    @staticmethod
    def get() -> LightspanCallback | None:
        return None if current_context() is None else _callback


_everywhere: Final = cast("ContextVar[Any | None]", _InScopes())


def instrument() -> Instrumentation:
    """Add `LightspanCallback` to every LangChain and LangGraph run of this process.

    It may be called before or after graphs and models are built; twice is once. As a context
    manager (`with instrument():`) it is undone at the end of the block.
    """
    with _state.lock:
        if _is_installed():
            return Instrumentation(None)
        langchain_context.register_configure_hook(
            _everywhere, inheritable=True, handle_class=LightspanCallback
        )
        _watch()
        enable_adapter(__name__, _SCOPES)
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument`; LangChain is left as it was."""
    with _state.lock:
        hooks = langchain_context._configure_hooks
        hooks[:] = [hook for hook in hooks if hook[0] is not _everywhere]
        unregister_resolver(resolve)
        remove_call_listener(_note_call)
        while _state.patches:
            _state.patches.pop().undo()
    disable_adapter(__name__)


class Instrumentor(AdapterInstrumentor):
    """What `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)


def _watch() -> None:
    """What a callback alone needs too: to be asked who acts, and no cache where none may answer."""
    register_resolver(resolve)
    add_call_listener(_note_call)
    if not _state.patches:
        with _state.lock:
            _state.patches = _state.patches or _cache.switch(_is_cache_off)


def _is_cache_off() -> bool:
    current = current_context()
    if current is None or current.scope.gateway_url is None:
        return False
    try:
        return resolve_agent(current).is_routed
    except Exception as error:
        add_capture_error(current.scope.recorder, _NAME, error)
        return False


def _is_installed() -> bool:
    return any(hook[0] is _everywhere for hook in langchain_context._configure_hooks)

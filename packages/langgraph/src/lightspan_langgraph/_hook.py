"""Listens to LangChain and tells core who is acting.

LangChain calls the handler whenever a run begins or ends. From that `RunTree` knows every run's
place; when the wire shim (or a person's `with lightspan.agent(…)`) asks who is acting, the resolver
finds the innermost run of the calling context and answers with its place. The handler pushes
nothing: asynchronous callbacks may run in a task of their own, where a push would be lost.

Errors never reach the app: they mark the attempt as damaged.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import ToolMessage
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers import context as langchain_context
from langgraph.errors import GraphBubbleUp

from lightspan import conventions, scope
from lightspan.emit import exception_attributes
from lightspan.spans import SpanStatus
from lightspan_langgraph._identity import End, Place, RunKind, RunTree, Start

TEXT_LIMIT: Final = 65_536
"""Characters of a tool's arguments or result that its span keeps."""


class _Attempt:
    """The runs of one attempt and where its spans go; it does not keep the recorder alive."""

    def __init__(self, current: scope.Scope) -> None:
        self.tree = RunTree(current.rollout_id, current.attempt_id, current.trace_id)
        self.recorder = weakref.ref(current.recorder)


_attempts: weakref.WeakKeyDictionary[scope.Recorder, _Attempt] = weakref.WeakKeyDictionary()
"""An attempt's runs are forgotten as soon as nobody holds its recorder."""
_owners: weakref.WeakValueDictionary[UUID, _Attempt] = weakref.WeakValueDictionary()
"""The attempt of each open run: a run may end in another context than it began in."""
_lock = threading.Lock()

_model: ContextVar[UUID | None] = ContextVar("lightspan_langgraph_model", default=None)
"""The model run that last began in this context and has not answered yet."""


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
        if scope.pushed() is not None:
            _start(RunKind.CHAIN, serialized, event)

    def on_retriever_start(self, serialized: Any, query: Any, **event: Any) -> None:
        if scope.pushed() is not None:
            _start(RunKind.RETRIEVER, serialized, event)

    def on_tool_start(self, serialized: Any, input_str: str, **event: Any) -> None:
        if scope.pushed() is not None:
            _start(RunKind.TOOL, serialized, event, input_str)

    def on_chat_model_start(self, serialized: Any, messages: Any, **event: Any) -> None:
        if scope.pushed() is not None:
            _start(RunKind.MODEL, serialized, event)

    def on_llm_start(self, serialized: Any, prompts: Any, **event: Any) -> None:
        if scope.pushed() is not None:
            _start(RunKind.MODEL, serialized, event)

    def on_llm_new_token(self, token: Any, **event: Any) -> None:
        if _model.get() is not None:
            _model.set(None)  # the request is out: what this context calls now is not the model's

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _succeeded, None)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _succeeded, None)

    def on_llm_end(self, response: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _succeeded, None)

    def on_tool_end(self, output: Any, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _tool_returned, output)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **event: Any) -> None:
        _end(run_id, _failed, error)

    on_retriever_error = on_llm_error = on_tool_error = on_chain_error


# --- events ---------------------------------------------------------------------------------
def _start(kind: RunKind, serialized: Any, event: Mapping[str, Any], text: str = "") -> None:
    current = scope.pushed()
    if current is None:
        return
    try:
        scope.register_resolver(resolve)
        _note_start(current, kind, _name(serialized, event), event, text)
    except Exception as error:
        _damage(current.scope.recorder, error)


def _note_start(
    current: scope.Acting, kind: RunKind, name: str, event: Mapping[str, Any], text: str
) -> None:
    run_id, attempt = event["run_id"], _attempt(current.scope)
    forgotten = attempt.tree.start(
        Start(
            run_id=run_id,
            parent_id=event.get("parent_run_id") or _current_run(),  # `generate` does not inherit
            kind=kind,
            name=name,
            pushed=_place(_given(current)),
            metadata=event.get("metadata") or {},
            attributes=_tool_called(event, text) if kind is RunKind.TOOL else {},
        )
    )
    _owners[run_id] = attempt
    if forgotten is not None:
        _owners.pop(forgotten, None)
    if kind is RunKind.MODEL:
        _model.set(run_id)


def _end(run_id: UUID, describe: Callable[[UUID, Any], End], what: Any) -> None:
    attempt = _owners.pop(run_id, None)
    recorder = attempt.recorder() if attempt is not None else None
    if attempt is None or recorder is None:
        return
    try:
        for span in attempt.tree.end(describe(run_id, what)):
            recorder.add(span)
    except Exception as error:
        _damage(recorder, error)


def _damage(recorder: scope.Recorder, error: Exception) -> None:
    """Errors of ours damage the attempt; they never reach the app."""
    recorder.damage(f"lightspan_langgraph: {type(error).__name__}: {error}")


def _succeeded(run_id: UUID, _: Any) -> End:
    return End(run_id)


def _failed(run_id: UUID, error: BaseException) -> End:
    if isinstance(error, GraphBubbleUp | GeneratorExit):  # interrupted, abandoned
        return End(run_id, SpanStatus.UNSET)
    return End(run_id, SpanStatus.ERROR, str(error), exception_attributes(error))


def _tool_returned(run_id: UUID, output: Any) -> End:
    attributes = {conventions.TOOL_CALL_RESULT: _shown(output)}
    if not isinstance(output, ToolMessage):
        return End(run_id, attributes=attributes)
    attributes[conventions.TOOL_CALL_ID] = output.tool_call_id
    if output.status != "error":
        return End(run_id, attributes=attributes)
    attributes[conventions.ERROR_TYPE] = "ToolException"
    return End(run_id, SpanStatus.ERROR, attributes=attributes)


def _tool_called(event: Mapping[str, Any], text: str) -> dict[str, Any]:
    inputs = event.get("inputs")
    return {
        conventions.TOOL_CALL_ARGUMENTS: _shown(text if inputs is None else inputs),
        conventions.TOOL_CALL_ID: event.get("tool_call_id"),
    }


def _name(serialized: Any, event: Mapping[str, Any]) -> str:
    name = event.get("name")
    if not name and isinstance(serialized, Mapping):
        name = serialized.get("name") or (serialized.get("id") or [None])[-1]
    return str(name or "")


def _shown(value: Any) -> str:
    """The value as text or JSON, cut to a length that a span can carry."""
    content = value.content if isinstance(value, ToolMessage) else value
    text = content if isinstance(content, str) else _json(content)
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:TEXT_LIMIT]}… ({len(text)} characters)"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except Exception:  # keys that are no text, cycles, a `repr` of the app's that raises
        return f"<{type(value).__name__}>"


def _attempt(current: scope.Scope) -> _Attempt:
    attempt = _attempts.get(current.recorder)
    if attempt is not None:
        return attempt
    with _lock:
        return _attempts.setdefault(current.recorder, _Attempt(current))


# --- who is acting --------------------------------------------------------------------------
def resolve(acting: scope.Acting) -> scope.Acting | None:
    """Who really acts, by LangChain's runs; None where no run is known (`scope.Resolver`)."""
    attempt = _attempts.get(acting.scope.recorder)
    if attempt is None:
        return None
    try:
        place = attempt.tree.place(_place(acting), _current_run(), _model.get())
    except Exception as error:
        _damage(acting.scope.recorder, error)
        return None
    if place is None:
        return None
    return replace(acting, frames=place.frames, parent_span_id=place.span_id)


def _current_run() -> UUID | None:
    """The chain or tool run of the calling context."""
    config = var_child_runnable_config.get()
    return getattr((config or {}).get("callbacks"), "parent_run_id", None)


def _given(acting: scope.Acting) -> scope.Acting:
    """What `resolve` will be given in this context: the resolvers before it have had their say."""
    for resolver in scope.resolvers():
        if resolver is resolve:
            break
        acting = resolver(acting) or acting
    return acting


def _place(acting: scope.Acting) -> Place:
    return Place(acting.frames, acting.parent_span_id)


# --- installing -----------------------------------------------------------------------------
_callback: Final = LightspanCallback()
_everywhere: ContextVar[Any | None] = ContextVar("lightspan_langgraph_callback", default=_callback)


class Instrumentation:
    """What `instrument` returns: as a context manager it undoes what that call did."""

    def __init__(self, *, did_install: bool) -> None:
        self._did_install = did_install

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._did_install:
            uninstrument()


def instrument() -> Instrumentation:
    """Add `LightspanCallback` to every LangChain and LangGraph run of this process.

    It may be called before or after graphs and models are built; twice is once. As a context
    manager (`with instrument():`) it is undone at the end of the block.
    """
    with _lock:
        if _is_installed():
            return Instrumentation(did_install=False)
        langchain_context.register_configure_hook(
            _everywhere, inheritable=True, handle_class=LightspanCallback
        )
        scope.register_resolver(resolve)
        return Instrumentation(did_install=True)


def uninstrument() -> None:
    """Undo `instrument`; LangChain is left as it was."""
    with _lock:
        hooks = langchain_context._configure_hooks
        hooks[:] = [hook for hook in hooks if hook[0] is not _everywhere]
        scope.unregister_resolver(resolve)


def _is_installed() -> bool:
    return any(hook[0] is _everywhere for hook in langchain_context._configure_hooks)

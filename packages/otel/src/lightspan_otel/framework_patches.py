"""Patches for frameworks whose own spans name no agent.

The patches create a span for each call of an agent, a workflow or a tool. These spans belong to our
private provider (`identity_tracer`), so they are never exported. Errors in the patches never reach
the app: they become capture errors of the attempt.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from opentelemetry import context as otel_context, trace
from opentelemetry.trace import Span, Status, StatusCode

from lightspan.capture import context
from lightspan.capture.adapter import add_capture_error, claim_scope, release_scope
from lightspan.capture.patch import Patch
from lightspan.schema import semconv as c
from lightspan_otel.identity_tracer import PROVIDER
from lightspan_otel.open_spans import NAME

_DSPY: Final = "dspy"
_LLAMA: Final = "llama_index"
_COVERED_SCOPES: Final = {
    _DSPY: ["openinference.instrumentation.dspy"],
    _LLAMA: ["openinference.instrumentation.llama_index"],
}
"""Library → instrumentation scopes to ignore: their spans show the same tools and no agents."""


class _CaptureErrors:
    """A context manager that records exceptions in its block as capture errors of the attempt.

    The exceptions are not raised, so that the app continues.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, stack: object) -> bool:
        if not isinstance(error, Exception):
            return False
        current = context.current_context()
        if current is not None:
            add_capture_error(current.scope.recorder, NAME, error)
        return True


def _start(
    library: str, operation: str, name: str, attributes: dict[str, str], inside: Span | None = None
) -> Span:
    """Start a span in our private provider.

    Args:
        library: instrumentation scope of the span.
        operation: GenAI operation, such as `invoke_agent`.
        name: name of the agent or tool.
        attributes: further attributes.
        inside: the parent; None for the current span.
    """
    parent = None if inside is None else trace.set_span_in_context(inside)
    attributes = {c.OPERATION_NAME: operation, **attributes}
    tracer = PROVIDER.get_tracer(library)
    return tracer.start_span(f"{operation} {name}", parent, attributes=attributes)


def _agent(library: str, name: str, inside: Span | None = None) -> Span:
    return _start(library, "invoke_agent", name, {c.AGENT_NAME: name}, inside)


def _tool(library: str, name: str, call_id: str | None, inside: Span | None = None) -> Span:
    attributes = {c.TOOL_NAME: name, **({c.TOOL_CALL_ID: call_id} if call_id else {})}
    return _start(library, "execute_tool", name, attributes, inside)


def _end(span: Span, error: BaseException | None = None) -> None:
    if error is not None and not isinstance(error, GeneratorExit):
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


# --- DSPy -----------------------------------------------------------------------------------


class _Program(NamedTuple):
    """A DSPy module that the app called, with the modules that it consists of."""

    names: Mapping[int, str]
    """`id()` of the module or a part → its name, such as `think.predict`; "" for no name."""


_program: ContextVar[_Program | None] = ContextVar("lightspan_otel_program", default=None)


_NO_PARTS: Final = frozenset({"history", "callbacks", "demos", "traces", "train"})
"""Attributes of a module that are not searched for parts, because they grow without bound."""


def _program_of(module: Any, kind: type) -> _Program:
    """Return a DSPy module, with the modules that it consists of and their names.

    Args:
        module: the module.
        kind: base class of all modules of DSPy.
    """
    names = {id(module): type(module).__name__}
    queue = [module]
    while queue:
        for name, value in list(vars(queue.pop()).items()):
            items: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
            if isinstance(value, dict):
                items = list(value.values())
            for item in items if name not in _NO_PARTS else ():
                if isinstance(item, kind) and id(item) not in names:
                    names[id(item)] = ""
                    queue.append(item)
    predictors = {id(part): name for name, part in module.named_predictors() if part is not module}
    return _Program({**names, **predictors})


@contextmanager
def _running(module: Any, kind: type, *, is_predictor: bool) -> Iterator[None]:
    """Run a DSPy module in the block, with a span around it if it is an agent.

    A module that the app calls is an agent, named by its class. A module inside it is an agent only
    if it calls a model; it has its name in `named_predictors`.

    Args:
        module: the module.
        kind: base class of all modules of DSPy.
        is_predictor: whether the module calls a model.
    """
    span = token = None
    with _CaptureErrors():
        program = _program.get()
        place = None if program is None else program.names.get(id(module))
        if place is None:
            token = _program.set(_program_of(module, kind))
            span = _agent(_DSPY, type(module).__name__)
        elif is_predictor:
            span = _agent(_DSPY, place or type(module).__name__)
    try:
        with _current(span):
            yield
    finally:
        if token is not None:
            _program.reset(token)


@contextmanager
def _current(span: Span | None) -> Iterator[None]:
    """Make `span` current in the block, and end it with the block. If it is None, do nothing."""
    if span is None:
        yield
        return
    attached = otel_context.attach(trace.set_span_in_context(span))
    try:
        yield
    except BaseException as error:
        _end(span, error)
        raise
    else:
        _end(span)
    finally:
        otel_context.detach(attached)


def dspy(framework: Any) -> Callable[[], None]:
    """Patch DSPy's modules and tools.

    Args:
        framework: the module `dspy`.

    Returns:
        Function that removes the patches.
    """

    def module(instance: Any) -> Any:
        is_predictor = isinstance(instance, framework.Predict)
        return _running(instance, framework.Module, is_predictor=is_predictor)

    def tool(instance: Any) -> Any:
        span = None
        with _CaptureErrors():
            span = _tool(_DSPY, str(instance.name), None)
        return _current(span)

    patches = [
        Patch(owner, name, functools.partial(wrap, vars(owner)[name], around))
        for owner, around in ((framework.Module, module), (framework.Tool, tool))
        for name, wrap in (("__call__", _within), ("acall", _within_async))
    ]

    claim_scope(_DSPY, _COVERED_SCOPES[_DSPY])

    def undo() -> None:
        release_scope(_DSPY)
        for patch in patches:
            patch.undo()

    return undo


def _within(original: Any, around: Callable[[Any], Any], patch: Patch) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        if not patch.on:
            return original(self, *args, **more)
        with around(self):
            return original(self, *args, **more)

    return call


def _within_async(original: Any, around: Callable[[Any], Any], patch: Patch) -> Any:
    @functools.wraps(original)
    async def call(self: Any, *args: Any, **more: Any) -> Any:
        if not patch.on:
            return await original(self, *args, **more)
        with around(self):
            return await original(self, *args, **more)

    return call


# --- LlamaIndex -----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Run:
    """A running workflow."""

    span: Span
    agent: Span | None = None
    """Span of the active agent in a workflow of several agents; None before its first step."""
    name: str = ""

    def turn_of(self, name: str) -> Span:
        """Return the open span of the agent `name`, whose turn it is in the workflow.

        If the turn was another agent's, that agent's span ends and a new one begins.
        """
        if self.agent is None or self.name != name:
            self.end_turn()
            self.agent, self.name = _agent(_LLAMA, name, self.span), name
        return self.agent

    def end_turn(self, error: BaseException | None = None) -> None:
        """End the span of the agent whose turn it is."""
        if self.agent is not None:
            _end(self.agent, error)
            self.agent = None


_run: ContextVar[_Run | None] = ContextVar("lightspan_otel_run", default=None)


@dataclass(slots=True)
class _Steps:
    """A span handler that LlamaIndex calls when a step of a workflow begins and ends.

    The calls are made in the asyncio task of the step.
    """

    open_spans: dict[str, tuple[Any, Span | None]] = field(default_factory=dict)
    """Step id → (context token, span that ends with the step; None if there is none)."""

    def span_enter(self, id_: str, bound_args: Any, **more: Any) -> None:
        """Make the span of the step's tool or agent the current span.

        Other steps have no span. The arguments are LlamaIndex's.
        """
        run = _run.get()
        if run is None:
            return
        with _CaptureErrors():
            event = bound_args.arguments.get("ev")
            name = getattr(event, "current_agent_name", None)
            tool_name = getattr(event, "tool_name", None)  # a user's step may have this name too
            if ".call_tool-" in id_ and tool_name:
                inside = run.agent or run.span
                tool = _tool(_LLAMA, str(tool_name), getattr(event, "tool_id", None), inside)
                self._enter(id_, tool, tool)
            elif name and run.name is not _ALONE:
                self._enter(id_, run.turn_of(str(name)), None)

    def _enter(self, id_: str, span: Span, ends: Span | None) -> None:
        self.open_spans[id_] = otel_context.attach(trace.set_span_in_context(span)), ends

    def span_exit(self, id_: str, bound_args: Any, result: Any = None, **more: Any) -> None:
        """Make the span before the step current again.

        If the step called a tool, the span of the tool ends.
        """
        output = getattr(result, "tool_output", None)
        error = getattr(output, "exception", None)
        self._leave(id_, error, has_failed=bool(getattr(output, "is_error", False)))

    def span_drop(self, id_: str, bound_args: Any, err: Any = None, **more: Any) -> None:
        """Do the same as `span_exit`, for a step that raised `err`."""
        self._leave(id_, err)

    def _leave(self, id_: str, error: Any, *, has_failed: bool = False) -> None:
        attached, ends = self.open_spans.pop(id_, (None, None))
        with _CaptureErrors():
            if attached is not None:
                otel_context.detach(attached)
            if ends is not None and has_failed and error is None:
                ends.set_status(Status(StatusCode.ERROR))
            if ends is not None:
                _end(ends, error)

    # The rest of a span handler's interface.
    def capture_propagation_context(self) -> dict[str, Any]:
        """Return nothing: our spans do not cross processes."""
        return {}

    def restore_propagation_context(self, context: dict[str, Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


_ALONE: Final = "<alone>"
"""Name of the active agent if a single agent is the whole workflow."""


def llama_index(agents: Any, workflows: Any, instrumentation: Any) -> Callable[[], None]:
    """Patch LlamaIndex's agents, workflows and tools.

    Args:
        agents: the module `llama_index.core.agent.workflow`.
        workflows: the module `workflows.workflow`.
        instrumentation: the module `llama_index_instrumentation`.

    Returns:
        Function that removes the patches.
    """

    def running(original: Any, patch: Patch) -> Any:
        @functools.wraps(original)
        def run(self: Any, *args: Any, **more: Any) -> Any:
            if not patch.on:
                return original(self, *args, **more)
            begun = None
            with _CaptureErrors():
                begun = _begun(self, isinstance(self, agents.BaseWorkflowAgent))
            if begun is None:
                return original(self, *args, **more)
            return _started(begun, functools.partial(original, self, *args, **more))

        return run

    patch = Patch(
        workflows.Workflow, "run", functools.partial(running, vars(workflows.Workflow)["run"])
    )
    steps, dispatcher = _Steps(), instrumentation.get_dispatcher()
    # First, so that the spans of other handlers of the same steps are inside ours.
    dispatcher.span_handlers.insert(0, steps)
    claim_scope(_LLAMA, _COVERED_SCOPES[_LLAMA])

    def undo() -> None:
        patch.undo()
        release_scope(_LLAMA)
        handlers = dispatcher.span_handlers
        handlers[:] = [handler for handler in handlers if handler is not steps]

    return undo


def _begun(workflow: Any, is_agent: bool) -> _Run:
    if is_agent:
        return _Run(_agent(_LLAMA, str(workflow.name)), name=_ALONE)
    return _Run(_start(_LLAMA, "invoke_workflow", type(workflow).__name__, {}))


def _started(run: _Run, start: Callable[[], Any]) -> Any:
    """Start a workflow and return its handler. `run.span` is the current span in the workflow.

    The workflow's tasks copy the context variables, so the span stays current in them. It ends with
    the workflow, before code that waits for the workflow continues.

    Args:
        run: the workflow and its span.
        start: function that starts the workflow.
    """
    attached = otel_context.attach(trace.set_span_in_context(run.span))
    token = _run.set(run)
    try:
        handler = start()
    except BaseException as error:
        _end(run.span, error)
        raise
    finally:
        _run.reset(token)
        otel_context.detach(attached)

    def over(task: Any) -> None:
        with _CaptureErrors():
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            run.end_turn(error)
            _end(run.span, error)

    with _CaptureErrors():
        handler._result_task.add_done_callback(over)
    return handler

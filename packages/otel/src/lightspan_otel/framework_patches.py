"""Frameworks whose own spans name no agent: they are told of from the framework's calls.

Each call becomes a span of ours (`tracer`), which nobody exports: from there on such a framework is
as any other. Nothing here raises into the app: what goes wrong marks the attempt as damaged.
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
_TELL_TOO: Final = {
    _DSPY: ["openinference.instrumentation.dspy"],
    _LLAMA: ["openinference.instrumentation.llama_index"],
}
"""OpenTelemetry's instrumentation scopes whose spans tell of the same tools, and of no agent."""


class _Blamed:
    """What goes wrong in here is ours: it damages the attempt and goes no further."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, stack: object) -> bool:
        if not isinstance(error, Exception):
            return False
        current = context.current_context()
        if current is not None:
            add_capture_error(current.scope.recorder, NAME, error)
        return True


def _agent(library: str, name: str, inside: Span | None = None) -> Span:
    """A span of an agent's, inside another one, or the current one."""
    around = None if inside is None else trace.set_span_in_context(inside)
    attributes = {c.OPERATION_NAME: "invoke_agent", c.AGENT_NAME: name}
    return PROVIDER.get_tracer(library).start_span(
        f"invoke_agent {name}", around, attributes=attributes
    )


def _workflow(library: str, name: str) -> Span:
    attributes = {c.OPERATION_NAME: "invoke_workflow"}
    return PROVIDER.get_tracer(library).start_span(f"invoke_workflow {name}", attributes=attributes)


def _tool(library: str, name: str, call_id: str | None, inside: Span | None = None) -> Span:
    around = None if inside is None else trace.set_span_in_context(inside)
    attributes = {c.OPERATION_NAME: "execute_tool", c.TOOL_NAME: name}
    if call_id:
        attributes[c.TOOL_CALL_ID] = call_id
    return PROVIDER.get_tracer(library).start_span(
        f"execute_tool {name}", around, attributes=attributes
    )


def _end(span: Span, error: BaseException | None = None) -> None:
    if error is not None and not isinstance(error, GeneratorExit):
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


# --- DSPy -----------------------------------------------------------------------------------


class _Program(NamedTuple):
    """A module that runs, with all that it consists of."""

    names: Mapping[int, str]
    """Identity of a module inside → its place, such as `think.predict`."""


_program: ContextVar[_Program | None] = ContextVar("lightspan_otel_program", default=None)


_NO_PARTS: Final = frozenset({"history", "callbacks", "demos", "traces", "train"})
"""What a module keeps of its past, without end: no part of it is in there."""


def _program_of(module: Any, kind: type) -> _Program:
    """A module with the names of its parts; empty for one that has none."""
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
    told = {id(part): name for name, part in module.named_predictors() if part is not module}
    return _Program({**names, **told})


@contextmanager
def _running(module: Any, kind: type, *, is_predictor: bool) -> Iterator[None]:
    """A module of DSPy's runs. The outermost one is an agent of its class's name, and so is one
    that is no part of the module that runs it; of what it consists of, those are that ask a model,
    under the names that DSPy gives them (`named_predictors`). What is between says nothing more."""
    span = token = None
    with _Blamed():
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
    """The span, if there is one, is the current one in here, and ends with it."""
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
    """Tell of DSPy's modules and tools.

    Args:
        framework: its module.

    Returns:
        What undoes it.
    """

    def module(instance: Any) -> Any:
        is_predictor = isinstance(instance, framework.Predict)
        return _running(instance, framework.Module, is_predictor=is_predictor)

    def tool(instance: Any) -> Any:
        span = None
        with _Blamed():
            span = _tool(_DSPY, str(instance.name), None)
        return _current(span)

    patches = [
        Patch(owner, name, functools.partial(wrap, vars(owner)[name], around))
        for owner, around in ((framework.Module, module), (framework.Tool, tool))
        for name, wrap in (("__call__", _within), ("acall", _within_async))
    ]

    claim_scope(_DSPY, _TELL_TOO[_DSPY])

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
    """A workflow that runs."""

    span: Span
    agent: Span | None = None
    """Of a workflow of several agents: the one whose turn it is."""
    name: str = ""

    def turn_of(self, name: str) -> Span:
        """The span of the agent whose turn it is, from its first step to another agent's."""
        if self.agent is None or self.name != name:
            self.end_turn()
            self.agent, self.name = _agent(_LLAMA, name, self.span), name
        return self.agent

    def end_turn(self, error: BaseException | None = None) -> None:
        """Whose turn it was, it is no more."""
        if self.agent is not None:
            _end(self.agent, error)
            self.agent = None


_run: ContextVar[_Run | None] = ContextVar("lightspan_otel_run", default=None)


@dataclass(slots=True)
class _Steps:
    """Hears when the steps of workflows begin and end, in their own tasks (a span handler)."""

    open_spans: dict[str, tuple[Any, Span | None]] = field(default_factory=dict)
    """Id of a step → what leaves it, and its span if it ends with it."""

    def span_enter(self, id_: str, bound_args: Any, **more: Any) -> None:
        """A step begins, or something else of LlamaIndex's."""
        run = _run.get()
        if run is None:
            return
        with _Blamed():
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
        """It ends."""
        output = getattr(result, "tool_output", None)
        error = getattr(output, "exception", None)
        self._leave(id_, error, has_failed=bool(getattr(output, "is_error", False)))

    def span_drop(self, id_: str, bound_args: Any, err: Any = None, **more: Any) -> None:
        """It ends with an error."""
        self._leave(id_, err)

    def _leave(self, id_: str, error: Any, *, has_failed: bool = False) -> None:
        attached, ends = self.open_spans.pop(id_, (None, None))
        with _Blamed():
            if attached is not None:
                otel_context.detach(attached)
            if ends is not None and has_failed and error is None:
                ends.set_status(Status(StatusCode.ERROR))
            if ends is not None:
                _end(ends, error)

    # what else is asked of a span handler
    def capture_propagation_context(self) -> dict[str, Any]:
        """Nothing of ours goes to another process."""
        return {}

    def restore_propagation_context(self, context: dict[str, Any]) -> None:
        """Nothing came."""

    def close(self) -> None:
        """LlamaIndex's instrumentation is shut down."""


_ALONE: Final = "<alone>"
"""In place of the name of whose turn it is, where one agent is the whole workflow."""


def llama_index(agents: Any, workflows: Any, instrumentation: Any) -> Callable[[], None]:
    """Tell of LlamaIndex's agents, workflows and tools.

    Args:
        agents: its `core.agent.workflow`.
        workflows: its `workflows.workflow`.
        instrumentation: `llama_index_instrumentation`.

    Returns:
        What undoes it.
    """

    def running(original: Any, patch: Patch) -> Any:
        @functools.wraps(original)
        def run(self: Any, *args: Any, **more: Any) -> Any:
            if not patch.on:
                return original(self, *args, **more)
            begun = None
            with _Blamed():
                begun = _begun(self, isinstance(self, agents.BaseWorkflowAgent))
            if begun is None:
                return original(self, *args, **more)
            return _started(begun, functools.partial(original, self, *args, **more))

        return run

    patch = Patch(
        workflows.Workflow, "run", functools.partial(running, vars(workflows.Workflow)["run"])
    )
    steps, dispatcher = _Steps(), instrumentation.get_dispatcher()
    # The first: spans of others that hear the same steps are inside ours.
    dispatcher.span_handlers.insert(0, steps)
    claim_scope(_LLAMA, _TELL_TOO[_LLAMA])

    def undo() -> None:
        patch.undo()
        release_scope(_LLAMA)
        handlers = dispatcher.span_handlers
        handlers[:] = [each for each in handlers if each is not steps]

    return undo


def _begun(workflow: Any, is_agent: bool) -> _Run:
    if is_agent:
        return _Run(_agent(_LLAMA, str(workflow.name)), name=_ALONE)
    return _Run(_workflow(_LLAMA, type(workflow).__name__))


def _started(run: _Run, start: Callable[[], Any]) -> Any:
    """Start a workflow inside its span; its tasks take the context over. It goes on after that, and
    the span with it, which ends before whoever waits for the workflow is told."""
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
        with _Blamed():
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            run.end_turn(error)
            _end(run.span, error)

    with _Blamed():
        handler._result_task.add_done_callback(over)
    return handler

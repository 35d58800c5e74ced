"""What a person's own code may say: rewards, annotations, messages, objects, agents, operations.

Outside a scope every function is a no-op that returns None, so an app that emits runs unchanged
without lightspan's runner.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self

from lightspan.capture.context import (
    AgentContext,
    AttemptHandle,
    act,
    agent_attributes,
    current_agent,
    current_context,
    end_step,
    make_span,
    start_attempt,
)
from lightspan.errors import RewardError
from lightspan.schema import semconv as c
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.redaction import clean_text
from lightspan.schema.reward import parse_reward
from lightspan.schema.semconv import exception_attributes
from lightspan.schema.spans import (
    Attributes,
    AttributeValue,
    Span,
    SpanKind,
    SpanStatus,
    clean_attributes,
    now_ns,
    text_of,
)

RESPONSE_ID_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_")
"""The gateway's response ids are one of these and the call id: `cmpl-` is of text completions,
`resp_` of the Responses API."""


def emit_reward(
    value: float | bool | Mapping[str, float] | None,
    *,
    primary: str | None = None,
    call: str | None = None,
    span: Span | str | None = None,
) -> Span | None:
    """Emit a reward: on the attempt, or on one model call, or on one span.

    Args:
        value: a number, a bool (True is 1.0), or named dimensions; None is no value.
        primary: the dimension that is the value (default: `"reward"`, else the first).
        call: a call id, or the `id` of an OpenAI response.
        span: a span or its id.

    Raises:
        RewardError: text or another type that is no reward; `call` and `span` both given.
    """
    if call is not None and span is not None:
        raise RewardError("emit_reward takes call= or span=, not both")
    reward = parse_reward(value, primary)
    if reward is None:
        return None
    attributes: Attributes = {
        c.REWARD_DIMENSION + name: number for name, number in reward.dimensions.items()
    }
    if reward.value is not None:
        attributes[c.REWARD_VALUE] = reward.value
    if call is not None:
        attributes[c.REWARD_CALL_ID] = _call_id(call)
    if span is not None:
        attributes[c.REWARD_SPAN_ID] = span if isinstance(span, str) else span.span_id
    return _emit("lightspan.reward", SpanKind.REWARD, attributes)


def _call_id(call: str) -> str:
    """The call id that a response id holds."""
    for prefix in RESPONSE_ID_PREFIXES:
        call = call.removeprefix(prefix)
    return call


def emit_annotation(values: Mapping[str, AttributeValue]) -> Span | None:
    """Attach named values to the attempt."""
    attributes = {c.ANNOTATION + key: value for key, value in values.items()}
    return _emit("lightspan.annotation", SpanKind.ANNOTATION, attributes)


def emit_message(text: str) -> Span | None:
    """A line of text for people who inspect the attempt."""
    return _emit("lightspan.message", SpanKind.MESSAGE, {c.MESSAGE_BODY: text})


def emit_object(value: Any) -> Span | None:
    """Any value as JSON (what JSON cannot say becomes its `str`)."""
    attributes: Attributes = {
        c.OBJECT_TYPE: type(value).__qualname__,
        c.OBJECT_JSON: dump_json(value),
    }
    return _emit("lightspan.object", SpanKind.OBJECT, attributes)


def emit_exception(error: BaseException) -> Span | None:
    """An exception that the app handled itself."""
    attributes = exception_attributes(error)
    return _emit("lightspan.exception", SpanKind.EXCEPTION, attributes, status=SpanStatus.ERROR)


def _emit(name: str, kind: SpanKind, attributes: Attributes, **fields: Any) -> Span | None:
    current = current_agent()
    if current is None:
        return None
    span = make_span(current, name, kind, attributes, **fields)
    current.scope.recorder.add(span)
    return span


class _Block(ContextDecorator):
    """A `with` block or decorator (of functions and generators, sync and async) that records one
    span."""

    def __init__(
        self, name: str, kind: SpanKind, attributes: Attributes, given: Any = None
    ) -> None:
        self._name = name
        self._kind = kind
        self._given = given
        self._attributes = attributes
        self._open: list[tuple[AgentContext, Span, Callable[[], None], AttemptHandle | None]] = []

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[override]
        if inspect.isgeneratorfunction(function):
            return self._around_generator(function)
        if inspect.isasyncgenfunction(function):
            return self._around_async_generator(function)
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._recreate_cm():
                return await function(*args, **kwargs)

        return wrapped

    def _around_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._recreate_cm():
                items = function(*args, **kwargs)
                try:
                    item = next(items)
                    while True:  # `yield from` would not let us end the step
                        try:
                            with _BetweenSteps():
                                sent = yield item
                        except GeneratorExit:
                            items.close()
                            raise
                        except BaseException as error:
                            item = items.throw(error)
                        else:
                            item = items.send(sent)
                except StopIteration as end:
                    return end.value

        return wrapped

    def _around_async_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._recreate_cm(), suppress(StopAsyncIteration):
                items = function(*args, **kwargs)
                item = await anext(items)
                while True:
                    try:
                        with _BetweenSteps():
                            sent = yield item
                    except GeneratorExit:
                        await items.aclose()
                        raise
                    except BaseException as error:
                        item = await items.athrow(error)
                    else:
                        item = await items.asend(sent)

        return wrapped

    def _recreate_cm(self) -> Self:
        return type(self)(self._name, self._kind, dict(self._attributes), self._given)

    def __enter__(self) -> Span | None:
        current = current_context()
        if current is None:
            return None
        current, root = start_attempt(current, self._attempt_name, self._given)
        try:
            inner = self._inside(current)
            span = make_span(
                current,
                self._name,
                self._kind,
                self._described(current),
                span_id=inner.parent_span_id,
                status=SpanStatus.OK,
            )
        except Exception as error:  # ours: the app must not see it
            current.scope.recorder.add_capture_error(f"{self._name}: {error!r}")
            if root is not None:
                root.close()
            return None
        span = span.replace(attributes={**span.attributes, c.AGENT_PATH: clean_text(inner.path)})
        self._open.append((current, span, act(inner, sys._getframe(1)), root))
        return span

    @property
    def _attempt_name(self) -> str:
        """Of an attempt that begins with it."""
        return self._name

    def _inside(self, current: AgentContext) -> AgentContext:
        return current.enter_tool()

    def _described(self, current: AgentContext) -> Attributes:
        return self._attributes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._open:
            return
        current, span, leave, root = self._open.pop()
        leave()
        failed: dict[str, Any] = {}
        if isinstance(error, GeneratorExit):  # whoever read it has enough: that is no error
            failed = {"status": SpanStatus.UNSET}
        elif error is not None:
            attributes = clean_attributes({**span.attributes, **exception_attributes(error)})
            failed = {
                "status": SpanStatus.ERROR,
                "status_message": text_of(error),
                "attributes": attributes,
            }
        current.scope.recorder.add(span.replace(end_ns=now_ns(), **failed))
        if root is not None:
            root.close(error)


class _BetweenSteps:
    """Around a `yield`: whoever takes the items acts as before, and then the generator again."""

    def __enter__(self) -> None:
        end_step(sys._getframe(1))

    def __exit__(self, *error: object) -> None:
        current_context()


class _AgentBlock(_Block):
    @property
    def _attempt_name(self) -> str:
        return self._agent

    @property
    def _agent(self) -> str:
        return str(self._attributes[c.AGENT_NAME])

    def _inside(self, current: AgentContext) -> AgentContext:
        return current.enter_agent(self._agent)

    def _described(self, current: AgentContext) -> Attributes:
        return {**self._attributes, **agent_attributes(self._agent, current.frames)}


def agent(name: str, *, input: Any = None) -> _Block:
    """Say which agent acts: `with lightspan.agent("planner"):` or as a decorator.

    Model calls inside belong to this agent; nested agents make a path (`team/planner`). In a
    generator, between two items whoever takes them acts. If it starts tasks or threads, decorate
    it: in a `with` block, what it starts before it asks a model may miss its agent.

    Args:
        name: of the agent.
        input: what it is asked to do, to be recorded with it.
    """
    attributes = {**agent_attributes(name), **_input(input)}
    return _AgentBlock(f"invoke_agent {name}", SpanKind.AGENT, attributes, input)


def agent_span(name: str, *, input: Any = None) -> _Block:
    """Open an agent's AGENT span and push its frame, for the duration of a `with` block.

    It works in coroutines and generators, and does nothing where nothing is recorded. In production
    the outermost block is an attempt.

    Args:
        name: name of the agent or team.
        input: what it is asked: the task of an attempt that begins with it.
    """
    return _AgentBlock(f"invoke_agent {name}", SpanKind.AGENT, agent_attributes(name), input)


def _input(value: Any) -> Attributes:
    return {} if value is None else {c.OPERATION_INPUT: dump_json(value)}


def operation(name: str, *, input: Any = None, **attributes: AttributeValue) -> _Block:
    """Record a block or function as one span: `with lightspan.operation("retrieve", k=3):`.

    In production the outermost block is an attempt, and `input` its task.
    """
    return _Block(name, SpanKind.OPERATION, {**attributes, **_input(input)}, input)


@contextmanager
def tool(name: str, arguments: str = "") -> Iterator[Span | None]:
    """Record a block as one tool call."""
    with tool_span(name, arguments) as span:
        yield span


def tool_span(name: str, arguments: str = "", call_id: str = "") -> _Block:
    """Open a tool call's TOOL span for the duration of a `with` block.

    The block gets the span, to whose attributes a result may be added, or None where nothing is
    recorded.

    Args:
        name: name of the tool.
        arguments: what it is called with, as JSON.
        call_id: id of the call in the model's answer.
    """
    attributes: Attributes = {
        c.OPERATION_NAME: "execute_tool",
        c.TOOL_NAME: name,
        c.TOOL_CALL_ARGUMENTS: arguments,
        c.OPENINFERENCE_KIND: "TOOL",
    }
    if call_id:
        attributes[c.TOOL_CALL_ID] = call_id
    return _Block(f"execute_tool {name}", SpanKind.TOOL, attributes)


def current_attempt_id() -> str | None:
    """The id of the attempt that is under way, to give feedback on it later (`lightspan.feedback`).

    None outside of one, and in one that is not recorded.
    """
    current = current_agent()
    if current is None or not current.scope.recorder.keeps:
        return None
    return current.scope.attempt_id or None

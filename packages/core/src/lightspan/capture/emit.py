"""The API for an app's own code: rewards, annotations, messages, objects, agents, operations.

Outside an attempt every function is a no-op that returns None, so an app runs unchanged without a
runner.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from lightspan.capture import context
from lightspan.capture.recorder import Recorder
from lightspan.errors import RewardError
from lightspan.schema import semconv as c, spans
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.records import Mode
from lightspan.schema.redaction import clean_text
from lightspan.schema.reward import parse_reward, reward_attributes
from lightspan.schema.semconv import exception_attributes
from lightspan.schema.spans import Attributes, AttributeValue, Span, SpanKind, SpanStatus

log = logging.getLogger(__name__)

_Opened = tuple[context.AgentContext, Span, Callable[[], None], context.AttemptHandle | None]
"""An open block: the context around it, its span, a function that restores the context, and the
attempt that began with the block, or None."""
RESPONSE_ID_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_")
"""Prefixes of the gateway's response ids, before the call id: of chat completions, text completions
and the Responses API."""


def emit_reward(
    value: float | bool | Mapping[str, float] | None,
    *,
    primary: str | None = None,
    call: str | None = None,
    span: Span | str | None = None,
    attributes: Mapping[str, AttributeValue] = {},
) -> Span | None:
    """Emit a reward for the attempt, or for one model call (`call`) or span (`span`) in it.

    Args:
        value: a number, a bool (True is 1.0), or a mapping of names to numbers; None emits nothing.
        primary: name of the number that is the reward's value. None for the name `"reward"`, or for
            the only name.
        call: a call id, or the `id` of an OpenAI response.
        span: a span or its id.
        attributes: further attributes of the reward's span; empty for none.

    Raises:
        RewardError: the value is text or another type that is no reward, or a mapping in which
            `primary` names no number; or both `call` and `span` are given.
    """
    if call is not None and span is not None:
        raise RewardError("emit_reward takes call= or span=, not both")
    reward = parse_reward(value, primary)
    if reward is None:
        return None
    for prefix in RESPONSE_ID_PREFIXES:
        call = call and call.removeprefix(prefix)
    fields = {
        **attributes,
        **reward_attributes(reward),
        c.REWARD_CALL_ID: call,
        c.REWARD_SPAN_ID: span.span_id if isinstance(span, Span) else span,
    }
    return _emit("lightspan.reward", SpanKind.REWARD, fields)


def emit_annotation(values: Mapping[str, AttributeValue]) -> Span | None:
    """Attach named values to the attempt."""
    attributes = {f"{c.ANNOTATION}{key}": value for key, value in values.items()}
    return _emit("lightspan.annotation", SpanKind.ANNOTATION, attributes)


def emit_message(text: str, attributes: Mapping[str, AttributeValue] = {}) -> Span | None:
    """Attach a line of text to the attempt, for the people who inspect the attempt."""
    return _emit("lightspan.message", SpanKind.MESSAGE, {**attributes, c.MESSAGE_BODY: text})


def emit_object(value: Any, attributes: Mapping[str, AttributeValue] = {}) -> Span | None:
    """Attach a value to the attempt as JSON; a part that JSON cannot express becomes its `str`."""
    fields = {c.OBJECT_TYPE: type(value).__qualname__, c.OBJECT_JSON: dump_json(value)}
    return _emit("lightspan.object", SpanKind.OBJECT, {**attributes, **fields})


def emit_exception(
    error: BaseException, attributes: Mapping[str, AttributeValue] = {}
) -> Span | None:
    """Attach an exception that the app handled to the attempt."""
    fields = {**attributes, **exception_attributes(error)}
    return _emit("lightspan.exception", SpanKind.EXCEPTION, fields, status=SpanStatus.ERROR)


def _emit(name: str, kind: SpanKind, attributes: dict[str, Any], **fields: Any) -> Span | None:
    current = context.current_agent()
    if current is None:
        return None
    span = context.make_span(current, name, kind, attributes, **fields)
    current.scope.recorder.add(span)
    return span


@dataclass(eq=False)
class _Block(ContextDecorator):
    """A `with` block or decorator that records one span.

    It decorates functions and generators, sync and async.

    Args:
        name: name of the span.
        kind: kind of the span.
        attributes: attributes of the span.
        input: input of the attempt that this block opens in production; None if it is unknown.
        agent: name of the agent that acts in the block; None if the block is no agent.
    """

    name: str
    kind: SpanKind
    attributes: Attributes
    input: Any = None
    agent: str | None = None
    _open: list[_Opened] = field(default_factory=list, init=False)

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
                    while True:  # `yield from` has no hook between two steps
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
        return replace(self, attributes=dict(self.attributes))

    def __enter__(self) -> Span | None:
        current = context.current_context()
        if current is None:
            return None
        name, attributes = self.agent, self.attributes
        current, attempt = context.start_attempt(
            current, self.name if name is None else name, self.input
        )
        try:
            if name is None:
                inside = current.enter_tool()
            else:
                inside = current.enter_agent(name)
                attributes = {**attributes, **context.agent_attributes(name, current.frames)}
            span = context.make_span(
                current, self.name, self.kind, attributes, span_id=inside.parent_span_id
            )
        except Exception as error:  # a capture error must not reach the app
            current.add_capture_error(f"{self.name}", error)
            if attempt is not None:
                attempt.close()
            return None
        span = span.replace(attributes={**span.attributes, c.AGENT_PATH: clean_text(inside.path)})
        if current.scope.mode is Mode.PRODUCTION:  # the attempt may end first
            give_up = functools.partial(_record_end, current.scope.recorder, span)
            current.scope.recorder.register_pending(span.span_id, give_up)
        leave = context.set_agent_in_block(inside, sys._getframe(1))
        self._open.append((current, span, leave, attempt))
        return span

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._open:
            return
        current, span, leave, attempt = self._open.pop()
        here = context.pushed_in(copy_context())
        has_moved = here is None or here.scope is not current.scope
        leave()
        changes: dict[str, Any] = {"status": SpanStatus.OK}
        if isinstance(error, GeneratorExit):  # the reader stopped early, which is not an error
            changes = {}
        elif error is not None:
            attributes = {**span.attributes, **exception_attributes(error)}
            changes = {"status": SpanStatus.ERROR, "status_message": spans.text_of(error)}
            changes["attributes"] = spans.clean_attributes(attributes)
        _record_end(current.scope.recorder, span, **changes)
        if attempt is not None:
            recorder = current.scope.recorder
            if has_moved and error is None and recorder.keeps and not recorder.has_called:
                _warn_of_context(self.name)
            attempt.close(error)


def _record_end(recorder: Recorder, span: Span, **changes: Any) -> None:
    """Record the span of a block with status UNSET, or with `changes`; the block is not pending."""
    recorder.add(span.replace(end_ns=spans.now_ns(), **{"status": SpanStatus.UNSET, **changes}))
    recorder.resolve_pending(span.span_id)


@functools.lru_cache
def _warn_of_context(name: str) -> None:
    """Log, once, that calls may be missing from the attempts of a block, whose name is `name`."""
    log.warning(
        "lightspan: the block %r ended in another context than it began in, without a model call: "
        "calls of threads, tasks and handlers are attempts of their own. Decorate the generator, "
        "make FastAPI's dependency async, or use the ASGI middleware of docs/guides/fastapi.md",
        name,
    )


class _BetweenSteps:
    """A `with` block around the `yield` of a decorated generator.

    Inside this block the generator is suspended, and its agent is not the acting agent.
    """

    def __enter__(self) -> None:
        context.leave_step(sys._getframe(1))

    def __exit__(self, *error: object) -> None:
        context.current_context()  # sets the generator's agent again


def agent(name: str, *, input: Any = None) -> _Block:
    """Set the acting agent in a `with` block or a decorated function.

    Example: `with lightspan.agent("planner"):`. Model calls inside belong to this agent, and nested
    agents make a path (`team/planner`). In production the outermost block is an attempt.

    In a generator, the agent does not act between two items. Work that an item starts in a pool, a
    task, an event loop or a thread belongs to the agent. In production, a thread belongs to it only
    if the thread runs `contextvars.copy_context().run`.

    Args:
        name: name of the agent or team.
        input: input of the agent or team, recorded in its span; None if unknown.
    """
    return replace(agent_span(_text(name, agent), input=input), attributes=_input_attributes(input))


def agent_span(name: str, *, input: Any = None) -> _Block:
    """Set the acting agent as `agent` does, but do not record the input in the span.

    Args:
        name: name of the agent or team.
        input: input of the attempt that this block opens in production; None if it is unknown.
    """
    return _Block(f"invoke_agent {name}", SpanKind.AGENT, {}, input, agent=name)


def _text(name: Any, decorator: Callable[..., Any]) -> Any:
    """Return the name of a block; raise `TypeError` for the function in `@lightspan.operation`."""
    if callable(name):
        raise TypeError(f"{name!r:.60} needs a name: @lightspan.{decorator.__name__}('NAME')")
    return name


def _input_attributes(value: Any) -> Attributes:
    return {} if value is None else {c.OPERATION_INPUT: dump_json(value)}


def operation(name: str, *, input: Any = None, **attributes: AttributeValue) -> _Block:
    """Record a block or function as one span: `with lightspan.operation("retrieve", k=3):`.

    In production the outermost block is an attempt with `input` as its task. An input that is not
    JSON, or is longer than 262,144 characters, is no task.

    Raises:
        TypeError: `name` is a function, as in `@lightspan.operation` without a name.
    """
    attributes |= _input_attributes(input)
    return _Block(_text(name, operation), SpanKind.OPERATION, attributes, input)


def tool(name: str, arguments: str = "", call_id: str = "") -> _Block:
    """Record a tool call as one span, in a `with` block or as a decorator.

    The value of the `with` statement is the span. The block may add the result to the span's
    attributes. The value is None if nothing is recorded.

    Args:
        name: name of the tool.
        arguments: arguments of the call, as JSON.
        call_id: id of the tool call in the model's answer; empty if unknown.
    """
    attributes: dict[str, Any] = {
        c.OPERATION_NAME: "execute_tool",
        c.TOOL_NAME: _text(name, tool),
        c.TOOL_CALL_ARGUMENTS: arguments,
        c.TOOL_CALL_ID: call_id or None,
        c.OPENINFERENCE_KIND: "TOOL",
    }
    return _Block(f"execute_tool {name}", SpanKind.TOOL, attributes)


def current_attempt_id() -> str | None:
    """Return the id of the current attempt, for later feedback (`lightspan.feedback`).

    Returns None outside an attempt, and in an attempt that is not recorded.
    """
    current = context.current_agent()
    if current is None or not current.scope.recorder.keeps:
        return None
    return current.scope.attempt_id or None

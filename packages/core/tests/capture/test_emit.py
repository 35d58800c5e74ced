"""Test the spans and rewards that a user's code emits."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import pytest

from lightspan.capture import emit, sdk_instrumentation
from lightspan.capture.context import AttemptContext, current_agent
from lightspan.capture.entry import open_scope
from lightspan.errors import RewardError
from lightspan.schema import semconv as c
from lightspan.schema.spans import Span, SpanKind, SpanStatus, decode_span, encode_span

TRACE = "0123456789abcdef0123456789abcdef"
ROOT = "00000000000000aa"


def acting_path() -> str | None:
    current = current_agent()
    return None if current is None else current.path


@pytest.fixture
def scope() -> Iterator[AttemptContext]:
    with open_scope(
        AttemptContext(rollout_id="ro", attempt_id="at", trace_id=TRACE, root_span_id=ROOT)
    ) as made:
        yield made
    sdk_instrumentation.uninstall()


def only(scope: AttemptContext) -> Span:
    [span] = scope.recorder.drain()
    assert decode_span(encode_span(span)) == span
    assert (span.rollout_id, span.attempt_id, span.trace_id) == ("ro", "at", TRACE)
    return span


def test_outside_a_scope_nothing_happens() -> None:
    assert emit.emit_reward(1.0) is None
    assert emit.emit_annotation({"a": 1}) is None
    assert emit.emit_message("hi") is None
    assert emit.emit_object([1]) is None
    assert emit.emit_exception(ValueError("x")) is None
    assert acting_path() is None
    with emit.agent("writer") as span, emit.tool("search") as other, emit.operation("x") as third:
        assert (span, other, third) == (None, None, None)


@pytest.mark.parametrize(
    ("value", "known"),
    [
        (0.5, {c.REWARD_VALUE: 0.5}),
        (True, {c.REWARD_VALUE: 1.0}),
        (float("nan"), {}),
        (
            {"reward": 1, "length": float("inf"), "style": 0.5},
            {
                c.REWARD_VALUE: 1.0,
                c.REWARD_DIMENSION + "reward": 1.0,
                c.REWARD_DIMENSION + "style": 0.5,
            },
        ),
    ],
)
def test_rewards(scope: AttemptContext, value: Any, known: dict[str, Any]) -> None:
    emit.emit_reward(value)
    span = only(scope)
    assert span.attributes == {c.AGENT_PATH: "app", **known}
    assert (span.name, span.kind, span.parent_id) == ("lightspan.reward", SpanKind.REWARD, ROOT)


def test_rewards_of_a_call_or_a_span(scope: AttemptContext) -> None:
    emit.emit_reward(1.0, call="chatcmpl-call-7")
    assert only(scope).attributes[c.REWARD_CALL_ID] == "call-7"
    emit.emit_reward(1.0, call="call-7")
    assert only(scope).attributes[c.REWARD_CALL_ID] == "call-7"
    message = emit.emit_message("x")
    only(scope)
    assert message is not None
    emit.emit_reward(1.0, span=message)
    assert only(scope).attributes[c.REWARD_SPAN_ID] == message.span_id
    emit.emit_reward({"a": 1.0, "b": 0.5}, primary="b", span="00000000000000bb")
    assert only(scope).attributes[c.REWARD_VALUE] == 0.5


def test_what_is_no_reward(scope: AttemptContext) -> None:
    with pytest.raises(RewardError, match="call= or span=, not both"):
        emit.emit_reward(1.0, call="a", span="b")
    with pytest.raises(RewardError, match="not the text 'good'"):
        emit.emit_reward("good")  # type: ignore[arg-type]
    assert emit.emit_reward(None) is None
    assert scope.recorder.drain() == []


def test_annotations_messages_objects(scope: AttemptContext) -> None:
    emit.emit_annotation({"a": 1, "b": ["x"], "c": object})  # type: ignore[dict-item]
    assert only(scope).attributes == {
        c.AGENT_PATH: "app",
        c.ANNOTATION + "a": 1,
        c.ANNOTATION + "b": ["x"],
        c.ANNOTATION + "c": "<class 'object'>",
    }
    emit.emit_annotation({1: "a", None: 2})  # type: ignore[dict-item]
    assert only(scope).attributes == {
        c.AGENT_PATH: "app",
        c.ANNOTATION + "1": "a",
        c.ANNOTATION + "None": 2,
    }
    emit.emit_message("half a \ud83d pair")
    assert only(scope).attributes[c.MESSAGE_BODY] == "half a \N{REPLACEMENT CHARACTER} pair"
    emit.emit_object({"a": [1, None]})
    assert only(scope).attributes[c.OBJECT_JSON] == '{"a":[1,null]}'


def test_attributes_are_those_of_the_same_span(scope: AttemptContext) -> None:
    own = {"a": 1, "b": [True], c.MESSAGE_BODY: "no", c.OBJECT_JSON: "no", c.REWARD_VALUE: 9.0}
    emit.emit_reward(0.5, attributes=own)
    emit.emit_message("text", own)
    emit.emit_object(1, own)
    emit.emit_exception(ValueError("x"), own)
    reward, message, thing, error = scope.recorder.drain()
    for span in (reward, message, thing, error):
        assert (span.attributes["a"], span.attributes["b"]) == (1, [True])
    assert reward.attributes[c.REWARD_VALUE] == 0.5
    assert message.attributes[c.MESSAGE_BODY] == "text"
    assert thing.attributes[c.OBJECT_JSON] == "1"
    assert error.attributes[c.EXCEPTION_TYPE] == "ValueError"


def test_exceptions(scope: AttemptContext) -> None:
    emit.emit_exception(KeyError("column"))
    span = only(scope)
    assert (span.status, span.attributes[c.EXCEPTION_TYPE]) == (SpanStatus.ERROR, "KeyError")
    assert span.attributes[c.EXCEPTION_MESSAGE] == "'column'"


def test_agents_nest(scope: AttemptContext) -> None:
    with emit.agent("team") as team, emit.agent("a/b") as inner:
        assert acting_path() == "team/a%2Fb"
        emit.emit_message("hi")
    assert acting_path() == "app"
    message, first, second = scope.recorder.drain()
    assert team is not None
    assert inner is not None
    assert (first.span_id, second.span_id) == (inner.span_id, team.span_id)
    assert [s.parent_id for s in (message, first, second)] == [inner.span_id, team.span_id, ROOT]
    assert first.attributes == {
        c.AGENT_PATH: "team/a%2Fb",
        c.OPERATION_NAME: "invoke_agent",
        c.AGENT_NAME: "a/b",
        c.OPENINFERENCE_KIND: "AGENT",
        c.OPENINFERENCE_AGENT: "a/b",
        c.OPENINFERENCE_NODE: "a/b",
        c.OPENINFERENCE_PARENT: "team",
    }
    assert (first.name, first.kind, first.status) == (
        "invoke_agent a/b",
        SpanKind.AGENT,
        SpanStatus.OK,
    )


def test_tools_and_operations(scope: AttemptContext) -> None:
    with emit.tool("search", '{"q": 1}'):
        pass
    span = only(scope)
    assert (span.kind, span.attributes[c.TOOL_CALL_ARGUMENTS]) == (SpanKind.TOOL, '{"q": 1}')
    with pytest.raises(ValueError, match="boom"), emit.operation("retrieve", k=3):
        raise ValueError("boom")
    span = only(scope)
    assert (span.status, span.status_message) == (SpanStatus.ERROR, "boom")
    assert (span.attributes["k"], span.attributes[c.ERROR_TYPE]) == (3, "ValueError")


def test_decorated_functions(scope: AttemptContext) -> None:
    @emit.agent("writer")
    def write(depth: int) -> list[str | None]:
        return [acting_path(), *(write(depth - 1) if depth else [])]

    assert write(1) == ["writer", "writer/writer"]
    assert [span.name for span in scope.recorder.drain()] == ["invoke_agent writer"] * 2


def test_decorated_generators(scope: AttemptContext) -> None:
    @emit.agent("writer")
    def write() -> Generator[str | None, str, str]:
        try:
            return f"{(yield acting_path())} {(yield acting_path())}"
        except KeyError as error:
            return str(error)

    assert inspect.isgeneratorfunction(write)
    writing = write()
    assert [next(writing), acting_path(), writing.send("a")] == ["writer", "app", "writer"]
    with pytest.raises(StopIteration) as end:
        writing.send("b")
    assert (end.value.value, acting_path()) == ("a b", "app")
    assert only(scope).status is SpanStatus.OK
    writing = write()
    next(writing)
    with pytest.raises(StopIteration) as end:
        writing.throw(KeyError("c"))
    assert (end.value.value, only(scope).status) == ("'c'", SpanStatus.OK)
    writing = write()
    next(writing)
    writing.close()
    assert only(scope).status is SpanStatus.UNSET


async def test_decorated_coroutines_and_async_generators() -> None:
    @emit.agent("writer")
    async def write() -> str | None:
        await asyncio.sleep(0)
        return acting_path()

    @emit.agent("writer")
    async def stream() -> AsyncGenerator[str | None, str]:
        try:
            emit.emit_message(f"{(yield acting_path())}")
        except KeyError as error:
            emit.emit_message(str(error))

    assert inspect.isasyncgenfunction(stream)
    with open_scope(AttemptContext(rollout_id="ro", attempt_id="at")) as scope:
        assert list(await asyncio.gather(write(), write())) == ["writer", "writer"]
        assert len(scope.recorder.drain()) == 2
        for step, body in (("asend", "a"), ("athrow", "'c'")):
            writing = stream()
            assert [await anext(writing), acting_path()] == ["writer", "app"]
            with pytest.raises(StopAsyncIteration):
                await getattr(writing, step)("a" if step == "asend" else KeyError("c"))
            message, span = scope.recorder.drain()
            assert (message.attributes[c.MESSAGE_BODY], span.status) == (body, SpanStatus.OK)
            assert message.parent_id == span.span_id
        writing = stream()
        await anext(writing)
        await writing.aclose()
        [span] = scope.recorder.drain()
        assert span.status is SpanStatus.UNSET
    sdk_instrumentation.uninstall()

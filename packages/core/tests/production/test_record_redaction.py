"""Test the redaction hook, which gets records before they are stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, strategies as st

import lightspan
from lightspan.errors import ConfigError
from lightspan.lightning import build_episode
from lightspan.production.record import record
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.spans import Span, SpanEvent, SpanKind, SpanLink
from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from packages.core.tests.production.chat import say

SECRET = re.compile(r"hunter2|ann@example\.org")


def hide(span: Span) -> Span:
    return lightspan.map_text(span, lambda text: SECRET.sub("***", text))


def test_a_hook_sees_everything_before_it_is_kept(url: str, tmp_path: Path) -> None:
    def reply(request: Request) -> Reply:
        return Reply(text="your password is hunter2")

    @lightspan.operation("handle", input="hunter2", owner="ann@example.org")
    def handle(client: openai.OpenAI) -> None:
        say(client, "I am ann@example.org")
        with lightspan.tool("look", '{"who": "ann@\\u0065xample.org"}'):
            lightspan.emit_message("hunter2")
        raise RuntimeError("hunter2")

    with (
        ScriptedServer(reply) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        record(url, redact=hide),
        pytest.raises(RuntimeError),
    ):
        handle(client)
    [found] = read_recorded(url)
    assert found.answered == [("I am ***", "your password is ***")]
    assert found.rollout.task == "***"
    assert found.attempt.capture_errors == []
    assert SECRET.search(repr(found)) is None
    assert not any(SECRET.search(path.read_bytes().decode("latin1")) for path in tmp_path.iterdir())


def broken(span: Span) -> Span:
    raise LookupError(f"cannot redact {span.attributes}")


def no_span(span: Span) -> Any:
    return "nothing"


@pytest.mark.parametrize("hook", [broken, no_span])
def test_a_hook_that_fails_costs_the_content_not_the_call(
    hook: Any,
    client: openai.OpenAI,
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with record(url, redact=hook):
        for _ in range(2):
            with lightspan.operation("private", input="private"):
                assert say(client, "private").choices[0].message.content == "echo private"
    for found in read_recorded(url):
        assert found.rollout.task is None
        [damage] = found.attempt.capture_errors
        assert damage.startswith("redact failed on 3 spans (")
        assert [span.name for span in found.spans] == ["chain", "operation", "llm"]
        assert isinstance(found.calls[0].attributes[c.INPUT_TOKENS], int)
    assert len([one for one in caplog.records if "redact failed" in one.message]) == 1
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"private" not in stored
    assert "private" not in caplog.text


def test_an_asynchronous_hook_is_refused(url: str) -> None:
    async def asynchronous(span: Span) -> Span:
        return span

    with pytest.raises(ConfigError, match="is asynchronous"):
        record(url, redact=asynchronous)


def test_a_hook_may_leave_spans_out(client: openai.OpenAI, url: str) -> None:
    def only_structure(span: Span) -> Span | None:
        return None if span.kind == "llm" else span

    with record(url, redact=only_structure), lightspan.operation("handle"):
        say(client)
    [found] = read_recorded(url)
    assert (found.calls, found.attempt.capture_errors) == ([], [])
    assert found.attempt.message == "1 spans were left out by redact"


@pytest.mark.parametrize(
    "leave_out",
    [
        lambda span: None if span.kind == "chain" else span,
        lambda span: span.replace(attributes={**span.attributes, c.OPERATION_INPUT: "{hidden}"}),
        lightspan.without_content,
    ],
    ids=["root", "input", "content"],
)
def test_messages_never_stand_for_an_input_that_a_hook_left_out(
    client: openai.OpenAI, url: str, leave_out: Any
) -> None:
    with record(url, redact=leave_out), lightspan.operation("handle", input={"q": "private"}):
        say(client, "private")
    [found] = read_recorded(url)
    assert found.rollout.task is None
    assert found.attempt.capture_errors == []


def test_recording_without_content(client: openai.OpenAI, url: str, tmp_path: Path) -> None:
    with (
        record(url, redact="lightspan:without_content"),
        lightspan.agent("writer2"),
        lightspan.tool("look", '{"who": "private"}'),
    ):
        say(client, "private")
        lightspan.emit_message("private")
        lightspan.emit_reward({"reward": 0.5, "style": 1.0})
    [found] = read_recorded(url)
    assert found.tree() == (
        "invoke_workflow writer2\n"
        "  invoke_agent writer2\n"
        "    execute_tool look\n"
        "      chat m @writer2\n"
        "      lightspan.message\n"
        "      lightspan.reward"
    )
    [call] = found.calls
    assert call.attributes[c.REQUEST_MODEL] == "m"
    assert isinstance(call.attributes[c.INPUT_TOKENS], int)
    assert build_episode(found.attempt, found.rollout, found.spans, []).dimensions["style"] == 1.0
    assert (found.rollout.task, found.attempt.capture_errors) == (None, [])
    assert b"private" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_the_reason_of_an_input_passes_no_hook_and_is_left_out(
    client: openai.OpenAI, url: str
) -> None:
    with record(url, redact=hide), lightspan.operation("handle", input={"c": object()}):
        say(client)
    [found] = read_recorded(url)
    assert found.attempt.message == "no task: the input is not JSON"


def test_a_hook_cannot_change_whose_a_span_is(client: openai.OpenAI, url: str) -> None:
    def move(span: Span) -> Span:
        attributes = {**span.attributes, c.CALL_ID: "call-other", "odd": object()}
        return span.replace(attempt_id="at-other", span_id="f" * 16, attributes=attributes)

    with record(url, redact=move):
        say(client)
    [found] = read_recorded(url)
    assert found.attempt.capture_errors == []
    assert str(found.calls[0].attributes[c.CALL_ID]).startswith("call-")
    assert found.calls[0].attributes[c.CALL_ID] != "call-other"
    assert str(found.calls[0].attributes["odd"]).startswith("<object object")


# --- `map_text` ------------------------------------------------------------------------------
WORD = "hunter2"
TEXTS = st.text(max_size=8).map(lambda text: f'{text}{WORD}\n"ü\\{text}')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def starred(text: str) -> str:
    return text.replace(WORD, "***")


def make(**attributes: Any) -> Span:
    return Span(span_id="a" * 16, trace_id="b" * 32, name="n", attributes=attributes)


@given(VALUES, TEXTS, st.booleans())
def test_no_text_keeps_the_secret(value: Any, text: str, escaped: bool) -> None:
    as_json = json.dumps(value, ensure_ascii=escaped)
    calls = [{"id": "t", "function": {"name": "look", "arguments": json.dumps({"who": text})}}]
    asked: list[dict[str, Any]] = [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t", "content": [{"type": "text", "id": text}]},
    ]
    span = make(
        **{
            c.INPUT_MESSAGES: genai_messages.dump(asked),
            c.OPERATION_INPUT: as_json,
            c.TOOL_CALL_RESULT: text,
            "list": [text, text],
            "number": 3,
        }
    ).replace(
        status_message=text,
        resource={"host": text},
        events=[SpanEvent("said", 1, {"said": text})],
        links=[SpanLink("c" * 32, "d" * 16, {"said": text})],
    )
    changed = lightspan.map_text(span, starred)
    assert WORD not in repr(changed)
    assert changed.attributes["number"] == 3
    said = genai_messages.input_messages_of(changed.attributes)
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool"]
    assert said[0]["content"] == starred(text)
    assert json.loads(said[2]["tool_calls"][0]["function"]["arguments"]) == {"who": starred(text)}
    assert json.loads(str(changed.attributes[c.OPERATION_INPUT])) == _hidden(value)


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return starred(value)
    if isinstance(value, list):
        return [_hidden(item) for item in value]
    return {k: _hidden(v) for k, v in value.items()} if isinstance(value, dict) else value


IDENTITY: dict[str, Any] = {
    c.CALL_ID: "call-1",
    c.CALL_OUTCOME: "ok",
    c.ROUTE: "app",
    c.OPERATION_NAME: "chat",
    c.RESPONSE_ID: "chatcmpl-1",
    c.AGENT_PATH: "team1/writer2",
    c.AGENT_NAME: "writer2",
    c.OPENINFERENCE_NODE: "writer2",
    c.REQUEST_MODEL: "gpt-4o",
    c.RESPONSE_MODEL: "gpt-4o-2024",
    c.TOOL_NAME: "look3",
    c.TOOL_CALL_ID: "call_77",
    c.FINISH_REASONS: ["stop"],
    c.REWARD_CALL_ID: "call-1",
    c.ERROR_TYPE: "Error404",
}


def test_what_says_which_span_it_is_stays() -> None:
    span = make(**IDENTITY, **{c.MESSAGE_BODY: "order 77"}).replace(
        resource={"service.name": "desk2", "host": "h1"}
    )
    changed = lightspan.map_text(span, lambda text: re.sub(r"\d", "#", text))
    assert changed.attributes == {**IDENTITY, c.MESSAGE_BODY: "order ##"}
    assert changed.resource == {"service.name": "desk2", "host": "h#"}
    assert (changed.span_id, changed.trace_id, changed.name) == ("a" * 16, "b" * 32, "n")


def test_the_structure_of_messages_and_tools_stays() -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": ["string", "null"], "description": "?", "enum": ["?"]},
            "arguments": {"type": "string", "format": "date", "pattern": "[0-9]"},
        },
        "required": ["name", "arguments"],
    }
    tools = [{"type": "function", "function": {"name": "look3", "description": "?"}}]
    tools[0]["function"]["parameters"] = schema  # type: ignore[index]
    said = [{"role": "user", "name": "?", "parts": [{"type": "text", "content": "?"}]}]
    call = {"type": "tool_call", "id": "c1", "name": "look3", "arguments": '{"name":"?"}'}
    said.append({"role": "assistant", "parts": [call]})
    values = {c.TOOL_DEFINITIONS: json.dumps(tools), c.INPUT_MESSAGES: json.dumps(said)}
    texts = {key: value.replace("?", "ann 7") for key, value in values.items()}
    changed = lightspan.map_text(make(**texts), lambda _: "?").attributes
    assert {key: json.loads(str(value)) for key, value in changed.items()} == {
        c.TOOL_DEFINITIONS: tools,
        c.INPUT_MESSAGES: said,
    }


def test_without_content_keeps_names_and_no_text_of_the_apps() -> None:
    texts = {"x": WORD, c.INPUT_MESSAGES: WORD, c.TOOL_DEFINITIONS: WORD, c.MESSAGE_BODY: WORD}
    numbers = {c.INPUT_TOKENS: 7, c.REWARD_VALUE: 0.5}
    span = make(**IDENTITY, **numbers, **texts).replace(
        status_message=WORD,
        kind=SpanKind.LLM,
        resource={"service.name": "desk2", "x": WORD},
        events=[SpanEvent("said", 1, {"said": WORD})],
    )
    kept = lightspan.without_content(span)
    assert WORD not in repr(kept)
    assert (kept.name, kept.attributes) == ("n", {**IDENTITY, **numbers})
    assert kept.resource == {"service.name": "desk2"}

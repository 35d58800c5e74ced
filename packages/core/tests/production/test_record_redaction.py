"""Test the redaction hook, which gets records before they are stored."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, strategies as st

import lightspan
from lightspan.errors import ConfigError
from lightspan.production.record import record
from lightspan.production.redact import without_content
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

    @lightspan.operation("ann@example.org", input="hunter2")
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


@pytest.mark.parametrize("hook", [broken, no_span, f"{__name__}:absent"])
def test_a_hook_that_fails_costs_the_content_not_the_call(
    hook: Any,
    client: openai.OpenAI,
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    if isinstance(hook, str):
        monkeypatch.setenv("LIGHTSPAN_REDACT", hook)
        hook = None
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
        {"role": "tool", "tool_call_id": "t", "content": text},
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
        name=text,
        status_message=text,
        resource={"host": text},
        events=[SpanEvent(text, 1, {"said": text})],
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


def test_what_says_which_span_it_is_stays() -> None:
    place: dict[str, Any] = {
        c.CALL_ID: "call-1",
        c.CALL_OUTCOME: "ok",
        c.ROUTE: "app",
        c.OPERATION_NAME: "chat",
        c.RESPONSE_ID: "chatcmpl-1",
    }
    changed = lightspan.map_text(make(**place, **{c.AGENT_PATH: "writer"}), lambda _: "?")
    assert changed.attributes == {**place, c.AGENT_PATH: "?"}
    assert (changed.span_id, changed.trace_id, changed.name) == ("a" * 16, "b" * 32, "?")


def test_without_content_keeps_no_text_of_the_apps() -> None:
    span = make(
        **{c.CALL_ID: "call-1", c.INPUT_TOKENS: 7, c.REQUEST_MODEL: WORD, "x": WORD}
    ).replace(name=WORD, status_message=WORD, kind=SpanKind.LLM, resource={"x": WORD})
    kept = without_content(span)
    assert WORD not in repr(kept)
    assert (kept.name, kept.attributes) == ("llm", {c.CALL_ID: "call-1", c.INPUT_TOKENS: 7})

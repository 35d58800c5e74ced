"""`map_text`: every text that somebody wrote, and nothing that says which span it is."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st

from lightspan import map_text
from lightspan.production.redact import without_content
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.spans import Span, SpanEvent, SpanKind, SpanLink

SECRET = "hunter2"
TEXTS = st.text(max_size=8).map(lambda text: f'{text}{SECRET}\n"ü\\{text}')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def hide(text: str) -> str:
    return text.replace(SECRET, "***")


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
    changed = map_text(span, hide)
    assert SECRET not in repr(changed)
    assert changed.attributes["number"] == 3
    said = genai_messages.input_messages_of(changed.attributes)
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool"]
    assert said[0]["content"] == hide(text)
    assert json.loads(said[2]["tool_calls"][0]["function"]["arguments"]) == {"who": hide(text)}
    assert json.loads(str(changed.attributes[c.OPERATION_INPUT])) == _hidden(value)


def _hidden(value: Any) -> Any:
    if isinstance(value, str):
        return hide(value)
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
    changed = map_text(make(**place, **{c.AGENT_PATH: "writer"}), lambda _: "?")
    assert changed.attributes == {**place, c.AGENT_PATH: "?"}
    assert (changed.span_id, changed.trace_id, changed.name) == ("a" * 16, "b" * 32, "?")


def test_without_content_keeps_no_text_of_the_apps() -> None:
    span = make(
        **{c.CALL_ID: "call-1", c.INPUT_TOKENS: 7, c.REQUEST_MODEL: SECRET, "x": SECRET}
    ).replace(name=SECRET, status_message=SECRET, kind=SpanKind.LLM, resource={"x": SECRET})
    kept = without_content(span)
    assert SECRET not in repr(kept)
    assert (kept.name, kept.attributes) == ("llm", {c.CALL_ID: "call-1", c.INPUT_TOKENS: 7})

"""Test the conversion between OpenAI's chat messages and OpenTelemetry's."""

from __future__ import annotations

import enum
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.genai_attributes import (
    StreamedAnswer,
    answer_attributes,
    request_attributes,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CALL = st.fixed_dictionaries(
    {
        "id": TEXT,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT}),
    }
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "tool_call_id": TEXT, "content": TEXT},
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": st.one_of(st.none(), TEXT),
            "tool_calls": st.lists(CALL, min_size=1),
        }
    ),
)


@given(st.lists(MESSAGE))
def test_round_trip(messages: list[dict[str, Any]]) -> None:
    assert genai_messages.load(genai_messages.dump(messages)) == messages


def test_the_schema() -> None:
    messages: list[Any] = [
        {"role": "user", "name": "me", "content": [{"type": "text", "text": "a"}, {"type": "x"}]},
        {"role": "assistant", "content": "b", "finish_reason": "stop"},
    ]
    assert genai_messages.to_genai(messages) == [
        {
            "role": "user",
            "name": "me",
            "parts": [{"type": "text", "content": "a"}, {"type": "x"}],
        },
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "b"}],
            "finish_reason": "stop",
        },
    ]
    assert genai_messages.from_genai(genai_messages.to_genai(messages))[0] == messages[0]


@pytest.mark.parametrize(
    "message",
    [
        "text",
        5,
        None,
        {"content": 5},
        {"role": "user", "content": {"a": 1}},
        {"role": "user", "content": ["plain", 3]},
        {"role": "assistant", "tool_calls": "abc"},
        {"role": "assistant", "tool_calls": [1, {"function": "x"}]},
    ],
)
def test_what_is_no_message_is_kept_as_text(message: Any) -> None:
    [parsed] = json.loads(genai_messages.dump([message]))
    assert set(parsed) >= {"role", "parts"}


class Role(str, enum.Enum):  # noqa: UP042
    """Roles of a framework whose text is not their value."""

    SYSTEM = "system"


HALF = "half of a character"
HALVES = ["a\ud83d", "\ude42b"]
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TEXTS = [{"type": "text", "text": "One"}, {"type": "text", "text": "?"}]
THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "…"}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": Role.SYSTEM, "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "MessageRole.USER", "content": "a"}, {"role": "user", "content": "a"}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": TEXTS}, {"role": "user", "content": "One?"}),
        (
            {"role": "tool", "tool_call_id": "c", "content": TEXTS},
            {"role": "tool", "tool_call_id": "c", "content": "One?"},
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}],
            },
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        ),
        *(
            (
                {"role": "assistant", **thoughtful},
                {"role": "assistant", "content": "4", "reasoning_content": "Hm."},
            )
            for thoughtful in (
                {"content": "4", "reasoning_content": "Hm."},
                {"content": "4", "reasoning": "Hm.", "reasoning_details": [{"text": "Hm."}]},
                {"content": [THINKING, {"type": "text", "text": "4"}]},
                {"content": [SUMMARY, {"type": "text", "text": "4"}]},
            )
        ),
    ],
)
def test_every_reader_gets_one_form(message: Any, read: Any) -> None:
    assert genai_messages.load(genai_messages.dump([message])) == [read]
    assert genai_messages.load(genai_messages.dump([read])) == [read]


def test_a_foreign_call_s_arguments_are_text() -> None:
    """Check attributes of other libraries, whose arguments are objects."""
    parts = [{"type": "tool_call", "id": "c", "name": "f", "arguments": {"a": 1}}]
    [message] = genai_messages.from_genai([{"role": "assistant", "parts": parts}])
    assert message["tool_calls"] == [CALLED]


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        (
            "message",
            [
                {"type": "message_start", "message": []},
                {"type": "content_block_start", "index": None, "content_block": ["x"]},
                {"type": "content_block_delta", "index": None, "delta": {"text": "a"}},
                {"type": "content_block_delta", "index": 1, "delta": "b"},
            ],
        ),
        (
            "response",
            [
                {"type": "response.output_text.delta", "output_index": None, "delta": "a"},
                {"type": "response.output_item.added", "output_index": 1, "item": "x"},
                {"type": "response.output_item.done", "output_index": [1], "item": {}},
            ],
        ),
    ],
)
def test_malformed_events_are_noted(kind: str, events: list[Any]) -> None:
    streamed = StreamedAnswer()
    for event in events:
        streamed.add(event)
    assert streamed.irregular_field
    attributes = answer_attributes(streamed.answer())
    assert '"content":"a"' in str(attributes[c.OUTPUT_MESSAGES])


class Failing:
    def __str__(self) -> str:
        raise ValueError("no")


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, 2.5, None, "ä"]}, '{"a":[1,2.5,null,"ä"]}'),
        ({"a": {1, 2}.__class__}, '{"a":"<class \'set\'>"}'),
        (float("nan"), "null"),
        ("\ud800", '"\N{REPLACEMENT CHARACTER}"'),
        ({(1, 2): 3}, '{"(1, 2)":3}'),
        ({Failing: 1, "\ud800": 2}, '"<dict>"'),
        (CIRCLE, '"<list>"'),
        (Failing(), '"<Failing>"'),
    ],
)
def test_json_never_fails(value: Any, text: str) -> None:
    assert genai_messages.dump_json(value) == text


@pytest.mark.parametrize("ids", [True, False])
@given(
    calls=st.lists(st.tuples(st.text("ab", min_size=1), st.lists(st.text("xy{}")))), data=st.data()
)
def test_streamed_calls_without_an_index_stay_apart(
    ids: bool, calls: list[tuple[str, list[str]]], data: st.DataObject
) -> None:
    """Check streamed tool calls whose `index` is missing or null, as some servers send them."""
    gathered = StreamedAnswer()
    for number, (name, parts) in enumerate(calls):
        first = {"id": f"call-{number}"} if ids else {}
        deltas = [
            {**first, "function": {"name": name, "arguments": ""}},
            *({"function": {"arguments": part}} for part in parts),
        ]
        for delta in deltas:
            left_out = data.draw(st.sampled_from([{}, {"index": None}]))
            gathered.add({"choices": [{"delta": {"tool_calls": [{**delta, **left_out}]}}]})
    [choice] = gathered.answer()["choices"] or [{"message": {}}]
    assert choice["message"].get("tool_calls", []) == [
        {
            "id": f"call-{number}" if ids else None,
            "type": "function",
            "function": {"name": name, "arguments": "".join(parts)},
        }
        for number, (name, parts) in enumerate(calls)
    ]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.output_text.delta", "output_index": 0, "delta": "\ud83d"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "t", "text": "\ud83d"}},
    ],
)
def test_half_a_character_in_an_event_is_noted(event: dict[str, Any]) -> None:
    for text, field in (("🙂", ""), ("\ud83d", HALF)):
        streamed = StreamedAnswer()
        delta = text if isinstance(event["delta"], str) else {**event["delta"], "text": text}
        streamed.add({**event, "delta": delta})
        streamed.answer()
        assert streamed.irregular_field == field


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([{"choices": [{"delta": {"content": half}}]} for half in HALVES], "a🙂b"),
        ([{"choices": [{"delta": {"reasoning_content": half}}]} for half in HALVES], "a🙂b"),
        ([{"choices": [{"text": half}]} for half in HALVES], "a🙂b"),
        (
            [
                {"type": "response.output_text.delta", "output_index": 0, "delta": half}
                for half in HALVES
            ],
            "a🙂b",
        ),
        (
            [
                {
                    "type": "content_block_delta",
                    "index": 0,
                    "delta": {"type": "text_delta", "text": half},
                }
                for half in HALVES
            ],
            "a🙂b",
        ),
        ([{"choices": [{"delta": {"content": HALVES[0]}}]}], "a\N{REPLACEMENT CHARACTER}"),
    ],
    ids=["chat", "thought", "completion", "responses", "messages", "one half"],
)
def test_the_halves_of_a_character_in_two_chunks_are_joined(
    events: list[dict[str, Any]], text: str
) -> None:
    streamed = StreamedAnswer()
    for event in events:
        streamed.add(event)
    [message] = json.loads(str(answer_attributes(streamed.answer())[c.OUTPUT_MESSAGES]))
    assert streamed.irregular_field == ("" if text == "a🙂b" else HALF)
    assert [part["content"] for part in message["parts"]] == [text]


def test_halves_of_a_character_that_an_app_sends_are_joined() -> None:
    assert genai_messages.dump_json(["".join(HALVES), "\ud83d", {"a": "".join(HALVES)}]) == (
        '["a🙂b","\N{REPLACEMENT CHARACTER}",{"a":"a🙂b"}]'
    )


def test_a_streamed_response_that_was_cut_in_a_call() -> None:
    streamed = StreamedAnswer()
    item = {"type": "function_call", "call_id": "call_7", "name": "f", "arguments": ""}
    for event in (
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": '{"a"'},
    ):
        streamed.add(event)
    assert not streamed.complete
    [message] = json.loads(str(answer_attributes(streamed.answer())[c.OUTPUT_MESSAGES]))
    called = {"type": "tool_call", "id": "call_7", "name": "f", "arguments": '{"a"'}
    assert message["parts"] == [called]


def test_several_streamed_answers_are_complete_when_each_is() -> None:
    streamed = StreamedAnswer(choices=2)
    for number in range(2):
        streamed.add({"choices": [{"index": number, "delta": {}, "finish_reason": "stop"}]})
        assert streamed.complete is (number == 1)


def chat_chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize(
    ("deltas", "field"),
    [
        # clients that merge calls by their index would join them
        ([{"tool_calls": [CALLED]}, {"tool_calls": [{**CALLED, "id": "d"}]}], "tool_calls.index"),
        ([{"tool_calls": [{**CALLED, "index": None}, {**CALLED, "id": "d", "index": None}]}],
         "tool_calls.index"),
        ([{"tool_calls": [{**CALLED, "index": None}]}], ""),
        # one half of a character alone
        ([{"content": "a\ud83d"}, {"content": "b\ude42"}], HALF),
        ([{"reasoning_content": "\ud83d"}], HALF),
        ([{"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "\ud83d"}}]}],
         HALF),
        ([{"content": "a🙂b"}], ""),
    ],
)  # fmt: skip
def test_what_clients_read_in_different_ways_is_noted(deltas: list[Any], field: str) -> None:
    streamed = StreamedAnswer()
    for delta in deltas:
        streamed.add(chat_chunk(**delta))
    answer_attributes(streamed.answer())
    assert streamed.irregular_field == field


CALL = {"name": "f", "arguments": '{"x": 1}'}
CUSTOM = {"id": "c", "type": "custom", "custom": {"name": "code", "input": "print(1)"}}


@pytest.mark.parametrize(
    ("message", "deltas", "parts"),
    [
        (
            {"function_call": CALL},
            [
                {"function_call": {**CALL, "arguments": '{"x"'}},
                {"function_call": {"arguments": ": 1}"}},
            ],
            [{"type": "tool_call", "id": None, **CALL}],
        ),
        (
            {"tool_calls": [CUSTOM]},
            [
                {
                    "tool_calls": [
                        {"index": 0, **CUSTOM, "custom": {"name": "code", "input": "pri"}}
                    ]
                },
                {"tool_calls": [{"index": 0, "custom": {"input": "nt(1)"}}]},
            ],
            [{"type": "tool_call", "id": "c", "name": "code", "arguments": "print(1)"}],
        ),
        (
            {"audio": {"transcript": "hello"}},
            [{"audio": {"id": "a", "transcript": "hel"}}, {"audio": {"transcript": "lo"}}],
            [{"type": "text", "content": "hello"}],
        ),
    ],
    ids=["function_call", "custom tool", "audio"],
)
def test_other_fields_with_an_answer_are_recorded(
    message: dict[str, Any], deltas: list[Any], parts: list[Any]
) -> None:
    """Check the calls of the first API, of custom tools, and what was said, streamed and whole."""
    whole = {"choices": [{"index": 0, "message": {"role": "assistant", **message}}]}
    streamed = StreamedAnswer()
    for delta in deltas:
        streamed.add({"choices": [{"index": 0, "delta": delta}]})
    for answer in (whole, streamed.answer()):
        [recorded] = json.loads(str(answer_attributes(answer)[c.OUTPUT_MESSAGES]))
        assert [part for part in recorded["parts"] if part["type"] != "blob"][: len(parts)] == parts
    assert streamed.irregular_field == ""
    tools = request_attributes({"model": "m", "messages": [], "functions": [{"name": "f"}]})
    assert json.loads(str(tools[c.TOOL_DEFINITIONS])) == [{"name": "f"}]

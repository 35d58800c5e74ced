"""What was said in a call, told by events in each of the forms that libraries have for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.core.otel.test_vocabulary import ANSWERED, ASKED, GENAI, TOOLS, span

from lightspan.otel.utterances import heard
from lightspan.otel.vocabulary import completed, translated
from lightspan.schema import conventions as c, messages
from lightspan.schema.spans import Span, SpanEvent, SpanKind

CALLS = ASKED[2]["tool_calls"]
CHAT: dict[str, Any] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
TOOL: dict[str, Any] = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look"}
AGENT: dict[str, Any] = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "writer"}


def events(*named: tuple[str, dict[str, Any]]) -> list[SpanEvent]:
    return [SpanEvent(f"gen_ai.{name}", at, said) for at, (name, said) in enumerate(named, 1)]


FLAT = events(
    ("system.message", {"content": "Be brief."}),
    ("user.message", {"role": "user", "content": "Weather?"}),
    ("assistant.message", {"tool_calls": json.dumps(CALLS)}),
    ("tool.message", {"id": "call_1", "content": "rain"}),
    ("choice", {"index": 0, "finish_reason": "stop", "message": '{"content": "It rains."}'}),
)
"""Attributes of the span's events (conventions 1.28 to 1.36)."""
BODIES = [
    SpanEvent(
        event.name,
        event.time_ns,
        {
            "gen_ai.system": "az.ai.inference",
            "gen_ai.event.content": json.dumps(
                {
                    key: json.loads(str(value)) if str(value)[:1] in "[{" else value
                    for key, value in event.attributes.items()
                }
            ),
        },
    )
    for event in FLAT
]
"""Azure's SDKs: a body in one attribute."""
PREFIXED = [
    SpanEvent(
        event.name,
        event.time_ns,
        event.attributes
        if event.name == "gen_ai.choice"
        else {f"gen_ai.message.{key}": value for key, value in event.attributes.items()},
    )
    for event in FLAT
]
BLOCKS = events(
    ("system.message", {"content": "Be brief."}),
    ("user.message", {"content": '[{"text": "Weather?"}]'}),
    (
        "assistant.message",
        {
            "content": json.dumps(
                [
                    {
                        "toolUse": {
                            "toolUseId": "call_1",
                            "name": "weather",
                            "input": {"city": "Ulm"},
                        }
                    }
                ]
            )
        },
    ),
    (
        "tool.message",
        {
            "content": json.dumps(
                [
                    {
                        "toolResult": {
                            "toolUseId": "call_1",
                            "status": "success",
                            "content": [{"text": "rain"}],
                        }
                    }
                ]
            )
        },
    ),
    ("choice", {"finish_reason": "end_turn", "message": '[{"text": "It rains."}]'}),
)
"""Strands: the blocks of Amazon's Converse API as JSON."""
GEMINI = events(
    ("system.message", {"body": '{"content": "Be brief."}'}),
    ("user.message", {"body": '{"content": {"role": "user", "parts": [{"text": "Weather?"}]}}'}),
    (
        "user.message",
        {
            "body": json.dumps(
                {
                    "content": {
                        "role": "model",
                        "parts": [
                            {
                                "function_call": {
                                    "id": "call_1",
                                    "name": "weather",
                                    "args": {"city": "Ulm"},
                                }
                            }
                        ],
                    }
                }
            )
        },
    ),
    (
        "user.message",
        {
            "body": json.dumps(
                {
                    "content": {
                        "role": "user",
                        "parts": [
                            {
                                "function_response": {
                                    "id": "call_1",
                                    "name": "weather",
                                    "response": "rain",
                                }
                            }
                        ],
                    }
                }
            )
        },
    ),
    (
        "choice",
        {
            "body": json.dumps(
                {
                    "index": 0,
                    "finish_reason": "STOP",
                    "content": {"role": "model", "parts": [{"text": "It rains."}]},
                }
            )
        },
    ),
)
"""Google's ADK, whose records say a model's turns in `gen_ai.user.message` too."""
DETAILS = events(
    (
        "client.inference.operation.details",
        {key: GENAI[key] for key in ("gen_ai.system_instructions", c.INPUT_MESSAGES)},
    ),
    (
        "client.inference.operation.details",
        {c.OUTPUT_MESSAGES: GENAI[c.OUTPUT_MESSAGES], c.TOOL_DEFINITIONS: json.dumps(TOOLS)},
    ),
)
"""Conventions 1.37 and later."""
WHOLE = events(
    ("content.prompt", {"gen_ai.prompt": json.dumps(ASKED)}),
    ("content.completion", {"gen_ai.completion": json.dumps(ANSWERED)}),
)
"""Conventions 1.27 and before."""
LISTED = json.dumps(
    [
        {"content": "Be brief.", "role": "system", "event.name": "gen_ai.system.message"},
        {
            "content": "Weather?",
            "role": "user",
            "gen_ai.message.index": 0,
            "event.name": "gen_ai.user.message",
        },
        {
            "role": "assistant",
            "tool_calls": CALLS,
            "gen_ai.message.index": 1,
            "event.name": "gen_ai.assistant.message",
        },
        {
            "content": "rain",
            "role": "tool",
            "id": "call_1",
            "gen_ai.message.index": 2,
            "event.name": "gen_ai.tool.message",
        },
        {
            "index": 0,
            "message": {"role": "assistant", "content": "It rains."},
            "event.name": "gen_ai.choice",
        },
    ]
)
"""An attribute of Pydantic AI's (its instrumentation's version 1)."""

FORMS = {
    "flat": FLAT,
    "bodies": BODIES,
    "prefixed": PREFIXED,
    "blocks": BLOCKS,
    "gemini": GEMINI,
    "details": DETAILS,
    "whole": WHOLE,
}


def check_call(found: Span) -> None:
    assert messages.asked_of(found.attributes) == ASKED
    assert messages.answers_of(found.attributes) == ANSWERED


@pytest.mark.parametrize("form", FORMS)
def test_a_call(form: str) -> None:
    other = SpanEvent("retry", 9, {"content": "of the app's own"})
    found = translated(span(CHAT, events=[*FORMS[form], other]))
    check_call(found)
    assert found.events == [other]  # the rest is not kept twice
    reasons = {"details": None, "whole": None}.get(form, ["stop"])
    assert found.attributes.get(c.FINISH_REASONS) == reasons
    if form == "details":
        assert json.loads(str(found.attributes[c.TOOL_DEFINITIONS])) == TOOLS


def test_a_call_whose_events_are_an_attribute() -> None:
    found = translated(span({**CHAT, "events": LISTED}))
    check_call(found)
    assert "events" not in found.attributes


def test_what_attributes_say_is_not_said_again() -> None:
    """Each dialect's attributes come before events, of questions and of answers."""
    asked: list[dict[str, Any]] = [
        {c.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"text","content":"Hm?"}]}]'},
        {
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": "Hm?",
        },
        {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "Hm?"},
    ]
    for said in asked:
        found = translated(span({**CHAT, **said}, events=DETAILS))
        assert messages.asked_of(found.attributes) == [{"role": "user", "content": "Hm?"}]
        assert messages.answers_of(found.attributes) == ANSWERED


@pytest.mark.parametrize(
    "text", ["[1, 2]", '[{"city": "Ulm"}]', "[no JSON", '{"content": "x"}', "[]"]
)
def test_a_text_that_looks_like_parts_is_a_text(text: str) -> None:
    found = translated(span(CHAT, events=events(("user.message", {"content": text}))))
    assert messages.asked_of(found.attributes) == [{"role": "user", "content": text}]


def test_an_answer_that_is_a_text() -> None:
    told = events(("choice", {"message": "It rains.", "finish_reason": "max_tokens"}))
    found = translated(span(CHAT, events=told)).attributes
    assert messages.answers_of(found) == ANSWERED
    assert found[c.FINISH_REASONS] == ["length"]


def test_several_parts_are_parts() -> None:
    said = '[{"text": "a"}, {"image": {"format": "png"}}]'
    found = translated(span(CHAT, events=events(("user.message", {"content": said}))))
    assert messages.asked_of(found.attributes) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "text", "text": '{"image":{"format":"png"}}'},
            ],
        }
    ]


def test_a_library_that_may_not_tell() -> None:
    """It says that there was a message, and not which: its events stay as they are."""
    body = '{"index": 0, "message": {}}'
    told = events(("user.message", {"role": "user"}), ("choice", {"body": body}))
    found = translated(span(CHAT, events=told))
    assert found.events == told
    assert not {c.INPUT_MESSAGES, c.OUTPUT_MESSAGES} & found.attributes.keys()


@pytest.mark.parametrize(
    "told",
    [
        events(
            ("tool.message", {"role": "tool", "content": '{"what": "it"}', "id": "call_1"}),
            ("choice", {"message": '[{"text": "out"}]', "id": "call_1"}),
        ),
        events(
            (
                "client.inference.operation.details",
                {
                    c.INPUT_MESSAGES: '[{"role":"tool","parts":[{"type":"tool_call","name":"look",'
                    '"id":"call_1","arguments":"{\\"what\\": \\"it\\"}"}]}]'
                },
            ),
            (
                "client.inference.operation.details",
                {
                    c.OUTPUT_MESSAGES: '[{"role":"tool","parts":[{"type":"tool_call_response",'
                    '"id":"call_1","response":[{"text":"out"}]}]}]'
                },
            ),
        ),
    ],
)
def test_a_tool(told: list[SpanEvent]) -> None:
    found = translated(span(TOOL, events=told))
    assert found.events == []
    keys = (c.TOOL_CALL_ARGUMENTS, c.TOOL_CALL_RESULT)
    assert [found.attributes[key] for key in keys] == ['{"what": "it"}', "out"]


def test_an_agent() -> None:
    told = events(
        ("user.message", {"content": '[{"text": "Weather?"}]'}),
        ("choice", {"message": "It rains.", "finish_reason": "end_turn"}),
    )
    found = translated(span(AGENT, events=told)).attributes
    assert (found[c.OPERATION_INPUT], found[c.OPERATION_OUTPUT]) == ("Weather?", "It rains.")
    several = translated(span(AGENT, events=[*FLAT[:2], *FLAT[:2]])).attributes
    asked = [{"role": "user", "content": "Weather?"}] * 2
    assert json.loads(str(several[c.OPERATION_INPUT])) == asked


def test_other_spans_keep_their_events() -> None:
    told = events(("user.message", {"content": "x"}))
    assert translated(span({}, events=told)).events == told


def test_events_that_come_by_themselves() -> None:
    """A call that has its messages keeps them; one that lacks them gets them."""
    bare = translated(span(CHAT))
    assert bare.kind is SpanKind.LLM
    check_call(completed(bare, DETAILS))
    whole = translated(span({**CHAT, **GENAI}))
    assert completed(whole, events(("user.message", {"content": "other"}))) == whole


@pytest.mark.parametrize(
    "said",
    [
        {"content": "\ud800"},
        {"message": "null"},
        {"tool_calls": "[3, {}]"},
        {"content": '[{"toolUse": 3}, {"toolResult": null}]'},
        {"body": "[" * 100_000},
        {"parts": "3"},
    ],
)
def test_no_event_breaks_a_trace(said: dict[str, Any]) -> None:
    for name in ("user.message", "tool.message", "choice", "client.inference.operation.details"):
        heard(events((name, said)))
        for attributes in (CHAT, TOOL, AGENT):
            translated(span(attributes, events=events((name, said))))

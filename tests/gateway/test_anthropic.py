"""Tests of `/v1/messages`: parsing, answers, streams, errors, records and training."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import pytest

from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.stores.protocol import Store
from lightspan_gateway.api_errors import call_token_error
from lightspan_gateway.dialects.anthropic import parse_message
from lightspan_gateway.dialects.chat import parse_chat
from lightspan_gateway.grammars import grammar_of
from lightspan_testing.gateway_suite import TOOLS, Rig, make_rig
from lightspan_testing.scripted_engine import Say

SCHEMA = TOOLS[0]["function"]["parameters"]
TOOL: Any = {"name": "calculator", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
CALLED = f"Let me see.\n{CALL}"
SYSTEM = {"role": "system", "content": "Be brief."}
USER: Any = {"role": "user", "content": "What is 1?"}


@asynccontextmanager
async def client_of(rig: Rig, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    defaults = {
        "api_key": rig.attempt.call_token,
        "base_url": rig.gateway.url,
        "max_retries": 0,
    }
    async with anthropic.AsyncAnthropic(**{**defaults, **options}) as client:
        yield client


def body(rig: Rig, call_id: str, fields: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "model": "policy",
        "max_tokens": 100,
        "messages": [USER],
        "extra_headers": rig.headers(call_id),
    }
    return {**defaults, **fields}


async def ask(rig: Rig, call_id: str = "call-a", **fields: Any) -> Any:
    async with client_of(rig) as client:
        return await client.messages.create(**body(rig, call_id, fields))


async def events_of(rig: Rig, call_id: str = "call-a", **fields: Any) -> list[dict[str, Any]]:
    """Return the events that the SDK yields for a stream; it hides pings."""
    async with client_of(rig) as client:
        request = {**body(rig, call_id, fields), "stream": True}
        async with await client.messages.create(**request) as stream:
            return [event.model_dump(exclude_unset=True) async for event in stream]


def usage(prompt: int, answer: int) -> dict[str, int]:
    return {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": answer,
    }


# --- what is returned -----------------------------------------------------------------------
async def test_an_answer(store: Store) -> None:
    async with make_rig(store, "It is 1.") as rig:
        message = await ask(rig, system="Be brief.", extra_body={"temperature": 0.5})
        ids = rig.engine.ids("It is 1.")
        prompt = rig.tokenizer.render([SYSTEM, USER])
        assert message.model_dump(exclude_unset=True) == {
            "id": "msg_call-a",
            "type": "message",
            "role": "assistant",
            "model": "policy",
            "content": [{"type": "text", "text": "It is 1."}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": usage(len(prompt), len(ids)),
        }
        [record] = await rig.records()
        assert (record.prompt_ids, record.response_ids) == (prompt, ids)
        assert (record.sampling.temperature, record.sampling.max_tokens) == (0.5, 100)
        assert await ask(rig, system="Be brief.", extra_body={"temperature": 0.5}) == message
        assert len(rig.engine.requests) == 1  # the retry is the same call


async def test_tools_and_their_results(store: Store) -> None:
    """Check that a conversation with tools has the same prompt tokens as in chat completions."""
    async with make_rig(store, [CALLED, "One."]) as rig:
        described = {**TOOL, "description": "Counts.", "type": "custom"}
        first = await ask(rig, tools=[described], system="Be brief.")
        text, call = first.content
        assert (text.type, text.text) == ("text", "Let me see.")
        assert (call.type, call.name, call.input) == ("tool_use", "calculator", {"expression": "1"})
        assert (first.stop_reason, first.stop_sequence) == ("tool_use", None)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "1"}
        more = {"type": "text", "text": "Go on."}
        conversation = [
            USER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, more]},
        ]
        second = await ask(
            rig,
            "call-b",
            tools=[described],
            messages=conversation,
            system=[{"type": "text", "text": "Be brief."}],
        )
        assert second.content[0].text == "One."
        called_function = {"name": "calculator", "arguments": {"expression": "1"}}
        called = {"id": call.id, "type": "function", "function": called_function}
        chat = [
            SYSTEM,
            USER,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call.id, "content": "1"},
            {"role": "user", "content": "Go on."},
        ]
        function = {"name": "calculator", "description": "Counts.", "parameters": SCHEMA}
        tools = [{"type": "function", "function": function}]
        assert rig.engine.requests[1].prompt_ids == rig.tokenizer.render(chat, tools)


async def test_a_call_without_text_has_no_text_block(store: Store) -> None:
    async with make_rig(store, CALL) as rig:
        message = await ask(rig, tools=[TOOL])
        assert [block.type for block in message.content] == ["tool_use"]
        message = await ask(rig, "call-b", tools=[TOOL], tool_choice={"type": "none"})
        assert message.content[0].text == CALL


async def test_why_an_answer_ends(store: Store) -> None:
    async with make_rig(store, "a b c d e f") as rig:
        cut = await ask(rig, max_tokens=3)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
        stopped = await ask(rig, "call-b", stop_sequences=["x", "d", " c"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " c")
        assert stopped.content[0].text == "a b"
        *_, ended, _ = await events_of(rig, "call-c", stop_sequences=["d"])
        assert ended["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "d"}
        await rig.restart()  # answered from the store
        assert await ask(rig, "call-b", stop_sequences=["x", "d", " c"]) == stopped


async def test_tokens_are_counted(store: Store) -> None:
    async with make_rig(store, "ok") as rig, client_of(rig) as client:
        request = {"model": "policy", "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
        counted = await client.messages.count_tokens(**request, extra_headers=rig.headers("call-a"))
        assert counted.input_tokens == len(rig.tokenizer.render([SYSTEM, USER], TOOLS))
        with pytest.raises(anthropic.BadRequestError, match="'messages' must be"):
            await client.messages.count_tokens(model="policy", messages=[])
        assert rig.engine.requests == []
        assert await rig.spans() == []  # no generation


# --- who may ask ----------------------------------------------------------------------------
@pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
async def test_the_token_in_either_header(store: Store, header: str) -> None:
    async with make_rig(store, "ok") as rig, aiohttp.ClientSession() as session:
        url = f"{rig.gateway.url}/v1/messages"
        request = {"model": "policy", "max_tokens": 9, "messages": [USER]}
        token = rig.attempt.call_token
        value = token if header == "x-api-key" else f"Bearer {token}"
        async with session.post(url, json=request, headers={header: value}) as response:
            assert response.status == 200
        async with session.post(url, json=request, headers={header: value + "x"}) as response:
            assert response.status == 401
            assert await response.json() == {
                "type": "error",
                "error": {
                    "type": "authentication_error",
                    "message": call_token_error(token).message,
                    "details": {"error_code": "invalid_api_key"},
                },
                "request_id": None,
            }


# --- streams --------------------------------------------------------------------------------
async def test_a_stream_on_the_wire(store: Store) -> None:
    """Compare all bytes of a stream, because the SDK hides pings."""
    async with make_rig(store, "ok") as rig, aiohttp.ClientSession() as session:
        request = {"model": "policy", "max_tokens": 9, "messages": [USER], "stream": True}
        headers = {"x-api-key": rig.attempt.call_token, **rig.headers("call-a")}
        url = f"{rig.gateway.url}/v1/messages"
        async with session.post(url, json=request, headers=headers) as response:
            assert response.content_type == "text/event-stream"
            text = await response.text()
        lines = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
        events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
        assert [name for name, _ in lines] == [f"event: {event['type']}" for event in events]
        prompt, ids = rig.tokenizer.render([USER]), rig.engine.ids("ok")
        assert events == [
            {
                "type": "message_start",
                "message": {
                    "id": "msg_call-a",
                    "type": "message",
                    "role": "assistant",
                    "model": "policy",
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": usage(len(prompt), 0),
                },
            },
            {"type": "ping"},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
            *(
                {
                    "type": "content_block_delta",
                    "index": 0,
                    "delta": {"type": "text_delta", "text": letter},
                }
                for letter in "ok"
            ),
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": usage(len(prompt), len(ids)),
            },
            {"type": "message_stop"},
        ]


async def test_a_stream_of_calls(store: Store) -> None:
    async with make_rig(store, CALLED) as rig:
        events = await events_of(rig, tools=[TOOL])
        start = next(n for n, event in enumerate(events) if event["type"] == "content_block_stop")
        texts = [event["delta"]["text"] for event in events[2:start]]
        assert "".join(texts) == "Let me see."
        call_id = events[start + 1]["content_block"]["id"]
        empty = {"type": "tool_use", "id": call_id, "name": "calculator", "input": {}}
        written = {"type": "input_json_delta", "partial_json": '{"expression": "1"}'}
        assert events[start:-2] == [
            {"type": "content_block_stop", "index": 0},
            {"type": "content_block_start", "index": 1, "content_block": empty},
            {"type": "content_block_delta", "index": 1, "delta": written},
            {"type": "content_block_stop", "index": 1},
        ]
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert await events_of(rig, tools=[TOOL]) == events
        assert len(rig.engine.requests) == 1


@pytest.mark.parametrize("text", [CALLED, CALL, "", "ok"])
async def test_the_sdks_own_reading_of_a_stream(store: Store, text: str) -> None:
    """Check that `messages.stream()` assembles the same message as an unstreamed answer."""
    async with make_rig(store, text) as rig, client_of(rig) as client:
        request = body(rig, "call-a", {"tools": [TOOL]})
        async with client.messages.stream(**request) as stream:
            final = await stream.get_final_message()
        whole = await ask(rig, "call-b", tools=[TOOL])
        streamed, expected = final.model_dump(), whole.model_dump()
        for message in (streamed, expected):
            message.pop("id")
            for block in message["content"]:
                block.pop("id", None)
                block.pop("parsed_output", None)
        assert streamed == expected


async def test_an_error_in_mid_stream(store: Store) -> None:
    say = Say(text="a b c d", errors={2: RuntimeError("broke")})
    async with make_rig(store, lambda request: say) as rig:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await events_of(rig)
        assert caught.value.body == {
            "type": "error",
            "error": {
                "type": "api_error",
                "message": "the engine failed: RuntimeError: broke",
            },
            "request_id": "call-a",
        }


# --- what is refused ------------------------------------------------------------------------
def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
ANY = {"type": "any"}
JSON = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"messages": 5}, "'messages' must be list, not 5"),
        (said(IMAGE), "messages[0].content[0] is of type 'image'"),
        (
            said({"type": "tool_result", "content": [IMAGE]}),
            "messages[0].content[0].content[0] is of type 'image'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, USER]},
            "messages[0].content[0] is of type 'thinking'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "It"}]},
            "messages[1] is the assistant's",
        ),
        ({"system": [IMAGE]}, "system[0] is of type 'image'"),
        ({"tools": [{"type": "web_search", "name": "a"}]}, "tools[0] is of type 'web_search"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "'tools[0].defer_loading' = True cannot"),
        ({"tool_choice": ANY}, "'tool_choice' = 'any' names no tool"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [TOOL]},
            "'tool_choice.disable_parallel_tool_use' = True cannot be honoured",
        ),
        ({"tools": [{**TOOL, "strict": True}]}, "'tools' = "),
        ({"output_config": {"format": JSON}}, "'output_config.format' = "),
        ({"output_format": JSON, "output_config": {"format": JSON}}, "both set a format"),
        ({"output_config": {"brand_new": 1}}, "'output_config.brand_new' = 1 cannot be honoured"),
        ({"container": "c"}, "'container' cannot be honoured"),
        ({"brand_new": 1}, "'brand_new' = 1 cannot be honoured"),
        ({"messages": [{"role": "user", "content": "a b " * 600}]}, "shorten the messages"),
    ],
)
async def test_refusals_name_the_field(store: Store, fields: dict[str, Any], message: str) -> None:
    async with make_rig(store, "ok") as rig:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(rig, extra_body=fields)
        error_body: Any = caught.value.body
        assert (error_body["type"], error_body["request_id"]) == ("error", "call-a")
        assert error_body["error"]["type"] == "invalid_request_error"
        assert message in error_body["error"]["message"]
        codes = {"shorten": c.CONTEXT_OVERFLOW, "'image'": c.UNSUPPORTED_CONTENT}
        code = next((code for word, code in codes.items() if word in message), None)
        assert caught.value.error_code == code
        [span] = await rig.spans()  # refused, and recorded
        assert span.attributes[c.CALL_OUTCOME] == "error"
        assert rig.engine.requests == []


async def test_what_asks_for_nothing_is_taken(store: Store) -> None:
    cache = {"cache_control": {"type": "ephemeral"}}
    fields: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief.", **cache}],
        **said({"type": "text", "text": "What is 1?", "citations": None, **cache}),
        "tools": [{**TOOL, **cache, "eager_input_streaming": True, "allowed_callers": ["direct"]}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "speed": "standard",
        "context_management": {},
        "output_config": {"format": None},
        "cache_control": {"type": "ephemeral"},
    }
    async with make_rig(store, "ok") as rig:
        assert (await ask(rig, extra_body=fields)).content[0].text == "ok"
        assert rig.engine.requests[0].prompt_ids == rig.tokenizer.render([SYSTEM, USER], TOOLS)
        [span] = await rig.spans()
        assert c.SAMPLING_OVERRIDES not in span.attributes


# --- what holds an answer -------------------------------------------------------------------
STRICT: Any = {
    "type": "object",
    "properties": {"expression": {"enum": ["1", "2"]}},
    "required": ["expression"],
    "additionalProperties": False,
}
TOOL_HELD: Any = {"name": "calculator", "input_schema": STRICT, "strict": True}
FUNCTION: Any = {"name": "calculator", "parameters": STRICT, "strict": True}
CHAT_HELD: Any = {"type": "function", "function": FUNCTION}
ONE: dict[str, Any] = {"disable_parallel_tool_use": True}
STRICT_JSON = {"type": "json_schema", "schema": STRICT}
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": STRICT}}
CHAT_CHOICE = {"type": "function", "function": {"name": "calculator"}}


@pytest.mark.parametrize(
    ("fields", "as_chat"),
    [
        ({"output_config": {"format": STRICT_JSON}}, {"response_format": CHAT_FORMAT}),
        ({"output_format": STRICT_JSON}, {"response_format": CHAT_FORMAT}),
        (
            {"tools": [TOOL_HELD], "tool_choice": {"type": "any", **ONE}},
            {"tools": [CHAT_HELD], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [TOOL_HELD], "tool_choice": {"type": "tool", "name": "calculator", **ONE}},
            {"tools": [CHAT_HELD], "tool_choice": CHAT_CHOICE, "parallel_tool_calls": False},
        ),
        ({"tools": [TOOL_HELD]}, {"tools": [CHAT_HELD]}),
    ],
    ids=["format", "format-of-the-beta", "any", "tool", "strict"],
)
def test_what_holds_an_answer_is_what_holds_it_in_chat(
    fields: dict[str, Any], as_chat: dict[str, Any]
) -> None:
    said_twice = {"messages": [USER], "max_tokens": 100}
    message = parse_message({**said_twice, **fields}, mode=Mode.VAL, forced=None)
    chat = parse_chat({**said_twice, **as_chat}, mode=Mode.VAL, forced=None)
    assert message.constraint is not None
    assert chat.constraint is not None
    assert grammar_of(message.constraint, "hermes") == grammar_of(chat.constraint, "hermes")
    assert (message.messages, message.tools) == (chat.messages, chat.tools)

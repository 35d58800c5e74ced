"""Tests of `/v1/messages`: parsing, answers, streams, errors, records and training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import jsonschema
import pytest

from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.records import Mode
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.token_records import Sampling
from lightspan.stores.protocol import Store
from lightspan_testing.gateway_suite import TOOLS, Rig, make_rig
from lightspan_testing.scripted_engine import Gate, Say
from lightspan_testing.wait import until
from lightspan_torch.engine.tokenizer import load_tokenizer
from lightspan_torch.engine.transformers import TransformersEngine

FORCED = Sampling(temperature=0.5, max_tokens=40)
TRAINED = Target(route=Route.POLICY, policy="policy", sampling=FORCED)
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
    """Return the SDK's events of a stream, which exclude pings."""
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
    """A conversation has the same prompt tokens as in chat completions."""
    async with make_rig(store, [CALLED, "One.", "One."]) as rig:
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
        arguments = '{"expression": "1"}'
        called = {
            "id": call.id,
            "type": "function",
            "function": {"name": "calculator", "arguments": arguments},
        }
        chat = [
            SYSTEM,
            USER,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call.id, "content": "1"},
            {"role": "user", "content": "Go on."},
        ]
        function = {"name": "calculator", "description": "Counts.", "parameters": SCHEMA}
        tools = [{"type": "function", "function": function}]
        await rig.ask("call-c", model="policy", messages=chat, tools=tools)
        _, as_message, as_chat = rig.engine.requests
        assert as_message.prompt_ids == as_chat.prompt_ids
        spans = {str(span.attributes[c.CALL_ID]): span.attributes for span in await rig.spans()}
        for key in (c.INPUT_MESSAGES, c.TOOL_DEFINITIONS):
            recorded = [json.loads(str(spans[call_id][key])) for call_id in ("call-b", "call-c")]
            if (
                key == c.INPUT_MESSAGES
            ):  # one has the arguments in our JSON, the other in the model's
                for messages in recorded:
                    part = messages[2]["parts"][1]
                    part["arguments"] = json.loads(part["arguments"])
            assert recorded[0] == recorded[1]


async def test_a_call_without_text_has_no_text_block(store: Store) -> None:
    async with make_rig(store, CALL) as rig:
        message = await ask(rig, tools=[TOOL])
        assert [block.type for block in message.content] == ["tool_use"]
        result = {"type": "tool_result", "tool_use_id": message.content[0].id, "is_error": True}
        conversation = [
            USER,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        message = await ask(
            rig, "call-b", tools=[TOOL], tool_choice={"type": "none"}, messages=conversation
        )
        assert message.content[0].text == CALL
        function = {"name": "calculator", "arguments": {"expression": "1"}}
        called = {"id": result["tool_use_id"], "type": "function", "function": function}
        chat = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": called["id"], "content": "", "is_error": True},
        ]
        assert rig.engine.requests[1].prompt_ids == rig.tokenizer.render(chat, TOOLS)


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


async def test_an_empty_answer_is_an_empty_text(store: Store) -> None:
    async with make_rig(store, "") as rig:
        message = await ask(rig)
        assert [block.text for block in message.content] == [""]


# --- who may ask ----------------------------------------------------------------------------
@pytest.mark.parametrize("header", ["x-api-key", "Authorization"])
async def test_the_token_in_either_header(store: Store, header: str) -> None:
    async with make_rig(store, "ok") as rig, aiohttp.ClientSession() as session:
        url = f"{rig.gateway.url}/agents/team/writer/v1/messages"
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
                    "message": "unknown call token",
                    "details": {"error_code": "invalid_api_key"},
                },
                "request_id": None,
            }
        [span] = await rig.spans()
        assert span.attributes[c.AGENT_PATH] == "team/writer"


# --- streams --------------------------------------------------------------------------------
async def test_a_stream_on_the_wire(store: Store) -> None:
    """Compare all bytes, because the SDK hides pings."""
    async with make_rig(store, "ok") as rig, aiohttp.ClientSession() as session:
        request = {"model": "policy", "max_tokens": 9, "messages": [USER], "stream": True}
        headers = {"x-api-key": rig.attempt.call_token, **rig.headers("call-a")}
        url = f"{rig.gateway.url}/v1/messages"
        async with session.post(url, json=request, headers=headers) as response:
            assert response.content_type == "text/event-stream"
            text = await response.text()
        events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
        assert [name for name, _ in events] == [
            "event: message_start",
            "event: ping",
            "event: content_block_start",
            "event: content_block_delta",
            "event: content_block_delta",
            "event: content_block_stop",
            "event: message_delta",
            "event: message_stop",
        ]
        prompt, ids = rig.tokenizer.render([USER]), rig.engine.ids("ok")
        assert [json.loads(data.removeprefix("data: ")) for _, data in events] == [
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
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "o"},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "k"},
            },
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
    """`messages.stream()` assembles the same message as an unstreamed answer."""
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


async def test_a_retry_joins_the_call(store: Store) -> None:
    """A retry of the SDK during the first try causes no second generation."""
    gate = Gate()
    say = Say(text="slow", gates={0: gate})
    async with make_rig(store, lambda request: say) as rig:
        first = asyncio.ensure_future(ask(rig))
        await until(gate.reached.is_set)
        again = asyncio.ensure_future(ask(rig))
        gate.open()
        assert (await first).content == (await again).content
        assert len(rig.engine.requests) == 1


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
        ({"max_tokens": 0}, "'max_tokens' must be between 1"),
        ({"messages": []}, "'messages' must be a non-empty array"),
        ({"messages": 5}, "'messages' must be list, not 5"),
        ({"messages": [5]}, "messages[0] is of type 'int'"),
        (said(IMAGE), "messages[0].content[0] is of type 'image'"),
        (said({"type": "document"}), "'document'"),
        (
            said({"type": "tool_result", "content": [IMAGE]}),
            "messages[0].content[0].content[0] is of type 'image'",
        ),
        (
            said({"type": "text", "text": "a", "citations": []}),
            "messages[0].content[0].citations is of type 'list'",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, USER]},
            "messages[0].content[0] is of type 'thinking'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "It"}]},
            "messages[1] is the assistant's",
        ),
        ({"system": 5}, "'system' must be str or list, not 5"),
        ({"system": [IMAGE]}, "system[0] is of type 'image'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "'thinking' = "),
        ({"tools": [{"type": "web_search", "name": "a"}]}, "tools[0] is of type 'web_search"),
        ({"tools": [{"name": "a"}]}, "tools[0] needs a name and an input_schema"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "'tools[0].defer_loading' = True cannot"),
        ({"tool_choice": ANY}, "'tool_choice' = 'any' names no tool"),
        (
            {"tool_choice": {"type": "tool", "name": "b"}, "tools": [TOOL]},
            "names no tool; there are: calculator",
        ),
        ({"tool_choice": {"type": "some"}}, "'tool_choice' has the type 'some'"),
        ({"tool_choice": {"name": "b"}, "tools": [TOOL]}, "'tool_choice' has the type None"),
        ({"tool_choice": ANY, "tools": [TOOL]}, "'tool_choice' = 'any' cannot be honoured"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [TOOL]},
            "'tool_choice.disable_parallel_tool_use' = True cannot be honoured",
        ),
        ({"tools": [{**TOOL, "strict": True}]}, "'tools' = "),
        ({"output_config": {"format": JSON}}, "'output_config.format' = "),
        ({"output_format": JSON}, "'output_format' = "),
        ({"output_format": JSON, "output_config": {"format": JSON}}, "both set a format"),
        ({"output_config": {"brand_new": 1}}, "'output_config.brand_new' = 1 cannot be honoured"),
        ({"stop_sequences": [""]}, "'stop_sequences' must be"),
        ({"mcp_servers": [{"name": "x"}]}, "'mcp_servers' cannot be honoured"),
        ({"container": "c"}, "'container' cannot be honoured"),
        ({"inference_geo": "eu"}, "'inference_geo' = 'eu' cannot be honoured"),
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
        codes = {
            "shorten": c.CONTEXT_OVERFLOW,
            "'image'": c.UNSUPPORTED_CONTENT,
            "'document'": c.UNSUPPORTED_CONTENT,
        }
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


async def test_what_steers_a_providers_own_models_is_set_aside_in_val_mode(store: Store) -> None:
    fields = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}
    async with make_rig(store, "ok") as rig:
        assert (await ask(rig, extra_body=fields)).content[0].text == "ok"
        [span] = await rig.spans()
        assert json.loads(str(span.attributes[c.SAMPLING_OVERRIDES])) == {
            "output_config.effort": ["high", None],
            "thinking": [{"type": "adaptive"}, None],
        }


async def test_in_training_the_sampling_is_the_algorithms(store: Store) -> None:
    routing = Routing(rules=[Rule("writer", TRAINED)])
    async with make_rig(store, "ok", routing=routing, mode=Mode.TRAIN) as rig:
        request = {"temperature": 0.1, "top_k": 5, "inference_geo": "eu", "max_tokens": 99}
        headers = rig.headers("call-a", "writer")
        await ask(rig, extra_body=request, stop_sequences=["x"], extra_headers=headers)
        [record] = await rig.records()
        used = record.sampling
        assert (used.temperature, used.top_k, used.max_tokens, used.stop) == (0.5, 0, 40, ("x",))
        [span] = await rig.spans()
        assert json.loads(str(span.attributes[c.SAMPLING_OVERRIDES])) == {
            "inference_geo": ["eu", None],
            "temperature": [0.1, 0.5],
            "top_k": [5, 0],
            "max_tokens": [99, 40],
        }
        for refused in ({"container": "c"}, {"output_config": {"format": JSON}}):
            headers = rig.headers(f"call-{refused}", "writer")
            with pytest.raises(anthropic.BadRequestError, match="cannot be honoured"):
                await ask(rig, extra_body=refused, extra_headers=headers)


async def test_an_agent_that_is_frozen_to_an_endpoint_is_told_what_to_use(store: Store) -> None:
    endpoint = LLM(base_url="http://127.0.0.1:9/v1", model="m")
    frozen = Target(route=Route.ENDPOINT, endpoint=endpoint)
    async with make_rig(store, "ok", routing=Routing(default=frozen)) as rig:
        with pytest.raises(anthropic.BadRequestError, match="chat completions only"):
            await ask(rig)


# --- what holds an answer -------------------------------------------------------------------
STRICT: Any = {
    "type": "object",
    "properties": {"expression": {"enum": ["1", "2"]}},
    "required": ["expression"],
    "additionalProperties": False,
}
TOOL_HELD: Any = {"name": "calculator", "input_schema": STRICT, "strict": True}
CHAT_HELD: Any = {
    "type": "function",
    "function": {"name": "calculator", "parameters": STRICT, "strict": True},
}
ONE: dict[str, Any] = {"disable_parallel_tool_use": True}
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": STRICT}}
CHAT_CHOICE = {"type": "function", "function": {"name": "calculator"}}
HELD = [
    pytest.param(
        {"output_config": {"format": {"type": "json_schema", "schema": STRICT}}},
        {"response_format": CHAT_FORMAT},
        id="format",
    ),
    pytest.param(
        {"output_format": {"type": "json_schema", "schema": STRICT}},
        {"response_format": CHAT_FORMAT},
        id="format-of-the-beta",
    ),
    pytest.param(
        {"tools": [TOOL_HELD], "tool_choice": {"type": "any", **ONE}},
        {"tools": [CHAT_HELD], "tool_choice": "required", "parallel_tool_calls": False},
        id="any",
    ),
    pytest.param(
        {"tools": [TOOL_HELD], "tool_choice": {"type": "tool", "name": "calculator", **ONE}},
        {"tools": [CHAT_HELD], "tool_choice": CHAT_CHOICE, "parallel_tool_calls": False},
        id="tool",
    ),
    pytest.param({"tools": [TOOL_HELD]}, {"tools": [CHAT_HELD]}, id="strict"),
]


@pytest.mark.parametrize(("fields", "as_chat"), HELD)
async def test_what_holds_an_answer_is_what_holds_it_in_chat(
    store: Store, tiny: Path, fields: dict[str, Any], as_chat: dict[str, Any]
) -> None:
    """Both dialects have the same prompt and grammar, and the answer matches it."""
    engine: Any = TransformersEngine({"policy": tiny}, seed=0)
    await engine.start()
    rig = Rig(store, engine, load_tokenizer(tiny))
    await rig.start(Routing(default=Target(route=Route.POLICY, policy="policy")))
    try:
        message = await ask(rig, extra_body=fields)
        await rig.ask("call-b", messages=[USER], max_tokens=100, **as_chat)
        as_message, chat = sorted(await rig.records(), key=lambda record: record.call_id)
    finally:
        await rig.gateway.close()
        await engine.close()
    assert as_message.grammar == chat.grammar != ""
    assert as_message.prompt_ids == chat.prompt_ids
    [block] = message.content
    if "tool_choice" in fields:
        assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
        jsonschema.validate(block.input, STRICT)
    elif "tools" not in fields:
        jsonschema.validate(json.loads(block.text), STRICT)

"""Tests of `/v1/responses`: parsing, answers, streams, errors, records and training."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from lightspan.schema import genai_attributes, semconv as c
from lightspan.schema.genai_messages import load
from lightspan.schema.llm import LLM
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores.protocol import Store
from lightspan_testing.gateway_suite import TOOLS, Rig, make_rig
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.scripted_engine import Gate, Say
from lightspan_testing.wait import until

FUNCTION: Any = {"type": "function", **TOOLS[0]["function"]}
CALLED = (
    'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n'
    "</tool_call>"
)
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is 1?"}


async def ask(rig: Rig, call_id: str = "call-a", **fields: Any) -> Any:
    body = {"model": "policy", "input": "What is 1?", "extra_headers": rig.headers(call_id)}
    async with rig.client() as client:
        return await client.responses.create(**{**body, **fields})


async def events_of(rig: Rig, call_id: str = "call-a", **fields: Any) -> list[dict[str, Any]]:
    async with rig.client() as client:
        body = {"model": "policy", "input": "What is 1?", "extra_headers": rig.headers(call_id)}
        async with await client.responses.create(**{**body, **fields, "stream": True}) as stream:
            return [event.model_dump(exclude_unset=True) async for event in stream]


# --- what is returned -----------------------------------------------------------------------
async def test_an_answer(store: Store) -> None:
    async with make_rig(store, "It is 1.") as rig:
        response = await ask(rig, instructions="Be brief.", temperature=0.5, metadata={"a": "b"})
        ids = rig.engine.ids("It is 1.")
        prompt = rig.tokenizer.render([SYSTEM, USER])
        body = response.model_dump(exclude_unset=True)
        assert body.pop("created_at") > 1_700_000_000
        (item,) = body.pop("output")
        assert str(item.pop("id")).startswith("msg_")
        assert item == {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "It is 1.", "annotations": []}],
        }
        assert body == {
            "id": "resp_call-a",
            "object": "response",
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "instructions": "Be brief.",
            "max_output_tokens": None,
            "metadata": {"a": "b"},
            "model": "policy",
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": 0.5,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": {
                "input_tokens": len(prompt),
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": len(ids),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(prompt) + len(ids),
            },
        }
        assert response.output_text == "It is 1."
        [record] = await rig.records()
        assert (record.prompt_ids, record.response_ids) == (prompt, ids)
        assert record.sampling.temperature == 0.5


async def test_tokens_are_counted(store: Store) -> None:
    async with make_rig(store, "It is 1.") as rig, rig.client() as client:
        first = await ask(rig, instructions="Be brief.")
        request = {"model": "policy", "input": "What is 1?", "extra_headers": rig.headers("call-b")}
        counted = await client.responses.input_tokens.count(**request, instructions="Be brief.")
        assert counted.model_dump() == {
            "object": "response.input_tokens",
            "input_tokens": first.usage.input_tokens,
        }
        tools = await client.responses.input_tokens.count(**request, tools=[FUNCTION])
        assert tools.input_tokens == len(rig.tokenizer.render([USER], TOOLS))
        after = await client.responses.input_tokens.count(**request, previous_response_id=first.id)
        answer = {"role": "assistant", "content": "It is 1."}
        assert after.input_tokens == len(rig.tokenizer.render([USER, answer, USER]))
        with pytest.raises(openai.BadRequestError, match="'input' must be a non-empty text"):
            await client.responses.input_tokens.count(model="policy")
        assert len(rig.engine.requests) == len(await rig.spans()) == 1  # counting is no call


async def test_tools_and_their_outputs(store: Store) -> None:
    """Check that a conversation with tools has the same prompt tokens as in chat completions."""
    async with make_rig(store, [CALLED, "One."]) as rig:
        first = await ask(rig, tools=[FUNCTION])
        message, call = first.output
        assert message.content[0].text == "Let me see."
        assert (call.type, call.name, call.arguments) == (
            "function_call",
            "calculator",
            '{"expression": "1"}',
        )
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        sent = [USER, *(item.model_dump(exclude_unset=True) for item in first.output), output]
        second = await ask(rig, "call-b", tools=[FUNCTION], input=sent)
        assert second.output_text == "One."
        function = {"name": "calculator", "arguments": {"expression": "1"}}
        called = {"id": call.call_id, "type": "function", "function": function}
        assistant = {"role": "assistant", "content": "Let me see.", "tool_calls": [called]}
        result = {"role": "tool", "tool_call_id": call.call_id, "content": "1"}
        chat = rig.tokenizer.render([USER, assistant, result], TOOLS)
        assert rig.engine.requests[1].prompt_ids == chat


async def test_a_call_without_text_has_no_message(store: Store) -> None:
    text = CALLED.removeprefix("Let me see.\n")
    async with make_rig(store, text) as rig:
        response = await ask(rig, tools=[FUNCTION])
        assert [item.type for item in response.output] == ["function_call"]
        response = await ask(rig, "call-b", tools=[FUNCTION], tool_choice="none")
        assert response.output_text == text


async def test_an_answer_that_is_cut(store: Store) -> None:
    async with make_rig(store, "a b c d e f") as rig:
        response = await ask(rig, max_output_tokens=3)
        assert (response.status, response.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert response.usage.output_tokens == 3
        events = await events_of(rig, "call-b", max_output_tokens=3)
        assert events[-1]["type"] == "response.incomplete"


async def test_logprobs(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        response = await ask(rig, include=["message.output_text.logprobs"])
        result = response.output[0].content[0].logprobs
        assert [token.logprob for token in result] == rig.engine.logprobs(rig.engine.ids("ok"))


# --- streams --------------------------------------------------------------------------------
async def test_the_events_of_a_stream(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        events = await events_of(rig)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event["delta"] for event in events[4:6]] == ["o", "k"]
        assert events[6]["text"] == "ok"
        added, done = events[2]["item"], events[8]["item"]
        assert (added["status"], added["content"]) == ("in_progress", [])
        assert {event["item_id"] for event in events[3:8]} == {added["id"]} == {done["id"]}
        assert events[0]["response"]["status"] == "in_progress"
        assert await events_of(rig) == events  # a retry: the same answer
        assert len(rig.engine.requests) == 1
        whole = events[-1]["response"]
        assert (whole["status"], whole["output"]) == ("completed", [done])


async def test_a_stream_of_calls(store: Store) -> None:
    async with make_rig(store, CALLED) as rig:
        events = await events_of(rig, tools=[FUNCTION])
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[kinds.index("output_text.done") :] == [
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
        deltas = [event["delta"] for event in events if event["type"].endswith("text.delta")]
        assert "".join(deltas) == "Let me see."
        call = events[-2]["item"]
        assert (call["name"], call["arguments"]) == ("calculator", '{"expression": "1"}')
        assert events[-5]["item"]["arguments"] == ""
        assert {event["output_index"] for event in events[-5:-1]} == {1}


async def test_an_empty_answer_is_an_empty_message(store: Store) -> None:
    async with make_rig(store, "") as rig:
        events = await events_of(rig)
        assert [event["type"] for event in events].count("response.output_item.added") == 1
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_the_sdks_own_reading_of_a_stream(store: Store) -> None:
    """Check that `responses.stream()` accepts and assembles the events."""
    async with (
        make_rig(store, CALLED) as rig,
        rig.client() as client,
        client.responses.stream(model="policy", input="What is 1?", tools=[FUNCTION]) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_response()
        assert final.output_text == "Let me see."
        assert final.output[1].call_id.startswith("call_")


async def test_an_error_in_mid_stream(store: Store) -> None:
    say = Say(text="a b c d", errors={2: RuntimeError("broke")})
    async with make_rig(store, lambda request: say) as rig:
        with pytest.raises(openai.APIError, match="broke"):
            await events_of(rig)


# --- going on -------------------------------------------------------------------------------
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_previous_response(store: Store, restarted: bool) -> None:
    """Check that a response continues the earlier one without its instructions, also after a
    restart.
    """
    async with make_rig(store, [CALLED, "One.", "Bye."]) as rig:
        first = await ask(rig, tools=[FUNCTION], instructions="Be brief.")
        if restarted:
            await rig.restart()
        call_id = first.output[1].call_id
        output = {"type": "function_call_output", "call_id": call_id, "output": "1"}
        second = await ask(
            rig, "call-b", tools=[FUNCTION], input=[output], previous_response_id=first.id
        )
        assert second.previous_response_id == first.id
        if restarted:
            await rig.restart()
        again = {"instructions": "Be kind.", "input": "Bye!", "previous_response_id": second.id}
        await ask(rig, "call-c", **again)
        function = {"name": "calculator", "arguments": {"expression": "1"}}
        called = {"id": call_id, "type": "function", "function": function}
        messages: list[Any] = [
            USER,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": call_id, "content": "1"},
        ]
        assert rig.engine.requests[1].prompt_ids == rig.tokenizer.render(messages, TOOLS)
        messages = [
            {"role": "system", "content": "Be kind."},
            *messages,
            {"role": "assistant", "content": "One."},
            {"role": "user", "content": "Bye!"},
        ]
        assert rig.engine.requests[2].prompt_ids == rig.tokenizer.render(messages)
        last = max(await rig.spans(), key=lambda span: span.sequence_end or 0)
        roles = [message["role"] for message in load(str(last.attributes[c.INPUT_MESSAGES]))]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
        assert c.CALL_CONTEXT not in last.attributes  # the messages are whole


async def test_a_previous_response_with_a_key_is_not_gone_on_with_in_another_process(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a recorded conversation with a redacted key is not continued."""
    monkeypatch.setenv("DESK_API_KEY", "desk-7f3a9b-11aa22")
    async with make_rig(store, ["One.", "Two."]) as rig:
        first = await ask(rig, input="Is it desk-7f3a9b-11aa22?")
        second = await ask(rig, "call-b", input="So?", previous_response_id=first.id)
        assert "desk-7f3a9b-11aa22" in rig.tokenizer.decode(rig.engine.requests[1].prompt_ids)
        await rig.restart()
        with pytest.raises(openai.BadRequestError, match="held a key and was not stored") as caught:
            await ask(rig, "call-c", input="And?", previous_response_id=second.id)
        assert caught.value.code == "previous_response_not_found"


async def test_a_previous_response_that_is_not_there(store: Store) -> None:
    gate = Gate()
    texts = iter([Say(text="slow", gates={0: gate})])
    async with make_rig(store, lambda request: next(texts)) as rig:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(rig, previous_response_id="resp_nobody")
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"
        slow = asyncio.ensure_future(ask(rig, "call-slow"))
        await until(gate.reached.is_set)
        with pytest.raises(openai.BadRequestError, match="no answered response"):
            await ask(rig, "call-b", previous_response_id="resp_call-slow")
        gate.open()
        await slow


async def test_a_response_of_another_attempt_is_not_known(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        first = await ask(rig)
        rig.attempt = await rig.claim(Routing(default=Target(route=Route.POLICY, policy="policy")))
        with pytest.raises(openai.BadRequestError, match="in this attempt"):
            await ask(rig, "call-b", previous_response_id=first.id)


# --- what is refused ------------------------------------------------------------------------
IMAGE = {"type": "input_image", "image_url": "data:", "detail": "auto"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "non-empty"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]", "input_image"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "nothing to answer"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "'computer_call'"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0]", "'local_shell'"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "with a name"),
        ({"tools": [{**FUNCTION, "strict": True}]}, "tools", "cannot be honoured"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "cannot be honoured"),
        ({"text": {"brand_new": 1}}, "text.brand_new", "cannot be honoured"),
        ({"truncation": "auto"}, "truncation", "cannot be honoured"),
        ({"conversation": "conv_1"}, "conversation", "cannot be honoured"),
        ({"include": ["file_search_call.results"]}, "include", "cannot be honoured"),
        ({"instructions": 5}, "instructions", "must be str"),
        ({"input": "a b " * 600}, "input", "shorten the input"),
    ],
)
async def test_refusals_name_the_field(
    store: Store, fields: dict[str, Any], param: str, message: str
) -> None:
    async with make_rig(store, "ok") as rig:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(rig, extra_body=fields)
        error: Any = caught.value.body
        assert error["param"] == param
        assert message in error["message"]
        [span] = await rig.spans()  # refused, and recorded
        assert span.attributes[c.CALL_OUTCOME] == "error"
        assert rig.engine.requests == []


async def test_an_agent_frozen_to_an_endpoint_speaks_chat(store: Store) -> None:
    with ScriptedServer("from elsewhere") as endpoint:
        llm = LLM(base_url=endpoint.url, model="m")
        frozen = Target(route=Route.ENDPOINT, endpoint=llm)
        async with make_rig(store, "ok", routing=Routing(default=frozen)) as rig:
            with pytest.raises(openai.BadRequestError, match="set_default_openai_api"):
                await ask(rig)


# --- what is recorded -----------------------------------------------------------------------


def test_items_of_any_kind_are_recorded() -> None:
    """Check that a request to another endpoint is recorded with items of any type."""
    items = [{"role": "user", "content": [IMAGE]}, {"type": "reasoning", "summary": []}, 5]
    attributes = genai_attributes.request_attributes(
        {"model": "m", "input": items, "tools": [{"type": "mcp"}]}
    )
    text = str(attributes[c.INPUT_MESSAGES])
    assert '"modality":"image"' in text
    assert '"reasoning"' in text
    assert "mcp" in str(attributes[c.TOOL_DEFINITIONS])
    for odd in ({"input": None}, {"input": {"a": 1}}, {"input": "x", "tools": 5}):
        assert genai_attributes.request_attributes(odd)[c.OPERATION_NAME] == "chat"

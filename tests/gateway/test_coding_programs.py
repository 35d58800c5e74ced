"""Tests of requests as coding programs send them: their fields, tools and items."""

from __future__ import annotations

import json
import logging
from typing import Any

import aiohttp
import pytest

from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.routing import Route, Routing, Target, make_routing
from lightspan.schema.token_records import Sampling
from lightspan.stores.protocol import Store
from lightspan_programs import Command, system
from lightspan_testing.gateway_suite import TOOLS, Rig, make_rig
from tests.gateway.posting import post
from tests.serving.gateways import serving

TRAINED = Routing(
    default=Target(route=Route.POLICY, policy="policy", sampling=Sampling(max_tokens=100))
)
MODES = (Mode.TRAIN, Mode.VAL, Mode.DEV)
USER: Any = {"role": "user", "content": "Mend it."}
CHAT: dict[str, Any] = {"model": "policy", "messages": [USER]}
MESSAGES: dict[str, Any] = {**CHAT, "max_tokens": 9}
RESPONSE: dict[str, Any] = {"model": "policy", "input": [USER]}
EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
FIELDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/messages?beta=true", MESSAGES, {"context_management": EDITS}),
    ("/v1/messages", MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 31_999}}),
    ("/v1/messages", MESSAGES, {"thinking": {"type": "adaptive"}}),
    ("/v1/responses", RESPONSE, {"client_metadata": {"session_id": "s"}}),
    ("/v1/responses", RESPONSE, {"a_field_of_the_next_version": {"session": "s"}}),
    ("/v1/chat/completions", CHAT, {"provider": {"sort": "price"}, "trace_id": "t"}),
]


@pytest.mark.parametrize(("path", "body", "fields"), FIELDS)
async def test_fields_that_say_nothing_of_sampling_are_set_aside_in_every_mode(
    store: Store, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    for mode in MODES:
        async with make_rig(store, "ok", routing=TRAINED, mode=mode) as rig:
            status, answer = await post(rig, {**body, **fields}, path)
            assert status == 200, answer
            [span] = await rig.spans()
            asked = json.loads(str(span.attributes.get(c.SAMPLING_OVERRIDES, "{}")))
            ignored = {key: pair[0] for key, pair in asked.items() if pair[1] is None}
            assert ignored == {k: v for k, v in fields.items() if k != "client_metadata"}
    async with serving() as gateway, aiohttp.ClientSession() as session:
        sent = {**body, **fields, "model": "sql"}
        async with session.post(gateway.url + path, json=sent) as response:
            assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    "fields", [{"thinking": {"type": "enabled", "budget_tokens": 9}}, {"context_management": EDITS}]
)
async def test_tokens_of_such_requests_are_counted(store: Store, fields: dict[str, Any]) -> None:
    async with make_rig(store, "ok", routing=TRAINED, mode=Mode.VAL) as rig:
        body = {**CHAT, **fields}
        counted = await post(rig, body, "/v1/messages/count_tokens")
        assert counted == (200, {"input_tokens": len(rig.tokenizer.render([USER]))})


TITLE = "Generate a title.\nBe brief."
HEADER = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1;"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": TITLE}, USER]}),
        ("/v1/chat/completions", {"messages": [{"role": "developer", "content": TITLE}, USER]}),
        ("/v1/responses", {"input": "hi", "instructions": TITLE}),
        ("/v1/responses", {"input": [{"role": "system", "content": TITLE}, USER]}),
        (
            "/v1/messages",
            {"system": [HEADER, {"type": "text", "text": TITLE}], "messages": [USER]},
        ),
    ],
)
async def test_an_agent_is_known_by_its_system_prompt(
    store: Store, path: str, body: dict[str, Any]
) -> None:
    named = Command(["true"], agents={"title": system("Generate a title*")})
    routing = make_routing({"app": "policy"}, "shared", "policy").naming(named.agent_paths())
    limited = {**body, "max_tokens": 9} if path == "/v1/messages" else body
    async with make_rig(store, "ok", routing=routing, mode=Mode.TRAIN) as rig:
        for model in ("policy", "app"):  # the program has one name for all its calls
            status, answer = await post(rig, {**limited, "model": model}, path)
            assert status == 200, answer
        assert (await post(rig, CHAT))[0] == 200
        assert (await post(rig, {**limited, "model": "m"}, f"/agents/app{path}"))[0] == 200
        spans = await rig.spans()
        agents = [(span.attributes[c.AGENT_PATH], span.attributes[c.SELECTED]) for span in spans]
        assert agents == [("title", False), ("title", False), ("app", True), ("app", True)]


# --- tools of the Responses API -------------------------------------------------------------
GRAMMAR = 'start: "*** Begin Patch" LF /.+/'
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
FUNCTION: dict[str, Any] = {"type": "function", **TOOLS[0]["function"]}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "",
    "tools": [FUNCTION, {"type": "custom", "name": "note"}],
}
DIFF = '*** Begin Patch\n+say("ü")\n'


def called(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"Let me see.\n<tool_call>\n{call}\n</tool_call>"


async def ask(rig: Rig, *items: Any, tools: Any) -> list[dict[str, Any]]:
    body = {**RESPONSE, "input": [USER, *items], "tools": tools}
    status, answer = await post(rig, body, "/v1/responses")
    assert status == 200, answer
    return list(answer["output"])


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("apply_patch", {"input": DIFF}, {"name": "apply_patch", "input": DIFF}),
        ("agents.note", {"input": "a"}, {"namespace": "agents", "name": "note", "input": "a"}),
        (
            "agents.calculator",
            {"expression": "1"},
            {"namespace": "agents", "name": "calculator", "arguments": '{"expression": "1"}'},
        ),
        ("calculator", {"expression": "1"}, {"name": "calculator"}),
    ],
)
async def test_a_call_of_any_tool_goes_on_in_the_same_row(
    store: Store, name: str, arguments: Any, item: dict[str, Any]
) -> None:
    """Check the items of a call, and that sent back they have the tokens that were sampled."""
    tools = [AGENTS] if "." in name else [{"type": "custom", "name": "apply_patch"}, FUNCTION]
    async with make_rig(store, [called(name, arguments), "Done."], routing=TRAINED) as rig:
        message, call = await ask(rig, tools=tools)
        assert message["content"][0]["text"] == "Let me see."
        kind = "custom_tool_call" if "input" in item else "function_call"
        assert (call["type"], call["status"]) == (kind, "completed")
        assert item.items() <= call.items()
        assert ("namespace" in call) is ("namespace" in item)
        output = {"type": f"{kind}_output", "call_id": call["call_id"], "output": "ok"}
        [answer] = await ask(rig, message, call, output, tools=tools)
        assert answer["content"][0]["text"] == "Done."
        first, second = await rig.records()
        row = first.prompt_ids + first.response_ids
        assert second.prompt_ids[: len(row)] == row


async def test_the_offer_of_a_custom_tool_has_its_grammar(store: Store) -> None:
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    description = f"Edit files.\n\nThe input must match this grammar (lark):\n{GRAMMAR}"
    function = {"name": "apply_patch", "description": description, "parameters": text}
    async with make_rig(store, "ok", routing=TRAINED) as rig:
        await ask(rig, tools=[PATCH])
        offered = [{"type": "function", "function": function}]
        [record] = await rig.records()
        assert record.prompt_ids == rig.tokenizer.render([USER], offered)
        [span] = await rig.spans()
        overrides = json.loads(str(span.attributes[c.SAMPLING_OVERRIDES]))
        assert overrides["tools.apply_patch.format"] == [GRAMMAR, "in its description"]


async def test_a_call_of_a_custom_tool_without_its_input(store: Store) -> None:
    """Check that the program sees what the model wrote, so that it can refuse it."""
    async with make_rig(store, called("apply_patch", {"patch": "a"}), routing=TRAINED) as rig:
        _, call = await ask(rig, tools=[PATCH])
        assert call["input"] == '{"patch": "a"}'


async def test_the_stream_of_a_custom_call(store: Store) -> None:
    async with make_rig(store, called("apply_patch", {"input": DIFF})) as rig, rig.client() as app:
        body: Any = {**RESPONSE, "tools": [PATCH], "extra_headers": rig.headers("call-a")}
        async with await app.responses.create(**body, stream=True) as stream:
            events = [event.model_dump(exclude_unset=True) async for event in stream]
        kind = "response.custom_tool_call_input"
        shown = {e["type"]: e for e in events}
        assert shown[f"{kind}.delta"]["delta"] == shown[f"{kind}.done"]["input"] == DIFF
        added = [e["item"] for e in events if e["type"] == "response.output_item.added"][-1]
        done = shown["response.output_item.done"]["item"]
        assert added == {**done, "input": "", "status": "in_progress"}
        assert shown["response.completed"]["response"]["output"][-1] == done


async def test_a_forced_custom_tool(store: Store) -> None:
    """Check that `tool_choice` finds the tool: this engine has no grammars, so it is refused."""
    async with make_rig(store, "ok", routing=TRAINED) as rig:
        choice = {"type": "custom", "name": "apply_patch"}
        body = {**RESPONSE, "tools": [PATCH], "tool_choice": choice}
        status, answer = await post(rig, body, "/v1/responses")
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
        assert "cannot be honoured by this engine" in answer["error"]["message"]


async def test_tools_of_openais_servers_are_left_out_of_the_offer(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    search = {"type": "web_search", "external_web_access": True}
    finds = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
    remote = {"type": "mcp", "server_label": "docs", "server_url": "https://example.com"}
    caplog.set_level(logging.WARNING, "lightspan_gateway")
    async with make_rig(store, "ok", routing=TRAINED) as rig:
        for _ in range(2):
            await ask(rig, tools=[search, FUNCTION, finds, remote])
        for record in await rig.records():
            assert record.prompt_ids == rig.tokenizer.render([USER], TOOLS)
        overrides = json.loads(str((await rig.spans())[0].attributes[c.SAMPLING_OVERRIDES]))
        assert overrides["tools.web_search"] == [{"type": "web_search"}, None]
        assert overrides["tools.docs"] == [{"type": "mcp", "server_label": "docs"}, None]
        await ask(rig, tools=[search])
    names = [message.split("'")[1] for message in caplog.messages]
    assert names == ["docs", "tool_search", "web_search"]  # once each
    assert "of agent app is not offered to the model" in caplog.messages[0]


@pytest.mark.parametrize(
    ("tools", "where", "message"),
    [
        ([{"type": "local_shell"}], "tools[0]", "is of type 'local_shell'"),
        ([FUNCTION, "web_search"], "tools[1]", "is of type 'web_search'"),
        ([{"type": ["a"]}], "tools[0]", "is of type ['a']"),
        ([{"type": "custom"}], "tools[0]", "with a name"),
        ([{"type": "namespace", "name": "a"}], "tools[0]", "needs a name and an array"),
        ([{**AGENTS, "tools": [PATCH, {"type": "shell"}]}], "tools[0].tools[1]", "'shell'"),
    ],
)
async def test_other_tools_are_refused(store: Store, tools: Any, where: str, message: str) -> None:
    async with make_rig(store, "ok", routing=TRAINED) as rig:
        status, answer = await post(rig, {**RESPONSE, "tools": tools}, "/v1/responses")
        assert (status, answer["error"]["param"]) == (400, where)
        assert message in answer["error"]["message"]


async def test_reasoning_of_another_model_is_left_out(store: Store) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    async with make_rig(store, "ok", routing=TRAINED, mode=Mode.VAL) as rig:
        await ask(rig, thought, said, USER, tools=None)
        [record] = await rig.records()
        assistant = {"role": "assistant", "content": "a"}
        assert record.prompt_ids == rig.tokenizer.render([USER, assistant, USER])
        [span] = await rig.spans()
        overrides = json.loads(str(span.attributes[c.SAMPLING_OVERRIDES]))
        assert overrides["input.reasoning"] == [1, None]

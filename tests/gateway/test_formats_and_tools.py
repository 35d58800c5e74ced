"""Tests of structured answers that look like a tool call, for models with calls in plain JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lightspan.protocols.engine import EngineCapabilities, ToolParserName
from lightspan.stores.protocol import Store
from lightspan_gateway.limits import GatewayLimits
from lightspan_testing.gateway_suite import TOOLS, Rig, make_rig
from lightspan_testing.scripted_engine import ScriptedEngine, tiny_chat_tokenizer
from lightspan_torch.engine.tokenizer import TransformersTokenizer
from lightspan_vllm.engine import CAPABILITIES as VLLM_CAPABILITIES
from tests.gateway.posting import ask, post

ABLE = EngineCapabilities(exact_tokens=True, grammars="the script")
TEXT = {"type": "string"}
BARE: list[tuple[ToolParserName, str]] = [("json", "arguments"), ("llama", "parameters")]


def schema(arguments: str, name: Any) -> dict[str, Any]:
    properties = {"name": name, arguments: {"type": "object"}}
    return {"type": "object", "properties": properties, "required": [*properties]}


def in_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@asynccontextmanager
async def rig_of(store: Store, parser: ToolParserName, text: str) -> AsyncIterator[Rig]:
    tokenizer = TransformersTokenizer(tiny_chat_tokenizer().tokenizer, tool_parser=parser)
    engine = ScriptedEngine(tokenizer, lambda request: text, capabilities=ABLE)
    rig = Rig(store, engine, tokenizer)
    await rig.start()
    yield rig
    await rig.gateway.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("parser", "arguments"), BARE)
async def test_an_answer_in_a_format_is_no_call(
    store: Store, parser: ToolParserName, arguments: str, stream: bool
) -> None:
    """Check answers that look like calls: without tools, with tool choice `none`, with an
    unknown name.
    """
    text = json.dumps({"name": "multiply", arguments: {"x": 1}})
    free = in_format(schema(arguments, TEXT))
    chosen = in_format(schema(arguments, {"enum": ["multiply", "divide"]}))
    async with rig_of(store, parser, text) as rig:
        requests: list[dict[str, Any]] = [
            {"response_format": free},
            {"response_format": free, "tools": TOOLS, "tool_choice": "none"},
            {"response_format": chosen, "tools": TOOLS},
            {"response_format": {"type": "json_object"}, "tools": TOOLS},
        ]
        for number, fields in enumerate(requests):
            answer = (await rig.ask(f"call-{number}", stream=stream, **fields)).choice(0)
            assert (answer.content, answer.calls, answer.reason) == (text, [], "stop"), fields


@pytest.mark.parametrize(("parser", "arguments"), BARE)
async def test_a_call_beside_a_format_is_one(
    store: Store, parser: ToolParserName, arguments: str
) -> None:
    written = {"name": "calculator", arguments: {"expression": "1"}}
    other = in_format({"type": "object", "properties": {"answer": TEXT}})
    async with rig_of(store, parser, json.dumps(written)) as rig:
        for number, wanted in enumerate([{"type": "json_object"}, other]):
            answer = await rig.ask(f"call-{number}", response_format=wanted, tools=TOOLS)
            assert answer.choice(0).calls == [("calculator", '{"expression": "1"}')]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": in_format({"type": "object"})}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_a_format_that_vllm_is_not_trusted_with_is_refused(
    store: Store, fields: dict[str, Any], named: str
) -> None:
    """Check that the format is refused, because vLLM's masks may differ from the learner's."""
    tokenizer = tiny_chat_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda request: "free", capabilities=VLLM_CAPABILITIES)
    rig = Rig(store, engine, tokenizer)
    await rig.start()
    status, answer = await post(rig, ask(**fields))
    await rig.gateway.close()
    assert (status, answer["error"]["param"]) == (400, named)
    assert "cannot be honoured by this engine" in answer["error"]["message"]


async def test_a_gateway_s_limit_of_compiling(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, limits = threading.Event(), GatewayLimits(compile_timeout_s=0.05)
    async with make_rig(store, "{}", limits=limits, capabilities=ABLE) as rig:
        monkeypatch.setattr(rig.engine, "check_grammar", lambda *_: done.wait(10))
        status, body = await post(rig, ask(response_format={"type": "json_object"}))
        done.set()
        assert status == 400
        assert "takes over 0.05 s to compile" in body["error"]["message"]

"""Tests of LitAgentRunner, as the examples use it for debugging."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

import lightspan_agl as agl
from lightspan.errors import ConfigError
from lightspan.production.redact import map_text
from lightspan.schema.spans import SpanKind
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall

TOOLS: Any = [{"type": "function", "function": {"name": "rooms", "parameters": {"type": "object"}}}]


@agl.rollout
def books(task: Any, llm: agl.LLM, prompt_template: agl.PromptTemplate) -> float:
    text = prompt_template.format(**task)
    with openai.OpenAI(base_url=llm.endpoint, api_key="key", max_retries=0) as client:
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": text}], tools=TOOLS
        )
    return 0.5


@agl.rollout
async def emits(task: Any) -> None:
    agl.emit_reward(task["n"])


@agl.rollout
def emits_and_returns(task: Any) -> float:
    agl.emit_reward(0.25)
    return 0.5


@agl.rollout
def fails(task: Any) -> float:
    raise ValueError("no")


async def test_a_step_leaves_messages_and_the_reward() -> None:
    def answer(request: Request) -> Reply:
        return Reply(tool_calls=[ToolCall(name="rooms", call_id="c1")])

    runner = agl.LitAgentRunner[Any](agl.AgentOpsTracer())
    store = agl.InMemoryLightningStore()
    with ScriptedServer(answer) as server, runner.run_context(agent=books, store=store):
        resources: agl.NamedResources = {
            "main_llm": agl.LLM(endpoint=server.url, model="gpt"),
            "prompt": agl.PromptTemplate(template="for {n}", engine="f-string"),
        }
        rollout = await runner.step({"n": 2}, resources=resources)
    assert rollout.status == "succeeded"
    spans = await store.query_spans(rollout.rollout_id)
    assert agl.find_final_reward(spans) == 0.5
    [conversation] = agl.TraceToMessages().adapt(spans)
    user, assistant = conversation["messages"]
    assert user == {"role": "user", "content": "for 2"}
    [call] = assistant["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("c1", "rooms")
    assert conversation["tools"] == TOOLS


def vllm(request: httpx.Request) -> httpx.Response:
    """Answer as vLLM does with `return_token_ids`."""
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    if not json.loads(request.content).get("stream"):
        message = {"role": "assistant", "content": "hi you"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [7, 8]}
        return httpx.Response(
            200, json={**head, "prompt_token_ids": [1, 2, 3], "choices": [choice]}
        )
    parts = [("hi", [7], None), (" you", [8], None), ("", [], "stop")]
    chunks = [
        {
            **head,
            "object": "chat.completion.chunk",
            **({"prompt_token_ids": [1, 2, 3]} if text == "hi" else {}),
            "choices": [
                {"index": 0, "delta": {"content": text}, "finish_reason": end, "token_ids": ids}
            ],
        }
        for text, ids, end in parts
    ]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return httpx.Response(
        200, text="".join([*lines, "data: [DONE]\n\n"]), headers={"content-type": STREAM}
    )


STREAM = "text/event-stream"


@agl.rollout
def asks_vllm(task: Any) -> float:
    http = httpx.Client(transport=httpx.MockTransport(vllm))
    with openai.OpenAI(base_url="http://localhost/v1", api_key="k", http_client=http) as client:
        answer = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hello"}],
            stream=task,
            extra_body={"return_token_ids": True},
        )
        if task:
            list(answer)
    return 1.0


@pytest.mark.parametrize("streamed", [False, True])
async def test_token_ids_of_endpoints_are_recorded(streamed: bool) -> None:
    runner, store = agl.LitAgentRunner[Any](), agl.InMemoryLightningStore()
    with runner.run_context(agent=asks_vllm, store=store):
        rollout = await runner.step(streamed)
    spans = await store.query_spans(rollout.rollout_id)
    [call] = [span for span in spans if span.kind is SpanKind.LLM]
    assert call.attributes["lightspan.call.token_ids"] == "[[1,2,3],[7,8]]"
    redacted = map_text(call, str.upper)
    assert redacted.attributes["lightspan.call.token_ids"] == "[]"


async def test_emitted_rewards_and_failures() -> None:
    runner, store = agl.LitAgentRunner[Any](agl.OtelTracer()), agl.InMemoryLightningStore()
    with runner.run_context(agent=emits, store=store):
        rollout = await runner.step({"n": 0.25})
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == 0.25
    with runner.run_context(agent=emits_and_returns, store=store):
        rollout = await runner.step({})
    spans = await store.query_spans(rollout.rollout_id)
    assert [s.attributes.get("lightspan.reward.value") for s in spans][-2:] == [0.25, 0.5]
    assert agl.find_final_reward(spans) == 0.5
    with runner.run_context(agent=fails, store=store):
        rollout = await runner.step({"n": 1})
    assert rollout.status == "failed"
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) is None
    with pytest.raises(ConfigError, match="run_context"):
        await runner.step({"n": 1})

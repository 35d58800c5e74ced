"""Tests of LitAgentRunner, as the examples use it for debugging."""

from __future__ import annotations

from typing import Any

import openai
import pytest

import lightspan_agl as agl
from lightspan.errors import ConfigError
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


async def test_emitted_rewards_and_failures() -> None:
    runner, store = agl.LitAgentRunner[Any](agl.OtelTracer()), agl.InMemoryLightningStore()
    with runner.run_context(agent=emits, store=store):
        rollout = await runner.step({"n": 0.25})
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) == 0.25
    with runner.run_context(agent=fails, store=store):
        rollout = await runner.step({"n": 1})
    assert rollout.status == "failed"
    assert agl.find_final_reward(await store.query_spans(rollout.rollout_id)) is None
    with pytest.raises(ConfigError, match="run_context"):
        await runner.step({"n": 1})

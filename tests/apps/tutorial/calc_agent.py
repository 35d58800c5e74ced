"""An AutoGen agent that calculates with a tool, like that of the original's calculator example.

`python calc_agent.py` tries the agent out with the endpoint OPENAI_BASE_URL.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any, TypedDict, cast

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_core.tools import FunctionTool, StaticWorkbench
from autogen_ext.models.openai import OpenAIChatCompletionClient

import lightspan_agl as agl


class MathProblem(TypedDict):
    """A question and its result."""

    id: str
    question: str
    result: str


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def autogen_assistant_agent(
    model: str, openai_base_url: str, temperature: float, workbench: Any
) -> AssistantAgent:
    model_client = OpenAIChatCompletionClient(
        model=model,
        base_url=openai_base_url,
        api_key=os.environ.get("OPENAI_API_KEY", "token-abc123"),
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "family": ModelFamily.UNKNOWN,
            "structured_output": False,
        },
        temperature=temperature,
    )
    return AssistantAgent(
        name="calc", model_client=model_client, workbench=workbench, reflect_on_tool_use=True
    )


@agl.rollout
async def calc_agent(task: MathProblem, llm: agl.LLM) -> None:
    async with StaticWorkbench([FunctionTool(add, description="Add two numbers.")]) as workbench:
        calc_agent = autogen_assistant_agent(
            llm.model,
            llm.endpoint,
            llm.sampling_parameters.get("temperature", 0.7),
            workbench,
        )
        try:
            result = await asyncio.wait_for(
                calc_agent.run(task=f"{task['question']} Give the answer as ### ANSWER: x ###"),
                timeout=300.0,
            )
            last_message = cast(str, result.messages[-1].content)  # type: ignore[union-attr]
            found = re.search(r"###\s*ANSWER:\s*(.+?)(\s*###|$)", last_message)
            answer = found.group(1) if found else last_message
        except Exception as error:
            print("Failure:", str(error))
            answer = "None"
    # A reward that varies even with a random model.
    agl.emit_reward(1.0 if answer == str(task["result"]) else len(set(answer)) / 1000)


async def debug() -> None:
    runner = agl.LitAgentRunner[MathProblem](agl.AgentOpsTracer())
    store = agl.InMemoryLightningStore()
    resource = agl.LLM(
        endpoint=os.environ["OPENAI_BASE_URL"],
        model="gpt-4.1-nano",
        sampling_parameters={"temperature": 1.0},
    )
    made_up_task: MathProblem = {"id": "debug-1", "question": "What is 12 + 30?", "result": "42"}
    with runner.run_context(agent=calc_agent, store=store):
        rollout = await runner.step(made_up_task, resources={"main_llm": resource})
        spans = await store.query_spans(rollout.rollout_id)
        print(rollout.status, len(spans), agl.find_final_reward(spans))


if __name__ == "__main__":
    asyncio.run(debug())

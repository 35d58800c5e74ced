"""One app in several frameworks: a painter is asked for a color as structured output.

The reward is 1 for the task's color. Every model call is structured. Frameworks are imported where
they are used, because no environment has all of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

import lightspan

ENDPOINT: Any = {"base_url": "http://127.0.0.1:9/v1", "api_key": "unused"}
# More tokens than the grammar lets an answer have, white space included: an untaught model that
# drifts into white space would be cut otherwise, and its app have nothing to read a color from.
LONGEST = 400


class Paint(BaseModel):
    """The painter's structured answer."""

    color: Literal["red", "green", "blue", "white"]


def _reward(paint: Any, task: dict[str, Any]) -> float:
    return float(paint.color == task["color"])


@lightspan.rollout
def plain(task: dict[str, Any]) -> float:
    """Call the OpenAI client without a framework."""
    import openai

    with openai.OpenAI(**ENDPOINT) as client, lightspan.agent("painter"):
        answer = client.chat.completions.parse(
            model="m",
            max_tokens=LONGEST,
            messages=[{"role": "user", "content": task["question"]}],
            response_format=Paint,
        )
    return _reward(answer.choices[0].message.parsed, task)


@lightspan.rollout
def anthropic_plain(task: dict[str, Any]) -> float:
    """Call Anthropic's client without a framework."""
    import anthropic

    client = anthropic.Anthropic(base_url="http://127.0.0.1:9", api_key="unused")
    with client, lightspan.agent("painter"):
        answer = client.messages.parse(
            model="m",
            max_tokens=LONGEST,
            messages=[{"role": "user", "content": task["question"]}],
            output_format=Paint,
        )
    return _reward(answer.parsed_output, task)


@cache
def _anthropic_graph() -> Any:
    from langchain_anthropic import ChatAnthropic

    model: Any = ChatAnthropic(
        model="m", max_tokens=LONGEST, base_url="http://127.0.0.1:9", api_key="unused"
    )  # type: ignore[call-arg]
    return _graph_of(model.with_structured_output(Paint))


@lightspan.rollout
def langgraph_anthropic(task: dict[str, Any]) -> float:
    """Call LangChain's Anthropic model with a forced tool."""
    state = _anthropic_graph().invoke({"question": task["question"]})
    return _reward(state["paint"], task)


@cache
def _graph(method: Literal["json_schema", "function_calling"]) -> Any:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", max_tokens=LONGEST, **ENDPOINT)  # type: ignore[call-arg]
    return _graph_of(model.with_structured_output(Paint, method=method))


def _graph_of(structured: Any) -> Any:
    from langgraph.graph import END, START, StateGraph

    import lightspan_langgraph

    lightspan_langgraph.instrument()
    graph = StateGraph(dict)
    graph.add_node("painter", lambda state: {"paint": structured.invoke(state["question"])})
    graph.add_edge(START, "painter")
    graph.add_edge("painter", END)
    return graph.compile()


@lightspan.rollout
def langgraph(task: dict[str, Any]) -> float:
    """Run a LangChain agent with a response format."""
    state = _graph("json_schema").invoke({"question": task["question"]})
    return _reward(state["paint"], task)


@lightspan.rollout
def langgraph_tool(task: dict[str, Any]) -> float:
    """Run a LangChain agent with a forced tool."""
    state = _graph("function_calling").invoke({"question": task["question"]})
    return _reward(state["paint"], task)


@lightspan.rollout
async def autogen(task: dict[str, Any]) -> float:
    """Run an AutoGen agent with `output_content_type`."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import ModelFamily, ModelInfo
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    import lightspan_autogen

    lightspan_autogen.instrument()
    info = ModelInfo(
        vision=False,
        function_calling=True,
        json_output=True,
        family=ModelFamily.UNKNOWN,
        structured_output=True,
    )
    client = OpenAIChatCompletionClient(model="m", model_info=info, max_tokens=LONGEST, **ENDPOINT)
    painter = AssistantAgent("painter", client, system_message="", output_content_type=Paint)
    result = await painter.run(task=task["question"])
    return _reward(result.messages[-1].content, task)  # type: ignore[union-attr]


@lightspan.rollout
async def openai_agents(task: dict[str, Any]) -> float:
    """Run an agent of the OpenAI Agents SDK with `output_type`, by the Responses API."""
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner
    from openai import AsyncOpenAI

    import lightspan_openai_agents

    lightspan_openai_agents.instrument()
    painter = Agent(
        name="painter",
        output_type=Paint,
        model=OpenAIResponsesModel("m", AsyncOpenAI(**ENDPOINT)),
        model_settings=ModelSettings(max_tokens=LONGEST),
    )
    result = await Runner.run(painter, task["question"])
    return _reward(result.final_output, task)


@lightspan.rollout
def crewai(task: dict[str, Any]) -> float:
    """Run a crew with `output_pydantic`."""
    from crewai import LLM, Agent, Crew, Task

    import lightspan_crewai

    lightspan_crewai.instrument()
    llm = LLM(model="openai/m", max_tokens=LONGEST, **ENDPOINT)
    painter = Agent(role="painter", goal="Paint.", backstory="Paints.", llm=llm)
    job = Task(
        description=task["question"],
        expected_output="A color.",
        agent=painter,
        output_pydantic=Paint,
    )
    crew = Crew(agents=[painter], tasks=[job], verbose=False)
    return _reward(crew.kickoff().pydantic, task)


@cache
def _painter() -> Any:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    import lightspan_otel as otel

    otel.instrument("pydantic-ai")
    model = OpenAIChatModel("m", provider=OpenAIProvider(**ENDPOINT))
    return Agent(
        model,
        name="painter",
        output_type=NativeOutput(Paint),
        model_settings={"max_tokens": LONGEST},
    )


@lightspan.rollout
async def pydantic_ai(task: dict[str, Any]) -> float:
    """Run a Pydantic AI agent with `NativeOutput`, a response format.

    It has no adapter; the framework's spans name the agent.
    """
    return _reward((await _painter().run(task["question"])).output, task)

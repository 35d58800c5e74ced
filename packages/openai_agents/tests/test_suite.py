"""Run the adapter suite with the OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

pytest.importorskip("agents")

import agents
import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_trace_processors,
)
from agents.tool_context import ToolContext
from agents.tracing import get_trace_provider, setup
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseOutputMessage,
    ResponseOutputText,
)

from lightspan_openai_agents import _hook
from lightspan_testing.adapter_suite import (
    OTHER_MEANS,
    AdapterSuite,
    App,
    Model,
    Turn,
    broken,
    by_other_means,
    count,
    instructions,
    look,
)
from lightspan_testing.adapter_suite.scenario_runner import run_in_own_loop
from lightspan_testing.adapter_suite.scenarios import BOSS, FAILED, SCOUT, WRITER

RunOne = Callable[[Agent[Any], Any], Awaitable[Any]]
"""Function that runs an agent on an input to its end."""


class Own(agents.Model):
    """A custom model client with an SDK span for each call, like the SDK's LiteLLM client."""

    def __init__(self, answer: Callable[[Any], str]) -> None:
        self._answer = answer

    async def get_response(
        self, system_instructions: Any, input: Any, *args: Any, **more: Any
    ) -> agents.ModelResponse:
        asked = [
            {"role": "system", "content": system_instructions},
            {"role": "user", "content": str(input)},
        ]
        with agents.generation_span(model="mine", input=asked) as span:
            said = self._answer(asked)
            span.span_data.output = [{"role": "assistant", "content": said}]
        output: Any = [_message(said)]
        return agents.ModelResponse(output=output, usage=agents.Usage(), response_id=None)

    async def stream_response(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        answer = await self.get_response(*args, **more)
        response = Response(
            id="r",
            created_at=0,
            model="mine",
            object="response",
            output=answer.output,
            parallel_tool_calls=False,
            tool_choice="auto",
            tools=[],
        )
        yield ResponseCompletedEvent(
            response=response, sequence_number=0, type="response.completed"
        )


def _message(said: str) -> ResponseOutputMessage:
    part = ResponseOutputText(text=said, type="output_text", annotations=[])
    return ResponseOutputMessage(
        id="1", content=[part], role="assistant", status="completed", type="message"
    )


class Builder:
    """Build the apps of the suite's scenarios."""

    def __init__(self, model: Model, kind: type[Any]) -> None:
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
        self.client = openai.AsyncOpenAI(
            base_url=model.base_url,
            api_key=model.api_key,
            max_retries=model.max_retries,
            timeout=model.timeout_s,
            # keeps no connection, so that it can go from loop to loop
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
        )
        self.model = model
        self.kind = kind
        self.run: RunOne = _streamed if model.stream else Runner.run

    def agent(self, name: str, **more: Any) -> Agent[Any]:
        model = self.kind(self.model.name, self.client)
        return Agent(name=name, instructions=instructions(name), model=model, **more)

    def alone(self, agent: Agent[Any], tree: str, **more: Any) -> App:
        """Return an app that runs one agent, with all agents that it reaches."""

        async def run(text: str) -> Any:
            return (await self.run(agent, text)).final_output

        def in_thread(text: str) -> Any:
            return run_in_own_loop(lambda: Runner.run_sync(agent, text).final_output)

        return App(run=run, run_sync=in_thread, tree=tree, target=agent, **more)

    def several(self, run: Callable[[str], Awaitable[Any]], tree: str, *agents: Agent[Any]) -> App:
        """Return an app of plain Python that runs several agents."""
        return App(run=run, tree=tree, target=list(agents))

    # --- the table ------------------------------------------------------------------------
    def single(self) -> App:
        return self.alone(self.agent("writer"), WRITER)

    def team(self) -> App:
        writer, checker = self.agent("writer"), self.agent("checker")

        async def run(text: str) -> Any:
            draft = await self.run(writer, text)
            return await self.run(checker, f"{text}: {draft.final_output}")

        tree = """
            invoke_agent writer @writer
              chat @writer
            invoke_agent checker @checker
              chat @checker
        """
        return self.several(run, tree, writer, checker)

    def nested(self) -> App:
        inner = [self.agent(name) for name in ("writer", "checker")]
        tools = [agent.as_tool(agent.name, "Ask.") for agent in inner]
        drafting, judge = self.agent("drafting", tools=tools), self.agent("judge")

        async def run(text: str) -> Any:
            draft = await self.run(drafting, text)
            return await self.run(judge, f"{text}: {draft.final_output}")

        tree = """
            invoke_agent drafting @drafting
              chat @drafting
              execute_tool writer @drafting
                invoke_agent writer @drafting/writer
                  chat @drafting/writer
              chat @drafting
              execute_tool checker @drafting
                invoke_agent checker @drafting/checker
                  chat @drafting/checker
              chat @drafting
            invoke_agent judge @judge
              chat @judge
        """
        app = self.several(run, tree, drafting, judge)
        asks = [Turn(calls=[(agent.name, '{"input": "for {task}"}')]) for agent in inner]
        return replace(app, says={"drafting": [*asks, "A draft of {task}."]})

    def parallel(self) -> App:
        names = ("planner", "left", "right", "joiner")
        planner, left, right, joiner = everybody = [self.agent(name) for name in names]

        async def run(text: str) -> Any:
            await self.run(planner, text)
            await asyncio.gather(self.run(left, text), self.run(right, text))
            return await self.run(joiner, text)

        tree = "\n".join(f"invoke_agent {name} @{name}\n  chat @{name}" for name in names)
        return self.several(run, tree, *everybody)

    def tools(self) -> App:
        return self.alone(self.agent("scout", tools=[function_tool(look)]), SCOUT)

    def parallel_tools(self) -> App:
        tree = """
            invoke_agent scout @scout
              chat @scout
              execute_tool look @scout
              execute_tool count @scout
              chat @scout
        """
        tools = [function_tool(look), function_tool(count)]
        return self.alone(self.agent("scout", tools=tools), tree)

    def handoff(self) -> App:
        tree = """
            invoke_agent triage @triage
              chat @triage
              handoff @triage
            invoke_agent expert @expert
              chat @expert
        """
        return self.alone(self.agent("triage", handoffs=[self.agent("expert")]), tree)

    def agent_as_tool(self) -> App:
        expert = self.agent("expert", tools=[function_tool(look)])
        asks = Turn(calls=[("expert", '{"input": "help with {task}"}')])
        boss = self.agent("boss", tools=[expert.as_tool("expert", "Ask the expert.")])
        return self.alone(boss, BOSS, says={"boss": [asks, "Thanks: {task}."]})

    def same_name(self) -> App:
        tree = """
            invoke_agent writer @writer
              chat @writer
              execute_tool ask @writer
                invoke_agent writer @writer/writer
                  chat @writer/writer
              chat @writer
        """
        asks = Turn(calls=[("ask", '{"input": "help with {task}"}')])
        outer = self.agent("writer", tools=[self.agent("writer").as_tool("ask", "Ask.")])
        return self.alone(outer, tree, says={"writer": [asks, "A text for {task}."]})

    def unicode(self) -> App:
        name = "Prüferin日本"
        return self.alone(self.agent(name), f"invoke_agent {name} @{name}\n  chat @{name}")

    def tool_error(self) -> App:
        tree = """
            invoke_agent scout @scout
              chat @scout
              execute_tool broken @scout error
              chat @scout
        """
        return self.alone(self.agent("scout", tools=[function_tool(broken)]), tree)

    def model_error(self) -> App:
        return self.alone(self.agent("writer"), FAILED, raises=openai.APIStatusError)

    def retry(self) -> App:
        return self.single()

    def timeout(self) -> App:
        return self.alone(self.agent("writer"), FAILED, raises=openai.APITimeoutError)

    def cancelled(self) -> App:
        return self.alone(self.agent("writer"), FAILED)

    def own(self, scenario: str) -> App:
        model = Own(by_other_means(scenario, self.model))
        writer = Agent(name="writer", instructions=instructions("writer"), model=model)
        return self.alone(writer, OTHER_MEANS[scenario])


async def _streamed(agent: Agent[Any], text: Any) -> Any:
    result = Runner.run_streamed(agent, text)
    async for _ in result.stream_events():
        pass
    return result


class TestChatCompletions(AdapterSuite):
    framework = "openai_agents"
    notes_starts = (_hook, "begin")
    kind: ClassVar[type[Any]] = OpenAIChatCompletionsModel

    @pytest.fixture(autouse=True)
    def _no_uploads(self) -> None:
        set_trace_processors([])

    def build(self, scenario: str, model: Model) -> App:
        builder = Builder(model, self.kind)
        built: App = (
            builder.own(scenario) if scenario in OTHER_MEANS else getattr(builder, scenario)()
        )
        return built

    def patched(self) -> Mapping[str, Any]:
        provider: Any = get_trace_provider()
        return {
            "provider": setup.GLOBAL_TRACE_PROVIDER,
            "processors": provider._multi_processor._processors,
            "tool context": vars(ToolContext)["from_agent_context"],
        }

    silent_environment: ClassVar[Mapping[str, str]] = {
        "OTEL_SDK_DISABLED": "true",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }

    program_root = "invoke_workflow Agent workflow"
    program = """
    import sys
    from agents import Agent, OpenAIChatCompletionsModel, Runner
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=sys.argv[1], api_key="key")
    model = OpenAIChatCompletionsModel("m", client)
    writer = Agent(name="writer", instructions="You are writer.", model=model)
    print(Runner.run_sync(writer, sys.argv[2]).final_output)
    """

    def openinference(self) -> AbstractContextManager[Any]:
        from tests.adapters.fixtures import openinference

        return openinference("openai_agents.OpenAIAgentsInstrumentor", "openai.OpenAIInstrumentor")


class TestResponses(TestChatCompletions):
    """Run the same tests with the Responses API, including that of the gateway."""

    kind = OpenAIResponsesModel
    program = TestChatCompletions.program.replace("ChatCompletionsModel", "ResponsesModel")

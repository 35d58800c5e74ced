"""Strands Agents, known by its own spans."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider

from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.scenarios import App, Model, broken, count, instructions, look
from tests.frameworks.suite import FrameworkSuite, columns

strands = pytest.importorskip("strands")

from strands import Agent, tool  # noqa: E402
from strands.models.openai import OpenAIModel  # noqa: E402
from strands.models.openai_responses import OpenAIResponsesModel  # noqa: E402
from strands.multiagent import Swarm  # noqa: E402
from strands.telemetry.tracer import get_tracer  # noqa: E402


class Builder:
    def __init__(self, model: Model, kind: Any = OpenAIModel) -> None:
        client = {
            "base_url": model.base_url,
            "api_key": model.api_key,
            "max_retries": model.max_retries,
        }
        self.model = kind(client_args=client, model_id=model.name)
        self.stream = model.stream

    def agent(self, name: str, tools: Sequence[Any] = ()) -> Any:
        return Agent(
            model=self.model,
            name=name,
            system_prompt=instructions(name),
            tools=list(tools),
            callback_handler=None,
            load_tools_from_directory=False,
        )

    async def run(self, agent: Any, text: str) -> str:
        if not self.stream:
            return str(await agent.invoke_async(text))
        return str([event async for event in agent.stream_async(text)][-1])

    def alone(self, agent: Any, tree: str, **more: Any) -> App:
        return App(
            run=lambda text: self.run(agent, text),
            run_sync=lambda text: str(agent(text)),
            tree=tree,
            concurrent=False,
            **more,
        )

    # --- the table ------------------------------------------------------------------------
    def single(self) -> App:
        return self.alone(self.agent("writer"), "invoke_agent writer @writer\n  chat @writer")

    def parallel(self) -> App:
        names = ("planner", "left", "right", "joiner")
        planner, left, right, joiner = (self.agent(name) for name in names)

        async def run(text: str) -> Any:
            await self.run(planner, text)
            await asyncio.gather(self.run(left, text), self.run(right, text))
            return await self.run(joiner, text)

        tree = "\n".join(f"invoke_agent {name} @{name}\n  chat @{name}" for name in names)
        return App(run=run, tree=tree, concurrent=False)

    def parallel_tools(self) -> App:
        tree = """
            invoke_agent scout @scout
              chat @scout
              execute_tool look @scout
              execute_tool count @scout
              chat @scout
        """
        return self.alone(self.agent("scout", [tool(look), tool(count)]), tree)

    def agent_as_tool(self) -> App:
        inner = self.agent("expert", [tool(look)])

        @tool
        async def expert(task: str) -> str:
            """Ask the expert."""
            return str(await inner.invoke_async(task))

        tree = """
            invoke_agent boss @boss
              chat @boss
              execute_tool expert @boss
                invoke_agent expert @boss/expert
                  chat @boss/expert
                  execute_tool look @boss/expert
                  chat @boss/expert
              chat @boss
        """
        return self.alone(self.agent("boss", [expert]), tree)

    def handoff(self) -> App:
        """Two agents of a swarm, which has no name of its own."""
        agents = [self.agent("triage"), self.agent("expert", [tool(look)])]
        swarm = Swarm(agents, entry_point=agents[0])

        async def run(text: str) -> str:
            if not self.stream:
                return str(await swarm.invoke_async(text))
            return str([event async for event in swarm.stream_async(text)][-1])

        tree = """
            invoke_agent triage @triage
              chat @triage
              execute_tool handoff_to_agent @triage
              chat @triage
            invoke_agent expert @expert
              chat @expert
              execute_tool look @expert
              chat @expert
        """
        to = '{"agent_name": "expert", "message": "{task}"}'
        looks = Turn(calls=[("look", '{"what": "seven"}')])
        says = {
            "triage": [Turn(calls=[("handoff_to_agent", to)]), "Handed off: {task}."],
            "expert": [looks, "Done: {task}."],
        }
        return App(
            run=run, run_sync=lambda text: str(swarm(text)), tree=tree, says=says, concurrent=False
        )

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
        return self.alone(self.agent("scout", [tool(broken)]), tree)

    def model_error(self) -> App:
        tree = "invoke_agent writer @writer error\n  chat @writer error"
        return self.alone(self.agent("writer"), tree, raises=openai.APIStatusError)


class TestStrands(FrameworkSuite):
    name = "strands-agents"
    tells_messages = False
    kind: Any = OpenAIModel

    def build(self, scenario: str, model: Model) -> App:
        built: App = getattr(Builder(model, self.kind), scenario)()
        return built

    @contextmanager
    def telling(self, provider: TracerProvider) -> Iterator[None]:
        """The global one would be this, when its tracer is made; that can be once in a process."""
        tracer = get_tracer()
        before, tracer.tracer = tracer.tracer, provider.get_tracer(tracer.service_name)
        try:
            yield
        finally:
            tracer.tracer = before

    def patched(self) -> Any:
        return get_tracer().tracer


class TestResponses(TestStrands, responses=True):
    """The same with the Responses API."""

    kind: Any = OpenAIResponsesModel


pytest_generate_tests = columns

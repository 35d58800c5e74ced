"""Agno, known by the spans of OpenInference's instrumentation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider

from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.scenarios import App, Model, count, instructions, look
from tests.frameworks.suite import FrameworkSuite, columns

agno = pytest.importorskip("agno")
instrumentation = pytest.importorskip("openinference.instrumentation.agno")

from agno.agent import Agent  # noqa: E402
from agno.models.openai import OpenAIChat, OpenAIResponses  # noqa: E402
from agno.team import Team  # noqa: E402


class Builder:
    def __init__(self, model: Model, kind: Any = OpenAIChat) -> None:
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
        http = openai.DefaultAsyncHttpxClient(limits=limits)
        given: Any = {
            "base_url": model.base_url,
            "api_key": model.api_key,
            "max_retries": model.max_retries,
        }
        self.url = model.base_url
        self.given = given
        self.model = kind(id=model.name, **given)
        self.model.async_client = openai.AsyncOpenAI(**given, http_client=http)
        self.stream = model.stream

    def agent(self, name: str, tools: Sequence[Any] = ()) -> Any:
        return Agent(
            name=name,
            model=self.model,
            instructions=instructions(name),
            tools=list(tools),
            telemetry=False,
        )

    async def run(self, agent: Any, text: str) -> str:
        if not self.stream:
            return str((await agent.arun(text)).content)
        return "".join([str(event.content) async for event in agent.arun(text, stream=True)])

    def alone(self, agent: Any, tree: str, **more: Any) -> App:
        return App(
            run=lambda text: self.run(agent, text),
            run_sync=lambda text: str(agent.run(text).content),
            tree=tree,
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
        return App(run=run, tree=tree)

    def parallel_tools(self) -> App:
        tree = """
            invoke_agent scout @scout
              chat @scout
              execute_tool look @scout
              execute_tool count @scout
              chat @scout
        """
        return self.alone(self.agent("scout", [look, count]), tree)

    def agent_as_tool(self) -> App:
        """A member of a team; it runs when the tool by which it is asked has ended."""
        boss = Team(
            members=[self.agent("expert", [look])],
            name="boss",
            model=self.model,
            instructions=instructions("boss"),
            telemetry=False,
        )
        tree = """
            invoke_agent boss @boss
              chat @boss
              execute_tool delegate_task_to_member @boss
              invoke_agent expert @boss/expert
                chat @boss/expert
                execute_tool look @boss/expert
                chat @boss/expert
              chat @boss
        """
        asks = '{"member_id": "expert", "task": "help with {task}"}'
        says = {"boss": [Turn(calls=[("delegate_task_to_member", asks)]), "Thanks: {task}."]}
        return self.alone(boss, tree, says=says)

    def handoff(self) -> App:
        """A team whose member answers in its place."""
        team = Team(
            members=[self.agent("expert", [look])],
            name="triage",
            model=self.model,
            instructions=instructions("triage"),
            respond_directly=True,
            telemetry=False,
        )
        tree = """
            invoke_agent triage @triage
              chat @triage
              execute_tool delegate_task_to_member @triage
              invoke_agent expert @triage/expert
                chat @triage/expert
                execute_tool look @triage/expert
                chat @triage/expert
        """
        asks = '{"member_id": "expert", "task": "help with {task}"}'
        looks = Turn(calls=[("look", '{"what": "seven"}')])
        says = {
            "triage": [Turn(calls=[("delegate_task_to_member", asks)])],
            "expert": [looks, "Done: {task}."],
        }
        return self.alone(team, tree, says=says)

    def unicode(self) -> App:
        name = "Prüferin日本"
        return self.alone(self.agent(name), f"invoke_agent {name} @{name}\n  chat @{name}")


class TestAgno(FrameworkSuite):
    name = "agno"
    kind: Any = OpenAIChat

    def build(self, scenario: str, model: Model) -> App:
        built: App = getattr(Builder(model, self.kind), scenario)()
        return built

    @contextmanager
    def telling(self, provider: TracerProvider) -> Iterator[None]:
        instrumentor = instrumentation.AgnoInstrumentor()
        instrumentor.instrument(tracer_provider=provider)
        try:
            yield
        finally:
            instrumentor.uninstrument()

    def patched(self) -> Any:
        return instrumentation.AgnoInstrumentor().is_instrumented_by_opentelemetry


class TestResponses(TestAgno, responses=True):
    """The same with the Responses API."""

    kind: Any = OpenAIResponses


pytest_generate_tests = columns

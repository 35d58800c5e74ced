"""Microsoft's Agent Framework, known by its own spans."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider

from lightspan.capture.patch import Patch
from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.scenarios import App, Model, broken, count, instructions, look
from tests.frameworks.suite import FrameworkSuite, columns

agent_framework = pytest.importorskip("agent_framework")

from agent_framework import Agent, observability, tool  # noqa: E402
from agent_framework.openai import (  # noqa: E402
    OpenAIChatClient,
    OpenAIChatCompletionClient,
)
from agent_framework.orchestrations import HandoffBuilder  # noqa: E402


class Builder:
    def __init__(self, model: Model, kind: Any = OpenAIChatCompletionClient) -> None:
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
        client = openai.AsyncOpenAI(
            base_url=model.base_url,
            api_key=model.api_key,
            max_retries=model.max_retries,
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
        )
        # by the Responses API it would leave the conversation at the endpoint
        self.options = {"store": False} if kind is OpenAIChatClient else {}
        self.client = kind(model=model.name, async_client=client)
        self.stream = model.stream

    def agent(self, name: str, tools: Sequence[Any] = (), **more: Any) -> Any:
        return Agent(
            self.client,
            instructions(name),
            name=name,
            description="Ask it.",
            tools=list(tools),
            default_options=self.options,
            **more,
        )

    async def run(self, agent: Any, text: str) -> str:
        if not self.stream:
            return str((await agent.run(text)).text)
        return "".join([str(part.text) async for part in agent.run(text, stream=True)])

    def alone(self, agent: Any, tree: str, **more: Any) -> App:
        return App(run=lambda text: self.run(agent, text), tree=tree, **more)

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
        return self.alone(self.agent("scout", [tool(look), tool(count)]), tree)

    def handoff(self) -> App:
        """Two agents of a workflow, which is in no path; it ends by asking the user. The tool by
        which the first hands over never runs."""
        alone = {"require_per_service_call_history_persistence": True}
        triage = self.agent("triage", **alone)
        expert = self.agent("expert", [tool(look)], **alone)

        async def run(text: str) -> Any:
            workflow = (
                HandoffBuilder(participants=[triage, expert]).with_start_agent(triage).build()
            )
            if not self.stream:
                return await workflow.run(text)
            return [event async for event in workflow.run(text, stream=True)][-1]

        tree = """
            invoke_agent triage @triage
              chat @triage
            invoke_agent expert @expert
              chat @expert
              execute_tool look @expert
              chat @expert
        """
        looks = Turn(calls=[("look", '{"what": "seven"}')])
        says = {
            "triage": [Turn(calls=[("handoff_to_expert", "{}")])],
            "expert": [looks, "Done: {task}."],
        }
        return App(run=run, tree=tree, says=says)

    def agent_as_tool(self) -> App:
        expert = self.agent("expert", [tool(look)]).as_tool(name="expert", arg_name="task")
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
        raises = agent_framework.exceptions.ChatClientException
        return self.alone(self.agent("writer"), tree, raises=raises)


class TestAgentFramework(FrameworkSuite):
    name = "agent-framework"
    kind: Any = OpenAIChatCompletionClient

    def build(self, scenario: str, model: Model) -> App:
        built: App = getattr(Builder(model, self.kind), scenario)()
        return built

    @contextmanager
    def telling(self, provider: TracerProvider) -> Iterator[None]:
        """The global one would be this; that can be set once in a process."""
        patch = Patch(
            observability,
            "get_tracer",
            lambda patch: lambda *names, **more: provider.get_tracer("agent_framework"),
        )
        try:
            yield
        finally:
            patch.undo()

    def patched(self) -> Any:
        return observability.get_tracer

    def saying(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(observability.OBSERVABILITY_SETTINGS, "enable_sensitive_data", True)


class TestResponses(TestAgentFramework, responses=True):
    """The same with the Responses API."""

    kind: Any = OpenAIChatClient


pytest_generate_tests = columns

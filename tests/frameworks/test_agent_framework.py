"""Test Microsoft's Agent Framework, which is known by its own spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from lightspan.capture.patch import Patch
from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.scenarios import BOSS, LOOK, App, Model, instructions, look
from tests.frameworks.builder import AppBuilder, client
from tests.frameworks.framework_pages import calls, check_page
from tests.frameworks.suite import FrameworkSuite, columns

agent_framework = pytest.importorskip("agent_framework")

from agent_framework import Agent, observability, tool  # noqa: E402
from agent_framework.openai import (  # noqa: E402
    OpenAIChatClient,
    OpenAIChatCompletionClient,
)
from agent_framework.orchestrations import HandoffBuilder  # noqa: E402


class Builder(AppBuilder):
    raises = agent_framework.exceptions.ChatClientException

    def __init__(self, model: Model, kind: Any = OpenAIChatCompletionClient) -> None:
        # by the Responses API it would leave the conversation at the endpoint
        self.options = {"store": False} if kind is OpenAIChatClient else {}
        self.client = kind(model=model.name, async_client=client(model))
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

    def tool(self, function: Callable[..., Any]) -> Any:
        return tool(function)

    # --- the table ------------------------------------------------------------------------

    def handoff(self) -> App:
        """Return a workflow of two agents, which adds no name to the path and ends by asking the
        user.

        The tool by which the first agent hands over is never executed.
        """
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
        says = {
            "triage": [Turn(calls=[("handoff_to_expert", "{}")])],
            "expert": [LOOK, "Done: {task}."],
        }
        return App(run=run, tree=tree, says=says)

    def agent_as_tool(self) -> App:
        expert = self.agent("expert", [tool(look)]).as_tool(name="expert", arg_name="task")
        return self.alone(self.agent("boss", [expert]), BOSS)


class TestAgentFramework(FrameworkSuite):
    name = "agent-framework"
    builder = Builder
    kind: Any = OpenAIChatCompletionClient

    @contextmanager
    def telling(self, provider: TracerProvider) -> Iterator[None]:
        """Let the framework use `provider`, as if it were the global one, which can be set only
        once.
        """
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
    """Run the same tests with the Responses API."""

    kind: Any = OpenAIChatClient


def test_the_page(tmp_path: Path) -> None:
    check_page("agent-framework", tmp_path, [calls("ask_expert", task="6 x 7"), "42", "42 euros."])


pytest_generate_tests = columns

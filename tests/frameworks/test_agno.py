"""Test Agno, which is known by the spans of OpenInference's instrumentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.scenarios import LOOK, App, Model, instructions, look
from tests.frameworks.builder import AppBuilder, client
from tests.frameworks.framework_pages import calls, check_page
from tests.frameworks.suite import FrameworkSuite, columns

agno = pytest.importorskip("agno")
instrumentation = pytest.importorskip("openinference.instrumentation.agno")

from agno.agent import Agent  # noqa: E402
from agno.models.openai import OpenAIChat, OpenAIResponses  # noqa: E402
from agno.team import Team  # noqa: E402


class Builder(AppBuilder):
    def __init__(self, model: Model, kind: Any = OpenAIChat) -> None:
        self.model = kind(id=model.name, base_url=model.base_url, api_key=model.api_key)
        self.model.max_retries = model.max_retries
        self.model.async_client = client(model)
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

    def sync_of(self, agent: Any) -> Callable[[str], Any]:
        return lambda text: str(agent.run(text).content)

    def team(self, name: str, **more: Any) -> Any:
        """Return a team with a member `expert`."""
        return Team(
            members=[self.agent("expert", [look])],
            name=name,
            model=self.model,
            instructions=instructions(name),
            telemetry=False,
            **more,
        )

    # --- the table ------------------------------------------------------------------------

    def agent_as_tool(self) -> App:
        """Return an app whose team calls a member, which runs after the end of the tool call."""
        boss = self.team("boss")
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
        """Return an app whose team lets a member answer in its place."""
        triage = self.team("triage", respond_directly=True)
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
        says = {
            "triage": [Turn(calls=[("delegate_task_to_member", asks)])],
            "expert": [LOOK, "Done: {task}."],
        }
        return self.alone(triage, tree, says=says)


class TestAgno(FrameworkSuite):
    name = "agno"
    builder = Builder
    instrumentor = "agno.AgnoInstrumentor"
    kind: Any = OpenAIChat

    def patched(self) -> Any:
        return instrumentation.AgnoInstrumentor().is_instrumented_by_opentelemetry


class TestResponses(TestAgno, responses=True):
    """Run the same tests with the Responses API."""

    kind: Any = OpenAIResponses


def test_the_page(tmp_path: Path) -> None:
    asks = calls("delegate_task_to_member", member_id="expert", task="6 x 7")
    check_page("agno", tmp_path, [asks, "42", "42 euros."])


pytest_generate_tests = columns

"""Test Strands Agents, which is known by its own spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider

from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.scenarios import BOSS, LOOK, App, Model, instructions, look
from tests.frameworks.builder import AppBuilder
from tests.frameworks.framework_pages import calls, check_page
from tests.frameworks.suite import FrameworkSuite, columns

strands = pytest.importorskip("strands")

from strands import Agent, tool  # noqa: E402
from strands.models.openai import OpenAIModel  # noqa: E402
from strands.models.openai_responses import OpenAIResponsesModel  # noqa: E402
from strands.multiagent import Swarm  # noqa: E402
from strands.telemetry.tracer import get_tracer  # noqa: E402


class Builder(AppBuilder):
    concurrent = False
    raises = openai.APIStatusError

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

    def sync_of(self, agent: Any) -> Callable[[str], Any]:
        return lambda text: str(agent(text))

    def tool(self, function: Callable[..., Any]) -> Any:
        return tool(function)

    # --- the table ------------------------------------------------------------------------

    def agent_as_tool(self) -> App:
        inner = self.agent("expert", [tool(look)])

        @tool
        async def expert(task: str) -> str:
            """Ask the expert."""
            return str(await inner.invoke_async(task))

        return self.alone(self.agent("boss", [expert]), BOSS)

    def handoff(self) -> App:
        """Return an app with a swarm of two agents, which has no name."""
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
        says = {
            "triage": [Turn(calls=[("handoff_to_agent", to)]), "Handed off: {task}."],
            "expert": [LOOK, "Done: {task}."],
        }
        return App(
            run=run, run_sync=lambda text: str(swarm(text)), tree=tree, says=says, concurrent=False
        )


class TestStrands(FrameworkSuite):
    name = "strands-agents"
    builder = Builder
    tells_messages = False
    kind: Any = OpenAIModel

    @contextmanager
    def telling(self, provider: TracerProvider) -> Iterator[None]:
        """Let Strands use `provider`, as if it were the global one when the tracer is made."""
        tracer = get_tracer()
        before, tracer.tracer = tracer.tracer, provider.get_tracer(tracer.service_name)
        try:
            yield
        finally:
            tracer.tracer = before

    def patched(self) -> Any:
        return get_tracer().tracer


class TestResponses(TestStrands, responses=True):
    """Run the same tests with the Responses API."""

    kind: Any = OpenAIResponsesModel


def test_the_page(tmp_path: Path) -> None:
    check_page("strands", tmp_path, [calls("ask_expert", question="6 x 7"), "42", "42 euros."])


pytest_generate_tests = columns

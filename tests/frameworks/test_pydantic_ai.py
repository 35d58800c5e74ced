"""Test Pydantic AI, which is known by its own spans."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.scenario_runner import run_in_own_loop
from lightspan_testing.adapter_suite.scenarios import BOSS, App, Model, broken, instructions, look
from tests.frameworks.builder import AppBuilder, client
from tests.frameworks.framework_pages import calls, check_page
from tests.frameworks.suite import FrameworkSuite, columns

pydantic_ai = pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent, Tool  # noqa: E402
from pydantic_ai.exceptions import ModelHTTPError  # noqa: E402
from pydantic_ai.models.instrumented import InstrumentationSettings  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402


class Builder(AppBuilder):
    """Build agents of Pydantic AI, which share one client."""

    raises = ModelHTTPError

    def __init__(self, model: Model, kind: Callable[..., Any]) -> None:
        self.asked = kind(model.name, provider=OpenAIProvider(openai_client=client(model)))
        self.stream = model.stream

    def agent(self, name: str, tools: Sequence[Any] = ()) -> Any:
        return Agent(
            self.asked, name=name, instructions=instructions(name), tools=list(tools), retries=2
        )

    async def run(self, agent: Any, text: str) -> str:
        if not self.stream:
            return str((await agent.run(text)).output)
        async with agent.run_stream(text) as streamed:
            parts = [part async for part in streamed.stream_text(delta=True)]
        return "".join(parts)

    def sync_of(self, agent: Any) -> Callable[[str], Any]:
        return lambda text: run_in_own_loop(lambda: agent.run_sync(text))

    # --- the table ------------------------------------------------------------------------

    def team(self) -> App:
        writer, checker = self.agent("writer"), self.agent("checker")

        async def run(text: str) -> Any:
            return await self.run(checker, f"{text}: {await self.run(writer, text)}")

        tree = """
            invoke_agent writer @writer
              chat @writer
            invoke_agent checker @checker
              chat @checker
        """
        return App(run=run, tree=tree)

    def agent_as_tool(self) -> App:
        inner = self.agent("expert", [look])

        async def expert(task: str) -> str:
            """Ask the expert."""
            return str((await inner.run(task)).output)

        return self.alone(self.agent("boss", [expert]), BOSS)

    def same_name(self) -> App:
        inner = self.agent("writer")

        async def ask(task: str) -> str:
            """Ask."""
            return str((await inner.run(task)).output)

        tree = """
            invoke_agent writer @writer
              chat @writer
              execute_tool ask @writer
                invoke_agent writer @writer/writer
                  chat @writer/writer
              chat @writer
        """
        asks = Turn(calls=[("ask", '{"task": "help with {task}"}')])
        says = {"writer": [asks, "A text for {task}."]}
        return self.alone(self.agent("writer", [ask]), tree, says=says)

    def tool_error(self) -> App:
        tree = """
            invoke_agent scout @scout error
              chat @scout
              execute_tool broken @scout error
        """
        return self.alone(self.agent("scout", [Tool(broken)]), tree, raises=LookupError)


class TestChat(FrameworkSuite):
    name = "pydantic-ai"
    builder = Builder
    kind: Any = OpenAIChatModel

    @contextmanager
    def telling(self, provider: TracerProvider) -> Iterator[None]:
        Agent.instrument_all(InstrumentationSettings(tracer_provider=provider))
        try:
            yield
        finally:
            Agent.instrument_all(False)

    def patched(self) -> Any:
        return Agent._instrument_default


class TestResponses(TestChat):
    """Run the same tests with the Responses API, including that of the gateway."""

    kind = OpenAIResponsesModel


PROGRAM = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
import lightspan_otel as otel
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import ScriptedServer

def trace_it():
    trace.set_tracer_provider(TracerProvider())
    if sys.argv[2] == "on":
        Agent.instrument_all()

steps = [trace_it, lambda: otel.instrument("pydantic-ai")]
for step in steps if sys.argv[1] == "before" else reversed(steps):
    step()
with ScriptedServer("said") as server:
    provider = OpenAIProvider(base_url=server.url, api_key="key")
    agent = Agent(OpenAIChatModel("m", provider=provider), name="writer")

    @agent.instructions
    def look() -> str:
        return "Write."

    with captured() as attempt, trace.get_tracer("app").start_as_current_span("request"):
        agent.run_sync("hello")
print(attempt.tree)
"""


@pytest.mark.parametrize("telemetry", ["on", "off"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_apps_global_provider_is_heard_whenever_it_is_set(order: str, telemetry: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, order, telemetry], capture_output=True, text=True
    )
    assert done.stdout == "['invoke_agent writer @writer', '  chat m @writer']\n", done.stderr


def test_the_page(tmp_path: Path) -> None:
    check_page("pydantic-ai", tmp_path, [calls("ask_expert", question="6 x 7"), "42", "42 euros."])


pytest_generate_tests = columns

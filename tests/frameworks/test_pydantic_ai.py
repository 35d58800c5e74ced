"""Pydantic AI, known by its spans."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider

from lightspan.capture import sdk_instrumentation
from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.scenarios import App, Model, broken, count, instructions, look
from tests.frameworks.suite import FrameworkSuite, columns

pydantic_ai = pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent, Tool  # noqa: E402
from pydantic_ai.exceptions import ModelHTTPError  # noqa: E402
from pydantic_ai.models.instrumented import InstrumentationSettings  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402


class Builder:
    """Agents of Pydantic AI, one client for all."""

    def __init__(self, model: Model, kind: Callable[..., Any]) -> None:
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_keepalive_connections=0)
        client = openai.AsyncOpenAI(
            base_url=model.base_url,
            api_key=model.api_key,
            max_retries=model.max_retries,
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
        )
        self.asked = kind(model.name, provider=OpenAIProvider(openai_client=client))
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

    def alone(self, agent: Any, tree: str, **more: Any) -> App:
        def run_sync(text: str) -> Any:
            return _sync(lambda: agent.run_sync(text))

        return App(run=lambda text: self.run(agent, text), run_sync=run_sync, tree=tree, **more)

    def several(self, run: Callable[[str], Awaitable[Any]], tree: str) -> App:
        return App(run=run, tree=tree)

    # --- the table ------------------------------------------------------------------------
    def single(self) -> App:
        return self.alone(self.agent("writer"), "invoke_agent writer @writer\n  chat @writer")

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
        return self.several(run, tree)

    def parallel(self) -> App:
        names = ("planner", "left", "right", "joiner")
        planner, left, right, joiner = (self.agent(name) for name in names)

        async def run(text: str) -> Any:
            await self.run(planner, text)
            await asyncio.gather(self.run(left, text), self.run(right, text))
            return await self.run(joiner, text)

        tree = "\n".join(f"invoke_agent {name} @{name}\n  chat @{name}" for name in names)
        return self.several(run, tree)

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
        inner = self.agent("expert", [look])

        async def expert(task: str) -> str:
            """Ask the expert."""
            return str((await inner.run(task)).output)

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

    def unicode(self) -> App:
        name = "Prüferin日本"
        return self.alone(self.agent(name), f"invoke_agent {name} @{name}\n  chat @{name}")

    def tool_error(self) -> App:
        tree = """
            invoke_agent scout @scout error
              chat @scout
              execute_tool broken @scout error
        """
        return self.alone(self.agent("scout", [Tool(broken)]), tree, raises=LookupError)

    def model_error(self) -> App:
        tree = "invoke_agent writer @writer error\n  chat @writer error"
        return self.alone(self.agent("writer"), tree, raises=ModelHTTPError)


def _sync(work: Callable[[], Any]) -> Any:
    """`run_sync` where no loop is: in a thread, whose loop is closed afterwards."""

    def in_a_thread() -> Any:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            return work()
        finally:
            loop.run_until_complete(sdk_instrumentation.aclose())
            loop.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, in_a_thread).result()


class TestChat(FrameworkSuite):
    name = "pydantic-ai"
    kind: Any = OpenAIChatModel

    def build(self, scenario: str, model: Model) -> App:
        built: App = getattr(Builder(model, self.kind), scenario)()
        return built

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
    """The same with the Responses API, the gateway's own included."""

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


pytest_generate_tests = columns

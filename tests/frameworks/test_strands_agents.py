"""Test Strands Agents, which is known by its own spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel

import lightspan
import lightspan_otel as otel
from lightspan_testing.adapter_harness import Stage, Turn
from lightspan_testing.adapter_suite.scenario_runner import inside_root, play, play_outside
from lightspan_testing.adapter_suite.scenarios import BOSS, LOOK, App, Model, instructions, look
from lightspan_testing.attempts import read_recorded
from tests.frameworks.builder import AppBuilder
from tests.frameworks.framework_pages import calls, check_page
from tests.frameworks.suite import FrameworkSuite, columns

strands = pytest.importorskip("strands")

from strands import Agent, tool  # noqa: E402
from strands.models.openai import OpenAIModel  # noqa: E402
from strands.models.openai_responses import OpenAIResponsesModel  # noqa: E402
from strands.multiagent import GraphBuilder, Swarm  # noqa: E402
from strands.telemetry.tracer import get_tracer  # noqa: E402


class Found(BaseModel):
    """What the expert answers as structured output."""

    value: str


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

    def test_a_graph_is_one_attempt(self, stage: Stage, tmp_path: Path) -> None:
        builder, graph = Builder(Model(base_url=stage.url), self.kind), GraphBuilder()
        for name in ("triage", "expert"):
            graph.add_node(builder.agent(name), name)
        graph.add_edge("triage", "expert")
        graph.set_max_node_executions(2)
        tree = """
            invoke_agent triage @triage
              chat @triage
            invoke_agent expert @expert
              chat @expert
        """
        says = {"triage": ["Look it up: {task}."], "expert": ["Done: {task}."]}
        app = App(run=graph.build().invoke_async, tree=tree, says=says)
        store = f"sqlite:{tmp_path / 'traces.db'}"
        with otel.instrument(self.name), lightspan.record(store):
            played = play_outside(stage, app, "handoff", "async")
        [found] = read_recorded(store)
        self.check(inside_root(found, played), "handoff", app, stage)

    @pytest.mark.filterwarnings("ignore:Agent.structured_output")
    def test_structured_output_is_its_agents(self, stage: Stage) -> None:
        if self.kind is not OpenAIModel:
            pytest.skip("the oldest version asks the Responses API in another form")
        builder = Builder(Model(base_url=stage.url), self.kind)

        @tool
        async def expert(task: str) -> str:
            """Ask the expert."""
            return str(await builder.agent("expert").structured_output_async(Found, task))

        tree = """
            invoke_agent boss @boss
              chat @boss
              execute_tool expert @boss
                invoke_agent expert @boss/expert
                  chat @boss/expert
              chat @boss
        """
        boss = builder.agent("boss", [expert])
        says = {"expert": ['{"value": "{task}"}']}
        app = App(run=boss.invoke_async, tree=tree, says=says)
        with otel.instrument(self.name):
            played = play(stage, app, "agent_as_tool", "async", through_gateway=True)
        self.check(played, "agent_as_tool", app, stage)


class TestResponses(TestStrands, responses=True):
    """Run the same tests with the Responses API."""

    kind: Any = OpenAIResponsesModel


def test_the_page(tmp_path: Path) -> None:
    check_page("strands", tmp_path, [calls("ask_expert", question="6 x 7"), "42", "42 euros."])


pytest_generate_tests = columns

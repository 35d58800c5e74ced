"""Test Google's Agent Development Kit, which is known by its own spans and calls LiteLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from lightspan_testing.adapter_harness import Turn
from lightspan_testing.adapter_suite.scenarios import BOSS, LOOK, App, Model, instructions, look
from tests.frameworks.builder import AppBuilder
from tests.frameworks.framework_pages import calls, check_page
from tests.frameworks.suite import FrameworkSuite, columns

pytest.importorskip("google.adk")

from google.adk.agents import LlmAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.telemetry import node_tracing, tracing
from google.adk.tools.agent_tool import AgentTool
from google.genai import types

pytestmark = [
    # LiteLLM, whose worker of its log is left behind where a thread's event loop ends
    pytest.mark.filterwarnings("ignore:coroutine .*async_success_handler:RuntimeWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*async_success_handler:pytest.PytestUnraisableExceptionWarning"
    ),
    # LiteLLM, of a type of its own
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),
    # LiteLLM, which looks at all attributes of what is streamed, those of Pydantic's past too
    pytest.mark.filterwarnings(
        r"ignore:(The|Accessing the) .* attribute.* is deprecated:DeprecationWarning"
    ),
    # of its Workflow, which cannot be inside an agent
    pytest.mark.filterwarnings("ignore:(Parallel|Sequential)Agent is depr:DeprecationWarning"),
    # ADK's agents as tools, of ADK
    pytest.mark.filterwarnings("ignore:The `plugins` argument is deprecated:DeprecationWarning"),
]


class Builder(AppBuilder):
    def __init__(self, model: Model) -> None:
        self.model = LiteLlm(
            f"openai/{model.name}",
            api_base=model.base_url,
            api_key=model.api_key,
            max_retries=model.max_retries,
        )
        mode = StreamingMode.SSE if model.stream else StreamingMode.NONE
        self.config = RunConfig(streaming_mode=mode)

    def agent(self, name: str, tools: Sequence[Any] = (), **more: Any) -> Any:
        return LlmAgent(
            name=name,
            model=self.model,
            description="Ask it.",
            instruction=instructions(name),
            tools=list(tools),
            **more,
        )

    async def run(self, agent: Any, text: str) -> Any:
        runner = InMemoryRunner(agent, app_name="app")
        session = await runner.session_service.create_session(app_name="app", user_id="u")
        asked = types.Content(role="user", parts=[types.Part(text=text)])
        events = runner.run_async(
            user_id="u", session_id=session.id, new_message=asked, run_config=self.config
        )
        return [event async for event in events][-1]

    # --- the table ------------------------------------------------------------------------

    def parallel(self) -> App:
        """Return an app with ADK's `ParallelAgent`, which has a name and calls no model."""
        planner, left, right, joiner = map(self.agent, ("planner", "left", "right", "joiner"))
        both = ParallelAgent(name="both", sub_agents=[left, right])
        work = SequentialAgent(name="work", sub_agents=[planner, both, joiner])
        tree = """
            invoke_agent work @work
              invoke_agent planner @work/planner
                chat @work/planner
              invoke_agent both @work/both
                invoke_agent left @work/both/left
                  chat @work/both/left
                invoke_agent right @work/both/right
                  chat @work/both/right
              invoke_agent joiner @work/joiner
                chat @work/joiner
        """
        return self.alone(work, tree)

    def handoff(self) -> App:
        """Return an app with a transfer to a sub-agent, which runs after the first agent has
        ended.
        """
        triage = self.agent("triage", sub_agents=[self.agent("expert", [look])])
        tree = """
            invoke_agent triage @triage unset
              chat @triage
              execute_tool transfer_to_agent @triage
            invoke_agent expert @expert
              chat @expert
              execute_tool look @expert
              chat @expert
        """
        says = {
            "triage": [Turn(calls=[("transfer_to_agent", '{"agent_name": "expert"}')])],
            "expert": [LOOK, "Done: {task}."],
        }
        return self.alone(triage, tree, says=says)

    def agent_as_tool(self) -> App:
        expert = AgentTool(self.agent("expert", [look]))
        asks = Turn(calls=[("expert", '{"request": "help with {task}"}')])
        return self.alone(self.agent("boss", [expert]), BOSS, says={"boss": [asks, "{task}."]})


class TestAdk(FrameworkSuite):
    name = "google-adk"
    builder = Builder
    tells_messages = False

    @contextmanager
    def telling(self, provider: TracerProvider) -> Iterator[None]:
        """Let ADK use `provider`, as if it were the global one, which can be set only once."""
        before = tracing.tracer
        tracing.tracer = node_tracing.tracer = provider.get_tracer("gcp.vertex.agent")
        try:
            yield
        finally:
            tracing.tracer = node_tracing.tracer = before

    def patched(self) -> Any:
        return tracing.tracer, node_tracing.tracer


def test_the_page(tmp_path: Path) -> None:
    check_page("google-adk", tmp_path, [calls("expert", request="6 x 7"), "42", "42 euros."])


pytest_generate_tests = columns

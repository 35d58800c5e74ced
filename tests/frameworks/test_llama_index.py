"""Test LlamaIndex, whose spans name no agent: lightspan wraps its runs and steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import lightspan
import lightspan_otel as otel
from lightspan.schema.spans import SpanStatus
from lightspan_testing.adapter_harness import Stage, Turn
from lightspan_testing.adapter_suite.scenario_runner import play, play_outside
from lightspan_testing.adapter_suite.scenarios import (
    BOSS,
    FAILED,
    LOOK,
    WRITER,
    App,
    Model,
    instructions,
    look,
)
from lightspan_testing.attempts import read_recorded
from tests.frameworks.builder import AppBuilder, client
from tests.frameworks.framework_pages import calls, check_page
from tests.frameworks.suite import PROVIDER, FrameworkSuite, columns

pytest.importorskip("llama_index.core")
instrumentation = pytest.importorskip("openinference.instrumentation.llama_index")

pytestmark = [
    # it looks at all attributes of its agents, those of Pydantic's past too
    pytest.mark.filterwarnings(
        r"ignore:(The|Accessing the) .* attribute.* is deprecated:DeprecationWarning"
    ),
]

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent  # noqa: E402
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step  # noqa: E402
from llama_index.llms.openai import OpenAI, OpenAIResponses  # noqa: E402
from workflows import workflow as workflows  # noqa: E402


class Asking(OpenAI):
    """An OpenAI model whose name LlamaIndex does not know."""

    @property
    def metadata(self) -> Any:
        return super().metadata.model_copy(update={"is_function_calling_model": True})


class AskingResponses(OpenAIResponses):
    """The same for the Responses API: an OpenAI model whose name LlamaIndex does not know."""

    @property
    def metadata(self) -> Any:
        return super().metadata.model_copy(update={"is_function_calling_model": True})


class Builder(AppBuilder):
    def __init__(self, model: Model, kind: Any = Asking) -> None:
        self.model = kind(
            "gpt-4o-mini",
            async_http_client=client(model)._client,
            api_base=model.base_url,
            api_key=model.api_key,
            max_retries=model.max_retries,
        )
        self.stream = model.stream

    def agent(self, name: str, tools: Sequence[Any] = (), **more: Any) -> Any:
        return FunctionAgent(
            name=name,
            description="Ask it.",
            system_prompt=instructions(name),
            tools=list(tools),
            llm=self.model,
            streaming=self.stream,
            **more,
        )

    async def run(self, agent: Any, text: str) -> str:
        handler = agent.run(user_msg=text)
        if self.stream:
            async for _ in handler.stream_events():
                pass
        return str(await handler)

    # --- the table ------------------------------------------------------------------------

    def handoff(self) -> App:
        """Return an app of two agents in one workflow without a name."""
        workflow = AgentWorkflow(
            [self.agent("triage", can_handoff_to=["expert"]), self.agent("expert", [look])],
            root_agent="triage",
        )
        tree = """
            invoke_agent triage @triage
              chat @triage
              execute_tool handoff @triage
            invoke_agent expert @expert
              chat @expert
              execute_tool look @expert
              chat @expert
        """
        to = '{"to_agent": "expert", "reason": "it knows"}'
        says = {"triage": [Turn(calls=[("handoff", to)])], "expert": [LOOK, "Done: {task}."]}
        return self.alone(workflow, tree, says=says)

    def agent_as_tool(self) -> App:
        inner = self.agent("expert", [look])

        async def expert(task: str) -> str:
            """Ask the expert."""
            return str(await inner.run(user_msg=task))

        return self.alone(self.agent("boss", [expert]), BOSS)

    def cancelled(self) -> App:
        return self.alone(self.agent("writer"), FAILED)


class TestLlamaIndex(FrameworkSuite):
    name = "llama-index"
    builder = Builder
    instrumentor = "llama_index.LlamaIndexInstrumentor"
    tells_calls = False
    kind: Any = Asking

    def patched(self) -> Any:
        return vars(workflows.Workflow)["run"]

    def test_an_app_that_is_traced_already(self, stage: Stage, scenario: str, mode: str) -> None:
        """Check LlamaIndex's runs and steps in addition to OpenInference's spans, which name no
        agent.
        """
        with self.telling(PROVIDER), otel.instrument(PROVIDER), otel.instrument(self.name):
            app = self.app(stage, scenario, mode)
            played = play(stage, app, scenario, mode, through_gateway=True)
            self.check(played, scenario, app, stage)

    def test_a_workflow_of_ones_own(self, stage: Stage) -> None:
        """Check a custom workflow whose steps run agents; it has no name, and its steps are no
        tools.
        """
        writer = Builder(Model(base_url=stage.url)).agent("writer")

        class Own(Workflow):
            @step
            async def call_tool(self, ev: StartEvent) -> StopEvent:
                return StopEvent(result=str(await writer.run(user_msg=ev.text)))

        async def run(text: str) -> Any:
            return await Own().run(text=text)

        app = App(run=run, tree=WRITER)
        with otel.instrument(self.name):
            played = play(stage, app, "single", "async", through_gateway=True)
        self.check(played, "single", app, stage)

    def test_a_run_that_is_cancelled(self, stage: Stage, tmp_path: Path) -> None:
        """Check that a cancelled run is not recorded as succeeded."""
        store = f"sqlite:{tmp_path / 'traces.db'}"
        app = self.app(stage, "cancelled")
        with otel.instrument(self.name), lightspan.record(store):
            play_outside(stage, app, "cancelled", "async")
        [found] = read_recorded(store)
        assert found.attempt.status == "failed"
        [run] = [span for span in found.spans if span.name == "invoke_agent writer"]
        assert run.status is SpanStatus.ERROR


class TestResponses(TestLlamaIndex, responses=True):
    """Run the same tests with the Responses API."""

    kind: Any = AskingResponses


def test_the_page(tmp_path: Path) -> None:
    check_page(
        "llama-index",
        tmp_path,
        [calls("handoff", to_agent="expert", reason="it knows"), "42 euros."],
    )


pytest_generate_tests = columns

"""Test smolagents, which is known by the spans of OpenInference's instrumentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import lightspan_otel as otel
from lightspan_testing.adapter_harness import Stage, Turn
from lightspan_testing.adapter_suite.scenario_runner import play
from lightspan_testing.adapter_suite.scenarios import FAILED, LOOK, App, Model, instructions
from tests.frameworks.framework_pages import calls, check_page
from tests.frameworks.suite import FrameworkSuite, columns

smolagents = pytest.importorskip("smolagents")
instrumentation = pytest.importorskip("openinference.instrumentation.smolagents")

from smolagents import (  # noqa: E402
    AgentGenerationError,
    CodeAgent,
    MultiStepAgent,
    OpenAIModel,
    ToolCallingAgent,
    tool,
)

# It never closes its model's clients.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*socket:pytest.PytestUnraisableExceptionWarning"
    ),
]


@tool
def look(what: str) -> str:
    """Look something up.

    Args:
        what: it
    """
    return f"{what}: 7"


@tool
def count(what: str) -> str:
    """Count something.

    Args:
        what: it
    """
    return f"{len(what)} letters"


@tool
def broken(what: str) -> str:
    """Fail.

    Args:
        what: it
    """
    raise LookupError(f"nothing known of {what}")


def final(text: str) -> Turn:
    """Return the tool call with which an agent of smolagents ends."""
    return Turn(calls=[("final_answer", f'{{"answer": "{text}"}}')])


class Builder:
    def __init__(self, model: Model) -> None:
        self.model = OpenAIModel(
            model.name,
            api_base=model.base_url,
            api_key=model.api_key,
            client_kwargs={"max_retries": model.max_retries},
        )
        self.stream = model.stream

    def agent(self, name: str | None, tools: Sequence[Any] = (), **more: Any) -> Any:
        return ToolCallingAgent(
            list(tools),
            self.model,
            name=name,
            description="Ask it.",
            instructions=instructions(name or "writer"),
            stream_outputs=self.stream,
            verbosity_level=-1,
            **more,
        )

    def alone(self, agent: Any, tree: str, **more: Any) -> App:
        def run_sync(text: str) -> Any:
            if not self.stream:
                return agent.run(text)
            return list(agent.run(text, stream=True))[-1]

        async def run(text: str) -> Any:
            return run_sync(text)

        return App(run=run, run_sync=run_sync, tree=tree, concurrent=False, **more)

    # --- the table ------------------------------------------------------------------------
    def single(self) -> App:
        tree = """
            invoke_agent writer @writer
              chat @writer
              execute_tool final_answer @writer
        """
        return self.alone(self.agent("writer"), tree, says={"writer": [final("For {task}.")]})

    def parallel_tools(self) -> App:
        tree = """
            invoke_agent scout @scout
              chat @scout
              execute_tool look @scout
              execute_tool count @scout
              chat @scout
              execute_tool final_answer @scout
        """
        both = Turn(calls=[("look", '{"what": "seven"}'), ("count", '{"what": "seven"}')])
        says = {"scout": [both, final("Seven, for {task}.")]}
        return self.alone(self.agent("scout", [look, count]), tree, says=says)

    def agent_as_tool(self) -> App:
        """Return an app with a managed agent, which is no tool of smolagents and has no tool
        span.
        """
        tree = """
            invoke_agent boss @boss
              chat @boss
              invoke_agent expert @boss/expert
                chat @boss/expert
                execute_tool look @boss/expert
                chat @boss/expert
                execute_tool final_answer @boss/expert
              chat @boss
              execute_tool final_answer @boss
        """
        says = {
            "boss": [Turn(calls=[("expert", '{"task": "help with {task}"}')]), final("{task}.")],
            "expert": [LOOK, final("It is seven, {task}.")],
        }
        expert = self.agent("expert", [look])
        return self.alone(self.agent("boss", managed_agents=[expert]), tree, says=says)

    def parallel(self) -> App:
        """Return an app whose `planner` calls two managed agents at once, which run in threads."""
        tree = """
            invoke_agent planner @planner
              chat @planner
              invoke_agent left @planner/left
                chat @planner/left
                execute_tool final_answer @planner/left
              invoke_agent right @planner/right
                chat @planner/right
                execute_tool final_answer @planner/right
              chat @planner
              execute_tool final_answer @planner
        """
        asks = [(name, '{"task": "help with {task}"}') for name in ("left", "right")]
        says = {
            "planner": [Turn(calls=asks), final("Both of {task}.")],
            "left": [final("Left of {task}.")],
            "right": [final("Right of {task}.")],
        }
        inner = [self.agent(name) for name in ("left", "right")]
        return self.alone(self.agent("planner", managed_agents=inner), tree, says=says)

    def unicode(self) -> App:
        """Return an app whose agent's name is an identifier with non-ASCII letters."""
        name = "Prüferin日本"
        tree = f"invoke_agent {name} @{name}\n  chat @{name}\n  execute_tool final_answer @{name}"
        return self.alone(self.agent(name), tree, says={name: [final("Gut: {task}.")]})

    def tool_error(self) -> App:
        """Return an app whose tool fails; the model gets the error and continues."""
        tree = """
            invoke_agent scout @scout
              chat @scout
              execute_tool broken @scout error
              chat @scout
              execute_tool final_answer @scout
        """
        says = {
            "scout": [
                Turn(calls=[("broken", '{"what": "it"}')]),
                final("No luck with {task}."),
            ]
        }
        return self.alone(self.agent("scout", [broken]), tree, says=says)

    def model_error(self) -> App:
        return self.alone(self.agent("writer"), FAILED, raises=AgentGenerationError)


class TestToolCalling(FrameworkSuite):
    name = "smolagents"
    builder = Builder
    instrumentor = "smolagents.SmolagentsInstrumentor"

    def patched(self) -> Any:
        return type(vars(MultiStepAgent)["run"])  # what wraps it is equal to it

    def test_an_agent_that_writes_code(self, stage: Stage) -> None:
        model = Builder(Model(base_url=stage.url)).model
        agent = CodeAgent(
            [look], model, name="coder", instructions=instructions("coder"), verbosity_level=-1
        )

        async def run(text: str) -> Any:
            return agent.run(text)

        code = "Thoughts: look.\n<code>\nfinal_answer(look(what='seven') + ' {task}')\n</code>"
        tree = """
            invoke_agent coder @coder
              chat @coder
              execute_tool look @coder
              execute_tool final_answer @coder
        """
        app = App(run=run, tree=tree, says={"coder": [code]})
        with otel.instrument(self.name):
            # what it says ends before a stop sequence
            played = play(stage, app, "single", "async", through_gateway=False)
        self.check(played, "single", app, stage)


def test_the_page(tmp_path: Path) -> None:
    check_page(
        "smolagents",
        tmp_path,
        [
            calls("expert", task="6 x 7"),
            calls("final_answer", answer="42"),
            calls("final_answer", answer="42 euros."),
        ],
    )


pytest_generate_tests = columns

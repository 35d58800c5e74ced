"""The toy adapter in the suite that every adapter passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import openai
import pytest
from toyframe import Agent, AgentTool, Team, Tool

from lightspan.capture import context
from lightspan_testing.adapter_suite import (
    AdapterSuite,
    App,
    Impossible,
    Model,
    broken,
    count,
    instructions,
    look,
)
from lightspan_testing.adapter_suite.scenarios import BOSS, FAILED, SCOUT, WRITER


class TestSuite(AdapterSuite):
    framework = "toy"
    impossible: ClassVar = {
        "handoff": "toyframe has none",
        "bypassing": "toyframe asks by the OpenAI SDK only",
        "fallback": "toyframe asks by the OpenAI SDK only",
        "recovered": "toyframe asks by the OpenAI SDK only",
        "stopped": "toyframe asks by the OpenAI SDK only",
    }
    notes_starts: ClassVar = (context, "make_span")
    program = """
        import asyncio, sys
        import openai, toyframe

        async def main():
            async with openai.AsyncOpenAI(base_url=sys.argv[1], api_key="key") as client:
                agent = toyframe.Agent("writer", client, instructions="You are writer.")
                print(await agent.run(sys.argv[2]))

        asyncio.run(main())
    """
    program_root = "invoke_workflow writer"

    def build(self, scenario: str, model: Model) -> App:
        if scenario not in TREES:
            raise Impossible(scenario)
        client = openai.AsyncOpenAI(
            base_url=model.base_url,
            api_key=model.api_key,
            max_retries=model.max_retries,
            timeout=model.timeout_s,
        )

        def agent(name: str, *tools: Tool) -> Agent:
            return Agent(
                name,
                client,
                model=model.name,
                instructions=instructions(name),
                tools=tools,
                stream=model.stream,
            )

        runner, tree = BUILD.get(scenario, BUILD["single"])(agent), TREES[scenario]
        raises = openai.OpenAIError if scenario in ("model_error", "timeout") else None

        async def run(text: str) -> str:
            return str(await runner.run(text))

        return App(run=run, tree=tree, target=runner, close=client.close, raises=raises)

    def patched(self) -> Mapping[str, Any]:
        owners = {Team: "run", Agent: "run", Tool: "call", AgentTool: "call"}
        return {
            **{f"{owner.__name__}.{name}": vars(owner)[name] for owner, name in owners.items()},
            **{
                f"{owner.__name__}.__init_subclass__": vars(owner).get("__init_subclass__")
                for owner in (Team, Agent, Tool)
            },
        }

    @pytest.mark.skip("the toy is one module, and nobody else instruments toyframe")
    def test_a_framework_that_is_absent_too_old_or_too_new(self) -> None: ...

    @pytest.mark.skip("the program's module is not on the path of another process")
    def test_started_by_opentelemetry(self) -> None: ...


BUILD: dict[str, Callable[[Callable[..., Agent]], Any]] = {
    "single": lambda agent: agent("writer"),
    "team": lambda agent: Team("team", [agent("writer"), agent("checker")]),
    "nested": lambda agent: Team(
        "team", [Team("drafting", [agent("writer"), agent("checker")]), agent("judge")]
    ),
    "parallel": lambda agent: Team(
        "team",
        [
            agent("planner"),
            Team("both", [agent("left"), agent("right")], at_once=True),
            agent("joiner"),
        ],
    ),
    "tools": lambda agent: agent("scout", Tool(look)),
    "parallel_tools": lambda agent: agent("scout", Tool(look), Tool(count)),
    "agent_as_tool": lambda agent: agent("boss", AgentTool(agent("expert", Tool(look)))),
    "same_name": lambda agent: Team("team", [agent("writer"), Team("again", [agent("writer")])]),
    "unicode": lambda agent: agent("Prüferin日本"),
    "tool_error": lambda agent: agent("scout", Tool(broken)),
}
TREES = {
    "single": WRITER,
    "retry": WRITER,
    "model_error": FAILED,
    "timeout": FAILED,
    "cancelled": FAILED,
    "team": """
        invoke_agent team @team
          invoke_agent writer @team/writer
            chat @team/writer
          invoke_agent checker @team/checker
            chat @team/checker
    """,
    "nested": """
        invoke_agent team @team
          invoke_agent drafting @team/drafting
            invoke_agent writer @team/drafting/writer
              chat @team/drafting/writer
            invoke_agent checker @team/drafting/checker
              chat @team/drafting/checker
          invoke_agent judge @team/judge
            chat @team/judge
    """,
    "parallel": """
        invoke_agent team @team
          invoke_agent planner @team/planner
            chat @team/planner
          invoke_agent both @team/both
            invoke_agent left @team/both/left
              chat @team/both/left
            invoke_agent right @team/both/right
              chat @team/both/right
          invoke_agent joiner @team/joiner
            chat @team/joiner
    """,
    "tools": SCOUT,
    "parallel_tools": """
        invoke_agent scout @scout
          chat @scout
          execute_tool look @scout
          execute_tool count @scout
          chat @scout
    """,
    "agent_as_tool": BOSS,
    "same_name": """
        invoke_agent team @team
          invoke_agent writer @team/writer
            chat @team/writer
          invoke_agent again @team/again
            invoke_agent writer @team/again/writer
              chat @team/again/writer
    """,
    "unicode": """
        invoke_agent Prüferin日本 @Prüferin日本
          chat @Prüferin日本
    """,
    "tool_error": """
        invoke_agent scout @scout
          chat @scout
          execute_tool broken @scout error
          chat @scout
    """,
}

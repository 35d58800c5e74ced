"""Run the adapter suite with AutoGen: the real framework in every scenario."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import openai
import pytest

pytest.importorskip("autogen_agentchat")

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat, Swarm
from autogen_agentchat.teams._group_chat._sequential_routed_agent import SequentialRoutedAgent
from autogen_agentchat.tools import AgentTool
from autogen_core import BaseAgent, CancellationToken, SingleThreadedAgentRuntime
from autogen_core.models import ChatCompletionClient, CreateResult, RequestUsage
from autogen_core.tools import BaseTool, Workbench
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.models.replay import ReplayChatCompletionClient

from lightspan_autogen import _hook
from lightspan_autogen._messages import ENVELOPES, PROCESSING
from lightspan_testing.adapter_suite import (
    OTHER_MEANS,
    AdapterSuite,
    App,
    Impossible,
    Model,
    broken,
    by_other_means,
    count,
    instructions,
    look,
)
from lightspan_testing.adapter_suite.scenarios import BOSS, FAILED, SCOUT, WRITER

ABLE = ("function_calling", "json_output", "structured_output", "multiple_system_messages")
INFO: Any = {"vision": False, "family": "unknown", **dict.fromkeys(ABLE, True)}


def client(model: Model) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=model.name,
        base_url=model.base_url,
        api_key=model.api_key,
        model_info=INFO,
        max_retries=model.max_retries,
        timeout=model.timeout_s,
        parallel_tool_calls=True,
    )


class Cast:
    """Create the agents of one scenario."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.client = client(model)

    def agent(self, name: str, tools: Any = (), **more: Any) -> AssistantAgent:
        return AssistantAgent(
            name,
            self.client,
            tools=list(tools),
            system_message=instructions(name),
            model_client_stream=self.model.stream,
            **more,
        )

    def team(self, name: str, *participants: Any, **more: Any) -> RoundRobinGroupChat:
        turns = len(participants)
        return RoundRobinGroupChat(list(participants), name=name, max_turns=turns, **more)


def run(runner: Any, *inside: ChatAgent) -> Callable[[str], Any]:
    """Return a function that resets `runner` and the agents `inside` its tools, then runs
    `runner`.
    """

    async def once(text: str) -> Any:
        for agent in [*inside, *([runner] if isinstance(runner, ChatAgent) else [])]:
            await agent.on_reset(CancellationToken())
        if isinstance(runner, RoundRobinGroupChat) and runner._initialized:
            await runner.reset()
        return await runner.run(task=text)

    return once


BUILDERS: dict[str, Callable[[Cast], App]] = {}


def scenario(build: Callable[[Cast], App]) -> Callable[[Cast], App]:
    BUILDERS[build.__name__] = build
    return build


def app(runner: Any, tree: str, *inside: ChatAgent, **more: Any) -> App:
    return App(run=run(runner, *inside), tree=tree, target=runner, concurrent=False, **more)


@scenario
def single(cast: Cast) -> App:
    return app(cast.agent("writer"), WRITER)


@scenario
def team(cast: Cast) -> App:
    return app(
        cast.team("team", cast.agent("writer"), cast.agent("checker")),
        """
        invoke_agent team @team
          invoke_agent writer @team/writer
            chat @team/writer
          invoke_agent checker @team/checker
            chat @team/checker
        """,
    )


@scenario
def nested(cast: Cast) -> App:
    inner = cast.team("drafting", cast.agent("writer"), cast.agent("checker"))
    return app(
        cast.team("team", inner, cast.agent("judge")),
        """
        invoke_agent team @team
          invoke_agent drafting @team/drafting
            invoke_agent writer @team/drafting/writer
              chat @team/drafting/writer
            invoke_agent checker @team/drafting/checker
              chat @team/drafting/checker
          invoke_agent judge @team/judge
            chat @team/judge
        """,
    )


@scenario
def parallel(cast: Cast) -> App:
    planner, left, right, joiner = (
        cast.agent(name) for name in ("planner", "left", "right", "joiner")
    )
    graph = DiGraphBuilder()
    for agent in (planner, left, right, joiner):
        graph.add_node(agent)
    graph.add_edge(planner, left).add_edge(planner, right)
    graph.add_edge(left, joiner).add_edge(right, joiner)
    flow = GraphFlow(
        [planner, left, right, joiner],
        name="flow",
        graph=graph.build(),
        termination_condition=MaxMessageTermination(20),
    )
    return app(
        flow,
        """
        invoke_agent flow @flow
          invoke_agent planner @flow/planner
            chat @flow/planner
          invoke_agent left @flow/left
            chat @flow/left
          invoke_agent right @flow/right
            chat @flow/right
          invoke_agent joiner @flow/joiner
            chat @flow/joiner
        """,
    )


@scenario
def tools(cast: Cast) -> App:
    return app(
        cast.agent("scout", [look], reflect_on_tool_use=True),
        SCOUT,
    )


@scenario
def parallel_tools(cast: Cast) -> App:
    return app(
        cast.agent("scout", [look, count], reflect_on_tool_use=True),
        """
        invoke_agent scout @scout
          chat @scout
          chat @scout
          execute_tool count @scout
          execute_tool look @scout
        """,
    )


@scenario
def handoff(cast: Cast) -> App:
    triage = cast.agent("triage", handoffs=["expert"])
    swarm = Swarm(
        [triage, cast.agent("expert")],
        name="desk",
        termination_condition=TextMentionTermination("Done:"),
    )
    return app(
        swarm,
        """
        invoke_agent desk @desk
          invoke_agent triage @desk/triage
            chat @desk/triage
            execute_tool transfer_to_expert @desk/triage
          invoke_agent expert @desk/expert
            chat @desk/expert
        """,
    )


@scenario
def agent_as_tool(cast: Cast) -> App:
    expert = cast.agent("expert", [look], reflect_on_tool_use=True)
    tool = AgentTool(expert, return_value_as_last_message=True)
    boss = cast.agent("boss", [tool], reflect_on_tool_use=True)
    return app(
        boss,
        BOSS,
        expert,
    )


@scenario
def same_name(cast: Cast) -> App:
    return app(
        cast.team(
            "pair", cast.team("one", cast.agent("writer")), cast.team("two", cast.agent("writer"))
        ),
        """
        invoke_agent pair @pair
          invoke_agent one @pair/one
            invoke_agent writer @pair/one/writer
              chat @pair/one/writer
          invoke_agent two @pair/two
            invoke_agent writer @pair/two/writer
              chat @pair/two/writer
        """,
    )


@scenario
def unicode(cast: Cast) -> App:
    return app(cast.agent("Prüferin日本"), WRITER.replace("writer", "Prüferin日本"))


@scenario
def tool_error(cast: Cast) -> App:
    return app(
        cast.agent("scout", [broken], reflect_on_tool_use=True),
        """
        invoke_agent scout @scout
          chat @scout
          execute_tool broken @scout error
          chat @scout
        """,
    )


@scenario
def model_error(cast: Cast) -> App:
    return app(
        cast.team("team", cast.agent("writer")),
        """
        invoke_agent team @team error
          invoke_agent writer @team/writer error
            chat @team/writer error
        """,
        raises=RuntimeError,
    )


@scenario
def retry(cast: Cast) -> App:
    return single(cast)


@scenario
def timeout(cast: Cast) -> App:
    return app(cast.agent("writer"), FAILED, raises=openai.APITimeoutError)


@scenario
def cancelled(cast: Cast) -> App:
    return app(cast.agent("writer"), FAILED)


class Other(ReplayChatCompletionClient):
    """A model client that does not use the OpenAI SDK, or not for every answer."""

    def __init__(self, answer: Callable[[Any], str]) -> None:
        super().__init__(["?"])
        self._answer = answer

    async def create(self, messages: Any, **kwargs: Any) -> CreateResult:
        usage = RequestUsage(prompt_tokens=0, completion_tokens=0)
        said = self._answer(messages)
        return CreateResult(content=said, usage=usage, finish_reason="stop", cached=False)

    async def create_stream(self, messages: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        said = self._answer(messages)
        yield said
        usage = RequestUsage(prompt_tokens=0, completion_tokens=0)
        yield CreateResult(content=said, usage=usage, finish_reason="stop", cached=False)


def own(name: str, cast: Cast) -> App:
    def writer() -> AssistantAgent:
        return AssistantAgent(
            "writer",
            Other(by_other_means(name, cast.model)),
            system_message=instructions("writer"),
            model_client_stream=cast.model.stream,
        )

    async def run(text: str) -> Any:
        return await writer().run(task=text)

    return App(run=run, tree=OTHER_MEANS[name], target=writer())


BUILDERS.update({name: partial(own, name) for name in OTHER_MEANS})


class TestSuite(AdapterSuite):
    framework: ClassVar[str] = "autogen"
    notes_starts = (_hook, "_register")
    silent_environment: ClassVar[Mapping[str, str]] = {
        "OTEL_SDK_DISABLED": "true",
        "AUTOGEN_DISABLE_RUNTIME_TRACING": "true",
    }

    def build(self, scenario: str, model: Model) -> App:
        if scenario not in BUILDERS:
            raise Impossible(scenario)
        cast = Cast(model)
        return replace(BUILDERS[scenario](cast), close=cast.client.close)

    def patched(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for base in (
            ChatAgent,
            Team,
            BaseTool,
            Workbench,
            SequentialRoutedAgent,
            ChatCompletionClient,
        ):
            for known in {base, *_below(base)}:
                for name, value in vars(known).items():
                    if not name.startswith("_") or name == "__init_subclass__":
                        found[f"{known.__module__}.{known.__qualname__}.{name}"] = value
        for owner, names in (
            (BaseAgent, ("on_message",)),
            (SingleThreadedAgentRuntime, PROCESSING),
            *((envelope, ("__init__",)) for envelope in ENVELOPES),
        ):
            found |= {f"{owner.__qualname__}.{name}": vars(owner)[name] for name in names}
        return found

    program_root = "invoke_workflow writer"
    program = """
    import asyncio, sys
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def main():
        flags = ["vision", "function_calling", "json_output", "structured_output"]
        client = OpenAIChatCompletionClient(
            model="m",
            base_url=sys.argv[1],
            api_key="key",
            model_info={"family": "unknown", **dict.fromkeys(flags, False)},
        )
        writer = AssistantAgent("writer", client, system_message="You are writer.")
        print((await writer.run(task=sys.argv[2])).messages[-1].content)
        await client.close()

    asyncio.run(main())
    """

    def openinference(self) -> AbstractContextManager[Any]:
        from tests.adapters.fixtures import openinference

        return openinference(
            "autogen_agentchat.AutogenAgentChatInstrumentor", "openai.OpenAIInstrumentor"
        )


def _below(base: type) -> set[type]:
    found: set[type] = set()
    for known in type.__subclasses__(base):
        found |= {known, *_below(known)}
    return found

"""A framework inside itself, in ways of its own: what is not another agent's tool or code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from lightspan_testing.adapter_harness import Says, Turn
from lightspan_testing.adapter_suite import instructions
from tests.adapters.layers import (
    AutoGenAgent,
    CrewAI,
    InALoop,
    LangGraphNode,
    Layer,
    OpenAIAgents,
)


class Subgraph:
    """A compiled graph that is a node itself."""

    def __init__(self, url: str) -> None:
        from langgraph.graph import START, StateGraph

        self.names = ["ask"]
        graph: Any = StateGraph(dict)
        graph.add_node("ask", LangGraphNode("helper", url, None).graph)
        graph.add_edge(START, "ask")
        self.graph = graph.compile()

    async def run(self, text: str) -> Any:
        return (await self.graph.ainvoke({"text": text}))["said"]

    def run_sync(self, text: str) -> Any:
        return self.graph.invoke({"text": text})["said"]


class TeamInTeam(InALoop):
    """A team that is a member of a team."""

    def __init__(self, url: str) -> None:
        from autogen_agentchat.teams import RoundRobinGroupChat

        self.names = ["ask"]
        writer = AutoGenAgent("writer", url, None).agent
        helper = RoundRobinGroupChat([writer], name="helper", max_turns=1)
        self.team = RoundRobinGroupChat([helper], name="ask", max_turns=1)

    async def run(self, text: str) -> Any:
        return (await self.team.run(task=text)).messages[-1].to_text()  # type: ignore[union-attr]


class AgentTool(AutoGenAgent):
    """AutoGen's `AgentTool`."""

    def __init__(self, url: str) -> None:
        from autogen_agentchat import tools
        from autogen_agentchat.agents import AssistantAgent

        super().__init__("ask", url, None)
        helper = AutoGenAgent("helper", url, None).agent
        self.agent = AssistantAgent(
            "ask",
            self.agent._model_client,
            tools=[tools.AgentTool(helper)],
            system_message=instructions("ask"),
            reflect_on_tool_use=True,
        )


class AsTool(OpenAIAgents):
    """The Agents SDK's `as_tool`."""

    def __init__(self, url: str) -> None:
        super().__init__("ask", url, None)
        helper = OpenAIAgents("helper", url, None).agent
        self.agent.tools = [helper.as_tool("helper", "Ask the helper.")]


class Handoff(OpenAIAgents):
    """An agent that hands over: the two stand side by side."""

    def __init__(self, url: str) -> None:
        super().__init__("ask", url, None)
        self.agent.handoffs = [OpenAIAgents("helper", url, None).agent]


class CrewInFlow:
    """A crew that a method of a flow kicks off."""

    def __init__(self, url: str) -> None:
        from crewai.flow.flow import Flow, start

        self.names = ["Ask"]
        helper = CrewAI("helper", url, None)

        class Ask(Flow[dict[str, str]]):
            @start()
            def begin(self) -> str:
                return str(helper.run_sync(self.state["text"]))

        class AskAsync(Flow[dict[str, str]]):
            name = "Ask"

            @start()
            async def begin(self) -> str:
                return str(await helper.run(self.state["text"]))

        self.flow: Any = Ask()
        self.flow_async: Any = AskAsync()

    async def run(self, text: str) -> Any:
        return await self.flow_async.kickoff_async(inputs={"text": text})

    def run_sync(self, text: str) -> Any:
        return self.flow.kickoff(inputs={"text": text})


class OwnWay(NamedTuple):
    """One of them."""

    framework: str
    make: Callable[[str], Layer]
    tree: str
    """What is to be recorded."""
    says: Says


def _calling(name: str, arguments: str) -> Says:
    asking = Turn(calls=[(name, arguments)])
    return {"ask": [asking, "ask is done with {task}."], "helper": ["helper knows of {task}."]}


OWN_WAYS: Final[Mapping[str, OwnWay]] = {
    "LangGraph: a graph that is a node": OwnWay(
        "langgraph",
        Subgraph,
        """
        invoke_agent ask @ask
          invoke_agent helper @ask/helper
            chat @ask/helper
        """,
        {"helper": ["helper knows of {task}."]},
    ),
    "AutoGen: a team in a team": OwnWay(
        "autogen",
        TeamInTeam,
        """
        invoke_agent ask @ask
          invoke_agent helper @ask/helper
            invoke_agent writer @ask/helper/writer
              chat @ask/helper/writer
        """,
        {"writer": ["writer knows of {task}."]},
    ),
    "AutoGen: `AgentTool`": OwnWay(
        "autogen",
        AgentTool,
        """
        invoke_agent ask @ask
          chat @ask
          execute_tool helper @ask
            invoke_agent helper @ask/helper
              chat @ask/helper
          chat @ask
        """,
        _calling("helper", '{"task": "help with {task}"}'),
    ),
    "OpenAI Agents SDK: `as_tool`": OwnWay(
        "openai_agents",
        AsTool,
        """
        invoke_agent ask @ask
          chat @ask
          execute_tool helper @ask
            invoke_agent helper @ask/helper
              chat @ask/helper
          chat @ask
        """,
        _calling("helper", '{"input": "help with {task}"}'),
    ),
    "OpenAI Agents SDK: a handoff": OwnWay(
        "openai_agents",
        Handoff,
        """
        invoke_agent ask @ask
          chat @ask
          handoff @ask
        invoke_agent helper @helper
          chat @helper
        """,
        _calling("transfer_to_helper", "{}"),
    ),
    "CrewAI: a crew in a flow's method": OwnWay(
        "crewai",
        CrewInFlow,
        """
        invoke_agent Ask @Ask
          invoke_agent begin @Ask/begin
            invoke_agent helper @Ask/begin/helper
              chat @Ask/begin/helper
        """,
        {"helper": ["helper knows of {task}."]},
    ),
}

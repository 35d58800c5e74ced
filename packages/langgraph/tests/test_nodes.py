"""Test nodes of custom graphs that have names of prebuilt nodes: `agent`, `model`, `tools`."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain.agents.middleware import before_model
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from lightspan_langgraph import agents
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import ScriptedServer
from packages.langgraph.tests.langgraph_apps import (
    USER,
    ask_raw,
    asks,
    calls_tool,
    chat,
    graph_of,
    look,
    raw_client,
)

pytestmark = pytest.mark.usefixtures("installed_langgraph")

NAMES = ("agent", "model", "tools", "generate_structured_response")


def react(model: Any, tools: Any, **more: Any) -> Any:
    """Call `create_react_agent`, and ignore its deprecation warning."""
    from langgraph.prebuilt import create_react_agent

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_react_agent(model, tools, **more)


def tutorial(chat_model: Any, *tools: Any, **compiled: Any) -> Any:
    """Return the graph with which LangGraph's tutorials begin."""
    model = chat_model.bind_tools(tools)

    def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    builder: Any = StateGraph(MessagesState)
    builder.add_node("agent", call_model)
    builder.add_node("tools", ToolNode(tools))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return builder.compile(**compiled)


TUTORIAL = [
    "invoke_agent agent @agent",
    "  chat m @agent",
    "execute_tool look @app",
    "invoke_agent agent @agent",
    "  chat m @agent",
]


@pytest.mark.parametrize("compiled", [{}, {"name": "scout"}])
def test_the_graph_of_the_tutorials(server: ScriptedServer, compiled: Any) -> None:
    server.script = calls_tool("look", '{"what": "x"}')
    graph = tutorial(chat(server), look, **compiled)
    with captured() as run:
        graph.invoke(USER)
    assert run.tree == TUTORIAL
    assert agents(graph) == (("agent",), True)


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_ones_own(server: ScriptedServer, name: str) -> None:
    model = chat(server)

    class Own:
        def __call__(self, state: Any) -> dict[str, Any]:
            return asks(model)(state)

        def method(self, state: Any) -> dict[str, Any]:
            return self(state)

    for node in (
        asks(model),
        Own(),
        Own().method,
        functools.partial(lambda node, state: node(state), asks(model)),
        RunnableLambda(asks(model)),
        RunnableLambda(asks(model), name=name),
        RunnableLambda(lambda state: state["messages"]) | model | (lambda m: {"messages": [m]}),
    ):
        graph = graph_of((name, node))
        with captured() as run:
            graph.invoke(USER)
        assert run.tree == [f"invoke_agent {name} @{name}", f"  chat m @{name}"]
        assert agents(graph) == ((name,), True)


@pytest.mark.parametrize("name", ["agent", "model"])
@pytest.mark.parametrize(
    ("make", "more", "path"),
    [
        (create_agent, {}, "{name}"),
        (create_agent, {"name": "scout"}, "{name}/scout"),
        (react, {}, "{name}"),
        (react, {"name": "scout"}, "{name}/scout"),
    ],
)
def test_a_prebuilt_agent_in_a_node_of_ones_own(
    server: ScriptedServer, name: str, make: Any, more: Any, path: str
) -> None:
    graph = graph_of((name, make(chat(server), [look], **more)))
    with captured() as run:
        graph.invoke(USER)
    assert run.calls == [path.format(name=name)]
    assert agents(graph) == ((path.format(name=name),), True)


@before_model
def quiet(state: Any, runtime: Any) -> None:
    """A middleware's node."""


@pytest.mark.parametrize(
    "make",
    [
        create_agent,
        functools.partial(create_agent, middleware=[quiet]),
        react,
        functools.partial(
            react, pre_model_hook=lambda state: {"llm_input_messages": state["messages"]}
        ),
        functools.partial(react, version="v1"),
    ],
)
def test_the_nodes_of_prebuilt_agents_never_count(server: ScriptedServer, make: Any) -> None:
    server.script = calls_tool("look", '{"what": "x"}')
    for more, path in (({}, "app"), ({"name": "scout"}, "scout")):
        graph = make(chat(server), [look], **more)
        with captured() as run:
            graph.invoke(USER)
        assert set(run.calls) == {path}
        assert agents(graph) == ((path,), True)


def test_ones_own_graph_in_a_tool_of_a_prebuilt_agent(server: ScriptedServer) -> None:
    """Check nodes that inherit the metadata of the prebuilt agent."""
    server.script = calls_tool("deep")
    inner = graph_of(("agent", asks(chat(server))), ("model", asks(chat(server))))

    @tool
    def deep() -> str:
        """Ask the inner graph."""
        return str(inner.invoke(USER)["messages"][-1].content)

    for make in (create_agent, react):
        graph = make(chat(server), [deep], name="scout")
        with captured() as run:
            graph.invoke(USER)
        assert run.tree == [
            "invoke_agent scout @scout",
            "  chat m @scout",
            "  execute_tool deep @scout",
            "    invoke_agent agent @scout/agent",
            "      chat m @scout/agent",
            "    invoke_agent model @scout/model",
            "      chat m @scout/model",
            "  chat m @scout",
        ]
        assert agents(graph) == (("scout", "scout/agent", "scout/model"), True)


def test_a_name_of_ones_own_goes_before(server: ScriptedServer) -> None:
    builder: Any = StateGraph(MessagesState)
    builder.add_node("agent", asks(chat(server)), metadata={"lightspan_agent": "poet"})
    graph = builder.add_edge(START, "agent").add_edge("agent", END).compile()
    with captured() as run:
        graph.invoke(USER)
    assert run.calls == ["poet"]
    assert agents(graph) == (("poet",), True)


def test_a_tool_node_is_no_agent(server: ScriptedServer) -> None:
    """Check that a call in a custom graph's tool is the app's, unless `lightspan.agent` names
    it.
    """
    server.script = calls_tool("deep")
    client = raw_client(server)

    @tool
    def deep() -> str:
        """Ask the raw client."""
        ask_raw(client)
        return "7"

    with captured() as run:
        tutorial(chat(server), deep).invoke(USER)
    assert run.calls == ["agent", "app", "agent"]

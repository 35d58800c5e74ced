"""Test prebuilt agents, and names that the user sets."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, before_agent, wrap_model_call
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph

from lightspan.capture import context, emit
from lightspan_langgraph import agents
from lightspan_testing.attempts import captured, push
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


AGENT_WITH_TOOL = [
    "invoke_agent scout @scout",
    "  chat m @scout",
    "  execute_tool look @scout",
    "  chat m @scout",
]


def test_a_named_agent(server: ScriptedServer) -> None:
    server.script = calls_tool("look", '{"what": "seven"}')
    agent = create_agent(chat(server), [look], name="scout")
    with captured() as run:
        agent.invoke(USER)
    assert run.tree == AGENT_WITH_TOOL
    span = run.one("execute_tool look")
    assert span.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.call.id": "call_7",
        "gen_ai.tool.call.arguments": '{"what": "seven"}',
        "gen_ai.tool.call.result": "seven: 7",
        "lightspan.agent.path": "scout",
        "openinference.span.kind": "TOOL",
    }
    assert agents(agent).paths == ("scout",)


def test_an_unnamed_agent_at_the_top_is_the_app(server: ScriptedServer) -> None:
    server.script = calls_tool("look", '{"what": "seven"}')
    agent = create_agent(chat(server), [look])
    with captured() as run:
        agent.invoke(USER)
    assert run.tree == ["chat m @app", "execute_tool look @app", "chat m @app"]
    assert agents(agent).paths == ("app",)


def test_agents_inside_nodes(server: ScriptedServer) -> None:
    """Check an unnamed agent, one with the node's name, and one with another name, each in a
    node.
    """
    model = chat(server)
    graph = graph_of(
        ("plain", create_agent(model, [])),
        ("same", create_agent(model, [], name="same")),
        ("draft", create_agent(model, [], name="writer")),
    )
    with captured() as run:
        graph.invoke(USER)
    assert run.tree == [
        "invoke_agent plain @plain",
        "  chat m @plain",
        "invoke_agent same @same",
        "  chat m @same",
        "invoke_agent draft @draft",
        "  invoke_agent writer @draft/writer",
        "    chat m @draft/writer",
    ]
    assert agents(graph) == (("plain", "same", "draft/writer"), True)


@pytest.mark.parametrize("inner_name", ["outer", None])
def test_an_agent_as_a_tool(server: ScriptedServer, inner_name: str | None) -> None:
    """Check that the inner agent has its own name, and that the outer agent acts again after it."""
    server.script = calls_tool("ask_helper")
    inner = create_agent(chat(server), [], name=inner_name)

    @tool
    def ask_helper() -> str:
        """Ask the helper."""
        return str(inner.invoke(USER)["messages"][-1].content)

    outer = create_agent(chat(server), [ask_helper], name="outer")
    with captured() as run:
        outer.invoke(USER)
    named = [f"    invoke_agent {inner_name} @outer/{inner_name}"] if inner_name else []
    path, indent = (f"outer/{inner_name}", "      ") if inner_name else ("outer", "    ")
    assert run.tree == [
        "invoke_agent outer @outer",
        "  chat m @outer",
        "  execute_tool ask_helper @outer",
        *named,
        f"{indent}chat m @{path}",
        "  chat m @outer",
    ]
    assert set(agents(outer).paths) == {"outer", path}


def test_conditional_edges_call_models(server: ScriptedServer) -> None:
    """Check that the agents are those of the calls, at START and after a node."""
    model, scout = chat(server), create_agent(chat(server), [], name="scout")

    def first(state: Any) -> str:
        model.invoke("1")
        return "work"

    def second(state: Any) -> str:
        scout.invoke(USER)
        return END

    graph: Any = StateGraph(MessagesState)
    graph.add_node("work", asks(model))
    graph.add_conditional_edges(START, first, ["work"])
    graph.add_conditional_edges("work", second, [END])
    app = graph.compile()
    with captured() as run:
        app.invoke(USER)
    assert run.calls == ["app", "work", "work/scout"]
    assert agents(app) == (("work", "app", "work/scout"), True)


def test_a_cached_function_may_make_agents(server: ScriptedServer) -> None:
    @functools.lru_cache
    def scout() -> Any:
        return create_agent(chat(server), [], name="scout")

    def work(state: Any) -> Any:
        return scout().invoke(state)

    assert agents(graph_of(("work", work))) == (("work",), False)


def test_a_router_returns_names_of_nodes_not_of_globals(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspector = create_agent(chat(server), [], name="inspector")
    monkeypatch.setitem(globals(), "inspect", inspector)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("triage", lambda _: {})
    graph.add_node("inspect", asks(chat(server)))
    graph.add_edge(START, "triage")
    graph.add_conditional_edges("triage", lambda _: "inspect", ["inspect"])
    assert agents(graph.compile()) == (("triage", "inspect"), True)


def _middleware(kind: str, helper: Any) -> Any:
    def call(*_: Any) -> None:
        helper.invoke(USER)

    class Own(AgentMiddleware[Any, Any]):
        def after_model(self, state: Any, runtime: Any) -> None:
            call()

    def around(request: Any, handler: Any) -> Any:
        call()
        return handler(request)

    kinds = {"node": before_agent(call), "class": Own(), "model": wrap_model_call(around)}
    return kinds[kind]


@pytest.mark.parametrize("kind", ["node", "class", "model"])
def test_agents_in_middleware(server: ScriptedServer, kind: str) -> None:
    helper = create_agent(chat(server), [], name="helper")
    middleware = [_middleware(kind, helper)]
    host = create_agent(chat(server), [], name="host", middleware=middleware)
    assert agents(host) == (("host", "host/helper"), True)
    with captured() as run:
        host.invoke(USER)
    assert set(run.calls) == {"host", "host/helper"}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_tool_that_passes_its_config_on(
    server: ScriptedServer, is_async: bool, in_graph: bool
) -> None:
    """Check that an agent keeps its name although the metadata in the config has its caller's."""
    server.script = calls_tool("ask")
    inner: Any = create_agent(chat(server), [], name="scout")
    if in_graph:

        def node(state: Any) -> Any:
            return agent.invoke(state)

        async def node_async(state: Any) -> Any:
            return await agent.ainvoke(state)

        agent, inner = inner, graph_of(("mid", node_async if is_async else node))

    @tool
    def ask(config: RunnableConfig) -> str:
        """Ask."""
        return str(inner.invoke(USER, config)["messages"][-1].content)

    @tool("ask")
    async def ask_async(config: RunnableConfig) -> str:
        """Ask."""
        return str((await inner.ainvoke(USER, config))["messages"][-1].content)

    boss = create_agent(chat(server), [ask_async if is_async else ask], name="boss")
    with captured() as run:
        asyncio.run(boss.ainvoke(USER)) if is_async else boss.invoke(USER)
    path = "boss/mid/scout" if in_graph else "boss/scout"
    assert run.calls == ["boss", path, "boss"]


# --- names given by hand --------------------------------------------------------------------
def test_explicit_names(server: ScriptedServer) -> None:
    plain, judge = chat(server), chat(server, metadata={"lightspan_agent": "judge"})
    client = raw_client(server)

    def work(state: Any) -> dict[str, Any]:
        plain.invoke("1")
        stream = judge.stream("2 3")
        next(stream)
        ask_raw(client)  # while the judge still streams
        list(stream)
        plain.invoke("4")
        return {}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("work", work)
    graph.add_node("again", asks(plain), metadata={"lightspan_agent": "poet"})
    graph.add_edge(START, "work")
    graph.add_edge("work", "again")
    with captured() as run:
        graph.compile().invoke(USER, {"metadata": {"lightspan_agent": "team"}})
    assert run.calls == ["team/work", "team/work/judge", "team/work", "team/work", "team/poet"]
    assert agents(graph.compile()).paths == ("work", "work/judge", "poet")


def test_frames_of_ours_and_of_langgraph_interleave(server: ScriptedServer) -> None:
    model, client = chat(server), raw_client(server)
    inner = graph_of(("check", asks(model)))

    def work(state: Any) -> dict[str, Any]:
        with emit.agent("thinker"):
            model.invoke("1")
            ask_raw(client)
            inner.invoke(USER)
        with push(context.Frame("pushed", "ab" * 8)):
            ask_raw(client)
        ask_raw(client)
        return {}

    with captured() as run, emit.agent("crew"):
        graph_of(("work", work)).invoke(USER)
        ask_raw(client)
    assert run.calls == [
        "crew/work/thinker",
        "crew/work/thinker",
        "crew/work/thinker/check",
        "crew/work/pushed",
        "crew/work",
        "crew",
    ]

"""Test installing the adapter, `agents()`, and the program on the adapter's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph

from lightspan.capture import context, emit
from lightspan_langgraph import LightspanCallback, _hook, agents, uninstrument
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import ScriptedServer
from packages.langgraph.tests.langgraph_apps import TWO_NODES, USER, asks, chat, graph_of, two_nodes
from tests.adapters.guide_pages import import_page, shown

pytestmark = pytest.mark.usefixtures("installed_langgraph")


def test_the_callback_alone(server: ScriptedServer) -> None:
    uninstrument()
    callback = LightspanCallback()
    with captured() as run:
        two_nodes(server).invoke(USER, {"callbacks": [callback]})
    assert run.tree == TWO_NODES
    context.unregister_resolver(_hook.resolve)


def test_the_callback_and_instrument_record_once(server: ScriptedServer) -> None:
    model = chat(server, callbacks=[LightspanCallback()])
    graph = graph_of(("writer", asks(model)), ("checker", asks(model)))
    with captured() as run:
        graph.invoke(USER, {"callbacks": [LightspanCallback(), LightspanCallback()]})
    assert run.tree == TWO_NODES


def test_a_scope_opened_inside_a_run_is_recorded(server: ScriptedServer) -> None:
    inner = two_nodes(server)

    def recorded(_: Any) -> list[str]:
        with captured() as run:
            inner.invoke(USER)
        return run.tree

    assert RunnableLambda(recorded).invoke("go") == TWO_NODES


# --- the static list ------------------------------------------------------------------------
def test_agents_in_a_chain_and_a_model(server: ScriptedServer) -> None:
    model = chat(server)
    prompt = ChatPromptTemplate.from_messages([("user", "{q}")])
    assert agents(prompt | model) == (("app",), True)
    assert agents(chat(server, metadata={"lightspan_agent": "poet"})) == (("poet",), True)


def test_agents_sees_what_a_node_refers_to(server: ScriptedServer) -> None:
    inner = create_agent(chat(server), [], name="helper")
    judge = chat(server, metadata={"lightspan_agent": "judge"})

    def work(state: Any) -> dict[str, Any]:
        judge.invoke("?")
        return {"messages": inner.invoke(state)["messages"]}

    assert agents(graph_of(("work", work))) == (("work", "work/helper", "work/judge"), True)


def test_agents_of_a_graph_that_a_node_may_call_again(server: ScriptedServer) -> None:
    """Check a node that calls its own graph, and an app whose method is a node of its graph."""
    model = chat(server)

    def research(state: Any) -> dict[str, Any]:
        model.invoke("?")
        return dict(graph.invoke(state))

    class App:
        def __init__(self) -> None:
            self.graph = graph_of(("work", self.work))

        def work(self, state: Any) -> dict[str, Any]:
            return {"messages": [model.invoke("?")]}

    graph = graph_of(("research", research))
    assert agents(graph) == (("research",), False)
    assert agents(App().graph) == (("work",), False)


@pytest.mark.skipif(not hasattr(StateGraph, "set_node_defaults"), reason="an older langgraph")
def test_error_handlers_are_agents_with_the_names_of_langgraph(server: ScriptedServer) -> None:
    model = chat(server)

    def fails(state: Any) -> Any:
        raise ValueError("no JSON")

    graph: Any = StateGraph(MessagesState)
    graph.set_node_defaults(error_handler=asks(model))
    graph.add_node("write", fails, error_handler=asks(model))
    graph.add_node("review", fails)
    graph.add_edge(START, "write")
    graph.add_edge(START, "review")
    graph = graph.compile()
    with captured() as run:
        graph.invoke(USER)
    paths = {"__error_handler__write", "__default_error_handler__"}
    assert {span.attributes["lightspan.agent.path"] for span in run.llm_spans} == paths
    found = agents(graph)
    assert {*found.paths} == {"write", "review", *paths}
    assert found.complete


def test_agents_lists_tasks(server: ScriptedServer) -> None:
    """Check that a task is an agent inside its entrypoint, as in the recorded calls."""
    model = chat(server)

    @task
    def write(text: str) -> str:
        return model.invoke(text).text

    @task(name="check")
    def review(text: str) -> str:
        return model.invoke(text).text

    @entrypoint()
    def flow(text: str) -> str:
        return review(write(text).result()).result()

    with captured() as run:
        flow.invoke("x")
    assert [span.attributes["lightspan.agent.path"] for span in run.llm_spans] == [
        "flow/write",
        "flow/check",
    ]
    assert agents(flow) == (("flow", "flow/check", "flow/write"), True)

    @entrypoint()
    def makes(text: str) -> str:
        @task
        def hidden(text: str) -> str:
            return model.invoke(text).text

        return hidden(text).result()

    assert agents(makes) == (("makes",), False)


def test_agents_built_inside_a_node_make_the_list_incomplete(server: ScriptedServer) -> None:
    model = chat(server)

    def builds(state: Any) -> dict[str, Any]:
        return dict(create_agent(model, [], name="hidden").invoke(state))

    def names(state: Any) -> dict[str, Any]:
        model.invoke("x", {"metadata": {"lightspan_agent": "hidden"}})
        return {}

    def pushes(state: Any) -> dict[str, Any]:
        with emit.agent("hidden"):
            return {}

    for node in (builds, names, pushes):
        assert agents(graph_of(("work", node))) == (("work",), False)


# --- the package ----------------------------------------------------------------------------
def test_the_page(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the app on the page, and compare its agents with those that the page shows."""
    page = import_page("langgraph", tmp_path, monkeypatch, server.url)
    assert shown("langgraph") == [str(agents(page["haiku"].graph))]
    with captured() as run:
        assert page["learning"].answer(page["train"].topics[0]) == 0.0
    assert run.calls == ["write", "revise"]

"""Installing, what is known without running, and what the package says of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain_core.callbacks import CallbackManager
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers import context as langchain_context

import lightspan
import lightspan_langgraph
from lightspan.capture import context, emit
from lightspan.capture.entry import open_scope
from lightspan_langgraph import LightspanCallback, _hook, agents, instrument, uninstrument
from lightspan_testing.attempts import captured, make_scope
from lightspan_testing.scripted import ScriptedServer
from packages.langgraph.tests.langgraph_apps import TWO_NODES, USER, asks, chat, graph_of, two_nodes

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


def test_instrument_twice_is_once(server: ScriptedServer) -> None:
    count = len(langchain_context._configure_hooks)
    with instrument():
        assert len(langchain_context._configure_hooks) == count
        with captured() as run:
            two_nodes(server).invoke(USER)
    assert run.tree == TWO_NODES
    assert len(langchain_context._configure_hooks) == count  # the outer one still holds


def test_langchain_tells_nobody_outside_a_scope() -> None:
    def listening() -> list[Any]:
        return [h for h in CallbackManager.configure().handlers if h is _hook._callback]

    assert listening() == []
    with open_scope(make_scope()):
        assert listening() == [_hook._callback]
    assert listening() == []


def test_a_scope_opened_inside_a_run_is_recorded(server: ScriptedServer) -> None:
    inner = two_nodes(server)

    def recorded(_: Any) -> list[str]:
        with captured() as run:
            inner.invoke(USER)
        return run.tree

    assert RunnableLambda(recorded).invoke("go") == TWO_NODES


def test_uninstrument(server: ScriptedServer) -> None:
    uninstrument()
    uninstrument()
    assert _hook.resolve not in context.resolvers()
    with captured() as run:
        two_nodes(server).invoke(USER)
    assert run.tree == ["chat m @app", "chat m @app"]


def test_outside_a_scope_nothing_is_kept(server: ScriptedServer) -> None:
    before = len(_hook._state.owners)
    assert two_nodes(server).invoke(USER)["messages"]
    assert len(_hook._state.owners) == before


SEPARATE = """
import asyncio, sys
import lightspan_langgraph
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
model = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key="key")
async def writer(state):
    return {"messages": [await model.ainvoke("hi")]}
graph = StateGraph(MessagesState).add_node("writer", writer).add_edge(START, "writer").compile()
from lightspan.capture import sdk_instrumentation
from lightspan.schema.routing import make_routing
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
lightspan_langgraph.instrument()
async def attempt(number):
    scope = AttemptContext(rollout_id="r", attempt_id=str(number), root_span_id="1" * 16,
                  gateway_url=sys.argv[1], call_token="t",
                  routing=make_routing({"writer": "main"}, None, "main"))
    with open_scope(scope):
        await graph.ainvoke({"messages": [("user", "go")]})
    await sdk_instrumentation.aclose()
    assert not scope.recorder.capture_errors()
    for span in scope.recorder.drain():
        print(span.attempt_id, span.name, span.attributes["lightspan.agent.path"])
for number in (1, 2):
    asyncio.run(attempt(number))
"""


@pytest.mark.parametrize("environment", [{}, {"OTEL_SDK_DISABLED": "true"}])
def test_two_loops_with_graph_and_client_built_at_import(
    environment: Mapping[str, str], server: ScriptedServer
) -> None:
    """Everything is built before `instrument`; telemetry on and off."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SEPARATE, server.origin],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{n} invoke_agent writer writer" for n in (1, 2)]
    parents = [request.headers["traceparent"] for request in server.requests]
    assert [request.headers["x-lightspan-agent"] for request in server.requests] == ["writer"] * 2
    assert len({parent.split("-")[2] for parent in parents}) == 2


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


def test_agents_of_a_plain_graph(server: ScriptedServer) -> None:
    assert agents(two_nodes(server)) == (("writer", "checker"), True)


# --- the package ----------------------------------------------------------------------------
def test_the_readme(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app of the README runs and says what the README says it does; its training compiles."""
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    readme = Path(__file__).parents[3] / "packages" / "langgraph" / "README.md"
    app, training = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    compile(training, "training", "exec")
    names: dict[str, Any] = {}
    exec(compile(app, "app", "exec"), names)
    assert f"# {agents(names['graph'])}" in training
    with captured() as run:
        names["graph"].invoke(USER)
    assert run.calls == ["write", "revise"]


def test_public_names() -> None:
    names: Sequence[str] = lightspan_langgraph.__all__
    assert names == ["LightspanCallback", "agents", "instrument", "uninstrument"]
    assert all(hasattr(lightspan_langgraph, name) for name in names)
    assert lightspan is not None

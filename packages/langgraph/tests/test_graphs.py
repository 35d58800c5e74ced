"""Test that every graph node is an agent, in streams, subgraphs, threads and concurrent runs."""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Annotated, Any, TypedDict

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from lightspan_testing.attempts import Captured, captured
from lightspan_testing.scripted import ScriptedServer
from packages.langgraph.tests.langgraph_apps import (
    TWO_NODES,
    USER,
    ask_raw,
    asks,
    asks_async,
    chat,
    graph_of,
    raw_client,
    two_nodes,
)

pytestmark = pytest.mark.usefixtures("installed_langgraph")


def check_answers(run: Captured) -> None:
    """Check the response id and the usage of each call, which LangChain drops from a stream."""
    spans = [span.attributes for span in run.spans if span.kind == "llm"]
    ids = [str(attributes["gen_ai.response.id"]) for attributes in spans]
    assert [one.startswith("chatcmpl-") for one in ids] == [True, True]
    assert len(set(ids)) == 2
    for attributes in spans:
        assert attributes["gen_ai.usage.input_tokens"] == 1
        assert attributes["gen_ai.usage.output_tokens"] == 1


@pytest.mark.parametrize("mode", ["messages", "values", "updates", ["messages", "custom"]])
def test_stream(server: ScriptedServer, mode: Any) -> None:
    model = chat(server, stream_usage=True)
    graph = graph_of(("writer", asks(model)), ("checker", asks(model)))
    with captured() as run:
        chunks = list(graph.stream(USER, stream_mode=mode))
    assert chunks
    assert run.tree == TWO_NODES
    assert bool(server.requests[0].body.get("stream")) is ("messages" in mode)
    check_answers(run)


def test_stream_without_usage(server: ScriptedServer) -> None:
    """Check that no usage is requested from the endpoint unless the app requests it."""
    with captured() as run:
        list(two_nodes(server).stream(USER, stream_mode="messages"))
    spans = [span.attributes for span in run.spans if span.kind == "llm"]
    assert ["gen_ai.response.id" in attributes for attributes in spans] == [True, True]
    assert ["gen_ai.usage.input_tokens" in attributes for attributes in spans] == [False, False]


async def test_astream_events(server: ScriptedServer) -> None:
    model = chat(server, stream_usage=True)
    graph = graph_of(("writer", asks_async(model)), ("checker", asks_async(model)))
    with captured() as run:
        events = [event["event"] async for event in graph.astream_events(USER, version="v2")]
    assert "on_chat_model_stream" in events
    assert run.tree == TWO_NODES
    assert [request.body["stream"] for request in server.requests] == [True, True]
    check_answers(run)


def test_interrupt_and_resume(server: ScriptedServer) -> None:
    """Check that the interrupted node runs again from its beginning: one more call, and no
    error.
    """
    model = chat(server)

    def review(state: Any) -> dict[str, Any]:
        model.invoke("draft")
        return {"messages": [("user", interrupt("good?"))]}

    graph = graph_of(("review", review), checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    with captured() as run:
        assert "__interrupt__" in graph.invoke(USER, config)
        graph.invoke(Command(resume="yes"), config)
    assert run.tree == [
        "invoke_agent review @review unset",
        "  chat m @review",
        "invoke_agent review @review",
        "  chat m @review",
    ]


class Fan(TypedDict):
    seen: Annotated[list[str], operator.add]


def test_send_fan_out(server: ScriptedServer) -> None:
    model = chat(server)

    def work(state: Any) -> dict[str, Any]:
        return {"seen": [model.invoke(str(state["n"])).text]}

    graph: Any = StateGraph(Fan)
    graph.add_node("work", work)
    graph.add_conditional_edges(
        START, lambda state: [Send("work", {"n": n}) for n in range(8)], ["work"]
    )
    with captured() as run:
        out = graph.compile().invoke({"seen": []})
    assert sorted(out["seen"]) == list("01234567")
    assert sorted(run.tree) == sorted(["invoke_agent work @work", "  chat m @work"] * 8)
    parents = Counter(span.parent_id for span in run.spans if span.kind == "llm")
    assert set(parents.values()) == {1}


def test_the_functional_api(server: ScriptedServer) -> None:
    model = chat(server)

    @task
    def write(text: str) -> str:
        return model.invoke(text).text

    @entrypoint()
    def flow(text: str) -> str:
        model.invoke("plan")
        return write(text).result()

    with captured() as run:
        assert flow.invoke("x") == "x"
    assert run.tree == [
        "invoke_agent flow @flow",
        "  chat m @flow",
        "  invoke_agent write @flow/write",
        "    chat m @flow/write",
    ]


def test_a_model_called_by_a_conditional_edge_belongs_to_the_node_before(
    server: ScriptedServer,
) -> None:
    model = chat(server)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("writer", asks(model))

    def route(state: Any) -> str:
        model.invoke("where?")
        return END

    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", route, [END])
    with captured() as run:
        graph.compile().invoke(USER)
    assert run.calls == ["writer", "writer"]


# --- many at once ---------------------------------------------------------------------------
async def test_batch_abatch_gather(server: ScriptedServer) -> None:
    model = chat(server)
    graph = graph_of(("writer", asks(model)), ("checker", RunnableLambda(asks(model))))
    with captured() as run:
        await asyncio.to_thread(graph.batch, [USER] * 4)
        await graph.abatch([USER] * 4)
        await asyncio.gather(*(graph.ainvoke(USER) for _ in range(4)))
        await model.abatch(["a", "b"])
    assert Counter(run.calls) == {"writer": 12, "checker": 12, "app": 2}
    assert Counter(run.tree) == {**dict.fromkeys(TWO_NODES, 12), "chat m @app": 2}


# --- threads --------------------------------------------------------------------------------
def test_threads(server: ScriptedServer) -> None:
    """Check that a thread has the agent's name if it gets the context, and else is outside the
    scope.
    """
    client = raw_client(server)

    def work(state: Any) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(copy_context().run, ask_raw, client).result()
            pool.submit(ask_raw, client).result()
        return {}

    with captured() as run:
        graph_of(("work", work)).invoke(USER)
    assert run.calls == ["work"]
    assert len(server.requests) == 2

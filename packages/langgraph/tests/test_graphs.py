"""Graphs: every node is an agent, in streams, in subgraphs, in threads, many at once."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Annotated, Any, TypedDict

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from lightspan.capture import context, emit, sdk_instrumentation
from lightspan.capture.entry import open_scope
from lightspan_langgraph import agents
from lightspan_testing.adapter_harness import Part, Stage
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
    human,
    raw_client,
    two_nodes,
)

pytestmark = pytest.mark.usefixtures("installed_langgraph")


def test_every_node_is_an_agent(server: ScriptedServer) -> None:
    graph = two_nodes(server)
    with captured() as run:
        graph.invoke(USER)
    assert run.tree == TWO_NODES
    span = run.one("invoke_agent writer")
    assert span.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "writer",
        "lightspan.agent.path": "writer",
        "openinference.span.kind": "AGENT",
        "agent.name": "writer",
        "graph.node.id": "writer",
    }
    assert (span.rollout_id, span.attempt_id, span.trace_id) == (
        "r",
        run.scope.attempt_id,
        run.scope.trace_id,
    )


async def test_every_node_is_an_agent_async(server: ScriptedServer) -> None:
    model = chat(server)
    graph = graph_of(("writer", asks_async(model)), ("checker", asks_async(model)))
    with captured() as run:
        await graph.ainvoke(USER)
    assert run.tree == TWO_NODES


def check_answers(run: Captured) -> None:
    """Each call has its own answer's id and what it used, which LangChain forgets of a stream."""
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
    """Nobody asks another endpoint for it unless the app does; the gateway counts by itself."""
    with captured() as run:
        list(two_nodes(server).stream(USER, stream_mode="messages"))
    spans = [span.attributes for span in run.spans if span.kind == "llm"]
    assert ["gen_ai.response.id" in attributes for attributes in spans] == [True, True]
    assert ["gen_ai.usage.input_tokens" in attributes for attributes in spans] == [False, False]

    with Stage() as stage:
        played = stage.open(Part({"writer": ["A draft."]}), through_gateway=True)
        graph = graph_of(("writer", asks(chat(stage), f"You are writer. {played.text}")))
        with open_scope(played.scope):
            list(graph.stream(USER, stream_mode="messages"))
        sdk_instrumentation.close()
        stage.close(played)
    (attributes,) = (span.attributes for span in played.spans if span.kind == "llm")
    (record,) = played.records
    assert str(attributes["gen_ai.response.id"]).startswith("chatcmpl-")
    assert attributes["gen_ai.usage.input_tokens"] == len(record.prompt_ids)
    assert attributes["gen_ai.usage.output_tokens"] == len(record.response_ids)


async def test_astream_messages(server: ScriptedServer) -> None:
    model = chat(server, stream_usage=True)
    graph = graph_of(("writer", asks_async(model)), ("checker", asks_async(model)))
    with captured() as run:
        async for _ in graph.astream(USER, stream_mode="messages"):
            pass
    assert run.tree == TWO_NODES
    assert [request.body["stream"] for request in server.requests] == [True, True]
    check_answers(run)


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
    """The interrupted node runs again from its top: one more call, and no error."""
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


def fan_graph(node: Callable[[Any], Any], width: int) -> Any:
    graph: Any = StateGraph(Fan)
    graph.add_node("work", node)
    graph.add_conditional_edges(
        START, lambda state: [Send("work", {"n": n}) for n in range(width)], ["work"]
    )
    return graph.compile()


def test_send_fan_out(server: ScriptedServer) -> None:
    model = chat(server)

    def work(state: Any) -> dict[str, Any]:
        return {"seen": [model.invoke(str(state["n"])).text]}

    with captured() as run:
        out = fan_graph(work, 8).invoke({"seen": []})
    assert sorted(out["seen"]) == list("01234567")
    assert sorted(run.tree) == sorted(["invoke_agent work @work", "  chat m @work"] * 8)
    parents = Counter(span.parent_id for span in run.spans if span.kind == "llm")
    assert set(parents.values()) == {1}


def test_subgraphs(server: ScriptedServer) -> None:
    graph = graph_of(("draft_team", two_nodes(server)), ("judge", asks(chat(server))))
    with captured() as run:
        graph.invoke(USER)
    assert run.tree == [
        "invoke_agent draft_team @draft_team",
        "  invoke_agent writer @draft_team/writer",
        "    chat m @draft_team/writer",
        "  invoke_agent checker @draft_team/checker",
        "    chat m @draft_team/checker",
        "invoke_agent judge @judge",
        "  chat m @judge",
    ]
    assert run.one("invoke_agent writer").attributes["graph.node.parent_id"] == "draft_team"
    assert agents(graph).paths == ("draft_team/writer", "draft_team/checker", "judge")


def test_a_graph_called_inside_a_node(server: ScriptedServer) -> None:
    inner = two_nodes(server)
    graph = graph_of(("outer", lambda state: inner.invoke(state)))
    with captured() as run:
        graph.invoke(USER)
    assert run.calls == ["outer/writer", "outer/checker"]


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


def test_a_generation_of_several_prompts(server: ScriptedServer) -> None:
    model = chat(server, metadata={"lightspan_agent": "twins"})

    def work(state: Any) -> dict[str, Any]:
        model.generate([[human("a")], [human("b")]])
        return {}

    with captured() as run:
        graph_of(("work", work)).invoke(USER)
    assert run.calls == ["work/twins", "work/twins"]
    assert [span.name for span in run.spans].count("invoke_agent twins") == 2


# --- threads --------------------------------------------------------------------------------
def test_threads(server: ScriptedServer) -> None:
    """With the context carried along the name is known; a bare thread is outside the scope."""
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


def test_the_scope_alone_in_a_thread_falls_back_to_what_is_pushed(server: ScriptedServer) -> None:
    client = raw_client(server)

    def work(state: Any) -> dict[str, Any]:
        pushed = context.current_context()

        def in_thread() -> None:
            context.set_agent(pushed)
            ask_raw(client)

        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        return {}

    with captured() as run, emit.agent("crew"):
        graph_of(("work", work)).invoke(USER)
    assert run.calls == ["crew"]


async def test_32_attempts_at_once(server: ScriptedServer) -> None:
    """Every attempt has its own calls, whole and rightly named, and nobody else's."""
    model, client = chat(server), raw_client(server)
    graph = graph_of(("writer", asks_async(model)), ("draft", create_agent(model, [], name="poet")))
    ready = asyncio.Barrier(32)

    async def attempt(number: int) -> Captured:
        await ready.wait()
        with captured() as run:
            await graph.ainvoke({"messages": [("user", f"question {number}")]})
            await asyncio.to_thread(ask_raw, client, f"last {number}")
        return run

    runs = await asyncio.gather(*(attempt(number) for number in range(32)))
    for number, run in enumerate(runs):
        assert run.tree == [
            "invoke_agent writer @writer",
            "  chat m @writer",
            "invoke_agent draft @draft",
            "  invoke_agent poet @draft/poet",
            "    chat m @draft/poet",
            "chat m @app",
        ]
        assert {span.attempt_id for span in run.spans} == {run.scope.attempt_id}
        last = max((s for s in run.spans if s.kind == "llm"), key=lambda span: span.start_ns)
        assert f"last {number}" in str(last.attributes["gen_ai.input.messages"])

"""The adapter with the real framework, the real OpenAI client and a real HTTP server."""

from __future__ import annotations

import asyncio
import gc
import itertools
import operator
import os
import re
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

import openai
from langchain.agents import create_agent
from langchain_core.callbacks import CallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_core.tracers import context as langchain_context
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel, SecretStr

import lightspan
import lightspan_langgraph
from lightspan import emit, scope, wire
from lightspan.routing import make_routing
from lightspan.scope import Recorder, Scope, open_scope
from lightspan.spans import Span, SpanStatus
from lightspan.testing.scripted import Reply, Request, ScriptedServer, ToolCall
from lightspan.testing.stage import Part, Stage
from lightspan_langgraph import LightspanCallback, _hook, agents, instrument, uninstrument
from lightspan_langgraph._identity import RunTree

ROOT_ID = "0" * 15 + "1"
USER: Any = {"messages": [("user", "go")]}


# --- helpers --------------------------------------------------------------------------------
def echo(request: Request) -> str:
    return request.last_text


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(echo) as running:
        yield running


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    hooks = list(langchain_context._configure_hooks)
    with instrument():
        yield
    assert langchain_context._configure_hooks == hooks
    assert _hook.resolve not in scope.resolvers()


def make_scope(**more: Any) -> Scope:
    return Scope(rollout_id="r", attempt_id=uuid.uuid4().hex, root_span_id=ROOT_ID, **more)


class Captured:
    """The spans of one attempt."""

    def __init__(self, current: Scope) -> None:
        self.scope = current
        self.spans: list[Span] = []

    def close(self) -> None:
        self.spans = self.scope.recorder.drain()
        assert self.scope.recorder.damages() == []

    @property
    def tree(self) -> list[str]:
        """Every span, indented by depth: name, path, and the status where it is not ok."""
        ids = {span.span_id for span in self.spans}
        assert all(span.parent_id in ids | {ROOT_ID} for span in self.spans), "an orphan"
        lines = list(self._lines(ROOT_ID, 0))
        assert len(lines) == len(self.spans), "a cycle"
        return lines

    def _lines(self, parent: str, depth: int) -> Iterator[str]:
        children = [span for span in self.spans if span.parent_id == parent]
        for span in sorted(children, key=lambda span: (span.start_ns, span.name)):
            status = "" if span.status is SpanStatus.OK else f" {span.status}"
            yield f"{'  ' * depth}{span.name} @{path_of(span)}{status}"
            yield from self._lines(span.span_id, depth + 1)

    @property
    def calls(self) -> list[str]:
        """The agent path of every model call, in order."""
        found = [span for span in self.spans if span.kind == "llm"]
        return [path_of(span) for span in sorted(found, key=lambda span: span.start_ns)]

    def one(self, name: str) -> Span:
        (span,) = (span for span in self.spans if span.name == name)
        return span


def path_of(span: Span) -> str:
    return str(span.attributes["lightspan.agent.path"])


@contextmanager
def captured(**more: Any) -> Iterator[Captured]:
    result = Captured(make_scope(**more))
    with open_scope(result.scope):
        yield result
    result.close()


def chat(server: ScriptedServer | Stage, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="m", base_url=server.url, api_key=SecretStr("key"), max_retries=0, **more
    )


def raw_client(server: ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="key", max_retries=0)


def ask_raw(client: openai.OpenAI, text: str = "raw") -> None:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def graph_of(*nodes: tuple[str, Any], **compiled: Any) -> Any:
    """A graph whose nodes run one after the other."""
    graph: Any = StateGraph(MessagesState)
    for name, node in nodes:
        graph.add_node(name, node)
    names = [START, *(name for name, _ in nodes), END]
    for before, after in itertools.pairwise(names):
        graph.add_edge(before, after)
    return graph.compile(**compiled)


def asks(model: Any, text: str = "hi") -> Callable[[Any], dict[str, Any]]:
    def node(state: Any) -> dict[str, Any]:
        return {"messages": [model.invoke(text)]}

    return node


def asks_async(model: Any, text: str = "hi") -> Callable[[Any], Any]:
    async def node(state: Any) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(text)]}

    return node


def calls_tool(name: str, arguments: str = "{}") -> Callable[[Request], Reply | str]:
    """A model that calls the tool once for every question, then answers."""

    def script(request: Request) -> Reply | str:
        wants = request.body.get("tools") and request.messages[-1]["role"] == "user"
        if not wants:
            return "done"
        return Reply(tool_calls=[ToolCall(name=name, arguments=arguments, call_id="call_7")])

    return script


def two_nodes(server: ScriptedServer) -> Any:
    model = chat(server)
    return graph_of(("writer", asks(model)), ("checker", asks(model)))


TWO_NODES = [
    "invoke_agent writer @writer",
    "  chat m @writer",
    "invoke_agent checker @checker",
    "  chat m @checker",
]


# --- graphs ---------------------------------------------------------------------------------
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
        wire.close()
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


# --- prebuilt agents ------------------------------------------------------------------------
@tool
def look(what: str) -> str:
    """Look something up."""
    return f"{what}: 7"


AGENT_WITH_TOOL = [
    "invoke_agent scout @scout",
    "  chat m @scout",
    "  execute_tool look @scout",
    "  chat m @scout",
]


def test_a_named_agent(server: ScriptedServer) -> None:
    server._script = calls_tool("look", '{"what": "seven"}')
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


async def test_a_named_agent_async(server: ScriptedServer) -> None:
    server._script = calls_tool("look", '{"what": "seven"}')
    agent = create_agent(chat(server), [look], name="scout")
    with captured() as run:
        await agent.ainvoke(USER)
    assert run.tree == AGENT_WITH_TOOL


def test_an_unnamed_agent_at_the_top_is_the_app(server: ScriptedServer) -> None:
    server._script = calls_tool("look", '{"what": "seven"}')
    agent = create_agent(chat(server), [look])
    with captured() as run:
        agent.invoke(USER)
    assert run.tree == ["chat m @app", "execute_tool look @app", "chat m @app"]
    assert agents(agent).paths == ("app",)


def test_agents_inside_nodes(server: ScriptedServer) -> None:
    """Unnamed: the node's name. Of the node's name: one agent. Of another: nested."""
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


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
@pytest.mark.parametrize(("name", "path"), [("reader", "reader"), (None, "app")])
def test_create_react_agent(server: ScriptedServer, name: str | None, path: str) -> None:
    from langgraph.prebuilt import create_react_agent

    server._script = calls_tool("look", '{"what": "seven"}')
    agent = create_react_agent(chat(server), [look], name=name)
    with captured() as run:
        agent.invoke(USER)
    assert run.calls == [path, path]
    assert path_of(run.one("execute_tool look")) == path
    assert agents(agent).paths == (path,)


@pytest.mark.parametrize("inner_name", ["helper", "outer", None])
def test_an_agent_as_a_tool(server: ScriptedServer, inner_name: str | None) -> None:
    """The inner agent under its own name, the outer one again after it."""
    server._script = calls_tool("ask_helper")
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


def test_parallel_tools(server: ScriptedServer) -> None:
    calls = [ToolCall(name="inner", arguments=f'{{"n": {n}}}', call_id=f"c{n}") for n in range(4)]

    def script(request: Request) -> Reply | str:
        first = request.messages[-1]["role"] == "user" and request.body.get("tools")
        return Reply(tool_calls=calls) if first else "done"

    server._script = script
    client = raw_client(server)

    @tool
    def inner(n: int) -> str:
        """Ask."""
        ask_raw(client, str(n))
        return str(n)

    with captured() as run:
        create_agent(chat(server), [inner], name="outer").invoke(USER)
    assert len(run.tree) == 11
    tools = {span.span_id: span for span in run.spans if span.kind == "tool"}
    nested = [span for span in run.spans if span.kind == "llm" and span.parent_id in tools]
    assert len({span.parent_id for span in nested}) == 4
    assert {path_of(span) for span in run.spans} == {"outer"}


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


async def test_an_explicit_name_on_a_model_async(server: ScriptedServer) -> None:
    judge = chat(server, metadata={"lightspan_agent": "judge"})
    plain = chat(server)

    async def work(state: Any) -> dict[str, Any]:
        await asyncio.gather(judge.ainvoke("1"), plain.ainvoke("2"), judge.ainvoke("3"))
        await plain.ainvoke("4")
        return {}

    with captured() as run:
        await graph_of(("work", work)).ainvoke(USER)
    assert Counter(run.calls) == {"work/judge": 2, "work": 2}
    assert run.calls[-1] == "work"


def test_frames_of_ours_and_of_langgraph_interleave(server: ScriptedServer) -> None:
    model, client = chat(server), raw_client(server)
    inner = graph_of(("check", asks(model)))

    def work(state: Any) -> dict[str, Any]:
        with emit.agent("thinker"):
            model.invoke("1")
            ask_raw(client)
            inner.invoke(USER)
        with scope.push(scope.Frame("pushed", "ab" * 8)):
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


def test_another_framework_around_langgraph(server: ScriptedServer) -> None:
    """Its resolver, registered first, says who acts around the graph."""
    uninstrument()
    crew = scope.Frame("crew", "cd" * 8)

    def other(acting: scope.Acting) -> scope.Acting:
        return replace(acting, frames=(crew, *acting.frames), parent_span_id=crew.span_id)

    scope.register_resolver(other)
    try:
        with instrument(), captured() as run:
            two_nodes(server).invoke(USER)
    finally:
        scope.unregister_resolver(other)
    assert run.calls == ["crew/writer", "crew/checker"]
    assert {s.parent_id for s in run.spans if s.kind == "agent"} == {crew.span_id}


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
        model.generate([[_human("a")], [_human("b")]])
        return {}

    with captured() as run:
        graph_of(("work", work)).invoke(USER)
    assert run.calls == ["work/twins", "work/twins"]
    assert [span.name for span in run.spans].count("invoke_agent twins") == 2


def _human(text: str) -> Any:
    from langchain_core.messages import HumanMessage

    return HumanMessage(text)


# --- model clients that bypass the OpenAI SDK -----------------------------------------------
class Own(BaseChatModel):
    """A model client of the user's own."""

    says: str = "fine"

    @property
    def _llm_type(self) -> str:
        return "own"

    def _generate(self, messages: Any, *args: Any, **more: Any) -> ChatResult:
        if self.says == "fail":
            raise ConnectionError("down")
        usage: Any = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
        message = AIMessage(self.says, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(self, messages: Any, *args: Any, **more: Any) -> Iterator[ChatGenerationChunk]:
        for letter in self.says:
            yield ChatGenerationChunk(message=AIMessageChunk(letter))


def node_of(model: Any, **more: Any) -> Any:
    def work(state: Any) -> dict[str, Any]:
        return {"messages": [model.invoke([("system", "Be kind."), ("user", "go")], **more)]}

    return graph_of(("writer", work))


def test_a_client_that_bypasses_the_sdk_is_recorded_as_structure() -> None:
    with captured() as run:
        node_of(Own(metadata={"lightspan_agent": "poet"})).invoke(USER)
    assert run.tree == [
        "invoke_agent writer @writer",
        "  invoke_agent poet @writer/poet",
        "    chat Own @writer/poet",
    ]
    found = dict(run.one("chat Own").attributes)
    assert str(found.pop("lightspan.call.id")).startswith("call")
    assert found == {
        "lightspan.agent.path": "writer/poet",
        "lightspan.route": "app",
        "lightspan.call.outcome": "ok",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "Own",
        "openinference.span.kind": "LLM",
        "gen_ai.input.messages": '[{"role":"system","parts":[{"type":"text","content":"Be kind."}]'
        '},{"role":"user","parts":[{"type":"text","content":"go"}]}]',
        "gen_ai.output.messages": '[{"role":"assistant","parts":[{"type":"text","content":'
        '"fine"}],"finish_reason":"stop"}]',
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 2,
    }


def test_a_bypassing_client_that_streams() -> None:
    def work(state: Any) -> dict[str, Any]:
        return {"messages": ["".join(chunk.text for chunk in Own().stream("go"))]}

    with captured() as run:
        graph_of(("writer", work)).invoke(USER)
    assert run.tree == ["invoke_agent writer @writer", "  chat Own @writer"]
    assert '"content":"fine"' in str(run.one("chat Own").attributes["gen_ai.output.messages"])


def test_a_bypassing_text_model() -> None:
    from langchain_core.language_models import FakeListLLM

    with captured() as run:
        FakeListLLM(responses=["fine"]).invoke("go")
    (call,) = run.spans
    assert path_of(call) == "app"
    assert '"content":"go"' in str(call.attributes["gen_ai.input.messages"])
    assert '"content":"fine"' in str(call.attributes["gen_ai.output.messages"])


def test_a_bypassing_client_that_fails() -> None:
    with captured() as run, pytest.raises(ConnectionError):
        node_of(Own(says="fail")).invoke(USER)
    assert run.tree == ["invoke_agent writer @writer error", "  chat Own @writer error"]
    span = run.one("chat Own")
    assert span.attributes["lightspan.call.outcome"] == "error"
    assert span.attributes["error.type"] == "ConnectionError"


async def test_several_prompts_of_a_bypassing_client() -> None:
    prompts: Any = [[_human("a")], [_human("b")]]
    with captured() as run:
        Own().generate(prompts)
        await Own().agenerate(prompts)
        await Own().abatch(["c", "d"])
    asked = [str(span.attributes["gen_ai.input.messages"]) for span in run.spans]
    assert sorted(re.findall(r'"content":"(\w)"', "".join(asked))) == list("aabbcd")


def test_a_client_around_an_openai_client_records_nothing_twice(server: ScriptedServer) -> None:
    inner = chat(server)

    class Around(Own):
        def _generate(self, messages: Any, *args: Any, **more: Any) -> ChatResult:
            said = inner.invoke(messages)
            return ChatResult(generations=[ChatGeneration(message=AIMessage(said.text))])

    with captured() as run:
        node_of(Around()).invoke(USER)
    assert run.tree == ["invoke_agent writer @writer", "  chat m @writer"]


def test_what_langchains_cache_answers_is_no_call() -> None:
    from langchain_core.caches import InMemoryCache

    model = Own(cache=InMemoryCache())
    with captured() as run:
        for _ in range(3):
            model.invoke("go")
    assert [span.name for span in run.spans] == ["chat Own"]


def test_a_bypassing_client_leaves_nothing_behind() -> None:
    with captured() as run:
        next(Own().stream("go"))
        attempt = _hook._attempts[run.scope.recorder]
    gc.collect()
    assert attempt.asks == {}
    assert len(run.spans) == 1


def test_a_graph_that_is_renamed_while_it_runs(server: ScriptedServer) -> None:
    """It keeps the name that it had when it began; the next run has the new one."""

    @tool
    def rename() -> str:
        """Rename the agent."""
        agent.name = "author"
        return "done"

    agent = create_agent(chat(server), [rename], name="writer")
    server._script = lambda request: (
        Reply(text="done")
        if request.messages[-1]["role"] == "tool"
        else Reply(tool_calls=[ToolCall(name="rename", arguments="{}", call_id="c1")])
    )
    with captured() as run:
        agent.invoke(USER)
    assert run.calls == ["writer", "writer"]


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
        pushed = scope.pushed()

        def in_thread() -> None:
            scope.set_acting(pushed)
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


# --- other clients --------------------------------------------------------------------------
def test_a_raw_client_in_a_node_and_in_a_tool(server: ScriptedServer) -> None:
    server._script = calls_tool("deep")
    client = raw_client(server)

    @tool
    def deep() -> str:
        """Ask the raw client."""
        ask_raw(client)
        return "7"

    def work(state: Any) -> dict[str, Any]:
        ask_raw(client)
        return {}

    with captured() as run:
        graph_of(("work", work), ("scout", create_agent(chat(server), [deep]))).invoke(USER)
    assert run.tree == [
        "invoke_agent work @work",
        "  chat m @work",
        "invoke_agent scout @scout",
        "  chat m @scout",
        "  execute_tool deep @scout",
        "    chat m @scout",
        "  chat m @scout",
    ]


async def test_a_raw_async_client(server: ScriptedServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.url, api_key="key") as client:

        async def work(state: Any) -> dict[str, Any]:
            question: Any = [{"role": "user", "content": "raw"}]
            await client.chat.completions.create(model="m", messages=question)
            return {}

        with captured() as run:
            await graph_of(("work", work)).ainvoke(USER)
    assert run.calls == ["work"]


def test_langchain_without_a_graph(server: ScriptedServer) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "{q}")]) | chat(server)
    named = chain.with_config(metadata={"lightspan_agent": "poet"})
    with captured() as run:
        chain.invoke({"q": "a"})
        named.invoke({"q": "b"})
        look.invoke({"what": "x"})
    assert run.tree == [
        "chat m @app",
        "invoke_agent poet @poet",
        "  chat m @poet",
        "execute_tool look @app",
    ]


class Verdict(BaseModel):
    good: bool


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # langchain-openai 1.0's own
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_output(server: ScriptedServer, method: Any) -> None:
    def script(request: Request) -> Reply:
        if request.body.get("tools"):
            return Reply(tool_calls=[ToolCall(name="Verdict", arguments='{"good": true}')])
        return Reply(text='{"good": true}')

    server._script = script
    model = chat(server).with_structured_output(Verdict, method=method)
    with captured() as run:
        graph_of(("judge", lambda state: {"messages": [str(model.invoke("json?"))]})).invoke(USER)
    assert run.tree == ["invoke_agent judge @judge", "  chat m @judge"]


# --- what goes wrong ------------------------------------------------------------------------
def failing(state: Any) -> dict[str, Any]:
    raise KeyError("no such node")


def test_an_error_in_a_node(server: ScriptedServer) -> None:
    with captured() as run, pytest.raises(KeyError, match="no such node"):
        graph_of(("writer", asks(chat(server))), ("broken", failing)).invoke(USER)
    assert run.tree == [
        "invoke_agent writer @writer",
        "  chat m @writer",
        "invoke_agent broken @broken error",
    ]
    span = run.one("invoke_agent broken")
    assert (span.attributes["error.type"], span.status_message) == ("KeyError", "'no such node'")


def test_an_error_in_a_tool(server: ScriptedServer) -> None:
    server._script = calls_tool("broken")

    @tool
    def broken() -> str:
        """Fail."""
        raise RuntimeError("no such tool")

    with captured() as run, pytest.raises(RuntimeError, match="no such tool"):
        create_agent(chat(server), [broken], name="scout").invoke(USER)
    assert run.tree == [
        "invoke_agent scout @scout error",
        "  chat m @scout",
        "  execute_tool broken @scout error",
    ]
    assert run.one("execute_tool broken").attributes["error.type"] == "RuntimeError"


def test_a_tool_that_reports_its_error(server: ScriptedServer) -> None:
    server._script = calls_tool("broken")

    @tool
    def broken() -> str:
        """Fail."""
        from langchain_core.tools import ToolException

        raise ToolException("try again")

    broken.handle_tool_error = True
    with captured() as run:
        create_agent(chat(server), [broken], name="scout").invoke(USER)
    span = run.one("execute_tool broken")
    assert span.status is SpanStatus.ERROR
    assert span.attributes["gen_ai.tool.call.result"] == "try again"


def test_a_tool_with_a_result_that_no_span_can_carry(server: ScriptedServer) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("unprintable")

    @tool
    def odd() -> Any:
        """Return something odd."""
        return Odd()

    @tool
    def huge() -> Any:
        """Return something huge."""
        return b"x" * 1_000_000

    with captured() as run:
        odd.invoke({})
        huge.invoke({})
    assert run.one("execute_tool odd").attributes["gen_ai.tool.call.result"] == "<Odd>"
    shown = str(run.one("execute_tool huge").attributes["gen_ai.tool.call.result"])
    assert len(shown) < 70_000
    assert shown.endswith("… (1000005 characters)")


def test_an_error_of_the_model(server: ScriptedServer) -> None:
    server._script = lambda request: Reply(status=400, text="no such model")
    with captured() as run, pytest.raises(openai.BadRequestError):
        two_nodes(server).invoke(USER)
    assert run.tree == ["invoke_agent writer @writer error", "  chat m @writer error"]


async def test_cancellation(server: ScriptedServer) -> None:
    server._script = lambda request: Reply(text="late", delay_s=0.5)
    with captured() as run:
        graph = graph_of(("writer", asks_async(chat(server))))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(graph.ainvoke(USER), 0.2)
        await asyncio.sleep(0.05)
    assert run.tree == ["invoke_agent writer @writer error", "  chat m @writer error"]
    assert run.one("invoke_agent writer").attributes["error.type"] == "CancelledError"


def test_an_abandoned_stream(server: ScriptedServer) -> None:
    """Leaving a stream half read is no error; nothing leaks."""
    graph = two_nodes(server)
    with captured() as run:
        for _ in graph.stream(USER, stream_mode="messages"):
            break
        gc.collect()
        model = chat(server)
        for _ in model.stream("a b c"):
            break
        gc.collect()
    assert path_of(run.spans[0]) in ("writer", "app")
    assert _open_runs(run.scope.recorder) == 0


def test_an_attempt_leaves_nothing_behind(server: ScriptedServer) -> None:
    """Whatever was abandoned goes with the attempt, even with a generator that is still held."""
    graph, held = two_nodes(server), []
    gc.collect()
    before = len(_hook._owners)
    for _ in range(3):
        with captured() as run:
            stream = graph.stream(USER)
            next(stream)
            held.append(stream)
            assert _open_runs(run.scope.recorder) > 0
        del run
    gc.collect()
    assert len(_hook._owners) == before
    for stream in held:
        stream.close()  # its end comes too late, and is nobody's


def _open_runs(recorder: Recorder) -> int:
    return len(_hook._attempts[recorder].tree)


def test_an_error_of_ours_damages_the_attempt_and_never_reaches_the_app(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    current = make_scope()
    monkeypatch.setattr(RunTree, "start", broken)
    monkeypatch.setattr(RunTree, "place", broken)
    with open_scope(current):
        assert two_nodes(server).invoke(USER)["messages"]
    assert current.recorder.damages()
    assert {reason.partition(": ")[0] for reason in current.recorder.damages()} == {
        "lightspan_langgraph"
    }


# --- installing -----------------------------------------------------------------------------
def test_the_callback_alone(server: ScriptedServer) -> None:
    uninstrument()
    callback = LightspanCallback()
    with captured() as run:
        two_nodes(server).invoke(USER, {"callbacks": [callback]})
    assert run.tree == TWO_NODES
    scope.unregister_resolver(_hook.resolve)


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
    assert _hook.resolve not in scope.resolvers()
    with captured() as run:
        two_nodes(server).invoke(USER)
    assert run.tree == ["chat m @app", "chat m @app"]


def test_outside_a_scope_nothing_is_kept(server: ScriptedServer) -> None:
    before = len(_hook._owners)
    assert two_nodes(server).invoke(USER)["messages"]
    assert len(_hook._owners) == before


SEPARATE = """
import asyncio, sys
import lightspan_langgraph
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
model = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key="key")
async def writer(state):
    return {"messages": [await model.ainvoke("hi")]}
graph = StateGraph(MessagesState).add_node("writer", writer).add_edge(START, "writer").compile()
from lightspan import wire
from lightspan.routing import make_routing
from lightspan.scope import Scope, open_scope
lightspan_langgraph.instrument()
async def attempt(number):
    scope = Scope(rollout_id="r", attempt_id=str(number), root_span_id="1" * 16,
                  gateway_url=sys.argv[1], call_token="t",
                  routing=make_routing({"writer": "main"}, None, "main"))
    with open_scope(scope):
        await graph.ainvoke({"messages": [("user", "go")]})
    await wire.aclose()
    assert not scope.recorder.damages()
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


# --- where calls go -------------------------------------------------------------------------
def test_a_trained_agent_goes_to_the_gateway_and_a_third_party_sees_no_header_of_ours(
    server: ScriptedServer,
) -> None:
    """The frozen agent's request is, header for header, that of an app without lightspan."""
    headers = {"x-app": "1"}
    model = chat(server, default_headers=headers)
    graph = graph_of(("draft team", asks(model)), ("checker", asks(model)))
    uninstrument()
    graph.invoke(USER)
    plain = [request.headers for request in server.requests]
    server.requests.clear()
    instrument()
    with ScriptedServer("trained") as gateway:
        routing = make_routing({"draft team": "main"}, None, "main")
        more = {"gateway_url": gateway.origin, "call_token": "secret", "routing": routing}
        with captured(**more) as run:
            graph.invoke(USER)
        wire.close()
        (ours,) = gateway.requests
    (theirs,) = server.requests
    assert dict(theirs.headers) == dict(plain[1])
    assert ours.headers["x-lightspan-agent"] == "draft%20team"
    assert ours.headers["authorization"] == "Bearer secret"
    assert "x-app" not in ours.headers
    node = run.one("invoke_agent draft team")
    assert ours.headers["traceparent"] == f"00-{run.scope.trace_id}-{node.span_id}-01"
    assert run.calls == ["checker"]


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


def test_the_readme(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app of the README runs and says what the README says it does; its training compiles."""
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    readme = Path(__file__).parents[2] / "packages" / "langgraph" / "README.md"
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

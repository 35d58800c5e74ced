"""Test the caches of LangChain and LangGraph.

That of models is switched off for calls to the gateway, and reported for other calls. That of nodes
is switched off in rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import pytest

pytest.importorskip("langchain_openai")

from langchain_core.caches import BaseCache, InMemoryCache
from langchain_core.globals import get_llm_cache, set_llm_cache
from langgraph.cache.memory import InMemoryCache as NodeCache
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.types import CachePolicy

import lightspan
from lightspan.capture import sdk_instrumentation
from lightspan.schema.records import Mode
from lightspan.schema.routing import make_routing
from lightspan_langgraph import LightspanCallback, _hook, instrument, uninstrument
from lightspan_testing.attempts import captured, read_recorded
from lightspan_testing.scripted import ScriptedServer
from packages.langgraph.tests.langgraph_apps import USER, asks, chat, graph_of, human

pytestmark = pytest.mark.usefixtures("installed_langgraph")


class Own(BaseCache):
    """A custom cache that defines only synchronous methods."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def lookup(self, prompt: str, llm_string: str) -> Any:
        return self.kept.get((prompt, llm_string))

    def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
        self.kept[prompt, llm_string] = return_val

    def clear(self, **_: Any) -> None:
        self.kept.clear()


@pytest.fixture
def cache() -> Iterator[InMemoryCache]:
    """Set the app's cache for every model."""
    made = InMemoryCache()
    set_llm_cache(made)
    yield made
    assert get_llm_cache() is made
    set_llm_cache(None)


@pytest.fixture
def gateway() -> Iterator[ScriptedServer]:
    with ScriptedServer("trained") as running:
        yield running
        sdk_instrumentation.close()


def trained(gateway: ScriptedServer, **more: Any) -> Any:
    """Open an attempt in which only the writer is trained."""
    routing = make_routing({"writer": "main"}, None, "main")
    return captured(gateway_url=gateway.origin, call_token="secret", routing=routing, **more)


def app(server: ScriptedServer, **more: Any) -> Any:
    model = chat(server, **more)
    return graph_of(("writer", asks(model)), ("checker", asks(model, "check")))


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.VAL, Mode.DEV])
@pytest.mark.usefixtures("cache")
def test_no_cache_answers_for_a_trained_agent(
    server: ScriptedServer, gateway: ScriptedServer, mode: Mode
) -> None:
    """Check that a frozen agent's second answer comes from the app's cache, without a request."""
    for number in (1, 2):
        with trained(gateway, mode=mode) as run:
            app(server).invoke(USER)
        assert run.tree == [
            "invoke_agent writer @writer",
            "invoke_agent checker @checker",
            "  chat m @checker",
        ]
        assert len(gateway.requests) == number
        assert run.llm_spans[0].attributes["lightspan.route"] == "app"
    assert len(server.requests) == 1


@pytest.mark.usefixtures("cache")
def test_what_a_cache_answers_is_a_call_without_tokens(server: ScriptedServer) -> None:
    with captured() as run:
        chat(server).invoke("go")
        chat(server).invoke("go")
    asked, answered = (dict(span.attributes) for span in run.llm_spans)
    assert len(server.requests) == 1
    assert run.tree == ["chat m @app", "chat m @app"]
    assert str(answered.pop("lightspan.call.id")).startswith("call")
    assert answered == {
        "lightspan.agent.path": "app",
        "lightspan.route": "app",
        "lightspan.call.outcome": "ok",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "openinference.span.kind": "LLM",
        "gen_ai.input.messages": asked["gen_ai.input.messages"],
        "gen_ai.output.messages": asked["gen_ai.output.messages"],
        "gen_ai.response.finish_reasons": ["stop"],
        "lightspan.call.cached": True,
    }
    assert asked["gen_ai.usage.output_tokens"] == 1


@pytest.mark.parametrize("own", [InMemoryCache, Own])
def test_a_cache_of_a_model(server: ScriptedServer, gateway: ScriptedServer, own: Any) -> None:
    """Check that earlier cached answers are ignored, and that the policy's answers are not
    cached.
    """
    cache = own()
    graph = graph_of(("writer", asks(chat(server, cache=cache))))
    before = graph.invoke(USER)["messages"][-1].text
    with trained(gateway):
        inside = graph.invoke(USER)["messages"][-1].text
    after = graph.invoke(USER)["messages"][-1].text
    assert (before, inside, after) == ("hi", "trained", "hi")
    assert (len(server.requests), len(gateway.requests)) == (1, 1)


@pytest.mark.parametrize("own", [InMemoryCache, Own])
async def test_every_way_to_ask(server: ScriptedServer, gateway: ScriptedServer, own: Any) -> None:
    model = chat(server, cache=own(), metadata={"lightspan_agent": "writer"})
    said: list[str] = []
    with trained(gateway) as run:
        for _ in range(2):
            said.append(model.invoke("go").text)
            said.append((await model.ainvoke("go")).text)
            said += [answer.text for answer in model.batch(["go", "go"])]
            said += [answer.text for answer in await model.abatch(["go", "go"])]
            said.append("".join(chunk.text for chunk in model.stream("go")))
            said.append("".join([chunk.text async for chunk in model.astream("go")]))
            several: Any = await model.agenerate([[human("go")], [human("go")]])
            said += [one[0].text for one in several.generations]
        await sdk_instrumentation.aclose()
    assert said == ["trained"] * 20
    assert len(gateway.requests) == 20
    assert run.calls == []
    assert server.requests == []


@pytest.mark.usefixtures("cache")
def test_one_callback_is_enough(server: ScriptedServer, gateway: ScriptedServer) -> None:
    uninstrument()
    assert _hook._state.patches == []
    for number in (1, 2):
        with trained(gateway):
            app(server).invoke(USER, {"callbacks": [LightspanCallback()]})
        assert len(gateway.requests) == number
    uninstrument()
    assert _hook._state.patches == []
    instrument()


@pytest.mark.usefixtures("cache")
def test_in_production_the_cache_answers_and_is_reported(
    server: ScriptedServer, tmp_path: Path
) -> None:
    url = f"sqlite:{tmp_path / 'store.db'}"
    with lightspan.record(url):
        for _ in range(2):
            app(server).invoke(USER)
    assert len(server.requests) == 2
    for one in read_recorded(url):
        assert one.tree().splitlines() == [
            "invoke_workflow LangGraph",
            "  invoke_agent writer",
            "    chat m @writer",
            "  invoke_agent checker",
            "    chat m @checker",
        ]


# --- results of nodes -----------------------------------------------------------------------
GO: Any = {"question": "go"}


class OwnNodes(NodeCache[Any]):
    """A custom cache of nodes, defined before `instrument()` or after it."""

    def get(self, keys: Any) -> Any:
        return super().get(keys)


class Question(TypedDict, total=False):
    """A state without messages, whose random ids would be part of the cache's key."""

    question: str
    messages: list[Any]


def cached_graph(server: ScriptedServer, cache: Any) -> Any:
    """Return a graph whose only node is cached."""
    graph: Any = StateGraph(Question)
    graph.add_node("writer", asks(chat(server)), cache_policy=CachePolicy())
    graph.add_edge(START, "writer")
    graph.add_edge("writer", END)
    return graph.compile(cache=cache)


def cached_task(server: ScriptedServer, cache: Any) -> Any:
    """Return a workflow of the functional API whose only task is cached."""
    model = chat(server, metadata={"lightspan_agent": "writer"})

    @task(cache_policy=CachePolicy())
    def write(question: Any) -> Any:
        return {"messages": [model.invoke("hi")]}

    @entrypoint(cache=cache)
    def workflow(question: Any) -> Any:
        return write("go").result()

    return workflow


@pytest.mark.parametrize("own", [NodeCache, OwnNodes])
@pytest.mark.parametrize("make", [cached_graph, cached_task])
@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.VAL, Mode.DEV])
async def test_no_cached_node_answers_in_a_rollout(
    server: ScriptedServer, gateway: ScriptedServer, own: Any, make: Any, mode: Mode
) -> None:
    """Check that a result from before is ignored, and that the policy's answers are not kept."""
    cache = own()
    app = make(server, cache)
    first = [app.invoke(GO)["messages"][-1].text for _ in range(2)]
    stored = {key: dict(values) for key, values in cache._cache.items()}
    with trained(gateway, mode=mode):
        inside = [app.invoke(GO)["messages"][-1].text for _ in range(2)]
        inside += [(await app.ainvoke(GO))["messages"][-1].text for _ in range(2)]
        await sdk_instrumentation.aclose()
    after = [app.invoke(GO)["messages"][-1].text for _ in range(2)]
    assert (first, inside, after) == (["hi"] * 2, ["trained"] * 4, ["hi"] * 2)
    assert (len(server.requests), len(gateway.requests)) == (1, 4)
    assert {key: dict(values) for key, values in cache._cache.items()} == stored


def test_a_cached_node_is_off_where_only_prompts_are_learned(server: ScriptedServer) -> None:
    """Check a rollout without a gateway: the key of a node does not contain the agents' prompts."""
    app = cached_graph(server, NodeCache())
    for _ in range(2):
        with captured() as run:
            app.invoke(GO)
        assert run.tree == ["invoke_agent writer @writer", "  chat m @writer"]
    assert len(server.requests) == 2


def test_in_production_a_cached_node_answers(server: ScriptedServer, tmp_path: Path) -> None:
    app = cached_graph(server, NodeCache())
    with lightspan.record(f"sqlite:{tmp_path / 'store.db'}"):
        for _ in range(2):
            app.invoke(GO)
    assert len(server.requests) == 1


def test_uninstrument_restores_the_cache_of_nodes() -> None:
    assert hasattr(NodeCache.get, "__wrapped__")
    uninstrument()
    assert not hasattr(NodeCache.get, "__wrapped__")
    instrument()

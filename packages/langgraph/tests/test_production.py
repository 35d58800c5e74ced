"""Production: real LangGraph apps outside every rollout, recorded into a real store."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypedDict
from urllib.parse import urlsplit

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from pydantic import SecretStr

import lightspan
import lightspan_langgraph
from lightspan.capture import context
from lightspan.production import record
from lightspan.production.options import STORE_VARIABLE
from lightspan.schema import semconv as c
from lightspan_testing.attempts import Recorded, read_recorded
from lightspan_testing.scripted import Reply, Request, Script, ScriptedServer, ToolCall


class State(TypedDict):
    question: str
    said: Annotated[list[str], operator.add]


@pytest.fixture
def script() -> Script:
    def echo(request: Request) -> str:
        return f"echo {request.last_text}"

    return echo


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the store that the environment names."""
    url = f"sqlite:{tmp_path / 'production.db'}"
    monkeypatch.setenv(STORE_VARIABLE, url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "support")
    yield url
    lightspan_langgraph.uninstrument()
    assert context.current_context() is None


def chat(server: ScriptedServer, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="m", base_url=server.url, api_key=SecretStr("secret-key"), max_retries=0, **more
    )


def make_graph(model: Any, **compiled: Any) -> Any:
    """`writer`, then `checker`."""

    def ask(name: str) -> Any:
        def node(state: State) -> dict[str, Any]:
            prompt = [("system", f"You are {name}."), ("user", state["question"])]
            return {"said": [model.invoke(prompt).text]}

        async def anode(state: State) -> dict[str, Any]:
            prompt = [("system", f"You are {name}."), ("user", state["question"])]
            return {"said": [(await model.ainvoke(prompt)).text]}

        return RunnableLambda(node, anode, name=name)

    graph: Any = StateGraph(State)
    graph.add_node("writer", ask("writer"))
    graph.add_node("checker", ask("checker"))
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "checker")
    graph.add_edge("checker", END)
    return graph.compile(**compiled)


def question(text: str) -> dict[str, Any]:
    return {"question": text, "said": []}


TREE = """
invoke_workflow LangGraph
  invoke_agent writer
    chat m @writer
  invoke_agent checker
    chat m @checker
"""


SCOUT = """
invoke_workflow scout
  invoke_agent scout
    chat m @scout
    execute_tool look
      invoke_agent looker
        chat m @scout/looker
    chat m @scout
"""


ROLLOUTS = """
invoke_workflow LangGraph
  invoke_agent ask
    invoke_agent helper
      chat m @ask/helper
    invoke_agent helper
      chat m @ask/helper
"""


def read(url: str) -> list[Recorded]:
    assert record.flush()
    return read_recorded(url)


def test_a_graph_is_an_attempt_with_its_input_as_the_task(
    server: ScriptedServer, store: str
) -> None:
    graph = make_graph(chat(server))
    with lightspan_langgraph.instrument():
        said = graph.invoke(question("one"))["said"]
        [found] = read(store)
    assert said == ["echo one", "echo one"]
    assert found.tree() == TREE.strip()
    assert found.rollout.task == {"question": "one", "said": []}
    assert (found.rollout.mode, found.rollout.run_id) == ("production", "support")
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])
    port = urlsplit(server.url).port
    assert [span.attributes[c.SERVER_PORT] for span in found.calls] == [port] * 2
    assert all(span.resource == {"service.name": "support"} for span in found.spans)
    assert "secret-key" not in repr(found)


async def test_asynchronous_and_streamed_runs_at_once(server: ScriptedServer, store: str) -> None:
    graph = make_graph(chat(server, streaming=True))

    async def stream(text: str) -> list[Any]:
        return [chunk async for chunk in graph.astream(question(text), stream_mode="messages")]

    with lightspan_langgraph.instrument():
        await asyncio.gather(
            *(graph.ainvoke(question(f"task {n}")) for n in range(8)),
            *(stream(f"stream {n}") for n in range(8)),
        )
        found = await asyncio.to_thread(read, store)
    wanted = {f"task {n}" for n in range(8)} | {f"stream {n}" for n in range(8)}
    assert {one.rollout.task["question"] for one in found} == wanted
    for one in found:
        assert one.tree() == TREE.strip()
        text = one.rollout.task["question"]
        assert [call.answer for call in one.answered] == [f"echo {text}"] * 2
        assert (one.attempt.status, one.attempt.capture_errors) == ("succeeded", [])


def test_threads_do_not_mix(server: ScriptedServer, store: str) -> None:
    graph = make_graph(chat(server))
    with lightspan_langgraph.instrument(), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: graph.invoke(question(f"q{n}")), range(16)))
        found = read(store)
    assert len(found) == 16
    for one in found:
        assert one.tree() == TREE.strip()
        assert {call.asked for call in one.answered} == {one.rollout.task["question"]}


def test_a_model_alone_is_an_attempt(server: ScriptedServer, store: str) -> None:
    with lightspan_langgraph.instrument():
        chat(server).invoke("alone")
        [found] = read(store)
    assert found.tree() == "chat m @app"
    assert found.rollout.task == {"messages": [{"role": "user", "content": "alone"}]}


def test_an_app_that_raises_is_a_failed_attempt(store: str) -> None:
    with ScriptedServer(lambda _: Reply(text="no", status=400)) as server:
        graph = make_graph(chat(server))
        with lightspan_langgraph.instrument():
            with pytest.raises(Exception, match="400"):
                graph.invoke(question("one"))
            [found] = read(store)
    assert (found.attempt.status, found.attempt.outcome) == ("failed", "app_error")
    assert [span.status for span in found.spans] == ["error"] * 3


def test_an_interrupted_graph_is_no_failure(server: ScriptedServer, store: str) -> None:
    model = chat(server)

    def ask(state: State) -> dict[str, Any]:
        model.invoke("before")
        return {"said": [str(interrupt("really?"))]}

    graph: Any = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    compiled = graph.compile(checkpointer=InMemorySaver())
    with lightspan_langgraph.instrument():
        compiled.invoke(question("one"), {"configurable": {"thread_id": "1"}})
        [found] = read(store)
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])


def test_tools_and_agents_inside_agents(store: str) -> None:
    def look(what: str) -> str:
        """Look something up."""
        with lightspan.agent("looker"):
            return str(chat(server).invoke(f"look {what}").text)

    def reply(request: Request) -> Reply:
        if request.last_text.startswith(("look", "echo")):
            return Reply(text=f"echo {request.last_text}")
        return Reply(tool_calls=[ToolCall(name="look", arguments='{"what": "it"}', call_id="t")])

    with ScriptedServer(reply) as server:
        agent = create_agent(chat(server), [look], name="scout", system_prompt="You are scout.")
        with lightspan_langgraph.instrument():
            agent.invoke({"messages": [("user", "go")]})
            [found] = read(store)
    assert found.tree() == SCOUT.strip()
    assert found.rollout.task == {"messages": [["user", "go"]]}


def test_a_rollout_in_a_node_is_in_the_attempt_of_the_graph(
    server: ScriptedServer, store: str
) -> None:
    """What begins in a node is in its attempt, though LangGraph pushes nothing there."""

    @lightspan.rollout
    def answer(task: str) -> float:
        with lightspan.agent("helper"):
            chat(server).invoke(task)
        return 1.0

    @lightspan.rollout
    async def answer_async(task: str) -> float:
        return answer(task)

    def ask(state: State) -> dict[str, Any]:
        answer(state["question"])
        asyncio.run(answer_async(state["question"]))
        return {"said": []}

    graph: Any = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    with lightspan_langgraph.instrument():
        graph.compile().invoke(question("one"))
        found = read(store)
    assert [one.tree() for one in found] == [ROLLOUTS.strip()]


def test_the_app_asks_for_its_attempt_and_rewards_it(server: ScriptedServer, store: str) -> None:
    model, seen = chat(server), []

    def ask(state: State) -> dict[str, Any]:
        model.invoke("x")
        seen.append(lightspan.current_attempt_id())
        lightspan.emit_reward(0.75)
        return {"said": []}

    graph: Any = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    with lightspan_langgraph.instrument():
        graph.compile().invoke(question("one"))
        assert lightspan.current_attempt_id() is None
        [found] = read(store)
    assert seen == [found.attempt.attempt_id]
    [reward] = [span for span in found.spans if span.kind == "reward"]
    assert reward.attributes[c.REWARD_VALUE] == 0.75


def test_work_left_behind_is_not_lost(server: ScriptedServer, store: str) -> None:
    """A thread that goes on after its graph: a call of its own, or late in the attempt."""
    model, ended, threads = chat(server), threading.Event(), []

    def later() -> None:
        ended.wait(10)
        model.invoke("later")

    def ask(state: State) -> dict[str, Any]:
        threads.append(threading.Thread(target=later))
        threads[-1].start()
        return {"said": [model.invoke("now").text]}

    graph: Any = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    with lightspan_langgraph.instrument():
        graph.compile().invoke(question("one"))
        ended.set()
        threads[0].join()
        found = read(store)
    asked = [call.asked for one in found for call in one.answered]
    assert asked == ["now", "later"]


def test_nothing_is_patched_without_the_variable(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    with lightspan_langgraph.instrument():
        assert context.current_context() is None
        assert make_graph(chat(server)).invoke(question("one"))["said"] == ["echo one"] * 2
        assert not record._state.by_environment
        assert lightspan.current_attempt_id() is None


PROGRAM = """
from langchain_openai import ChatOpenAI
import sys
ChatOpenAI(model="m", base_url=sys.argv[1], api_key="k", max_retries=0).invoke("hello")
"""


def test_opentelemetry_instrument_turns_it_on(server: ScriptedServer, store: str) -> None:
    """No line of code at all, and a program that ends at once."""
    from importlib.metadata import entry_points

    known = [point.name for point in entry_points(group="opentelemetry_instrumentor")]
    if "lightspan_langgraph" not in known:
        pytest.skip("the adapter is not installed as a package")
    program = (
        "from importlib.metadata import entry_points\n"
        "[point] = [p for p in entry_points(group='opentelemetry_instrumentor')"
        " if p.name == 'lightspan_langgraph']\n"
        "point.load()().instrument()\n" + PROGRAM
    )
    subprocess.run(
        [sys.executable, "-c", program, server.url], check=True, env=os.environ, timeout=60
    )
    [found] = read_recorded(store)
    assert found.tree() == "chat m @app"
    assert json.loads(str(found.calls[0].attributes[c.INPUT_MESSAGES]))[0]["role"] == "user"

"""Test LangGraph apps in production, outside of every rollout, with a real store."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

pytest.importorskip("langchain_openai")

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt

import lightspan
from lightspan import PromptTemplate
from lightspan.production import record
from lightspan.schema import semconv as c
from lightspan.schema.prompts import LearnedPrompt, PromptPlace
from lightspan_langgraph import _hook
from lightspan_testing.attempts import Recorded, read_recorded
from lightspan_testing.scripted import ScriptedServer
from packages.langgraph.tests.langgraph_apps import USER, chat, graph_of

pytestmark = pytest.mark.usefixtures("installed_langgraph")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """Return the URL of the production store."""
    url = f"sqlite:{tmp_path / 'production.db'}"
    with record.record(url, service="support"):
        yield url


def read(url: str) -> list[Recorded]:
    assert record.flush()
    return read_recorded(url)


def echoes(server: ScriptedServer) -> Any:
    """Return a graph whose node sends the last message to its model."""
    model = chat(server)

    def writer(state: Any) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"][-1].text)]}

    return graph_of(("writer", writer))


TREE = """
invoke_workflow LangGraph
  invoke_agent writer
    chat m @writer
"""


def test_a_graph_is_an_attempt_with_its_input_as_the_task(
    server: ScriptedServer, store: str
) -> None:
    assert echoes(server).invoke(USER)["messages"][-1].text == "go"
    [found] = read(store)
    assert found.tree() == TREE.strip()
    assert found.rollout.task == {"messages": [["user", "go"]]}
    assert (found.rollout.mode, found.rollout.run_id) == ("production", "support")
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])
    assert found.calls[0].attributes[c.SERVER_PORT] == urlsplit(server.url).port


def test_threads_do_not_mix(server: ScriptedServer, store: str) -> None:
    graph = echoes(server)
    tasks = [{"messages": [["user", f"q{number}"]]} for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(graph.invoke, tasks))
    found = read(store)
    assert len(found) == 16
    for one in found:
        assert one.tree() == TREE.strip()
        assert [["user", call.asked] for call in one.answered] == one.rollout.task["messages"]


async def in_executor(work: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work)


def in_pool(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


IN_OPERATION = """
invoke_workflow job
  job
    invoke_agent writer
      chat m @writer
"""

WAYS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "directly": lambda work: work(),
    "ThreadPoolExecutor": in_pool,
    "run_in_executor": lambda work: asyncio.run(in_executor(work)),
    "to_thread": lambda work: asyncio.run(asyncio.to_thread(work)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_operation", [False, True])
def test_work_in_a_pool_belongs_to_the_node(
    server: ScriptedServer, store: str, way: str, is_operation: bool
) -> None:
    model = chat(server)

    def writer(state: Any) -> dict[str, Any]:
        return {"messages": [WAYS[way](partial(model.invoke, "go"))]}

    with lightspan.operation("job") if is_operation else nullcontext():
        graph_of(("writer", writer)).invoke(USER)
    [found] = read(store)
    assert found.tree() == (IN_OPERATION if is_operation else TREE).strip()


@pytest.mark.parametrize("way", ["task", "pool", "thread"])
def test_work_that_a_node_leaves_belongs_to_it(
    server: ScriptedServer, store: str, way: str
) -> None:
    """Check work that calls the model after its node has ended, while the graph runs on."""
    model, ended = chat(server), threading.Event()
    background: list[asyncio.Future[Any]] = []

    def work() -> None:
        assert ended.wait(20)
        model.invoke("go")

    async def task() -> None:
        await asyncio.to_thread(ended.wait, 20)
        await model.ainvoke("go")

    async def writer(state: Any) -> dict[str, Any]:
        if way == "task":
            background.append(asyncio.create_task(task()))
        elif way == "pool":
            background.append(asyncio.get_running_loop().run_in_executor(None, work))
        else:
            thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
            thread.start()
            background.append(asyncio.ensure_future(asyncio.to_thread(thread.join)))
        return {}

    async def end(state: Any) -> dict[str, Any]:
        ended.set()
        await asyncio.gather(*background)
        return {}

    asyncio.run(graph_of(("writer", writer), ("end", end)).ainvoke(USER))
    [found] = read(store)
    assert [call.attributes[c.AGENT_PATH] for call in found.calls] == ["writer"]
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])


def test_work_in_a_pool_of_a_node_gets_the_learned_text(
    server: ScriptedServer, tmp_path: Path
) -> None:
    learned = LearnedPrompt(
        before=PromptTemplate("Be dull."),
        after=PromptTemplate("Be brief."),
        place=PromptPlace.AGENT,
        agent="writer",
    )
    file = tmp_path / "prompts.json"
    file.write_bytes(msgspec.json.encode({"writer": learned}))
    model = chat(server)

    def writer(state: Any) -> dict[str, Any]:
        messages = [("system", "Be dull."), ("user", "go")]
        return {"messages": [in_pool(partial(model.invoke, messages))]}

    with lightspan.apply_prompts(file) as applied:
        graph_of(("writer", writer)).invoke(USER)
    assert (applied.sent, applied.not_sent) == ({"writer": 1}, {"writer": {}})
    assert len(_hook._state.ended) == 0  # without an attempt, nothing would remove it
    assert server.requests[-1].body["messages"][0]["content"] == "Be brief."


def test_a_model_alone_is_an_attempt(server: ScriptedServer, store: str) -> None:
    chat(server).invoke("alone")
    [found] = read(store)
    assert found.tree() == "chat m @app"
    assert found.rollout.task == {"messages": [{"role": "user", "content": "alone"}]}


def test_an_interrupted_graph_is_no_failure(server: ScriptedServer, store: str) -> None:
    model = chat(server)

    def ask(state: Any) -> dict[str, Any]:
        model.invoke("before")
        return {"messages": [str(interrupt("really?"))]}

    graph = graph_of(("ask", ask), checkpointer=InMemorySaver())
    graph.invoke(USER, {"configurable": {"thread_id": "1"}})
    [found] = read(store)
    assert (found.attempt.status, found.attempt.capture_errors) == ("succeeded", [])


def test_a_rollout_in_a_node_is_in_the_attempt_of_the_graph(
    server: ScriptedServer, store: str
) -> None:
    """Check that an operation inside a node belongs to the graph's attempt."""

    @lightspan.rollout
    def answer(task: str) -> float:
        with lightspan.agent("helper"):
            chat(server).invoke(task)
        return 1.0

    @lightspan.rollout
    async def answer_async(task: str) -> float:
        return answer(task)

    def ask(state: Any) -> dict[str, Any]:
        answer("one")
        asyncio.run(answer_async("two"))
        return {}

    graph_of(("ask", ask)).invoke(USER)
    [found] = read(store)
    assert found.tree().splitlines() == [
        "invoke_workflow LangGraph",
        "  invoke_agent ask",
        "    invoke_agent helper",
        "      chat m @ask/helper",
        "    invoke_agent helper",
        "      chat m @ask/helper",
    ]


def test_the_app_asks_for_its_attempt_and_rewards_it(server: ScriptedServer, store: str) -> None:
    ids: list[str | None] = []

    def ask(state: Any) -> dict[str, Any]:
        ids.append(lightspan.current_attempt_id())
        lightspan.emit_reward(0.75)
        return {}

    graph_of(("ask", ask)).invoke(USER)
    assert lightspan.current_attempt_id() is None
    [found] = read(store)
    assert ids == [found.attempt.attempt_id]
    [reward] = [span for span in found.spans if span.kind == "reward"]
    assert reward.attributes[c.REWARD_VALUE] == 0.75


def test_work_left_behind_is_not_lost(server: ScriptedServer, store: str) -> None:
    """Check a thread that continues after its graph: its call is recorded, separately or as
    late.
    """
    model, ended, threads = chat(server), threading.Event(), []

    def later() -> None:
        ended.wait(10)
        model.invoke("later")

    def ask(state: Any) -> dict[str, Any]:
        threads.append(threading.Thread(target=later))
        threads[-1].start()
        return {"messages": [model.invoke("now")]}

    graph_of(("ask", ask)).invoke(USER)
    ended.set()
    threads[0].join()
    assert [call.asked for one in read(store) for call in one.answered] == ["now", "later"]

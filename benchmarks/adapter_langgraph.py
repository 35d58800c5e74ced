"""CPU that the LangGraph adapter costs: one run of a graph with one node and one model call.

    python benchmarks/adapter_langgraph.py [--runs 300]

The model answers instantly and in process (no client, no HTTP), so the rows show LangGraph's own
work and what the adapter adds to it: nothing listening; the adapter outside any scope; the adapter
inside a scope; the same with the question "who is acting?" that the wire shim asks at each call.
Rows are interleaved in rounds; each figure is the median round, and its excess over the first row.
The last table is a call through the real OpenAI client to a local server in another process.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

from lightspan import scope
from lightspan.scope import Scope, open_scope
from lightspan.testing.scripted import ScriptedServer
from lightspan_langgraph import instrument

ROUNDS = 15
Row = tuple[str, bool, bool]
ROWS: list[Row] = [
    ("no adapter", False, False),
    ("adapter, no scope", True, False),
    ("adapter, in a scope", True, True),
]


def graph_of(model: Any, *, ask: bool) -> Any:
    """One node, one model call."""

    def node(state: Any) -> dict[str, Any]:
        if ask:
            scope.acting()
        return {"messages": [model.invoke("hi")]}

    builder = StateGraph(MessagesState).add_node("writer", node)
    return builder.add_edge(START, "writer").compile()


def fake_model() -> Any:
    def forever() -> Iterator[AIMessage]:
        while True:
            yield AIMessage("ok")

    return GenericFakeChatModel(messages=forever())


@contextmanager
def setting(*, adapter: bool, in_scope: bool) -> Iterator[None]:
    with instrument() if adapter else _nothing(), _scope() if in_scope else _nothing():
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _scope() -> Iterator[None]:
    with open_scope(Scope(rollout_id="r", attempt_id="a")):
        yield


def cpu_per_run(run: Callable[[], Any], runs: int) -> float:
    """CPU milliseconds of this process per run."""
    gc.collect()
    start = time.process_time()
    for _ in range(runs):
        run()
    return (time.process_time() - start) / runs * 1e3


def table(title: str, graph: Any, runs: int) -> None:
    question = {"messages": [("user", "go")]}
    figures: dict[str, list[float]] = {name: [] for name, _, _ in ROWS}
    for _ in range(ROUNDS):
        for name, adapter, in_scope in ROWS:
            with setting(adapter=adapter, in_scope=in_scope):
                figures[name].append(cpu_per_run(lambda: graph.invoke(question), runs))
    base = statistics.median(figures[ROWS[0][0]])
    print(f"{title}\n{'':24} CPU ms/run   added ms    ratio")
    for name, values in figures.items():
        middle = statistics.median(values)
        print(f"{name:24} {middle:10.3f} {middle - base:+10.3f} {middle / base:8.2f}")


def serve(pipe: Connection) -> None:
    with ScriptedServer("ok") as server:
        pipe.send(server.url)
        pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=300, help="runs in a round")
    runs = parser.parse_args().runs
    cpu_per_run(lambda: graph_of(fake_model(), ask=True).invoke({"messages": []}), 20)
    table("model in process", graph_of(fake_model(), ask=False), runs)
    table("model in process, asked who acts", graph_of(fake_model(), ask=True), runs)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    url = ours.recv()
    model = ChatOpenAI(model="m", base_url=url, api_key=lambda: "key")
    table("model over HTTP, recorded by the shim", graph_of(model, ask=False), max(runs // 4, 1))
    ours.send("stop")
    process.join()


if __name__ == "__main__":
    main()

"""Test errors in nodes, tools, models, and in the adapter itself."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain")

from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy

from lightspan.capture.entry import open_scope
from lightspan.capture.recorder import Recorder
from lightspan.lightning import build_episode
from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanStatus
from lightspan_langgraph import _hook
from lightspan_langgraph._identity import RunTree
from lightspan_testing.attempts import captured, make_scope
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from packages.langgraph.tests.langgraph_apps import (
    USER,
    asks,
    calls_tool,
    chat,
    graph_of,
    two_nodes,
)

pytestmark = pytest.mark.usefixtures("installed_langgraph")


def test_a_tool_that_reports_its_error(server: ScriptedServer) -> None:
    server.script = calls_tool("broken")

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


def test_the_calls_of_a_node_that_was_retried_are_known(server: ScriptedServer) -> None:
    tries: list[str] = []
    model = chat(server)

    def strict(state: Any) -> dict[str, Any]:
        answer = model.invoke("hi")
        tries.append("")
        if len(tries) < 3:
            raise ValueError("no JSON")
        return {"messages": [answer]}

    graph: Any = StateGraph(MessagesState)
    policy = RetryPolicy(max_attempts=3, initial_interval=0.0, jitter=False, retry_on=ValueError)
    graph.add_node("strict", strict, retry_policy=policy)
    graph.add_node("after", asks(model))
    graph.add_edge(START, "strict")
    graph.add_edge("strict", "after")
    with captured() as run:
        graph.compile().invoke(USER)
    first, second, third, after = run.llm_spans
    attempt = make_attempt()
    ids = {"rollout_id": attempt.rollout_id, "attempt_id": attempt.attempt_id}
    spans = [span.replace(**ids) for span in run.spans]
    episode = build_episode(attempt, make_rollout(), spans, [])
    retried = {call.span_id for call in episode.calls if call.key in episode.retried}
    assert retried == {first.span_id, second.span_id}
    assert len(episode.calls) == 4
    assert {third.span_id, after.span_id}.isdisjoint(retried)


def test_the_calls_of_a_sub_agent_that_a_cycle_runs_again_are_known(server: ScriptedServer) -> None:
    """Check that a later visit of a node repeats only the run with the same prompt."""
    model = chat(server)
    questions = ["skipped", "hi", "hi"]
    visits: list[str] = []

    def ask(state: Any) -> dict[str, Any]:
        answer = model.invoke(questions[len(visits) - 1])
        if len(visits) < 3:
            raise ValueError("no JSON")
        return {"messages": [answer]}

    sub = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile()

    def visit(state: Any) -> Any:
        visits.append("")
        try:
            return sub.invoke(state)
        except ValueError:
            return {"messages": []}

    graph: Any = StateGraph(MessagesState).add_node("visit", visit).add_edge(START, "visit")
    graph.add_conditional_edges("visit", lambda _: "visit" if len(visits) < 3 else "__end__")
    with captured() as run:
        graph.compile().invoke(USER)
    attempt = make_attempt()
    ids = {"rollout_id": attempt.rollout_id, "attempt_id": attempt.attempt_id}
    spans = [span.replace(**ids) for span in run.spans]
    calls = build_episode(attempt, make_rollout(), spans, []).calls
    assert [call.agent_path for call in calls] == ["visit/ask"] * 3
    records = [
        make_record(call.call_id, list(question.encode()), sequence=(n, n), span_id=call.span_id)
        for n, (call, question) in enumerate(zip(calls, questions, strict=True))
    ]
    episode = build_episode(attempt, make_rollout(), spans, records)
    _, second, _ = run.llm_spans
    retried = {call.span_id for call in episode.calls if call.key in episode.retried}
    assert retried == {second.span_id}


def test_calls_before_a_checkpoint_are_kept(server: ScriptedServer) -> None:
    """Check an agent whose tool fails once: the resumed run asks nothing again."""
    server.script = calls_tool("book")
    failures = [ConnectionError("down")]

    @tool
    def book() -> str:
        """Book."""
        if failures:
            raise failures.pop()
        return "booked"

    agent = create_agent(chat(server), [book], name="clerk", checkpointer=InMemorySaver())
    _, retried = _resumed(agent)
    assert retried == []
    failures.append(ConnectionError("down"))
    _, retried = _resumed(create_agent(chat(server), [book], name="clerk"), again=USER)
    assert retried == ["clerk"]  # a new run repeats the call


def test_only_what_a_resumed_graph_runs_again_is_repeated(server: ScriptedServer) -> None:
    """Check a subgraph whose second node fails after its call, and runs again with the graph."""
    model, failures = chat(server), [ValueError("no JSON")]

    def review(state: Any) -> dict[str, Any]:
        answer = model.invoke("review")
        if failures:
            raise failures.pop()
        return {"messages": [answer]}

    team = graph_of(("draft", asks(model, "draft")), ("review", review))
    run, retried = _resumed(graph_of(("team", team), checkpointer=InMemorySaver()))
    assert run.calls == ["team/draft", "team/review", "team/review"]
    assert retried == ["team/review"]


def test_calls_of_finished_tasks_are_kept(server: ScriptedServer) -> None:
    model, failures = chat(server), [ConnectionError("down")]

    @task
    def draft() -> str:
        return str(model.invoke("draft").content)

    @task
    def store() -> None:
        if failures:
            raise failures.pop()

    @entrypoint(checkpointer=InMemorySaver())
    def write(_: Any) -> str:
        text: str = draft().result()
        store().result()
        return text

    run, retried = _resumed(write)
    assert (run.calls, retried) == (["write/draft"], [])


def _resumed(graph: Any, again: Any = None) -> tuple[Any, list[str]]:
    """Run a graph that fails, run it with the input `again`; return paths of retried calls too."""
    config = {"configurable": {"thread_id": "1"}}
    with captured() as run:
        with pytest.raises((ConnectionError, ValueError)):
            graph.invoke(USER, config)
        graph.invoke(again, config)
    attempt = make_attempt()
    ids = {"rollout_id": attempt.rollout_id, "attempt_id": attempt.attempt_id}
    spans = [span.replace(**ids) for span in run.spans]
    calls = build_episode(attempt, make_rollout(), spans, []).calls
    asked = [str(call.span.attributes[c.INPUT_MESSAGES]) for call in calls if call.span]
    records = [
        make_record(
            call.call_id,
            [*text.encode()],
            sequence=(n, n),
            agent_path=call.agent_path,
            span_id=call.span_id,
        )
        for n, (call, text) in enumerate(zip(calls, asked, strict=True))
    ]
    episode = build_episode(attempt, make_rollout(), spans, records)
    return run, [call.agent_path for call in episode.calls if call.key in episode.retried]


def test_an_attempt_leaves_nothing_behind(server: ScriptedServer) -> None:
    """Check that abandoned runs are released with the attempt, even if a generator is still
    held.
    """
    graph, held = two_nodes(server), []
    gc.collect()
    before = len(_hook._state.owners)
    for _ in range(3):
        with captured() as run:
            stream = graph.stream(USER)
            next(stream)
            held.append(stream)
            assert _open_runs(run.scope.recorder) > 0
        del run
    gc.collect()
    assert len(_hook._state.owners) == before
    for stream in held:
        stream.close()  # its end comes too late, and is nobody's


def _open_runs(recorder: Recorder) -> int:
    return len(_hook._state.attempts[recorder].tree)


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
    assert current.recorder.capture_errors()
    assert {reason.partition(": ")[0] for reason in current.recorder.capture_errors()} == {
        "lightspan_langgraph"
    }

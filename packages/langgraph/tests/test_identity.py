"""Test agent paths and spans of run events, without any framework."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("lightspan_langgraph")

from lightspan.capture.context import AttemptContext, Frame
from lightspan.schema.routing import join_path
from lightspan_langgraph._identity import (
    End,
    Place,
    RunKind,
    RunTree,
    Start,
    graph_agent_name,
)

ATTEMPT = AttemptContext(rollout_id="rollout", attempt_id="attempt", trace_id="f" * 32)
ROOT = Place((), "0" * 16)
_numbers = itertools.count()


class Runs:
    """Hold a `RunTree`, and feed it with events in short form."""

    def __init__(self) -> None:
        self.tree = RunTree(ATTEMPT)

    def start(
        self,
        name: str,
        parent: uuid.UUID | None = None,
        *,
        kind: RunKind = RunKind.CHAIN,
        pushed: Place = ROOT,
        attributes: Mapping[str, Any] | None = None,
        **metadata: Any,
    ) -> uuid.UUID:
        run_id = uuid.uuid4()
        event = Start(run_id, parent, kind, name, pushed, metadata, attributes or {})
        self.tree.start(event)
        return run_id

    def node(self, name: str, parent: uuid.UUID | None, within: str = "", **more: Any) -> uuid.UUID:
        namespace = f"{within}{name}:{next(_numbers)}"
        more = {"langgraph_node": name, "langgraph_checkpoint_ns": namespace, **more}
        return self.start(name, parent, **more)

    def path(
        self, run: uuid.UUID | None, pushed: Place = ROOT, model: uuid.UUID | None = None
    ) -> str:
        place = self.tree.place(pushed, run, model)
        assert place is not None
        return join_path(frame.name for frame in place.frames)


NEW = {"ls_integration": "langchain_create_agent"}


@pytest.mark.parametrize(
    ("graph", "node", "metadata", "expected"),
    [
        ("outer", "model", {**NEW, "lc_agent_name": "outer"}, "outer"),  # again inside itself
        ("LangGraph", "model", {**NEW, "lc_agent_name": "outer"}, None),  # unnamed, inherited
        ("task 17", "model", NEW, None),  # unnamed, with a run_name
        ("writer", "Guard.before_agent", {}, "writer"),  # nested, in an older langgraph
        ("helper", "agent", {}, "helper"),  # create_react_agent(name="helper")
        ("helper", "agent", {**NEW, "lc_agent_name": "outer"}, "helper"),  # in outer's tool
        ("helper", "tools", {}, "helper"),  # the same, resumed at its tools
        ("LangGraph", "agent", {}, None),  # unnamed
    ],
)
def test_a_graph_is_an_agent_by_its_first_node(
    graph: str, node: str, metadata: Mapping[str, Any], expected: str | None
) -> None:
    assert graph_agent_name(graph, node, metadata) == expected


def test_an_agent_that_calls_itself_is_nested() -> None:
    runs = Runs()
    outer = runs.start("outer", lc_agent_name="outer")
    tool = runs.start("help", outer, kind=RunKind.TOOL, lc_agent_name="outer")
    again = runs.start("outer", tool, lc_agent_name="outer")
    model = runs.node("model", again, within="tools:1|", lc_agent_name="outer")
    assert (runs.path(tool), runs.path(model), runs.path(again)) == (
        "outer",
        "outer/outer",
        "outer/outer",
    )


def test_the_explicit_name_wins_where_it_first_appears() -> None:
    runs = Runs()
    graph = runs.start("LangGraph", lightspan_agent="team")
    node = runs.node("write", graph, lightspan_agent="team")
    renamed = runs.node("write", graph, lightspan_agent="author")
    named = runs.start("writer", graph, lc_agent_name="writer", lightspan_agent="poet")
    tools = runs.node("tools", graph, lightspan_agent="toolsmith")
    assert [runs.path(run) for run in (graph, node, renamed, named, tools)] == [
        "team",
        "team/write",
        "team/author",
        "team/poet",
        "team/toolsmith",
    ]


def test_a_run_that_began_later_is_nearer_than_an_open_model() -> None:
    runs = Runs()
    model = runs.start("ChatOpenAI", kind=RunKind.MODEL, lightspan_agent="judge")
    tool = runs.start("help", kind=RunKind.TOOL)
    assert runs.path(tool, model=model) == "app"


def test_frames_pushed_outside_come_first_and_inside_last() -> None:
    runs = Runs()
    outer = Place((Frame("crew", "1" * 16),), "1" * 16)
    graph = runs.start("LangGraph", pushed=outer)
    node = runs.node("write", graph, pushed=outer)
    around = runs.tree.place(outer, node, None)
    assert around is not None
    inner = Frame("inner", "2" * 16)
    bare = Place((*outer.frames, inner), inner.span_id)  # pushed on what was pushed
    built = Place((*around.frames, inner), inner.span_id)  # pushed on what was resolved
    assert runs.path(node, outer) == "crew/write"
    for pushed in (bare, built):
        nested = runs.node("check", runs.start("LangGraph", node, pushed=pushed), pushed=pushed)
        assert runs.path(node, pushed) == "crew/write/inner"
        assert runs.path(nested, pushed) == "crew/write/inner/check"


def test_a_span_opened_inside_a_run_is_the_parent_of_what_comes_next() -> None:
    runs = Runs()
    node = runs.node("write", runs.start("LangGraph"))
    assert runs.tree.place(Place((), "9" * 16), node, None) == Place(
        runs.tree.place(ROOT, node, None).frames,  # type: ignore[union-attr]
        "9" * 16,
    )


def test_unknown_runs_are_unknown() -> None:
    runs = Runs()
    assert runs.tree.place(ROOT, uuid.uuid4(), uuid.uuid4()) is None
    assert runs.tree.place(ROOT, None, None) is None
    assert runs.tree.end(End(uuid.uuid4())) == []
    assert runs.path(runs.node("write", uuid.uuid4())) == "write"  # its parent began outside


def test_a_run_that_is_told_of_twice_counts_once() -> None:
    runs = Runs()
    event = Start(uuid.uuid4(), None, RunKind.TOOL, "look", ROOT)
    runs.tree.start(event)
    runs.tree.start(event)
    assert len(runs.tree) == 1
    assert len(runs.tree.end(End(event.run_id))) == 1
    assert runs.tree.end(End(event.run_id)) == []


def test_work_left_behind_by_a_node_still_has_its_name() -> None:
    runs = Runs()
    node = runs.node("write", runs.start("LangGraph"))
    runs.tree.end(End(node))
    assert runs.path(node) == "write"


def test_ended_runs_leave_nothing_behind() -> None:
    runs = Runs()
    for _ in range(10_000):
        graph = runs.start("LangGraph")
        runs.tree.end(End(runs.node("write", graph)))
        runs.tree.end(End(graph))
    assert len(runs.tree) == 0
    assert len(runs.tree._closed) == 4_096

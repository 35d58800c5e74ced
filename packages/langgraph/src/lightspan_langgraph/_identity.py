"""From LangChain's run events to agent paths and spans: pure, without LangChain.

LangChain tells of *runs*: a graph, each of its nodes, each chain, tool and model inside, each with
the id of its parent. A run that is an agent's *boundary* adds one frame to the path:

    path(run) = path(parent run) + frames pushed since the parent began + own frame, if a boundary

so that `with lightspan.agent("x")` inside a node, and graphs inside other frameworks, come out in
the order in which they were entered. A boundary is, the first that applies naming it:

1. a run whose metadata says `lightspan_agent`, where its parent's does not say the same;
2. the run of a graph made by `create_agent(name=…)` or `create_react_agent(name=…)`. Everything
   inside inherits `lc_agent_name`, so the run counts where the name first appears. A graph that
   keeps quiet (`create_react_agent`, an agent that calls itself, in an older langgraph any nested
   agent) is known by its first node, a prebuilt one; then the graph's name is the agent's;
3. the run of a graph node (the first run of a new `langgraph_checkpoint_ns`), unless it is one of
   the nodes that prebuilt agents consist of (`_prebuilt`).

A node that holds just an agent of the same name is that agent: one frame, not two.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

from lightspan.instrumentation import (
    AgentContext,
    AttemptContext,
    Frame,
    Span,
    SpanEnd,
    SpanKind,
    SpanStatus,
    end_span,
    new_span_id,
)

EXPLICIT_KEY: Final = "lightspan_agent"
"""The metadata key with which a user names an agent."""

_AGENT_KEY: Final = "lc_agent_name"
_NODE_KEY: Final = "langgraph_node"
_NAMESPACE_KEY: Final = "langgraph_checkpoint_ns"
_MADE_BY_KEY: Final = "ls_integration"
_CREATE_AGENT: Final = "langchain_create_agent"
"""Newer versions of langchain write it; such agents also say their name, if they have one."""
_UNNAMED_GRAPH: Final = "LangGraph"

_REACT_NODES: Final = frozenset(
    {"agent", "tools", "pre_model_hook", "post_model_hook", "generate_structured_response"}
)
_PREBUILT_NODES: Final = _REACT_NODES | {"model"}
_PREBUILT_SUFFIXES: Final = (".before_agent", ".before_model", ".after_model", ".after_agent")

MAX_CLOSED: Final = 256
"""Ended runs that are remembered, for work that a node left behind in the background."""


def is_prebuilt_node(name: str) -> bool:
    """Whether a node of this name is part of a prebuilt agent (or LangGraph's own), by the name."""
    return name in _PREBUILT_NODES or name.endswith(_PREBUILT_SUFFIXES) or name.startswith("__")


def graph_agent_name(name: str, node: str, metadata: Mapping[str, Any]) -> str | None:
    """The name of the agent that a graph is, None if it has no name.

    Args:
        name: the graph's name.
        node: its first node, a prebuilt one.
        metadata: of the graph's run, inherited keys included.
    """
    if name == _UNNAMED_GRAPH:
        return None
    says_its_name = metadata.get(_MADE_BY_KEY) == _CREATE_AGENT and node not in _REACT_NODES
    return name if not says_its_name or name == metadata.get(_AGENT_KEY) else None


class Place(NamedTuple):
    """A context without its attempt, which a run must not keep alive."""

    frames: tuple[Frame, ...] = ()
    span_id: str | None = None

    @classmethod
    def of(cls, context: AgentContext) -> Place:
        """Return the place of a context."""
        return cls(context.frames, context.parent_span_id)


class RunKind(StrEnum):
    CHAIN = "chain"
    MODEL = "model"
    TOOL = "tool"
    RETRIEVER = "retriever"


class Start(NamedTuple):
    """A run begins."""

    run_id: UUID
    parent_id: UUID | None
    kind: RunKind
    name: str
    pushed: Place
    """What was pushed in this context at that moment."""
    metadata: Mapping[str, Any] = {}
    attributes: Mapping[str, Any] = {}
    """What a tool run puts on its span."""
    runs_prebuilt: bool | None = None
    """Of a node: whether what it runs is a prebuilt agent's; None where the name says it."""

    @property
    def is_prebuilt(self) -> bool:
        """Of a node: whether it is part of a prebuilt agent."""
        return is_prebuilt_node(self.name) if self.runs_prebuilt is None else self.runs_prebuilt


class End(NamedTuple):
    """A run ends."""

    run_id: UUID
    status: SpanStatus = SpanStatus.OK
    """UNSET for a run that was interrupted or abandoned: neither is an error."""
    message: str = ""
    attributes: Mapping[str, Any] = {}


class _OpenSpan(NamedTuple):
    """A span that will be emitted when its run ends."""

    kind: SpanKind
    name: str
    around: Place
    inside: Place


@dataclass(slots=True, eq=False)
class _Run:
    order: int
    start: Start
    inside: Place
    """What is around whatever happens in it."""
    namespace: str | None
    agent_name: str | None
    explicit: str | None
    node_frame: Frame | None
    """The frame of the graph node that the run is in, while no other agent is in between."""
    is_node: bool
    settled: bool = False
    """It is known whether this run is that of a graph that is an agent."""
    start_ns: int = field(default_factory=time.time_ns)
    open_spans: list[_OpenSpan] = field(default_factory=list)


class RunTree:
    """The runs of one attempt. Thread-safe."""

    def __init__(self, attempt: AttemptContext) -> None:
        self.attempt = attempt
        """Without its recorder, which lives as long as the attempt."""
        self._open: dict[UUID, _Run] = {}
        self._closed: dict[UUID, _Run] = {}
        self._orders = itertools.count()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """The number of open runs."""
        return len(self._open)

    def start(self, event: Start) -> None:
        """Note that a run begins; one that is known already is no news."""
        with self._lock:
            if event.run_id in self._open:
                return
            parent = self._find(event.parent_id)
            is_node = _is_node(event, parent)
            if parent is not None and is_node:
                _settle_graph(parent, event)
            self._open[event.run_id] = _enter(next(self._orders), event, parent, is_node=is_node)

    def end(self, event: End) -> list[Span]:
        """Note that a run ends: its spans; none if the run is not known or open."""
        with self._lock:
            run = self._open.pop(event.run_id, None)
            if run is None:
                return []
            self._closed[event.run_id] = run
            if len(self._closed) > MAX_CLOSED:
                del self._closed[next(iter(self._closed))]
            return [self._span(run, event, span) for span in run.open_spans]

    def place(self, pushed: Place, chain: UUID | None, model: UUID | None) -> Place | None:
        """Where a model call made now happens; None if no run is known to be around it.

        Args:
            pushed: what is pushed in the calling context.
            chain: the innermost chain or tool run, by LangChain's own context.
            model: the model run that last began in this context; it counts while it is open.
        """
        with self._lock:
            runs = (self._find(chain), self._open.get(model) if model else None)
            known = [run for run in runs if run is not None]
            if not known:
                return None
            return _place_in(max(known, key=lambda run: run.order), pushed)

    def inside(self, run_id: UUID) -> Place:
        """Where an open run is; nowhere if it is not known."""
        with self._lock:
            run = self._open.get(run_id)
            return Place((), None) if run is None else run.inside

    def _find(self, run_id: UUID | None) -> _Run | None:
        if run_id is None:
            return None
        return self._open.get(run_id) or self._closed.get(run_id)

    def _span(self, run: _Run, event: End, span: _OpenSpan) -> Span:
        is_tool = span.kind is SpanKind.TOOL
        return end_span(
            AgentContext(self.attempt, span.around.frames, span.around.span_id),
            span.kind,
            span.name,
            SpanEnd(event.status, event.message, event.attributes),
            span_id=span.inside.span_id,
            start_ns=run.start_ns,
            attributes=run.start.attributes if is_tool else None,
        )


def _place_in(run: _Run, pushed: Place) -> Place:
    """The place of something that happens now in `run`: what was pushed since comes last.

    `pushed` may hold the run's own frames too, as `current_agent()` returns them.
    """
    before, inside = run.start.pushed, run.inside
    if pushed == before:
        return inside
    newer = tuple(f for f in pushed.frames if f not in before.frames and f not in inside.frames)
    if newer:
        return Place((*inside.frames, *newer), pushed.span_id)
    is_deeper = pushed.frames in (before.frames, inside.frames)
    if is_deeper and pushed.span_id not in (before.span_id, inside.span_id):
        return Place(inside.frames, pushed.span_id)  # an operation, another framework's tool
    return inside


def _enter(order: int, event: Start, parent: _Run | None, *, is_node: bool) -> _Run:
    """The run that begins, with its own frame and spans."""
    metadata = event.metadata
    run = _Run(
        order=order,
        start=event,
        inside=event.pushed if parent is None else _place_in(parent, event.pushed),
        namespace=_text(metadata.get(_NAMESPACE_KEY)),
        agent_name=_text(metadata.get(_AGENT_KEY)),
        explicit=_text(metadata.get(EXPLICIT_KEY)),
        node_frame=parent.node_frame if parent else None,
        is_node=is_node,
    )
    if event.kind is RunKind.TOOL:
        _open_span(run, SpanKind.TOOL, event.name, Place(run.inside.frames, new_span_id()))
    name = _boundary_name(run, parent)
    if name is not None:
        _add_frame(run, name)
    return run


def _boundary_name(run: _Run, parent: _Run | None) -> str | None:
    if run.explicit and run.explicit != (parent.explicit if parent else None):
        return run.explicit
    if run.start.kind is not RunKind.CHAIN:
        return None
    if run.agent_name and run.agent_name != (parent.agent_name if parent else None):
        return run.agent_name
    if run.is_node and not run.start.is_prebuilt:
        return run.start.name
    return None


def _is_node(event: Start, parent: _Run | None) -> bool:
    """Whether the run is that of a graph node: the first one in a new namespace."""
    if event.kind is not RunKind.CHAIN or event.metadata.get(_NODE_KEY) != event.name:
        return False
    namespace = _text(event.metadata.get(_NAMESPACE_KEY))
    return namespace is not None and namespace != (parent.namespace if parent else None)


def _settle_graph(graph: _Run, node: Start) -> None:
    """At a graph's first node: see whether the graph is an agent that has kept quiet so far."""
    if graph.settled or graph.is_node or node.name.startswith("__"):
        return
    graph.settled = True
    name = graph_agent_name(graph.start.name, node.name, graph.start.metadata)
    if name is not None and node.is_prebuilt:
        _add_frame(graph, name)


def _add_frame(run: _Run, name: str) -> None:
    run.settled = True
    innermost = run.inside.frames[-1] if run.inside.frames else None
    is_the_node = innermost is not None and innermost == run.node_frame and innermost.name == name
    run.node_frame = None
    if is_the_node and not run.is_node:
        return  # a node that holds an agent of its name: one agent
    frame = Frame(name, new_span_id())
    _open_span(run, SpanKind.AGENT, name, Place((*run.inside.frames, frame), frame.span_id))
    if run.is_node:
        run.node_frame = frame


def _open_span(run: _Run, kind: SpanKind, name: str, inside: Place) -> None:
    run.open_spans.append(_OpenSpan(kind, name, run.inside, inside))
    run.inside = inside


def _text(value: Any) -> str | None:
    return str(value) if value else None

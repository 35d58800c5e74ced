"""Derive agent paths and spans from LangChain's run events, without importing LangChain.

LangChain reports *runs*: a graph, each of its nodes, and each chain, tool and model inside. Each
run has the id of its parent. An agent path is a list of frames; a frame is an agent that was
entered. A run that belongs to an agent, and is the outermost one, is the agent's *boundary* and
adds the agent's frame:

    path(run) = path(parent run) + frames pushed since the parent began + own frame, if a boundary

Frames are pushed by `with lightspan.agent("x")` inside a node, and by other frameworks. So all
frames are in the order in which their agents were entered. A run is a boundary in three cases; the
first that applies names the agent:

1. a run whose metadata has a `lightspan_agent` that differs from its parent's;
2. the run of a graph made by `create_agent(name=…)` or `create_react_agent(name=…)`. All runs
inside inherit the metadata `lc_agent_name`, so the boundary is the run where it first appears. Some
agents' graphs do not have it (`create_react_agent`, an agent that calls itself, any nested agent in
an older langgraph). They are recognised because their first node is a prebuilt one, and the graph's
name is the agent's;
3. the run of a graph node (the first run of a new `langgraph_checkpoint_ns`), unless it is one of
the nodes of prebuilt agents (`_prebuilt`).

If a node contains only an agent with the node's name, the two add one frame, not two.
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
    AttemptContext,
    Place,
    Span,
    SpanEnd,
    SpanKind,
    SpanStatus,
    end_span,
    semconv,
)

EXPLICIT_KEY: Final = "lightspan_agent"
"""Metadata key with which a user names an agent."""

AGENT_KEY: Final = "lc_agent_name"
"""Metadata key with the name of the prebuilt agent to which a run belongs."""
_NODE_KEY: Final = "langgraph_node"
_NAMESPACE_KEY: Final = "langgraph_checkpoint_ns"
_MADE_BY_KEY: Final = "ls_integration"
_CREATE_AGENT: Final = "langchain_create_agent"
"""Value of `ls_integration` in newer versions of langchain, whose agents also report their name."""
_UNNAMED_GRAPH: Final = "LangGraph"

_REACT_NODES: Final = frozenset(
    {"agent", "tools", "pre_model_hook", "post_model_hook", "generate_structured_response"}
)
_PREBUILT_NODES: Final = _REACT_NODES | {"model"}
ERROR_HANDLERS: Final = ("__error_handler__", "__default_error_handler__")
"""Beginnings of the names of LangGraph's nodes for `error_handler=` functions, which are the
user's."""
_PREBUILT_SUFFIXES: Final = (".before_agent", ".before_model", ".after_model", ".after_agent")

MAX_CLOSED: Final = 4_096
"""Maximum number of ended runs that are kept as parents of a node's background work."""


def is_prebuilt_node(name: str) -> bool:
    """Return whether prebuilt agents, or LangGraph itself, have nodes called `name`."""
    is_internal = name.startswith("__") and not name.startswith(ERROR_HANDLERS)
    return name in _PREBUILT_NODES or name.endswith(_PREBUILT_SUFFIXES) or is_internal


def graph_agent_name(name: str, node: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the name of the agent whose graph is called `name`; None if it has none.

    Newer versions of langchain also report the agent's name in the metadata. If the reported name
    differs from `name`, the graph is another one inside the agent, so None is returned.

    Args:
        name: name of the graph.
        node: name of the graph's first node.
        metadata: metadata of the graph's run, including inherited keys.
    """
    if name == _UNNAMED_GRAPH:
        return None
    says_its_name = metadata.get(_MADE_BY_KEY) == _CREATE_AGENT and node not in _REACT_NODES
    return name if not says_its_name or name == metadata.get(AGENT_KEY) else None


class RunKind(StrEnum):
    """The kinds of runs."""

    CHAIN = "chain"
    MODEL = "model"
    TOOL = "tool"
    RETRIEVER = "retriever"


class Start(NamedTuple):
    """The start of a run of a graph, node, chain, tool or model."""

    run_id: UUID
    parent_id: UUID | None
    kind: RunKind
    name: str
    pushed: Place
    """Place (agent path and span) of the pushed frames when the run begins."""
    metadata: Mapping[str, Any] = {}
    attributes: Mapping[str, Any] = {}
    """Span attributes of a tool run; empty for other runs."""
    runs_prebuilt: bool | None = None
    """Whether the run belongs to a prebuilt agent's node; None to decide by the node's name."""
    agent: str | None = None
    """Own name of the prebuilt agent whose graph the run is; None for other runs."""
    is_resumed: bool = False
    """Whether the run is that of a graph which goes on from a checkpoint."""

    @property
    def is_prebuilt(self) -> bool:
        """Whether the node is part of a prebuilt agent."""
        return is_prebuilt_node(self.name) if self.runs_prebuilt is None else self.runs_prebuilt


class End(NamedTuple):
    """The end of a run of a graph, node, chain, tool or model."""

    run_id: UUID
    status: SpanStatus = SpanStatus.OK
    """Status; UNSET for a run that was interrupted or abandoned, which is not an error."""
    message: str = ""
    attributes: Mapping[str, Any] = {}


class _OpenSpan(NamedTuple):
    """The parts of a span that are known before the end of its run."""

    kind: SpanKind
    name: str
    around: Place
    inside: Place


@dataclass(slots=True, eq=False)
class _Run:
    """A run that is open, or that has ended and may still get child runs."""

    order: int
    start: Start
    inside: Place
    """Place (agent path and span) of everything that happens in the run."""
    namespace: str | None
    agent_name: str | None
    explicit: str | None
    node_span_id: str | None
    """Span id of the innermost enclosing graph node; None if there is none, or an agent is in
    between.
    """
    is_node: bool
    is_resumed: bool
    """Whether the run is inside a graph which goes on from a checkpoint, or is a node with one."""
    is_settled: bool = False
    """Whether it is decided that the graph of this run is an agent, or that it is none."""
    start_ns: int = field(default_factory=time.time_ns)
    open_spans: list[_OpenSpan] = field(default_factory=list)


class RunTree:
    """The runs of one attempt. Thread-safe.

    Args:
        attempt: the attempt's scope. The caller has replaced its recorder by a placeholder, because
            the tree must not keep the recorder alive.
    """

    def __init__(self, attempt: AttemptContext) -> None:
        self.attempt = attempt
        self._open: dict[UUID, _Run] = {}
        self._closed: dict[UUID, _Run] = {}
        self._orders = itertools.count()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return the number of open runs."""
        return len(self._open)

    def start(self, event: Start) -> None:
        """Add a run that begins; do nothing if the run is open already."""
        with self._lock:
            if event.run_id in self._open:
                return
            parent = self._find(event.parent_id)
            is_node = _is_node(event, parent)
            if parent is not None and is_node:
                _settle_graph(parent, event)
            self._open[event.run_id] = _enter(next(self._orders), event, parent, is_node=is_node)

    def end(self, event: End) -> list[Span]:
        """Close a run and return its spans; an empty list if the run is unknown or closed."""
        with self._lock:
            run = self._open.pop(event.run_id, None)
            if run is None:
                return []
            self._closed[event.run_id] = run
            if len(self._closed) > MAX_CLOSED:
                del self._closed[next(iter(self._closed))]
            spans = [self._span(run, event, span) for span in run.open_spans]
            run.start = run.start._replace(attributes={})  # texts of a tool may be long
            return spans

    def place(self, pushed: Place, chain: UUID | None, model: UUID | None) -> Place | None:
        """Return the place (agent path and span) of a model call that is made now.

        None if no known run encloses the call.

        Args:
            pushed: place with the agents that the app has named by `lightspan.agent`.
            chain: id of the innermost chain or tool run, as LangChain's own context says; None if
                there is none.
            model: id of the model run that began last in the calling context; None if there is
                none. A run that has ended is ignored.
        """
        with self._lock:
            runs = (self._find(chain), self._open.get(model) if model else None)
            candidates = [run for run in runs if run is not None]
            if not candidates:
                return None
            return _place_in(max(candidates, key=lambda run: run.order), pushed)

    def around(self, run_id: UUID) -> list[UUID]:
        """Return the ids of a run and of the open runs around it, innermost first.

        The result is empty if no run with this id is open.
        """
        with self._lock:
            runs, run = [], self._open.get(run_id)
            while run is not None:
                runs.append(run.start.run_id)
                parent = run.start.parent_id
                run = None if parent is None else self._open.get(parent)
            return runs

    def inside(self, run_id: UUID) -> Place:
        """Return the place (agent path and span) of code inside the run `run_id`.

        The place is empty if no run with this id is open.
        """
        with self._lock:
            run = self._open.get(run_id)
            return Place() if run is None else run.inside

    def _find(self, run_id: UUID | None) -> _Run | None:
        if run_id is None:
            return None
        return self._open.get(run_id) or self._closed.get(run_id)

    def _span(self, run: _Run, event: End, span: _OpenSpan) -> Span:
        is_tool, resumed = span.kind is SpanKind.TOOL, {semconv.AGENT_RESUMED: True}
        is_resumed = run.is_resumed and span.kind is SpanKind.AGENT
        return end_span(
            span.around.within(self.attempt),
            span.kind,
            span.name,
            SpanEnd(event.status, event.message, event.attributes),
            span_id=span.inside.span_id,
            start_ns=run.start_ns,
            attributes=run.start.attributes if is_tool else resumed if is_resumed else None,
        )


def _place_in(run: _Run, pushed: Place) -> Place:
    """Return the place (agent path and span) of code that runs inside `run`.

    Agents that the app has named by `lightspan.agent` since the run began are part of the path.

    Args:
        run: the run.
        pushed: place of the calling context. It has the agents that the app has named, and may have
            the run's own frames too.
    """
    before, inside = run.start.pushed, run.inside
    if pushed == before:
        return inside
    newer = tuple(f for f in pushed.frames if f not in before.frames and f not in inside.frames)
    if newer:
        return Place((*inside.frames, *newer), pushed.span_id)
    is_deeper = pushed.frames in (before.frames, inside.frames)
    if is_deeper and pushed.span_id not in (before.span_id, inside.span_id):
        return Place(inside.frames, pushed.span_id)  # in an operation, or another framework's tool
    return inside


def _enter(order: int, event: Start, parent: _Run | None, *, is_node: bool) -> _Run:
    """Create the open run of `event`, with its spans and its part of the agent path.

    Args:
        order: number of the run in the order of starts.
        event: start of the run.
        parent: the enclosing run; None if there is none.
        is_node: whether the run is a graph node's.
    """
    metadata = event.metadata
    run = _Run(
        order=order,
        start=event,
        inside=event.pushed if parent is None else _place_in(parent, event.pushed),
        namespace=_text(metadata.get(_NAMESPACE_KEY)),
        agent_name=_text(metadata.get(AGENT_KEY)),
        explicit=_text(metadata.get(EXPLICIT_KEY)),
        node_span_id=parent.node_span_id if parent else None,
        is_node=is_node,
        is_resumed=event.is_resumed or (parent is not None and parent.is_resumed),
    )
    if event.is_resumed and parent is not None and parent.is_node:
        parent.is_resumed = True  # the node runs again, to go on with its graph
    if event.kind is RunKind.TOOL:
        _open_span(run, SpanKind.TOOL, event.name, run.inside.enter_tool())
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
        return run.start.agent or run.agent_name
    if run.start.agent and run.start.agent != run.agent_name:
        return run.start.agent  # the metadata is that of the agent which called it
    if run.is_node and not run.start.is_prebuilt:
        return run.start.name
    return None


def _is_node(event: Start, parent: _Run | None) -> bool:
    """Return whether a beginning run is that of a graph node.

    It is if it is the first run in a new namespace (`langgraph_checkpoint_ns`).
    """
    if event.kind is not RunKind.CHAIN or event.metadata.get(_NODE_KEY) != event.name:
        return False
    namespace = _text(event.metadata.get(_NAMESPACE_KEY))
    return namespace is not None and namespace != (parent.namespace if parent else None)


def _settle_graph(graph: _Run, node: Start) -> None:
    """Decide, when the first node of a graph begins, whether the graph is an agent's.

    If it is the graph of a prebuilt agent, the agent's frame is added to the run of the graph. This
    is needed for agents whose name is not in the metadata. At later nodes nothing is done.

    Args:
        graph: run of the graph.
        node: start of the node.
    """
    if graph.is_settled or graph.is_node or node.name.startswith("__"):
        return
    graph.is_settled = True
    name = graph_agent_name(graph.start.name, node.name, graph.start.metadata)
    if name is not None and node.is_prebuilt:
        _add_frame(graph, name)


def _add_frame(run: _Run, name: str) -> None:
    run.is_settled = True
    is_the_node = bool(run.inside.frames) and run.inside.frames[-1] == (name, run.node_span_id)
    run.node_span_id = None
    if is_the_node and not run.is_node:
        return  # a node that holds an agent of the same name is that agent
    _open_span(run, SpanKind.AGENT, name, run.inside.enter_agent(name))
    if run.is_node:
        run.node_span_id = run.inside.span_id


def _open_span(run: _Run, kind: SpanKind, name: str, inside: Place) -> None:
    run.open_spans.append(_OpenSpan(kind, name, run.inside, inside))
    run.inside = inside


def _text(value: Any) -> str | None:
    return str(value) if value else None

"""Detect graph nodes that are part of a prebuilt agent.

A node's name is not enough, because tutorials also name the nodes of custom graphs `agent` and
`tools`. Nodes with such names are recognised by the module of the function that they run.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final, NamedTuple

from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel
from langgraph.types import Command

from lightspan_langgraph._identity import AGENT_KEY, is_prebuilt_node

_AMBIGUOUS_NAMES: Final = frozenset({"agent", "model", "tools", "generate_structured_response"})
"""Names that nodes of prebuilt agents and of custom graphs may have.

A prebuilt node with such a name never runs a function of the user's; a prebuilt node with another
name may.
"""
_MAKERS: Final = ("langgraph.prebuilt", "langchain.agents")
_CALLBACKS: Final = ("langchain_core.callbacks", "lightspan_langgraph")
"""Modules between the start of a graph's run and this module."""
_RESUMING: Final = "__pregel_resuming"
_CHECKPOINTER: Final = "__pregel_checkpointer"
"""Keys of LangGraph in the `configurable` of a graph inside another."""


def is_prebuilt(name: str, bound: Any) -> bool:
    """Return whether the node `name`, which runs `bound`, is part of a prebuilt agent."""
    if name not in _AMBIGUOUS_NAMES:
        return is_prebuilt_node(name)
    function = getattr(bound, "func", None) or getattr(bound, "afunc", None)
    return isinstance(bound, ToolNode) or str(getattr(function, "__module__", "")).startswith(
        _MAKERS
    )


def is_running_prebuilt(name: str) -> bool | None:
    """Return whether the node that is about to run is part of a prebuilt agent.

    LangGraph passes only the node's name to a callback. Custom graphs may use some of these names
    too. For such a name, the call stack is searched for the object that runs the node.

    Returns:
        None if only the name decides (`is_prebuilt_node`), because custom graphs do not use the
        name, or because the object is not found.
    """
    if name not in _AMBIGUOUS_NAMES:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if type(owner).__name__ == "RunnableSeq":
            return is_prebuilt(name, owner.steps[0])
        frame = frame.f_back
    return None


class StartingGraph(NamedTuple):
    """What is known only from the object of a graph that is about to run."""

    agent: str | None = None
    """Own name of the graph's prebuilt agent; None if it has none. The metadata of the run has
    another name if a tool passes its `config` on to the agent: that of the tool's agent."""
    is_resumed: bool = False
    """Whether the graph goes on from a checkpoint, and keeps the results of the nodes before."""


def starting_graph() -> StartingGraph:
    """Return what is known of the graph that is about to run; the defaults if it is no graph."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_CALLBACKS):
        frame = frame.f_back
    graph = None if frame is None else frame.f_locals.get("self")
    if frame is None or not isinstance(graph, Pregel):
        return StartingGraph()
    values = (frame.f_locals.get("config") or {}).get("configurable") or {}
    given = frame.f_locals.get("input", ())
    is_resumed = values.get(_RESUMING, given is None or isinstance(given, Command))
    own = graph.checkpointer  # None inherits that of the graph around it, False has none
    has_checkpoints = values.get(_CHECKPOINTER) if own is None else own
    name = ((graph.config or {}).get("metadata") or {}).get(AGENT_KEY)
    return StartingGraph(name, bool(is_resumed and has_checkpoints))

"""List the agents of a graph that can be optimised, without running it.

The names come from the graph and the objects that its functions refer to, by the rules of
`_identity`. The list is *complete* if nothing could add another agent at run time: no function
creates an agent or graph, no metadata names one, and no other framework is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableLambda,
    RunnableParallel,
    RunnableSequence,
)
from langchain_core.tools import BaseTool
from langgraph.func import _TaskFunction, task
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel

from lightspan.instrumentation import AgentPaths, AgentSearch, Location
from lightspan_langgraph._identity import ERROR_HANDLERS, EXPLICIT_KEY, graph_agent_name
from lightspan_langgraph._prebuilt import is_prebuilt


def agents(app: Any) -> AgentPaths:
    """Return the agent paths in a compiled graph, an agent or a LangChain runnable.

    Args:
        app: result of `create_agent` or `StateGraph.compile`, or a chain, a model, a function.
    """
    return _Search().search(app, _Location())


_AGENTS = "langchain.agents."
"""Modules with the functions that call a prebuilt agent's middleware."""


@dataclass(frozen=True, slots=True)
class _Location(Location):
    in_node: bool = False
    """Whether the innermost name of the location is a graph node's."""


class _Search(AgentSearch[_Location]):
    makers = frozenset(
        {
            EXPLICIT_KEY,
            "StateGraph",
            "create_agent",
            "create_deep_agent",
            "create_react_agent",
            "create_supervisor",
            "create_swarm",
            "entrypoint",
            "globals",
            "import_module",
        }
    )
    installed = ("langchain", "langchain_core", "langgraph", "openai")

    def visit(self, thing: Any, where: _Location) -> None:
        if isinstance(thing, Pregel):
            self._graph(thing, where)
        elif isinstance(thing, BaseLanguageModel):
            self._model(thing, where)
        elif isinstance(thing, Runnable):
            self._runnable(thing, where)
        elif isinstance(thing, _TaskFunction):
            self._task(thing, where)
        elif isinstance(thing, FunctionType) and thing.__module__.startswith(_AGENTS):
            self.look_at_all(self.closure(thing), where)  # middleware of the user
        elif thing is task:
            self.complete = False  # the function that refers to it makes tasks
        else:
            super().visit(thing, where)

    def references(self, function: FunctionType, *, texts: bool = False) -> Iterator[Any]:
        """Yield what a function refers to, but no globals by texts: routers return names of nodes.

        A function that looks objects up by texts makes the list incomplete (`makers`).
        """
        yield from super().references(function, texts=texts)

    def _graph(self, graph: Pregel[Any, Any, Any, Any], where: _Location) -> None:
        inside, places = _in_graph(graph, where), dict[str, _Location]()
        for name, node in graph.nodes.items():
            if name.startswith("__") and not name.startswith(ERROR_HANDLERS):
                continue
            explicit = (node.metadata or {}).get(EXPLICIT_KEY)
            is_agent = explicit or not is_prebuilt(name, node.bound)
            agent = replace(inside.within(str(explicit or name)), in_node=True)
            location = agent if is_agent else inside
            calls_tools = isinstance(node.bound, ToolNode) and not is_agent
            if not calls_tools and not _is_graph(node.bound):
                self.add(location)
            self.look(node.bound, location)
            places[name] = location
        # a conditional edge is part of its node; that of START belongs to the agent of the graph
        branches = getattr(getattr(graph, "builder", None), "branches", {})
        for name, of_node in branches.items():
            paths = [branch.path for branch in of_node.values()]
            self.look_at_all(paths, places.get(name, inside))

    def _task(self, function: _TaskFunction[Any, Any], where: _Location) -> None:
        name = getattr(function.func, "__name__", type(function.func).__name__)
        inside = replace(where.within(name), in_node=True)
        self.add(inside)
        self.look(function.func, inside)

    def _model(self, model: Any, where: _Location) -> None:
        explicit = (getattr(model, "metadata", None) or {}).get(EXPLICIT_KEY)
        self.add(_named(where, explicit) if explicit else where)

    def _runnable(self, thing: Any, where: _Location) -> None:
        if isinstance(thing, RunnableBinding):
            explicit = (thing.config.get("metadata") or {}).get(EXPLICIT_KEY)
            self.look(thing.bound, _named(where, explicit) if explicit else where)
        elif isinstance(thing, RunnableSequence):
            self.look_at_all(thing.steps, where)
        elif isinstance(thing, RunnableParallel):
            self.look_at_all(thing.steps__.values(), where)
        elif isinstance(thing, RunnableLambda | BaseTool) or _is_langgraph(thing):
            self.look_at_all(_functions(thing), where)
        elif not isinstance(thing, BasePromptTemplate | BaseOutputParser):
            self.add(where)
            self.complete = False


def _in_graph(graph: Pregel[Any, Any, Any, Any], where: _Location) -> _Location:
    """Return the agent path of the nodes in `graph`.

    Args:
        graph: the graph.
        where: location of the graph itself.
    """
    metadata = (graph.config or {}).get("metadata") or {}
    agent_name = metadata.get("lc_agent_name")
    nodes = [name for name in graph.nodes if not name.startswith("__")]
    first = next(iter(nodes), None)
    is_agent = first is not None and is_prebuilt(first, graph.nodes[first].bound)
    by_name = graph_agent_name(graph.name, first, metadata) if first and is_agent else None
    name = metadata.get(EXPLICIT_KEY) or agent_name or by_name
    if not name or (where.in_node and where.names[-1] == name):
        return replace(where, in_node=False)
    return _named(where, name)


def _named(where: _Location, name: Any) -> _Location:
    """Return the location inside the agent `name`, which is entered at `where`.

    Args:
        where: location where the agent is used.
        name: name of the agent.
    """
    return replace(where.within(str(name)), in_node=False)


def _is_graph(bound: Any) -> bool:
    first = bound.steps[0] if isinstance(bound, RunnableSequence) else bound
    return isinstance(first, Pregel)


def _is_langgraph(thing: Any) -> bool:
    return type(thing).__module__.startswith("langgraph.")


def _functions(thing: Any) -> Iterator[Any]:
    """Yield the functions and tools that `thing`, a runnable of LangChain or LangGraph, calls."""
    for name in ("func", "afunc", "coroutine", "_run"):
        function = inspect.getattr_static(thing, name, None)
        if isinstance(function, FunctionType | MethodType | functools.partial):
            yield function
        elif name in getattr(thing, "__dict__", {}):
            yield thing.__dict__[name]
    yield from getattr(thing, "tools_by_name", {}).values()

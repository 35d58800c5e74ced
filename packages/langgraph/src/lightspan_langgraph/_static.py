"""What can be optimised in a graph, without running it.

The names come from the graph itself and from what its functions refer to; the rules are those of
`_identity`. The list is *complete* if nothing was found that could bring another agent at run time:
no agent or graph is built inside a function, no metadata names one, no other framework is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

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
from langgraph.pregel import Pregel

from lightspan.references import is_users, names_in, referred, root_of
from lightspan.routing import AgentPaths, join_path
from lightspan_langgraph._identity import EXPLICIT_KEY, graph_agent_name, is_prebuilt_node

_MAKERS: Final = frozenset(
    {
        "StateGraph",
        "create_agent",
        "create_deep_agent",
        "create_react_agent",
        "create_supervisor",
        "create_swarm",
        "entrypoint",
    }
)
"""Names which in a function's code mean that it may bring agents of its own."""
_FRAMEWORKS: Final = frozenset(
    {"agents", "autogen_agentchat", "autogen_core", "crewai", "lightspan"}
)
"""Modules that name agents of their own: the frameworks that lightspan knows, and itself."""
_INSTALLED: Final = ("langchain", "langchain_core", "langgraph", "openai")
"""Packages whose code brings no agents, wherever they lie."""
_LOOKED_AT_MOST: Final = 2_000


def agents(app: Any) -> AgentPaths:
    """The agent paths in a compiled graph, an agent or a LangChain runnable.

    Args:
        app: what `create_agent` or `StateGraph.compile` returned, or a chain, a model, a function.
    """
    found = _Search()
    found.look(app, _Where())
    return AgentPaths(tuple(found.paths), found.complete)


class _Where(NamedTuple):
    names: tuple[str, ...] = ()
    in_node: bool = False
    """The innermost name is a graph node's."""


@dataclass(slots=True)
class _Search:
    paths: dict[str, None] = field(default_factory=dict)
    complete: bool = True
    seen: dict[tuple[int, _Where], Any] = field(default_factory=dict)
    """What was looked at, kept alive so that ids stay unique."""

    def look(self, thing: Any, where: _Where) -> None:
        """Look at anything that an app consists of."""
        if (id(thing), where) in self.seen:
            return
        self.seen[id(thing), where] = thing
        if len(self.seen) > _LOOKED_AT_MOST:
            self.complete = False
        elif isinstance(thing, Pregel):
            self._graph(thing, where)
        elif isinstance(thing, BaseLanguageModel):
            self._model(thing, where)
        elif isinstance(thing, Runnable):
            self._runnable(thing, where)
        else:
            self._object(thing, where)

    def _graph(self, graph: Pregel[Any, Any, Any, Any], where: _Where) -> None:
        inside = _in_graph(graph, where)
        for name, node in graph.nodes.items():
            if name.startswith("__"):
                continue
            explicit = (node.metadata or {}).get(EXPLICIT_KEY)
            counts = explicit or not is_prebuilt_node(name)
            at = _Where((*inside.names, str(explicit or name)), True) if counts else inside
            if name != "tools" and not _is_graph(node.bound):
                self._add(at)
            self.look(node.bound, at)

    def _model(self, model: Any, where: _Where) -> None:
        explicit = (getattr(model, "metadata", None) or {}).get(EXPLICIT_KEY)
        self._add(_Where((*where.names, str(explicit))) if explicit else where)

    def _runnable(self, thing: Any, where: _Where) -> None:
        if isinstance(thing, RunnableBinding):
            explicit = (thing.config.get("metadata") or {}).get(EXPLICIT_KEY)
            self.look(thing.bound, _Where((*where.names, str(explicit))) if explicit else where)
        elif isinstance(thing, RunnableSequence):
            self._all(thing.steps, where)
        elif isinstance(thing, RunnableParallel):
            self._all(thing.steps__.values(), where)
        elif isinstance(thing, RunnableLambda | BaseTool) or _is_langgraph(thing):
            self._all(_functions(thing), where)
        elif not isinstance(thing, BasePromptTemplate | BaseOutputParser):
            self._add(where)
            self.complete = False

    def _object(self, thing: Any, where: _Where) -> None:
        if isinstance(thing, functools.partial):
            self._all((thing.func, *thing.args, *thing.keywords.values()), where)
        elif isinstance(thing, MethodType):
            self._all((thing.__func__, thing.__self__), where)
        elif isinstance(thing, Mapping):
            self._all(thing.values(), where)
        elif isinstance(thing, list | tuple | set | frozenset):
            self._all(thing, where)
        elif root_of(thing) in _FRAMEWORKS:
            self.complete = False
        elif is_users(thing, _INSTALLED):
            self._users(thing, where)

    def _users(self, thing: Any, where: _Where) -> None:
        if isinstance(thing, FunctionType):
            self._function(thing, where)
        elif isinstance(thing, type):
            self._all([v for v in vars(thing).values() if isinstance(v, FunctionType)], where)
        elif not isinstance(thing, ModuleType):
            self._all((type(thing), *getattr(thing, "__dict__", {}).values()), where)

    def _function(self, function: FunctionType, where: _Where) -> None:
        if not where.names and not self.paths:
            self._add(where)
        names = set(names_in(function.__code__, texts=True))
        if names & (_MAKERS | _FRAMEWORKS) or EXPLICIT_KEY in names:
            self.complete = False
        self._all(referred(function, names, installed=_INSTALLED), where)

    def _all(self, things: Any, where: _Where) -> None:
        for thing in list(things):
            self.look(thing, where)

    def _add(self, where: _Where) -> None:
        self.paths[join_path(where.names)] = None


def _in_graph(graph: Pregel[Any, Any, Any, Any], where: _Where) -> _Where:
    """Where the nodes of a graph are."""
    metadata = (graph.config or {}).get("metadata") or {}
    agent_name = metadata.get("lc_agent_name")
    nodes = [name for name in graph.nodes if not name.startswith("__")]
    by_name = graph_agent_name(graph.name, nodes[0], metadata) if nodes else None
    name = metadata.get(EXPLICIT_KEY) or agent_name or by_name
    if not name or (where.in_node and where.names[-1] == name):
        return where._replace(in_node=False)
    return _Where((*where.names, str(name)))


def _is_graph(bound: Any) -> bool:
    first = bound.steps[0] if isinstance(bound, RunnableSequence) else bound
    return isinstance(first, Pregel)


def _is_langgraph(thing: Any) -> bool:
    return type(thing).__module__.startswith("langgraph.")


def _functions(thing: Any) -> Iterator[Any]:
    """The functions (and tools) that a runnable of LangChain's or LangGraph's calls."""
    for name in ("func", "afunc", "coroutine", "_run"):
        function = inspect.getattr_static(thing, name, None)
        if isinstance(function, FunctionType | MethodType | functools.partial):
            yield function
        elif name in getattr(thing, "__dict__", {}):
            yield thing.__dict__[name]
    yield from getattr(thing, "tools_by_name", {}).values()

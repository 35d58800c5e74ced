"""What can be optimised in an agent and all that it can reach, without running it.

The walk follows handoffs, agents as tools, and what the functions of tools, guardrails, hooks and
instructions refer to; the rules are those of `_identity`. The list is *complete* if nothing was
found that could bring another agent at run time: no agent is built inside a function, no handoff
hides its agent, no other framework is called.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from agents import Agent, Handoff

from lightspan.references import enclosed, is_users, module_of, names_in, referred, root_of
from lightspan.routing import AgentPaths, join_path

_MAKERS: Final = frozenset({"Agent", "SandboxAgent", "as_tool", "clone"})
"""Names which in a function's code mean that it may bring agents of its own."""
_RUNNERS: Final = frozenset({"Runner", "run", "run_sync", "run_streamed"})
"""Names which in a function's code mean that it runs the agents that it mentions."""
_FRAMEWORKS: Final = frozenset(
    {"autogen_agentchat", "autogen_core", "crewai", "langchain", "langgraph", "lightspan"}
)
"""Modules that name agents of their own: the frameworks that lightspan knows, and itself."""
_OF_AN_AGENT: Final = (
    "tools",
    "input_guardrails",
    "output_guardrails",
    "instructions",
    "prompt",
    "hooks",
    "model",
    "tool_use_behavior",
)
"""What of an agent runs code while it acts."""
_SDK: Final = "agents"
_INSTALLED: Final = (_SDK, "openai")
"""Packages whose code brings no agents, wherever they lie."""
_LOOKED_AT_MOST: Final = 2_000


def agents(app: Any) -> AgentPaths:
    """The agent paths that an agent, or a function that runs agents, can reach.

    Args:
        app: an `Agent`, a list of them, or a function.
    """
    found = _Search()
    found.look(app, _Where())
    return AgentPaths(tuple(found.paths), found.complete)


class _Where(NamedTuple):
    """The agents around."""

    names: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()

    def entering(self, agent: Agent[Any]) -> _Where:
        names = (*self.names, agent.name) if agent.name else self.names
        return _Where(names, self.ids | {id(agent)})


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
        elif isinstance(thing, Agent):
            self._agent(thing, where)
        elif isinstance(thing, Handoff):
            self._handoff(thing, where)
        else:
            self._object(thing, where)

    def _agent(self, agent: Agent[Any], where: _Where) -> None:
        inside = where.entering(agent)
        self._add(inside)
        if id(agent) in where.ids:  # it can be reached from itself, deeper each time
            self.complete = False
            return
        for name in _OF_AN_AGENT:
            self.look(getattr(agent, name, None), inside)
        self._all(agent.handoffs, where)

    def _handoff(self, handoff: Handoff[Any, Any], where: _Where) -> None:
        reference = getattr(handoff, "_agent_ref", None)
        agent = reference() if reference is not None else None
        if agent is not None:
            self.look(agent, where)
        else:
            self._add(where._replace(names=(*where.names, handoff.agent_name)))
            self.complete = False
        self._all((handoff.on_invoke_handoff, handoff.input_filter), where)

    def _object(self, thing: Any, where: _Where) -> None:
        if isinstance(thing, functools.partial):
            self._all((thing.func, *thing.args, *thing.keywords.values()), where)
        elif isinstance(thing, MethodType):
            self._all((thing.__func__, thing.__self__), where)
        elif isinstance(thing, Mapping):
            self._all(thing.values(), where)
        elif isinstance(thing, list | tuple | set | frozenset):
            self._all(thing, where)
        elif _names_agents(thing):
            self.complete = False
        elif root_of(thing) == _SDK:
            self._all(_held(thing), where)
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
        if names & (_MAKERS | _FRAMEWORKS):
            self.complete = False
        for thing in list(referred(function, names, installed=_INSTALLED)):
            if isinstance(thing, Agent) and not names & _RUNNERS:
                self.complete = False  # it does something with an agent, who knows what
            else:
                self.look(thing, where)

    def _all(self, things: Iterable[Any], where: _Where) -> None:
        for thing in list(things):
            self.look(thing, where)

    def _add(self, where: _Where) -> None:
        self.paths[join_path(where.names)] = None


def _held(thing: Any) -> Iterator[Any]:
    """The functions and objects of the SDK's that something of the SDK's holds on to.

    That is how a tool or a guardrail leads to the user's function.
    """
    if isinstance(thing, type | ModuleType):
        return
    if isinstance(thing, FunctionType):
        held = enclosed(thing)
    else:
        held = iter(list(getattr(thing, "__dict__", {}).values()))
    for value in held:
        if callable(value) or isinstance(value, Agent | list | tuple) or root_of(value) == _SDK:
            yield value


def _names_agents(thing: Any) -> bool:
    """Whether it is of a framework that names agents (what `lightspan.testing` has is plain)."""
    return root_of(thing) in _FRAMEWORKS and not module_of(thing).startswith("lightspan.testing")

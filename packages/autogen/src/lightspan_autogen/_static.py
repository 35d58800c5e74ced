"""What can be optimised in a team or an agent, without running it.

Paths are those of `_identity`: a team, its agents, the teams and agents inside these and inside
their tools. The list is *complete* if nothing was found that could bring another agent at run
time: only classes of AutoGen's own, and tools that are functions which refer to none.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any, Final

from autogen_agentchat.agents import UserProxyAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.tools import BaseTool, FunctionTool, Workbench

from lightspan.instrumentation import (
    AgentPaths,
    AgentSearch,
    Location,
)
from lightspan_autogen._messages import NO_AGENTS

_OWN: Final = ("autogen_agentchat", "autogen_core", "autogen_ext")
_CALLED: Final = (
    "_participants",
    "_team",
    "_wrapped_agent",
    "_task_runner",
    "_tools",
    "_workbench",
)
"""Where AutoGen's classes keep what they invoke."""
_DEEPEST: Final = 50
"""Names in a path: an agent that can reach itself would have paths without end."""


def agents(app: Any) -> AgentPaths:
    """The paths of the agents in a team (or agent) that ask a model.

    A team is among them if its manager asks one (`SelectorGroupChat`, `MagenticOneGroupChat`); an
    agent that a person plays (`UserProxyAgent`) is not. Of a runtime, all that are registered with
    it are.

    Args:
        app: a team, an agent, a runtime, or a list of them.
    """
    return _Search().search(app, _Location())


@dataclass(frozen=True, slots=True)
class _Location(Location):
    holder: str | None = field(default=None, compare=False)
    """The name of the agent that holds what is there, if an agent does."""


class _Search(AgentSearch[_Location]):
    installed = _OWN

    def visit(self, thing: Any, where: _Location) -> None:
        if len(where.names) > _DEEPEST:
            return
        if isinstance(thing, list | tuple):
            self.look_at_all(thing, where)
        elif isinstance(thing, SingleThreadedAgentRuntime):
            self._runtime(thing, where)
        elif isinstance(thing, Team):
            self._team(thing, where.within(thing.name))
        elif isinstance(thing, ChatAgent):
            self._agent(thing, where if where.holder == thing.name else where.within(thing.name))
        elif isinstance(thing, FunctionTool):
            self._tool(thing._func, where)
        elif isinstance(thing, BaseTool | Workbench):
            self._inside(thing, where, None)
        elif callable(thing):
            self._tool(thing, where)

    def _runtime(self, runtime: Any, where: _Location) -> None:
        """Who is registered; which of them ask a model, or one another, is not seen."""
        self.complete = False
        for name, factory in runtime._agent_factories.items():
            made = [one for at, one in runtime._instantiated_agents.items() if at.type == name]
            kinds = [
                one
                for one in (*AgentSearch.closure(factory), *map(type, made))
                if isinstance(one, type)
            ]
            if any(issubclass(kind, NO_AGENTS) for kind in kinds):
                continue
            inside = where.within(name)
            self.add(inside)
            for held in (one for agent in made for one in vars(agent).values()):
                if isinstance(held, ChatAgent | Team):
                    self.look(held, replace(inside, holder=name))

    def _team(self, team: Any, where: _Location) -> None:
        if hasattr(team, "_model_client"):
            self.add(where)
        self._inside(team, where, None)

    def _agent(self, agent: Any, where: _Location) -> None:
        asks = getattr(agent, "_model_client", None) is not None or hasattr(agent, "_client")
        if asks or (not _is_own(agent) and not isinstance(agent, UserProxyAgent)):
            self.add(where)
        self._inside(agent, where, agent.name)

    def _inside(self, thing: Any, where: _Location, holder: str | None) -> None:
        if not _is_own(thing):
            self.complete = False
        for attribute in _CALLED:
            held = getattr(thing, attribute, None)
            for one in held if isinstance(held, list | tuple) else [held]:
                if one is not None:
                    self.look(one, replace(where, holder=holder))

    def _tool(self, function: Any, where: _Location) -> None:
        """A tool of the user's: agents that it refers to can be seen, those it builds cannot."""
        if isinstance(function, MethodType):
            function = function.__func__
        if not isinstance(function, FunctionType):
            return
        for held in self.references(function):
            if isinstance(held, ChatAgent | Team | BaseTool | SingleThreadedAgentRuntime):
                self.look(held, replace(where, holder=None))
            elif AgentSearch.package(held) in _OWN:
                self.complete = False


def _is_own(thing: Any) -> bool:
    """Whether the class is AutoGen's: what a user's class does cannot be seen."""
    return AgentSearch.package(type(thing)) in _OWN

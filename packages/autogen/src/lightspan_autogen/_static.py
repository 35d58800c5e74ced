"""List the agents of a team or agent that can be optimised, without running it.

The paths are those of a team, its agents, and the teams and agents inside these and inside their
tools. The list is *complete* if nothing could add another agent at run time: all classes are
AutoGen's, and the tools are functions that refer to nothing else of AutoGen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any, Final

from autogen_agentchat.agents import UserProxyAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.tools import BaseTool, FunctionTool, Workbench

from lightspan.instrumentation import AgentPaths, AgentSearch, Location
from lightspan_autogen._messages import NO_AGENTS

_AUTOGEN: Final = ("autogen_agentchat", "autogen_core", "autogen_ext")
_PARTS: Final = (
    "_participants",
    "_team",
    "_wrapped_agent",
    "_task_runner",
    "_tools",
    "_workbench",
)
"""Attributes in which AutoGen's classes store the objects that they invoke."""
_MAX_DEPTH: Final = 50
"""Maximum number of names in a path; an agent that can reach itself has endless paths."""


def agents(app: Any) -> AgentPaths:
    """Return the paths of the agents in `app` that call a model.

    The path of a team itself is included if its manager calls a model (`SelectorGroupChat`,
    `MagenticOneGroupChat`). An agent that forwards to a person (`UserProxyAgent`) is not included.
    For a runtime, the paths of all agents that are registered with it are returned.

    Args:
        app: a team, an agent, a runtime, or a list of them.
    """
    return _Search().search(app, _Location())


@dataclass(frozen=True, slots=True)
class _Location(Location):
    holder: str | None = field(default=None, compare=False)
    """Name of the agent that contains the object; None if no agent contains it."""


class _Search(AgentSearch[_Location]):
    installed = _AUTOGEN

    def visit(self, thing: Any, where: _Location) -> None:
        if len(where.names) > _MAX_DEPTH:
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
        """Add the agents that are registered with a runtime.

        The list of agents is marked incomplete, because the search cannot see which models and
        messages these agents use.
        """
        self.complete = False
        for name, factory in runtime._agent_factories.items():
            instances = [
                agent for key, agent in runtime._instantiated_agents.items() if key.type == name
            ]
            candidates = (*AgentSearch.closure(factory), *map(type, instances))
            if any(isinstance(cls, type) and issubclass(cls, NO_AGENTS) for cls in candidates):
                continue
            inside = where.within(name)
            self.add(inside)
            for value in (value for agent in instances for value in vars(agent).values()):
                if isinstance(value, ChatAgent | Team):
                    self.look(value, replace(inside, holder=name))

    def _team(self, team: Any, where: _Location) -> None:
        if hasattr(team, "_model_client"):
            self.add(where)
        self._inside(team, where, None)

    def _agent(self, agent: Any, where: _Location) -> None:
        has_client = getattr(agent, "_model_client", None) is not None or hasattr(agent, "_client")
        if has_client or not (_is_autogens(agent) or isinstance(agent, UserProxyAgent)):
            self.add(where)
        self._inside(agent, where, agent.name)

    def _inside(self, thing: Any, where: _Location, holder: str | None) -> None:
        if not _is_autogens(thing):
            self.complete = False
        for attribute in _PARTS:
            value = getattr(thing, attribute, None)
            for part in value if isinstance(value, list | tuple) else [value]:
                if part is not None:
                    self.look(part, replace(where, holder=holder))

    def _tool(self, function: Any, where: _Location) -> None:
        """Visit the agents to which the function of a tool refers.

        If the function refers to anything else of AutoGen, it may create agents. Then the list of
        agents is marked incomplete.
        """
        if isinstance(function, MethodType):
            function = function.__func__
        if not isinstance(function, FunctionType):
            return
        for value in self.references(function):
            if isinstance(value, ChatAgent | Team | BaseTool | SingleThreadedAgentRuntime):
                self.look(value, replace(where, holder=None))
            elif AgentSearch.package(value) in _AUTOGEN:
                self.complete = False


def _is_autogens(thing: Any) -> bool:
    """Return whether an object's class is defined by AutoGen instead of the user."""
    return AgentSearch.package(type(thing)) in _AUTOGEN

"""What can be optimised in a team or an agent, without running it.

Paths are those of `_identity`: a team, its agents, the teams and agents inside these and inside
their tools. The list is *complete* if nothing was found that could bring another agent at run
time: only classes of AutoGen's own, and tools that are functions which refer to none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Final

from autogen_agentchat.agents import UserProxyAgent
from autogen_agentchat.base import ChatAgent, Team
from autogen_core.tools import BaseTool, FunctionTool, Workbench

from lightspan.references import names_in, referred
from lightspan.routing import AgentPaths, join_path

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


def agents(app: Any) -> AgentPaths:
    """The paths of the agents in a team (or agent) that ask a model.

    A team is among them if its manager asks one (`SelectorGroupChat`, `MagenticOneGroupChat`); an
    agent that a person plays (`UserProxyAgent`) is not.

    Args:
        app: a team, an agent, or a list of them.
    """
    found = _Search()
    for thing in app if isinstance(app, list | tuple) else [app]:
        found.look(thing, ())
    return AgentPaths(tuple(found.paths), found.complete)


@dataclass(slots=True)
class _Search:
    paths: dict[str, None] = field(default_factory=dict)
    complete: bool = True
    seen: dict[tuple[int, tuple[str, ...]], Any] = field(default_factory=dict)
    """What was looked at, kept alive so that ids stay unique."""

    def look(self, thing: Any, names: tuple[str, ...], inside: Any = None) -> None:
        """Look at a team, agent, workbench or tool; `inside` is the agent that holds it."""
        if (id(thing), names) in self.seen or len(names) > 50:
            return
        self.seen[id(thing), names] = thing
        if isinstance(thing, Team):
            self._team(thing, (*names, thing.name))
        elif isinstance(thing, ChatAgent):
            is_wrapped = isinstance(inside, ChatAgent) and inside.name == thing.name
            self._agent(thing, names if is_wrapped else (*names, thing.name))
        elif isinstance(thing, FunctionTool):
            self._function(thing._func, names)
        elif isinstance(thing, BaseTool | Workbench):
            self._inside(thing, names, None)
        elif callable(thing):
            self._function(thing, names)

    def _team(self, team: Any, names: tuple[str, ...]) -> None:
        if hasattr(team, "_model_client"):
            self._add(names)
        self._inside(team, names, None)

    def _agent(self, agent: Any, names: tuple[str, ...]) -> None:
        asks = getattr(agent, "_model_client", None) is not None or hasattr(agent, "_client")
        if asks or (not _is_own(agent) and not isinstance(agent, UserProxyAgent)):
            self._add(names)
        self._inside(agent, names, agent)

    def _inside(self, thing: Any, names: tuple[str, ...], agent: Any) -> None:
        if not _is_own(thing):
            self.complete = False
        for attribute in _CALLED:
            held = getattr(thing, attribute, None)
            for one in held if isinstance(held, list | tuple) else [held]:
                if one is not None:
                    self.look(one, names, agent)

    def _function(self, function: Any, names: tuple[str, ...]) -> None:
        """A tool of the user's: agents that it refers to can be seen, those it builds cannot."""
        if isinstance(function, MethodType):
            function = function.__func__
        if not isinstance(function, FunctionType):
            return
        for held in referred(function, set(names_in(function.__code__)), installed=_OWN):
            if isinstance(held, ChatAgent | Team | BaseTool):
                self.look(held, names)
            elif _module(held).split(".")[0] in _OWN:
                self.complete = False

    def _add(self, names: tuple[str, ...]) -> None:
        self.paths[join_path(names)] = None


def _is_own(thing: Any) -> bool:
    """Whether the class is AutoGen's: what a user's class does cannot be seen."""
    return type(thing).__module__.split(".")[0] in _OWN


def _module(thing: Any) -> str:
    return str(getattr(thing, "__module__", None) or getattr(thing, "__name__", "") or "")

"""What can be optimised in a crew, flow or agent, without running it.

The names are those of `_identity`, with roles as they were written. The list is *complete* if
nothing was found that could bring another agent at run time: no function of the app makes agents,
and no other framework is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from crewai import Agent, Crew, Process, Task
from crewai.agents.agent_builder.base_agent import BaseAgent
from crewai.flow.flow import Flow
from crewai.lite_agent import LiteAgent
from crewai.llms.base_llm import BaseLLM

from lightspan.references import is_users, names_in, referred, root_of
from lightspan.routing import AgentPaths, join_path
from lightspan_crewai._hook import crew_name, role_of
from lightspan_crewai._identity import clean

MANAGER: Final = "Crew Manager"
"""The role of the manager that CrewAI makes for a hierarchical crew without one."""
PLANNER: Final = "Task Execution Planner"
"""The role of the agent that plans for a crew with `planning=True`."""
GUARDRAIL: Final = "Guardrail Agent"
"""The role of the agent that checks a guardrail given as text."""

_MAKERS: Final = frozenset({"Agent", "Crew", "LiteAgent", "CrewBase", "lightspan_agent"})
"""Names which in a function's code mean that it may bring agents of its own."""
_FRAMEWORKS: Final = frozenset(
    {"agents", "autogen_agentchat", "autogen_core", "langchain", "langgraph", "lightspan"}
)
"""Modules that name agents of their own: the frameworks that lightspan knows, and itself."""
_CLIENTS: Final = frozenset(
    {"LLM", "OpenAI", "AsyncOpenAI", "completion", "acompletion", "create_llm"}
)
"""Names which in a function's code mean that it may ask a model itself."""
_INSTALLED: Final = ("crewai", "openai", "litellm", "pydantic")
"""Packages whose code brings no agents, wherever they lie."""
_LOOKED_AT_MOST: Final = 2_000

Path = tuple[str, ...]


def agents(app: Any) -> AgentPaths:
    """The agent paths in a crew, a flow, an agent or a task.

    Args:
        app: a `Crew`, a `Flow` or its class, an `Agent`, a `Task`, a model or a function.
    """
    found = _Search()
    found.look(app, ())
    return AgentPaths(tuple(found.paths), found.complete)


@dataclass(slots=True)
class _Search:
    paths: dict[str, None] = field(default_factory=dict)
    complete: bool = True
    seen: dict[tuple[int, Path], Any] = field(default_factory=dict)
    """What was looked at, kept alive so that ids stay unique."""

    def look(self, thing: Any, at: Path) -> None:
        """Look at anything that an app consists of."""
        if (id(thing), at) in self.seen:
            return
        self.seen[id(thing), at] = thing
        if len(self.seen) > _LOOKED_AT_MOST:
            self.complete = False
        elif isinstance(thing, Crew):
            self._crew(thing, at)
        elif isinstance(thing, Flow) or (isinstance(thing, type) and issubclass(thing, Flow)):
            self._flow(thing, at)
        elif isinstance(thing, BaseAgent | LiteAgent):
            self._agent(thing, at)
        elif isinstance(thing, Task):
            self._task(thing, thing.agent, at)
        elif isinstance(thing, BaseLLM):
            self._add(at)
        else:
            self._object(thing, at)

    def _crew(self, crew: Any, at: Path) -> None:
        name = crew_name(crew)
        at = at if name is None else (*at, name)
        if crew.planning:
            self._add((*at, PLANNER))
        is_hierarchical = crew.process is Process.hierarchical
        manager = crew.manager_agent
        for task in crew.tasks:
            self._task(task, manager if is_hierarchical else task.agent, at)
        if is_hierarchical:
            self._managed(crew, manager, at)
        else:
            self._delegated(crew, at)
        for callback in (crew.step_callback, crew.task_callback):
            self.look(callback, at)
        self._all(crew.before_kickoff_callbacks, at)
        self._all(crew.after_kickoff_callbacks, at)

    def _managed(self, crew: Any, manager: Any, at: Path) -> None:
        leader = (*at, MANAGER if manager is None else _name(manager))
        self._add(leader)
        for agent in crew.agents:
            self._agent(agent, leader)

    def _delegated(self, crew: Any, at: Path) -> None:
        """Agents that may delegate ask their co-workers by a tool."""
        for task in crew.tasks:
            agent = task.agent
            if agent is not None and getattr(agent, "allow_delegation", False):
                for other in crew.agents:
                    if other is not agent:
                        self._agent(other, (*at, _name(agent)))

    def _task(self, task: Any, agent: Any, at: Path) -> None:
        inside = at
        if agent is not None:
            inside = (*at, _name(agent))
            self._agent(agent, at)
        self._all(task.tools or (), inside)
        guardrails = [task.guardrail, *_several(getattr(task, "guardrails", None))]
        for guardrail in guardrails:
            if isinstance(guardrail, str):
                self._add((*inside, GUARDRAIL))
            else:
                self.look(guardrail, inside)
        self.look(task.callback, inside)

    def _agent(self, agent: Any, at: Path) -> None:
        inside = (*at, _name(agent))
        self._add(inside)
        if not isinstance(agent, Agent | LiteAgent):
            self.complete = False  # an adapter to another framework, or an agent of the user's own
        self._all(agent.tools or (), inside)
        for name in ("step_callback", "guardrail"):
            value = getattr(agent, name, None)
            if isinstance(value, str):
                self._add((*inside, GUARDRAIL))
            else:
                self.look(value, inside)

    def _flow(self, flow: Any, at: Path) -> None:
        kind = flow if isinstance(flow, type) else type(flow)
        at = (*at, clean(getattr(flow, "name", None) or kind.__name__))
        for name in _methods(kind):
            inside = (*at, name)
            method = _unwrapped(inspect.getattr_static(kind, name))
            before = len(self.paths)
            self.look(method, inside)
            if len(self.paths) == before:
                self._add(inside)

    def _object(self, thing: Any, at: Path) -> None:
        if isinstance(thing, functools.partial):
            self._all((thing.func, *thing.args, *thing.keywords.values()), at)
        elif isinstance(thing, MethodType):
            self._all((thing.__func__, thing.__self__), at)
        elif isinstance(thing, dict):
            self._all(thing.values(), at)
        elif isinstance(thing, list | tuple | set | frozenset):
            self._all(thing, at)
        elif isinstance(thing, FunctionType):
            if is_users(thing, _INSTALLED):
                self._function(thing, at)
        elif root_of(thing) in _FRAMEWORKS:
            self.complete = False
        elif callable(getattr(thing, "func", None)):  # a tool made of a function
            self.look(thing.func, at)
        elif is_users(thing, _INSTALLED) and not isinstance(thing, ModuleType):
            self._users(thing, at)

    def _users(self, thing: Any, at: Path) -> None:
        kind = thing if isinstance(thing, type) else type(thing)
        self._all([v for v in vars(kind).values() if isinstance(v, FunctionType)], at)
        if not isinstance(thing, type):
            self._all(getattr(thing, "__dict__", {}).values(), at)

    def _function(self, function: FunctionType, at: Path) -> None:
        names = set(names_in(function.__code__))
        if names & (_MAKERS | _FRAMEWORKS):
            self.complete = False
        if names & _CLIENTS:
            self._add(at)
        self._all(referred(function, names, installed=_INSTALLED), at)

    def _all(self, things: Any, at: Path) -> None:
        for thing in list(things):
            self.look(thing, at)

    def _add(self, at: Path) -> None:
        self.paths[join_path(at)] = None


def _name(agent: Any) -> str:
    name = role_of(agent)
    return "" if name is None else name.template


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _methods(kind: type) -> Iterator[str]:
    """The methods that a flow runs: those that `@start`, `@listen` and `@router` marked."""
    for owner in reversed(kind.__mro__):
        if not owner.__module__.startswith("crewai."):
            for name, value in vars(owner).items():
                marked = type(value).__module__.startswith("crewai.flow")
                if marked and _unwrapped(value) is not value:
                    yield name


def _unwrapped(method: Any) -> Any:
    """The user's function in what CrewAI's decorators made of it."""
    for name in ("_meth", "__wrapped__"):
        inner = getattr(method, name, None)
        if inner is not None:
            return getattr(inner, "__func__", inner)
    return method

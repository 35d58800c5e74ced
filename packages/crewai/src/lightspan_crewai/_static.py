"""List the agents of a crew, flow or agent that can be optimised, without running it.

The names are those of `_identity`, with roles as templates. The list is *complete* if nothing could
add another agent at run time: no function of the app creates agents, and no other framework is
called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, Final

from crewai import Agent, Crew, Process, Task
from crewai.agents.agent_builder.base_agent import BaseAgent
from crewai.flow.flow import Flow
from crewai.lite_agent import LiteAgent
from crewai.llms.base_llm import BaseLLM

from lightspan.instrumentation import AgentPaths, AgentSearch, Location
from lightspan_crewai._hook import crew_name, role_of
from lightspan_crewai._identity import clean

MANAGER: Final = "Crew Manager"
"""Role of the manager that CrewAI creates for a hierarchical crew that has no manager."""
PLANNER: Final = "Task Execution Planner"
"""Role of the agent that plans for a crew with `planning=True`."""
GUARDRAIL: Final = "Guardrail Agent"
"""Role of the agent that checks a guardrail, if the guardrail is a text."""

_CLIENTS: Final = frozenset(
    {"LLM", "OpenAI", "AsyncOpenAI", "completion", "acompletion", "create_llm"}
)
"""Names in a function's code which mean that the function may call a model itself."""


def agents(app: Any) -> AgentPaths:
    """Return the agent paths in a crew, a flow, an agent or a task.

    Args:
        app: a `Crew`, a `Flow` or its class, an `Agent`, a `Task`, a model or a function.
    """
    return _Search().search(app, Location())


class _Search(AgentSearch[Location]):
    makers = frozenset({"Agent", "Crew", "LiteAgent", "CrewBase", "lightspan_agent"})
    installed = ("crewai", "openai", "litellm", "pydantic")
    reads_texts = False

    def visit(self, thing: Any, at: Location) -> None:
        if isinstance(thing, Crew):
            self._crew(thing, at)
        elif isinstance(thing, Flow) or (isinstance(thing, type) and issubclass(thing, Flow)):
            self._flow(thing, at)
        elif isinstance(thing, BaseAgent | LiteAgent):
            self._agent(thing, at)
        elif isinstance(thing, Task):
            self._task(thing, thing.agent, at)
        elif isinstance(thing, BaseLLM):
            self.add(at)
        elif _is_tool(thing) and not self.is_others(thing):
            self.look(thing.func, at)
        else:
            super().visit(thing, at)

    def mentions(self, names: set[str], at: Location) -> None:
        if names & _CLIENTS:
            self.add(at)

    def _crew(self, crew: Any, at: Location) -> None:
        name = crew_name(crew)
        at = at if name is None else at.within(name)
        if crew.planning:
            self.add(at.within(PLANNER))
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
        self.look_at_all(crew.before_kickoff_callbacks, at)
        self.look_at_all(crew.after_kickoff_callbacks, at)

    def _managed(self, crew: Any, manager: Any, at: Location) -> None:
        leader = at.within(MANAGER if manager is None else _name(manager))
        self.add(leader)
        for agent in crew.agents:
            self._agent(agent, leader)

    def _delegated(self, crew: Any, at: Location) -> None:
        """Add the agents to which agents of `crew` may delegate work."""
        for task in crew.tasks:
            agent = task.agent
            if agent is not None and getattr(agent, "allow_delegation", False):
                for other in crew.agents:
                    if other is not agent:
                        self._agent(other, at.within(_name(agent)))

    def _task(self, task: Any, agent: Any, at: Location) -> None:
        inside = at
        if agent is not None:
            inside = at.within(_name(agent))
            self._agent(agent, at)
        self.look_at_all(task.tools or (), inside)
        for guardrail in (task.guardrail, *_as_list(getattr(task, "guardrails", None))):
            self._guardrail(guardrail, inside)
        self.look(task.callback, inside)

    def _guardrail(self, guardrail: Any, at: Location) -> None:
        if isinstance(guardrail, str):
            self.add(at.within(GUARDRAIL))
        else:
            self.look(guardrail, at)

    def _agent(self, agent: Any, at: Location) -> None:
        inside = at.within(_name(agent))
        self.add(inside)
        if not isinstance(agent, Agent | LiteAgent):
            self.complete = False  # an adapter to another framework, or the user's own class
        self.look_at_all(agent.tools or (), inside)
        self.look(getattr(agent, "step_callback", None), inside)
        self._guardrail(getattr(agent, "guardrail", None), inside)

    def _flow(self, flow: Any, at: Location) -> None:
        kind = flow if isinstance(flow, type) else type(flow)
        at = at.within(clean(getattr(flow, "name", None) or kind.__name__))
        for name in _methods(kind):
            inside = at.within(name)
            method = _unwrapped(inspect.getattr_static(kind, name))
            before = len(self.paths)
            self.look(method, inside)
            if len(self.paths) == before:
                self.add(inside)


def _is_tool(thing: Any) -> bool:
    """Return whether an object is a tool made from a function."""
    return callable(getattr(thing, "func", None)) and not isinstance(thing, functools.partial)


def _name(agent: Any) -> str:
    name = role_of(agent)
    return "" if name is None else name.template


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _methods(kind: type) -> Iterator[str]:
    """Yield the names of a flow's methods that `@start`, `@listen` or `@router` decorates."""
    for owner in reversed(kind.__mro__):
        if not owner.__module__.startswith("crewai."):
            for name, value in vars(owner).items():
                marked = type(value).__module__.startswith("crewai.flow")
                if marked and _unwrapped(value) is not value:
                    yield name


def _unwrapped(method: Any) -> Any:
    """Return the user's function that CrewAI's decorators wrap."""
    for name in ("_meth", "__wrapped__"):
        inner = getattr(method, name, None)
        if inner is not None:
            return getattr(inner, "__func__", inner)
    return method

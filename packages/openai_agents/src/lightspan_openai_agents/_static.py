"""List the optimisable agents that an agent can reach, without running it.

The search follows handoffs, agents as tools, and the objects that the functions of tools,
guardrails, hooks and instructions refer to, by the rules of `_identity`. The list is *complete* if
nothing could add another agent at run time: no function creates an agent, no handoff hides its
agent, and no other framework is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any, Final

from agents import Agent, Handoff

from lightspan.instrumentation import AgentPaths, AgentSearch, Location

_RUNNERS: Final = frozenset({"Runner", "run", "run_sync", "run_streamed"})
"""Names in a function's code which mean that the function runs the agents that it mentions."""
_AGENT_ATTRIBUTES: Final = (
    "tools",
    "input_guardrails",
    "output_guardrails",
    "instructions",
    "prompt",
    "hooks",
    "model",
    "tool_use_behavior",
)
"""Attributes of an agent that contain code to run while the agent acts."""
_SDK: Final = "agents"


def agents(app: Any) -> AgentPaths:
    """Return the agent paths that an agent, or a function that runs agents, can reach.

    Args:
        app: an `Agent`, a list of them, or a function.
    """
    return _Search().search(app, _Location())


@dataclass(frozen=True, slots=True)
class _Location(Location):
    ids: frozenset[int] = frozenset()
    """Ids of the agent objects that enclose the location, by which cycles are recognised."""

    def entering(self, agent: Agent[Any]) -> _Location:
        inside = self.within(agent.name) if agent.name else self
        return replace(inside, ids=self.ids | {id(agent)})


class _Search(AgentSearch[_Location]):
    makers = frozenset({"Agent", "SandboxAgent", "as_tool", "clone"})
    installed = (_SDK, "openai")

    def visit(self, thing: Any, where: _Location) -> None:
        if isinstance(thing, Agent):
            self._agent(thing, where)
        elif isinstance(thing, Handoff):
            self._handoff(thing, where)
        else:
            super().visit(thing, where)
            if AgentSearch.package(thing) == _SDK:
                self.look_at_all(_parts(thing), where)

    def refers(self, thing: Any, names: set[str], where: _Location) -> None:
        if isinstance(thing, Agent) and not names & _RUNNERS:
            self.complete = False  # the function may use the agent in any way
        else:
            self.look(thing, where)

    def _agent(self, agent: Agent[Any], where: _Location) -> None:
        inside = where.entering(agent)
        self.add(inside)
        if id(agent) in where.ids:  # the agent can reach itself, so its paths are endless
            self.complete = False
            return
        for name in _AGENT_ATTRIBUTES:
            self.look(getattr(agent, name, None), inside)
        self.look_at_all(agent.handoffs, where)

    def _handoff(self, handoff: Handoff[Any, Any], where: _Location) -> None:
        reference = getattr(handoff, "_agent_ref", None)
        agent = reference() if reference is not None else None
        if agent is not None:
            self.look(agent, where)
        else:
            self.add(where.within(handoff.agent_name))
            self.complete = False
        self.look_at_all((handoff.on_invoke_handoff, handoff.input_filter), where)


def _parts(thing: Any) -> Iterator[Any]:
    """Yield the functions and SDK objects in the attributes of `thing`, an object of the SDK.

    For example, a tool or a guardrail has the user's function. For a function, the objects that it
    refers to are yielded.
    """
    if isinstance(thing, type | ModuleType):
        return
    if isinstance(thing, FunctionType):
        values = AgentSearch.closure(thing)
    else:
        values = iter(list(getattr(thing, "__dict__", {}).values()))
    for value in values:
        if (
            callable(value)
            or isinstance(value, Agent | list | tuple)
            or AgentSearch.package(value) == _SDK
        ):
            yield value

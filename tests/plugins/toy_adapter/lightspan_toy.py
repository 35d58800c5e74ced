"""lightspan for toyframe: every model call under the name of its agent."""

from __future__ import annotations

import functools
import threading
from typing import Any

import lightspan
from lightspan.instrumentation import (
    Adapter,
    AdapterInstrumentor,
    AgentPaths,
    AgentSearch,
    Instrumentation,
    Location,
    Patch,
    agent_span,
    patch_subclasses,
    require_framework,
    semconv,
    truncated_json,
)

with require_framework("lightspan-toy", framework="toyframe", floor="1.0"):
    import toyframe

__all__ = ["LightspanInstrumentor", "agents", "instrument", "uninstrument"]

_adapter = Adapter(__name__)
_patches: list[Patch] = []
_lock = threading.RLock()


# --- agents and tools -----------------------------------------------------------------------
def _run(original: Any, patch: Patch) -> Any:
    """Wrap `run` of a team or an agent."""

    @functools.wraps(original)
    async def run(self: Any, text: str) -> str:
        if not patch.on:
            return await original(self, text)
        with agent_span(self.name, input=text):
            return await original(self, text)

    return run


def _call(original: Any, patch: Patch) -> Any:
    """Wrap `call` of a tool."""

    @functools.wraps(original)
    async def call(self: Any, arguments: dict[str, str]) -> str:
        if not patch.on:
            return await original(self, arguments)
        with lightspan.tool(self.name, truncated_json(arguments)) as span:
            result = await original(self, arguments)
            if span is not None:
                span.attributes[semconv.TOOL_CALL_RESULT] = truncated_json(result)
            return result

    return call


def _wrap(name: str, make: Any, owner: type) -> None:
    """Wrap a method of a class that defines it."""
    original = vars(owner).get(name)
    if original is not None:
        _patches.append(Patch(owner, name, functools.partial(make, original)))


# --- installing -----------------------------------------------------------------------------
def instrument() -> Instrumentation:
    """Record every team, agent and tool of toyframe in this process. Idempotent."""
    with _lock:
        if _patches:
            return Instrumentation(None)
        for base, name, make in (
            (toyframe.Team, "run", _run),
            (toyframe.Agent, "run", _run),
            (toyframe.Tool, "call", _call),
        ):
            _patches.append(patch_subclasses(base, functools.partial(_wrap, name, make)))
        _adapter.enable()
        return Instrumentation(uninstrument)


def uninstrument() -> None:
    """Undo `instrument` and restore toyframe."""
    with _lock:
        while _patches:
            _patches.pop().undo()
    _adapter.disable()


class LightspanInstrumentor(AdapterInstrumentor):
    """The instrumentor that `opentelemetry-instrument python app.py` loads."""

    on = staticmethod(instrument)
    off = staticmethod(uninstrument)


# --- the agents of an app, without running it -----------------------------------------------
def agents(app: Any) -> AgentPaths:
    """Return the paths that `optimize=` may name."""
    return _Search().search(app, Location())


class _Search(AgentSearch[Location]):
    makers = frozenset({"Agent", "Team"})
    installed = ("toyframe", "openai")

    def visit(self, thing: Any, where: Location) -> None:
        if isinstance(thing, toyframe.Team):
            self.look_at_all(thing.members, where.within(thing.name))
        elif isinstance(thing, toyframe.Agent):
            inside = where.within(thing.name)
            self.add(inside)
            self.look_at_all(thing.tools.values(), inside)
        elif isinstance(thing, toyframe.AgentTool):
            self.look(thing.agent, where)
        elif isinstance(thing, toyframe.Tool):
            self.look(thing.function, where)
        else:
            super().visit(thing, where)

"""Small CrewAI apps, and a context manager that installs the adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from crewai import LLM, Agent, Crew, Task
from crewai.events import crewai_event_bus
from crewai.flow.flow import Flow

from lightspan.capture import context
from lightspan_crewai import _hook, instrument
from lightspan_testing.scripted import Reply, Request, ScriptedServer, ToolCall

WARNINGS = [
    # CrewAI warns of fields of its own that it reads itself.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:crewai"),
    # It never closes its clients: an asynchronous one outlives its event loop.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning"
    ),
]
"""Marks of every test file."""

WRITER = ["invoke_agent writer @writer", "  chat m @writer"]


def llm_of(server: Any, **more: Any) -> Any:
    more = {"provider": "openai", "max_retries": 0, **more}
    return LLM("m", base_url=server.url, api_key="key", **more)


def an_agent(server: ScriptedServer, role: str, **more: Any) -> Agent:
    more = {"llm": llm_of(server), "max_retry_limit": 0, **more}
    return Agent(role=role, goal="g", backstory="b", **more)


def a_task(agent: Agent | None = None, **more: Any) -> Task:
    return Task(**{"description": "d", "expected_output": "e", "agent": agent, **more})


def crew_of(*agents: Agent, **more: Any) -> Crew:
    return Crew(agents=list(agents), tasks=[a_task(one) for one in agents], **more)


def calls(name: str, arguments: str = "{}") -> Callable[[Request], Reply | str]:
    """Return a script of a model that calls the tool `name` once, then answers."""

    def script(request: Request) -> Reply | str:
        names = [one["function"]["name"] for one in request.body.get("tools") or ()]
        if name in names and all(said["role"] != "tool" for said in request.messages):
            return Reply(tool_calls=[ToolCall(name=name, arguments=arguments, call_id="call_7")])
        return "fine"

    return script


WATCHED = (
    (type(crewai_event_bus), "emit"),
    (Crew, "kickoff"),
    (Crew, "akickoff"),
    (Agent, "kickoff_async"),
    (Flow, "kickoff_async"),
)


@contextmanager
def installed() -> Iterator[None]:
    """Install the adapter in a block; check afterwards that it is removed without a trace."""
    before = [vars(owner).get(name) for owner, name in WATCHED]
    with instrument():
        yield
    assert [vars(owner).get(name) for owner, name in WATCHED] == before
    assert _hook._adapter.call_listener not in context.call_listeners()
    assert _hook._state.watches == []

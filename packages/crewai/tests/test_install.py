"""Test installing the adapter, `agents()`, and the README's program."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("crewai")

from crewai import LLM, Agent, Crew
from crewai.events import BaseEventListener, crewai_event_bus
from crewai.flow.flow import Flow, listen, start

from lightspan_crewai import LightspanListener, agents, uninstrument
from lightspan_testing.attempts import captured, tree
from lightspan_testing.scripted import ScriptedServer
from packages.crewai.tests.crewai_apps import WARNINGS, WRITER, a_task, an_agent, crew_of

pytestmark = [*WARNINGS, pytest.mark.usefixtures("installed_crewai")]


def test_the_listener_is_instrument(server: ScriptedServer) -> None:
    uninstrument()
    own = vars(type(crewai_event_bus))["emit"]
    listener = LightspanListener()
    assert isinstance(listener, BaseEventListener)
    assert vars(type(crewai_event_bus))["emit"] is not own
    LightspanListener()
    with captured() as run:
        crew_of(an_agent(server, "writer")).kickoff()
    assert run.tree == WRITER
    uninstrument()
    assert vars(type(crewai_event_bus))["emit"] is own


# --- the static list ------------------------------------------------------------------------
def test_agents_of_an_app_that_makes_agents(server: ScriptedServer) -> None:
    class Book(Flow[Any]):
        @start()
        def write(self) -> Any:
            return crew_of(Agent(role="hidden", goal="g", backstory="b")).kickoff()

        @listen(write)
        def check(self) -> Any:
            return LLM("m").call("check")

    assert agents(Book) == (("Book/write", "Book/check"), False)
    assert agents(Book()) == agents(Book)


def test_agents_by_their_settings(server: ScriptedServer) -> None:
    boss = an_agent(server, "boss", allow_delegation=True)
    writer = an_agent(server, "writer")
    tasks = [a_task(boss), a_task(writer, guardrail="is short", output_file=None)]
    assert agents(Crew(agents=[boss, writer], tasks=tasks)) == (
        ("boss", "writer", "writer/Guardrail Agent", "boss/writer"),
        True,
    )
    assert agents(a_task(writer)).paths == ("writer",)
    assert agents([writer, boss]).paths == ("writer", "boss")
    assert agents(crew_of(writer, planning=True)).paths == ("Task Execution Planner", "writer")


# --- the package ----------------------------------------------------------------------------
def test_the_readme(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "packages/crewai/README.md").read_text()
    app, of_rollout = (block.split("```")[0] for block in text.split("```python\n")[1:])
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    module = ModuleType("haiku")
    monkeypatch.setitem(sys.modules, "haiku", module)
    exec(app, module.__dict__)
    names: dict[str, Any] = {"__name__": "haiku_rollout"}
    exec(of_rollout, names)
    assert str(agents(module.crew)) in text
    with captured() as run:
        assert names["haiku"].function({"season": "winter", "topic": "rain"}) == 0.0
    assert [line.strip() for line in tree(run.spans) if "chat" in line] == [
        "chat @{season} poet",
        "chat @editor",
    ]
    assert "winter poet" in str(server.requests[0].messages)

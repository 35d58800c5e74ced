"""Test installing the adapter, `agents()`, and the program on the adapter's page."""

from __future__ import annotations

from pathlib import Path
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
from tests.adapters.guide_pages import import_page, shown

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
def test_the_page(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the app on the page, and compare its agents with those that the page shows."""
    page = import_page("crewai", tmp_path, monkeypatch, server.url)
    assert shown("crewai")[0] == str(agents(page["haiku"].crew))
    with captured() as run:
        assert page["learning"].answer(page["train"].topics[0]) == 0.0
    assert [line.strip() for line in tree(run.spans) if "chat" in line] == [
        "chat @{season} poet",
        "chat @editor",
    ]
    assert "winter poet" in str(server.requests[0].messages)

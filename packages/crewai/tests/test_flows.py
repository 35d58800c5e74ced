"""Test flows, and errors in flows and crews."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

pytest.importorskip("crewai")

import openai
from crewai import Crew
from crewai.flow.flow import Flow, and_, listen, router, start

from lightspan.capture import context
from lightspan_crewai import agents
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import Reply, Request, ScriptedServer
from packages.crewai.tests.crewai_apps import WARNINGS, a_task, an_agent, crew_of, llm_of

pytestmark = [*WARNINGS, pytest.mark.usefixtures("installed_crewai")]


def test_a_flow(server: ScriptedServer) -> None:
    """Check a flow with direct model calls, a crew, an agent, a router and two concurrent
    methods.
    """
    llm = llm_of(server)
    press = crew_of(an_agent(server, "writer"), name="press")
    scout = an_agent(server, "scout")
    url = server.url

    class Book(Flow[Any]):
        @start()
        def plan(self) -> Any:
            return llm.call("plan")

        @router(plan)
        def choose(self) -> str:
            return "go"

        @listen("go")
        async def look(self) -> Any:
            return await scout.kickoff_async("look")

        @listen("go")
        def write(self) -> Any:
            return press.copy().kickoff().raw

        @listen(and_(look, write))
        def finish(self) -> Any:
            return openai.OpenAI(base_url=url, api_key="k").chat.completions.create(
                model="m", messages=[{"role": "user", "content": "finish"}]
            )

    with captured() as run:
        Book().kickoff()
    expected = [
        "invoke_agent Book @Book",
        "  invoke_agent plan @Book/plan",
        "    chat m @Book/plan",
        "  invoke_agent choose @Book/choose",
        "  invoke_agent look @Book/look",
        "    invoke_agent scout @Book/look/scout",
        "      chat m @Book/look/scout",
        "  invoke_agent write @Book/write",
        "    invoke_agent press @Book/write/press",
        "      invoke_agent writer @Book/write/press/writer",
        "        chat m @Book/write/press/writer",
        "  invoke_agent finish @Book/finish",
        "    chat m @Book/finish",
    ]
    assert sorted(run.tree) == sorted(expected)
    assert run.tree[:4] == expected[:4]
    assert agents(Book) == (
        (
            "Book/plan",
            "Book/choose",
            "Book/look/scout",
            "Book/write/press/writer",
            "Book/finish",
        ),
        True,
    )


def test_a_flow_that_says_little(server: ScriptedServer) -> None:
    llm = llm_of(server)

    class Quiet(Flow[Any]):
        suppress_flow_events = True

        @start()
        def plan(self) -> Any:
            return llm.call("plan")

    with captured() as run:
        Quiet().kickoff()
    (line,) = (line.strip() for line in run.tree if "chat" in line)
    assert line in ("chat m @Quiet", "chat m @Quiet/plan")  # the latter up to 1.13


# --- failures -------------------------------------------------------------------------------
def test_a_failing_agent_is_tried_again_and_the_flow_around_it_stays() -> None:
    """Check that a failed call, which CrewAI reports twice, does not end the flow's entry."""
    answers = [Reply(status=400, text="no")] * 3

    def script(request: Request) -> Reply | str:
        return answers.pop() if answers and "crew" in str(request.messages) else "fine"

    with ScriptedServer(script) as server:
        writer = an_agent(server, "writer", max_retry_limit=3)
        press = Crew(agents=[writer], tasks=[a_task(writer, description="crew")], name="press")
        llm = llm_of(server)

        class Book(Flow[Any]):
            @start()
            def write(self) -> Any:
                press.kickoff()
                return llm.call("afterwards")

        with captured() as run:
            Book().kickoff()
    assert run.tree == [
        "invoke_agent Book @Book",
        "  invoke_agent write @Book/write",
        "    invoke_agent press @Book/write/press",
        "      invoke_agent writer @Book/write/press/writer",
        "        chat m @Book/write/press/writer error",
        "        chat m @Book/write/press/writer error",
        "        chat m @Book/write/press/writer error",
        "        chat m @Book/write/press/writer",
        "    chat m @Book/write",
    ]


def test_a_crew_that_fails_leaves_nothing_behind() -> None:
    with ScriptedServer([Reply(status=400, text="no"), "fine"]) as server:
        writer = an_agent(server, "writer")
        with captured() as run:
            with pytest.raises(openai.BadRequestError):
                crew_of(writer, name="first").kickoff()
            assert context.current_agent().path == "app"  # type: ignore[union-attr]
            crew_of(writer, name="second").kickoff()
    assert run.tree == [
        "invoke_agent first @first error",
        "  invoke_agent writer @first/writer error",
        "    chat m @first/writer error",
        "invoke_agent second @second",
        "  invoke_agent writer @second/writer",
        "    chat m @second/writer",
    ]
    assert "no" in run.one("invoke_agent first").status_message


async def test_a_crew_that_times_out_leaves_nothing_behind() -> None:
    """Check that a timeout, which CrewAI does not report, leaves no entry open in the same task."""
    release = threading.Event()

    def script(request: Request) -> str:
        if "slow" in str(request.messages):
            release.wait(20)
        return "fine"

    with ScriptedServer(script) as server:
        writer = an_agent(server, "writer")
        slow = Crew(agents=[writer], tasks=[a_task(writer, description="slow")], name="slow one")
        with captured() as run:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await slow.akickoff()
            assert context.current_agent().path == "app"  # type: ignore[union-attr]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await an_agent(server, "scout").kickoff_async("slow")
            await crew_of(an_agent(server, "other"), name="next").akickoff()
            release.set()
            await asyncio.get_running_loop().shutdown_default_executor()
    found = [line for line in run.tree if "chat" not in line]
    assert found == [
        "invoke_agent slow one @slow one unset",
        "  invoke_agent writer @slow one/writer unset",
        "invoke_agent scout @scout unset",
        "invoke_agent next @next",
        "  invoke_agent other @next/other",
    ]
    assert run.tree[-1] == "    chat m @next/other"

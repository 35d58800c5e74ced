"""Test crews: agent names from roles, managers, guardrails, plans, threads."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

pytest.importorskip("crewai")

from crewai import Agent, Crew, Process, Task
from crewai.project import CrewBase, agent, crew, task
from pydantic import BaseModel

from lightspan.capture import context
from lightspan.schema.routing import make_routing
from lightspan_crewai import agents
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import Request, ScriptedServer
from packages.crewai.tests.crewai_apps import (
    WARNINGS,
    WRITER,
    a_task,
    an_agent,
    calls,
    crew_of,
    llm_of,
)

pytestmark = [*WARNINGS, pytest.mark.usefixtures("installed_crewai")]


@pytest.mark.parametrize(
    ("optimize", "name"),
    [("{topic} analyst", "{topic} analyst"), ("rain analyst", "rain analyst")],
)
def test_a_role_template_is_selected_in_both_forms(
    server: ScriptedServer, optimize: str, name: str
) -> None:
    routing = make_routing({optimize: "policy"}, None, "policy")
    app = crew_of(an_agent(server, "{topic} analyst\n"), an_agent(server, "other"))
    with captured(routing=routing) as run:
        app.kickoff(inputs={"topic": "rain"})
        app.kickoff(inputs={"topic": "sun"})
    sun = name if "{" in name else "{topic} analyst"
    assert run.tree == [
        f"invoke_agent {name} @{name}",
        f"  chat m @{name}",
        "invoke_agent other @other",
        "  chat m @other",
        f"invoke_agent {sun} @{sun}",
        f"  chat m @{sun}",
        "invoke_agent other @other",
        "  chat m @other",
    ]
    routes = {span.attributes["lightspan.route"] for span in run.spans if span.kind == "llm"}
    assert routes == {"policy", "app"}
    assert agents(app).paths == ("{topic} analyst", "other")


def test_names_of_crews(server: ScriptedServer) -> None:
    @CrewBase
    class Press:
        agents_config: ClassVar[dict[str, Any]] = {}
        tasks_config: ClassVar[dict[str, Any]] = {}

        @agent
        def writer(self) -> Agent:
            return an_agent(server, "writer")

        @task
        def write(self) -> Task:
            return a_task(self.writer())

        @crew
        def crew(self) -> Crew:
            return Crew(agents=self.agents, tasks=self.tasks)

    with captured() as run:
        Press().crew().kickoff()
        crew_of(an_agent(server, "writer"), name="news/desk").kickoff()
    press = "Press/writer" if Press().crew().name == "Press" else "writer"  # since 1.14
    found = [line.strip() for line in run.tree if "chat" in line]
    assert found == [f"chat m @{press}", "chat m @news%2Fdesk/writer"]
    assert agents(Press().crew()).paths == (press,)


# --- crews ----------------------------------------------------------------------------------
DELEGATED = [
    "invoke_agent Crew Manager @Crew Manager",
    "  chat m @Crew Manager",
    "  execute_tool delegate_work_to_coworker @Crew Manager",
    "    invoke_agent writer @Crew Manager/writer",
    "      chat m @Crew Manager/writer",
    "  chat m @Crew Manager",
]


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_hierarchical_crew(is_own: bool, is_async: bool) -> None:
    ask = '{"task": "t", "context": "c", "coworker": "writer"}'
    with ScriptedServer(calls("delegate_work_to_coworker", ask)) as server:
        manager: dict[str, Any] = {"manager_llm": llm_of(server)}
        if is_own:
            manager = {"manager_agent": an_agent(server, "chief")}
        writer = an_agent(server, "writer")
        app = Crew(agents=[writer], tasks=[a_task()], process=Process.hierarchical, **manager)
        names = agents(app)
        with captured() as run:
            asyncio.run(app.akickoff()) if is_async else app.kickoff()
    chief = "chief" if is_own else "Crew Manager"
    assert run.tree == [line.replace("Crew Manager", chief) for line in DELEGATED]
    assert names == ((chief, f"{chief}/writer"), True)


class Poem(BaseModel):
    title: str


def test_what_follows_a_task_belongs_to_its_agent() -> None:
    """Check a model call that converts the task's output, and one in a guardrail function."""
    seen: list[str] = []

    def script(request: Request) -> str:
        text = str(request.messages)
        return '{"title": "Rain"}' if "title" in text else "no poem"

    def check(output):  # type: ignore[no-untyped-def]  # CrewAI reads annotations
        seen.append(context.current_agent().path)  # type: ignore[union-attr]
        return len(seen) > 1, "again"

    with ScriptedServer(script) as server:
        writer = an_agent(server, "writer")
        with captured() as run:
            Crew(agents=[writer], tasks=[a_task(writer, guardrail=check)]).kickoff()
            Crew(agents=[writer], tasks=[a_task(writer, output_pydantic=Poem)]).kickoff()
    assert seen == ["writer", "writer"]
    paths = {span.attributes["lightspan.agent.path"] for span in run.spans}
    assert paths == {"writer"}
    assert run.tree[:3] == ["invoke_agent writer @writer", "  chat m @writer", "  chat m @writer"]
    assert len([s for s in run.spans if s.kind == "llm"]) == len(server.requests)


def test_a_guardrail_that_is_a_text() -> None:
    """Check that CrewAI's guardrail agent is recorded, and that a rejected output is written
    again.
    """
    verdicts = ['{"valid": false, "feedback": "Longer."}', '{"valid": true, "feedback": null}']

    def script(request: Request) -> str:
        return verdicts.pop(0) if "Guardrail Agent" in str(request.messages) else "fine"

    with ScriptedServer(script) as server:
        writer = an_agent(server, "writer")
        with captured() as run:
            Crew(agents=[writer], tasks=[a_task(writer, guardrail="It is short.")]).kickoff()
    assert verdicts == []
    assert run.tree == [
        "invoke_agent writer @writer",
        "  chat m @writer",
        "  invoke_agent Guardrail Agent @writer/Guardrail Agent",
        "    chat m @writer/Guardrail Agent",
        "  chat m @writer",
        "  invoke_agent Guardrail Agent @writer/Guardrail Agent",
        "    chat m @writer/Guardrail Agent",
    ]
    assert len(server.requests) == 4


def test_a_crew_that_plans() -> None:
    plan = '{"list_of_plans_per_task": [{"task_number": 1, "task": "d", "plan": "Rhyme."}]}'

    def script(request: Request) -> str:
        return plan if "Task Execution Planner" in str(request.messages) else "fine"

    with ScriptedServer(script) as server:
        app = crew_of(an_agent(server, "writer"), planning=True, planning_llm=llm_of(server))
        with captured() as run:
            app.kickoff()
    assert run.tree == [
        "invoke_agent Task Execution Planner @Task Execution Planner",
        "  chat m @Task Execution Planner",
        *WRITER,
    ]
    assert "Rhyme." in server.requests[-1].last_text
    assert len(server.requests) == 2


def test_an_agent_alone(server: ScriptedServer) -> None:
    writer = an_agent(server, "writer")
    with captured() as run:
        writer.kickoff("hello")
        asyncio.run(writer.kickoff_async("hello"))
    assert run.tree == WRITER * 2
    assert agents(writer) == (("writer",), True)

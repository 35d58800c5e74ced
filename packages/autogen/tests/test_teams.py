"""Test teams: their managers, nested teams, teams as tools, and runtimes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")

from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent, UserProxyAgent
from autogen_agentchat.teams import MagenticOneGroupChat, RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.tools import FunctionTool

from lightspan_autogen import LightspanRuntime, agents, instrument, uninstrument
from lightspan_testing.adapter_suite import Turn
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import ScriptedServer
from packages.autogen.tests.autogen_apps import INFO, SAYS, TEAM, Rig, lines, two
from tests.adapters.guide_pages import import_page, shown

pytestmark = pytest.mark.usefixtures("installed_autogen")


async def test_the_manager_of_a_selector_team_is_the_team(rig: Rig) -> None:
    team = SelectorGroupChat(
        [rig.agent("writer"), rig.agent("checker"), rig.agent("judge")],
        model_client=rig.client,
        name="desk",
        selector_prompt="Select one of {participants} for: {history} {roles}",
        max_turns=2,
    )
    says = {"writer": ["W {task}."], "checker": ["C {task}."], "desk": ["checker", "writer"]}
    await rig.record(says, lambda text: team.run(task=text), desk="Select one of")
    assert rig.tree == lines("""
        invoke_agent desk @desk
          chat @desk
          invoke_agent checker @desk/checker
            chat @desk/checker
          chat @desk
          invoke_agent writer @desk/writer
            chat @desk/writer
    """)
    assert agents(team) == (("desk", "desk/writer", "desk/checker", "desk/judge"), True)


def ledger(speaker: str, *, is_done: bool) -> str:
    def entry(answer: Any) -> dict[str, Any]:
        return {"reason": "so", "answer": answer}

    return json.dumps(
        {
            "is_request_satisfied": entry(is_done),
            "is_in_loop": entry(False),
            "is_progress_being_made": entry(True),
            "next_speaker": entry(speaker),
            "instruction_or_question": entry("write about {task}"),
        }
    )


async def test_the_manager_of_magentic_one_is_the_team(rig: Rig) -> None:
    rig.client._model_info = {**INFO, "json_output": False, "structured_output": False}
    team = MagenticOneGroupChat([rig.agent("writer")], model_client=rig.client, name="magentic")
    says = {
        "magentic": [
            "facts",
            "plan",
            ledger("writer", is_done=False),
            ledger("writer", is_done=True),
            "Done.",
        ],
        "writer": ["W {task}."],
    }
    marks = {"writer": "You are writer.", "magentic": "task-"}
    await rig.record(says, lambda text: team.run(task=text), **marks)
    assert rig.tree == lines("""
        invoke_agent magentic @magentic
          chat @magentic
          chat @magentic
          chat @magentic
          invoke_agent writer @magentic/writer
            chat @magentic/writer
          chat @magentic
          chat @magentic
    """)
    assert agents(team) == (("magentic", "magentic/writer"), True)


async def test_a_society_of_mind_is_an_agent_around_its_team(rig: Rig) -> None:
    inner = RoundRobinGroupChat([rig.agent("writer")], name="inner", max_turns=1)
    society = SocietyOfMindAgent("society", team=inner, model_client=rig.client)
    team = RoundRobinGroupChat([society, rig.agent("judge")], name="team", max_turns=2)
    says = {"writer": ["W {task}."], "society": ["S {task}."], "judge": ["J {task}."]}
    await rig.record(says, lambda text: team.run(task=text), society="Earlier you were asked")
    assert rig.tree == lines("""
        invoke_agent team @team
          invoke_agent society @team/society
            invoke_agent inner @team/society/inner
              invoke_agent writer @team/society/inner/writer
                chat @team/society/inner/writer
            chat @team/society
          invoke_agent judge @team/judge
            chat @team/judge
    """)
    assert agents(team) == (("team/society", "team/society/inner/writer", "team/judge"), True)


async def test_a_team_as_a_tool(rig: Rig) -> None:
    inner = RoundRobinGroupChat([rig.agent("writer")], name="inner", max_turns=1)
    tool = TeamTool(inner, name="inner", description="writes", return_value_as_last_message=True)
    boss = rig.agent("boss", tool, reflect_on_tool_use=True)
    says = {
        "boss": [Turn(calls=[("inner", '{"task": "help with {task}"}')]), "B {task}."],
        "writer": ["W {task}."],
    }
    await rig.record(says, lambda text: boss.run(task=text))
    assert rig.tree == lines("""
        invoke_agent boss @boss
          chat @boss
          execute_tool inner @boss
            invoke_agent inner @boss/inner
              invoke_agent writer @boss/inner/writer
                chat @boss/inner/writer
          chat @boss
    """)
    assert agents(boss) == (("boss", "boss/inner/writer"), True)


async def test_a_runtime_that_was_started_outside_the_scope(rig: Rig) -> None:
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    await rig.record(SAYS, lambda text: two(rig, runtime=runtime).run(task=text))
    await runtime.stop_when_idle()
    assert rig.tree == lines(TEAM)


async def test_the_runtime_alone(rig: Rig) -> None:
    """Check that a `LightspanRuntime` without `instrument()` records only the teams that use it."""
    uninstrument()
    runtime = LightspanRuntime()
    runtime.start()
    await rig.record(SAYS, lambda text: two(rig, runtime=runtime).run(task=text))
    assert rig.tree == lines(TEAM)
    await rig.record(SAYS, lambda text: two(rig).run(task=text))
    assert rig.tree == ["chat @app", "chat @app"]
    with instrument():
        await rig.record(SAYS, lambda text: two(rig, runtime=runtime).run(task=text))
        assert rig.tree == lines(TEAM)
    await runtime.stop_when_idle()


# --- the static list ------------------------------------------------------------------------
def test_agents_of_what_cannot_be_seen(rig: Rig) -> None:
    expert = rig.agent("expert")

    async def ask() -> str:
        """Refer to an agent."""
        return str(await expert.run(task="x"))

    def builds() -> str:
        """Build an agent."""
        return str(AssistantAgent("hidden", rig.client))

    assert agents(rig.agent("boss", FunctionTool(ask, "ask"))) == (("boss", "boss/expert"), True)
    assert agents(rig.agent("boss", builds)) == (("boss",), False)
    assert agents(rig.agent("boss", AgentTool(expert))) == (("boss", "boss/expert"), True)
    assert agents(UserProxyAgent("person")) == ((), True)
    assert agents([rig.agent("one"), rig.agent("two")]) == (("one", "two"), True)


# --- the package ----------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Resolved model mismatch")  # the server echoes the name
async def test_the_page(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the app on the page, and compare its agents with those that the page shows."""
    page = import_page("autogen", tmp_path, monkeypatch, server.url)
    assert shown("autogen") == [str(agents(page["haiku"].make_team()))]
    with captured() as run:
        assert await page["learning"].answer(page["train"].topics[0]) == 0.0
    await page["haiku"].client.close()
    assert run.calls == ["poets/writer", "poets/reviser"]

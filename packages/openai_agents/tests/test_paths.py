"""Test agents and their paths: alone, after handoffs, as tools, in guardrails, in plain Python."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    Runner,
    function_tool,
    handoff,
    input_guardrail,
)

import lightspan
from lightspan.capture import context
from lightspan.schema.spans import SpanLink, SpanStatus
from lightspan_openai_agents import agents
from lightspan_testing.attempts import captured
from lightspan_testing.scripted import ScriptedServer
from packages.openai_agents.tests.openai_agents_apps import (
    AGENT_WITH_TOOL,
    HOW,
    Run,
    ask_raw,
    calls,
    look,
    make,
    run_async,
    says,
)

pytestmark = pytest.mark.usefixtures("installed_openai_agents")


@HOW
def test_an_agent_with_a_tool(server: ScriptedServer, run: Run) -> None:
    server.script = says({"scout": [calls("look")]})
    with captured() as attempt:
        run(make(server, "scout", tools=[look]))
    assert attempt.tree == AGENT_WITH_TOOL
    assert attempt.one("execute_tool look").attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.call.id": "call_look",
        "gen_ai.tool.call.arguments": '{"what": "seven"}',
        "gen_ai.tool.call.result": "seven: 7",
        "lightspan.agent.path": "scout",
        "openinference.span.kind": "TOOL",
    }


# --- several agents -------------------------------------------------------------------------
@HOW
def test_a_handoff(server: ScriptedServer, run: Run) -> None:
    """Check that the agents are siblings, and that the span names the agent that handed over."""
    server.script = says({"triage": [calls("transfer_to_billing")]})
    billing = make(server, "billing")
    triage = make(server, "triage", handoffs=[billing])
    with captured() as attempt:
        result = run(triage)
    assert result.final_output == "done"
    assert attempt.tree == [
        "invoke_agent triage @triage",
        "  chat m @triage",
        "  handoff @triage",
        "invoke_agent billing @billing",
        "  chat m @billing",
    ]
    span, source = attempt.one("invoke_agent billing"), attempt.one("invoke_agent triage")
    assert span.links == [
        SpanLink(attempt.scope.trace_id, source.span_id, {"lightspan.handoff.from": "triage"})
    ]
    assert attempt.one("handoff").attributes == {
        "lightspan.handoff.from": "triage",
        "lightspan.handoff.to": "billing",
        "lightspan.agent.path": "triage",
        "openinference.span.kind": "CHAIN",
    }
    assert agents(triage) == (("triage", "billing"), True)


@HOW
def test_handed_there_and_back(server: ScriptedServer, run: Run) -> None:
    server.script = says(
        {"triage": [calls("transfer_to_billing")], "billing": [calls("transfer_to_triage")]}
    )
    billing = make(server, "billing")
    triage = make(server, "triage", handoffs=[billing])
    billing.handoffs.append(handoff(triage))
    with captured() as attempt:
        run(triage)
    assert attempt.calls == ["triage", "billing", "triage"]
    found = [span for span in attempt.spans if span.kind == "agent"]
    found.sort(key=lambda span: span.start_ns)
    links = [[link.span_id for link in span.links] for span in found]
    assert links == [[], [found[0].span_id], [found[1].span_id]]
    assert agents(triage).paths == ("triage", "billing")


def test_an_expert_that_hands_off_inside_a_tool(server: ScriptedServer) -> None:
    server.script = says(
        {"manager": [calls("ask_expert")], "expert": [calls("transfer_to_writer")]}
    )
    writer = make(server, "writer")
    expert = make(server, "expert", handoffs=[writer])
    manager = make(server, "manager", tools=[expert.as_tool("ask_expert", "Ask.")])
    with captured() as attempt:
        run_async(manager)
    assert attempt.calls == ["manager", "manager/expert", "manager/writer", "manager"]
    (link,) = attempt.one("invoke_agent writer").links
    assert link.span_id == attempt.one("invoke_agent expert").span_id
    assert agents(manager).paths == ("manager", "manager/expert", "manager/writer")


# --- guardrails -----------------------------------------------------------------------------
def guarded(server: ScriptedServer, *, trips: bool = False) -> Agent[Any]:
    checker = make(server, "checker")

    @input_guardrail(name="on_topic")
    async def on_topic(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
        result = await Runner.run(checker, text)
        return GuardrailFunctionOutput(output_info=result.final_output, tripwire_triggered=trips)

    return make(server, "writer", input_guardrails=[on_topic])


@HOW
def test_an_agent_in_a_guardrail(server: ScriptedServer, run: Run) -> None:
    writer = guarded(server)
    with captured() as attempt:
        run(writer)
    assert sorted(attempt.tree) == sorted(
        [
            "invoke_agent writer @writer",
            "  guardrail on_topic @writer",
            "    invoke_agent checker @writer/checker",
            "      chat m @writer/checker",
            "  chat m @writer",
        ]
    )
    assert attempt.one("guardrail on_topic").attributes == {
        "lightspan.guardrail.triggered": False,
        "lightspan.agent.path": "writer",
        "openinference.span.kind": "GUARDRAIL",
    }
    assert agents(writer) == (("writer", "writer/checker"), True)


@HOW
def test_a_guardrail_that_trips(server: ScriptedServer, run: Run) -> None:
    writer = guarded(server, trips=True)
    with captured() as attempt, pytest.raises(InputGuardrailTripwireTriggered):
        run(writer)
    assert attempt.one("guardrail on_topic").attributes["lightspan.guardrail.triggered"] is True
    span = attempt.one("invoke_agent writer")
    assert span.status is SpanStatus.ERROR
    assert span.attributes["error.type"] in ("InputGuardrailTripwireTriggered", "AgentError")
    assert "writer/checker" in attempt.calls


# --- around and inside ----------------------------------------------------------------------
def test_plain_python_around_and_inside(server: ScriptedServer) -> None:
    """Check that `lightspan.agent` and the SDK's agents form one path, in the order of entering."""
    server.script = says({"scout": [calls("think")]})

    @function_tool
    def think() -> str:
        """Think."""
        with lightspan.agent("idea"):
            ask_raw(server)
        return "ok"

    with captured() as attempt, lightspan.agent("outer"):
        run_async(make(server, "scout", tools=[think]))
    assert attempt.calls == ["outer/scout", "outer/scout/idea", "outer/scout"]
    assert context.current_agent() is None


def test_a_raw_client_in_a_tool_acts_for_the_agent(server: ScriptedServer) -> None:
    server.script = says({"scout": [calls("raw")]})

    @function_tool
    def raw() -> str:
        """Ask."""
        ask_raw(server)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(copy_context().run, ask_raw, server).result()
        return "ok"

    with captured() as attempt:
        run_async(make(server, "scout", tools=[raw]))
    assert attempt.calls == ["scout"] * 4


def test_a_renamed_agent(server: ScriptedServer) -> None:
    """Check that a run keeps the agent's name from its beginning, and the next run has the new
    name.
    """
    server.script = says({"scout": [calls("rename")]})

    @function_tool
    def rename() -> str:
        """Rename."""
        agent.name = "ranger"
        return "ok"

    agent = make(server, "scout", tools=[rename])
    with captured() as attempt:
        run_async(agent)
        run_async(agent)
    assert attempt.calls == ["scout", "scout", "ranger"]
    assert agents(agent) == (("ranger",), False)


def test_an_agent_without_a_name_is_the_app(server: ScriptedServer) -> None:
    with captured() as attempt:
        run_async(make(server, ""))
    assert attempt.tree == ["chat m @app"]
    assert agents(make(server, "")).paths == ("app",)

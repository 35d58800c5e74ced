"""Test paths and spans of the SDK's operations, and paths of agents, without a model."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    GuardrailFunctionOutput,
    Handoff,
    InputGuardrail,
    RunConfig,
    Runner,
    function_tool,
    handoff,
)
from hypothesis import given, strategies as st

from lightspan.capture.adapter import SpanEnd
from lightspan.capture.context import AgentContext, AttemptContext
from lightspan.schema.routing import split_path
from lightspan.schema.spans import Attributes, SpanLink
from lightspan_openai_agents import agents
from lightspan_openai_agents._identity import (
    Operation,
    OperationKind,
    Origin,
    begin,
    hand_over,
    span_of,
)

SCOPE = AttemptContext(rollout_id="r", attempt_id="a", root_span_id="0" * 15 + "1")
TOP = AgentContext(SCOPE, parent_span_id=SCOPE.root_span_id)
AGENT, TOOL, RUN = OperationKind.AGENT, OperationKind.TOOL, OperationKind.RUN
HANDOFF, GUARDRAIL = OperationKind.HANDOFF, OperationKind.GUARDRAIL


def inside(parent: Operation, kind: OperationKind, name: str = "") -> Operation:
    return begin(kind, name, parent.inside, parent)


def spans(*operations: Operation) -> list[Any]:
    return [span_of(operation, SpanEnd()) for operation in operations]


# --- paths and spans --------------------------------------------------------------------------


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_path_has_the_names_that_were_entered(names: list[str]) -> None:
    operation = begin(RUN, "", TOP)
    for name in names:
        operation = inside(inside(operation, TOOL, "t"), AGENT, name)
    assert split_path(operation.inside.path) == names
    assert [frame.name for frame in operation.inside.frames] == names


def test_an_agent_without_a_name_is_nobody() -> None:
    agent = begin(AGENT, "", TOP)
    assert agent.inside is TOP
    assert spans(agent) == [None]


# --- lineage ----------------------------------------------------------------------------------
def test_a_handoff_is_inherited_once() -> None:
    run = begin(RUN, "", TOP)
    first = inside(run, AGENT, "triage")
    hand_over(inside(first, HANDOFF), "triage", "billing")
    second = inside(run, AGENT, "billing")
    third = inside(run, AGENT, "billing")
    assert second.inside.path == "billing"
    assert second.origin == Origin("triage", first.inside.frames[0].span_id)
    assert third.origin is None
    (span,) = spans(second)
    told: Attributes = {"lightspan.handoff.from": "triage"}
    assert span.links == [SpanLink(SCOPE.trace_id, first.inside.frames[0].span_id, told)]
    assert "graph.node.parent_id" not in span.attributes


def test_a_handoff_without_a_run_around() -> None:
    """Check that the attempt stores the handoff, where the SDK makes no `task` spans."""
    known: dict[str, Origin] = {}
    first = begin(AGENT, "triage", TOP, None, known)
    hand_over(inside(first, HANDOFF), "triage", "billing", known)
    assert begin(AGENT, "other", TOP, None, known).origin is None
    second = begin(AGENT, "billing", TOP, None, known)
    assert second.origin == Origin("triage", first.inside.frames[0].span_id)
    assert known == {}


# --- what can be optimised --------------------------------------------------------------------
WRITER = Agent(name="writer")
CRITIC = Agent(name="critic")


@function_tool
async def asks_critic(text: str) -> str:
    """Ask the critic."""
    return str((await Runner.run(CRITIC, text)).final_output)


async def helper(text: str) -> Any:
    return await Runner.run(CRITIC, text)


@function_tool
async def asks_through_a_helper(text: str) -> str:
    """Ask the critic."""
    return str((await helper(text)).final_output)


@function_tool
async def builds(text: str) -> str:
    """Ask somebody new."""
    return str((await Runner.run(Agent(name="new"), text)).final_output)


@function_tool
def plain(text: str) -> str:
    """Nobody."""
    return text.upper()


async def judges(context: Any, agent: Any, text: Any) -> GuardrailFunctionOutput:
    await Runner.run(CRITIC, text, run_config=RunConfig())
    return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)


def answer(task: dict[str, Any]) -> str:
    return str(Runner.run_sync(WRITER, str(task)).final_output)


def test_handoffs_stand_side_by_side() -> None:
    last = Agent(name="last")
    middle = Agent(name="middle", handoffs=[handoff(last)])
    first = Agent(name="first", handoffs=[middle])
    last.handoffs.append(first)
    assert agents(first) == (("first", "middle", "last"), True)


def test_an_agent_that_is_its_own_tool() -> None:
    agent = Agent(name="thinker")
    agent.tools.append(agent.as_tool("think", "Think deeper."))
    assert agents(agent) == (("thinker",), False)  # thinker/thinker/… has no end


@pytest.mark.parametrize(
    ("tool", "found"),
    [
        (asks_critic, (("writer", "writer/critic"), True)),
        (asks_through_a_helper, (("writer", "writer/critic"), True)),
        (builds, (("writer",), False)),
        (plain, (("writer",), True)),
    ],
)
def test_functions_of_tools(tool: Any, found: Any) -> None:
    assert agents(Agent(name="writer", tools=[tool])) == found


def test_functions_of_guardrails_and_instructions() -> None:
    guard = InputGuardrail(guardrail_function=judges)
    assert agents(Agent(name="writer", input_guardrails=[guard])).paths == (
        "writer",
        "writer/critic",
    )

    async def instructions(context: Any, agent: Any) -> str:
        return str((await Runner.run(CRITIC, "what?")).final_output)

    assert agents(Agent(name="writer", instructions=instructions)).paths == (
        "writer",
        "writer/critic",
    )


def test_a_handoff_that_hides_its_agent() -> None:
    async def choose(context: Any, arguments: str) -> Agent[Any]:
        return WRITER

    hidden: Handoff[Any, Any] = Handoff(
        tool_name="transfer",
        tool_description="",
        input_json_schema={},
        on_invoke_handoff=choose,
        agent_name="somebody",
    )
    assert agents(Agent(name="first", handoffs=[hidden])) == (("first", "somebody"), False)


def test_a_function_or_several_agents() -> None:
    assert agents(answer) == (("app", "writer"), True)
    assert agents([WRITER, CRITIC]) == (("writer", "critic"), True)

"""Test agent paths and spans of invocations, without AutoGen."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightspan_autogen")

from lightspan.capture.context import AgentContext, AttemptContext
from lightspan.schema.spans import SpanKind
from lightspan_autogen._identity import Invocation, Role, enter

ROOT = AgentContext(
    AttemptContext(rollout_id="ro", attempt_id="at", trace_id="f" * 32), (), "a" * 16
)


def entered(around: AgentContext, role: Role, innermost: Invocation | None = None) -> Invocation:
    opened = enter(around, role, innermost)
    assert opened is not None
    return opened


def team(name: str, owner: Any = None) -> Role:
    return Role(name, owner or object(), is_team=True)


def agent(name: str, owner: Any = None) -> Role:
    return Role(name, owner or object())


def tool(name: str, call_id: str | None = "call_1", arguments: str = "{}") -> Role:
    return Role(name, call_id, SpanKind.TOOL, arguments=arguments)


def test_teams_and_agents_make_the_path() -> None:
    outer = entered(ROOT, team("outer"))
    inner = entered(outer.inside, team("in/ner"), outer)
    writer = entered(inner.inside, agent("writer"), inner)
    assert [opened.inside.path for opened in (outer, inner, writer)] == [
        "outer",
        "outer/in%2Fner",
        "outer/in%2Fner/writer",
    ]
    assert writer.inside.parent_span_id == writer.span_id == writer.inside.frames[-1].span_id


def test_one_invocation_is_opened_once() -> None:
    writer = agent("writer")
    opened = entered(ROOT, writer)
    assert enter(opened.inside, writer, opened) is None
    desk = team("desk")
    opened = entered(ROOT, desk)
    assert enter(opened.inside, desk, opened) is None
    opened = entered(ROOT, tool("look", "call_1"))
    assert enter(opened.inside, tool("look", "call_1"), opened) is None
    assert enter(opened.inside, tool("look", "call_2"), opened) is not None
    assert enter(opened.inside, tool("count", "call_1"), opened) is not None


def test_an_agent_that_wraps_one_of_its_name_is_that_agent() -> None:
    wrapper = entered(ROOT, agent("writer"))
    assert enter(wrapper.inside, agent("writer"), wrapper) is None
    assert enter(wrapper.inside, agent("checker"), wrapper) is not None


def test_a_team_and_its_agent_may_have_one_name() -> None:
    around = entered(ROOT, team("writer"))
    inside = entered(around.inside, agent("writer"), around)
    assert inside.inside.path == "writer/writer"
    again = entered(inside.inside, team("writer"), inside)
    assert again.inside.path == "writer/writer/writer"
    nested = entered(again.inside, team("writer"), again)
    assert nested.inside.path == "writer/writer/writer/writer"


def test_an_agent_that_calls_itself_through_a_tool_is_nested() -> None:
    writer = agent("writer")
    outer = entered(ROOT, writer)
    call = entered(outer.inside, tool("writer"), outer)
    assert entered(call.inside, writer, call).inside.path == "writer/writer"

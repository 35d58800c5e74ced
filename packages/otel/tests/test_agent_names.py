"""Tests of roles and names in every dialect; message content is not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan_otel.agent_names import READ, Role, agent_name, role_of, tool_call_id, tool_name

GENAI = {"gen_ai.operation.name": "invoke_agent"}
OPENINFERENCE = {"openinference.span.kind": "AGENT"}
OPENLLMETRY = {"traceloop.span.kind": "agent"}
UUID = "0b9f2b3c-7a44-4d0e-9d3a-0c7f5f3e8b11"


@pytest.mark.parametrize(
    ("name", "attributes", "role"),
    [
        ("any", GENAI, Role.AGENT),
        ("any", OPENINFERENCE, Role.AGENT),
        ("any", OPENLLMETRY, Role.AGENT),
        ("invoke_agent writer", {}, Role.AGENT),
        # Google ADK with OpenInference: the operation is overwritten
        ("any", {**OPENINFERENCE, "gen_ai.operation.name": "generate_content"}, Role.AGENT),
        ("execute_tool look", {}, Role.TOOL),
        ("any", {"gen_ai.operation.name": "execute_tool"}, Role.TOOL),
        ("any", {"openinference.span.kind": "TOOL"}, Role.TOOL),
        ("any", {"traceloop.span.kind": "tool"}, Role.TOOL),
        ("any", {"gen_ai.operation.name": "invoke_workflow"}, Role.WORKFLOW),
        ("any", {"openinference.span.kind": "CHAIN"}, Role.WORKFLOW),
        ("any", {"traceloop.span.kind": "workflow"}, Role.WORKFLOW),
        # its chats and tools name their agent too
        ("chat m", {"gen_ai.operation.name": "chat", "gen_ai.agent.name": "a"}, Role.OTHER),
        ("create_agent writer", {"gen_ai.operation.name": "create_agent"}, Role.OTHER),
        ("GET /", {}, Role.OTHER),
    ],
)
def test_roles(name: str, attributes: Mapping[str, Any], role: Role) -> None:
    assert role_of(name, attributes) is role


@pytest.mark.parametrize(
    ("name", "attributes", "agent"),
    [
        ("any", {**GENAI, "gen_ai.agent.name": "writer"}, "writer"),
        ("any", {**OPENINFERENCE, "agent.name": "writer"}, "writer"),
        ("any", {**OPENLLMETRY, "traceloop.entity.name": "writer"}, "writer"),
        ("any", {**GENAI, "traceloop.entity.name": "no agent"}, None),
        ("invoke_agent my writer", GENAI, "my writer"),
        ("invoke_agent other", {"gen_ai.agent.name": "writer"}, "writer"),
        ("writer.run", OPENINFERENCE, "writer"),
        ("writer.arun_stream", OPENINFERENCE, "writer"),
        ("a run of something", OPENINFERENCE, None),
        ("any", {**OPENINFERENCE, "graph.node.id": "node"}, None),
        ("any", {**GENAI, "gen_ai.agent.name": "  "}, None),
        # ids that differ per process
        (f"invoke_agent {UUID}", GENAI, None),
        ("any", {**GENAI, "gen_ai.agent.name": UUID, "gen_ai.agent.id": UUID}, None),
        ("any", {**GENAI, "gen_ai.agent.name": UUID.replace("-", "")}, None),
        ("any", {**GENAI, "gen_ai.agent.name": UUID, "agent.name": "writer"}, "writer"),
        ("any", dict.fromkeys(["gen_ai.agent.name", "gen_ai.agent.id"], "a_12fe34cd"), None),
        # an id chosen by the user
        ("any", dict.fromkeys(["gen_ai.agent.name", "gen_ai.agent.id"], "writer"), "writer"),
        ("any", {**GENAI, "gen_ai.agent.name": "a_12fe34cd"}, "a_12fe34cd"),
        ("any", {**GENAI, "gen_ai.agent.name": "deadbeef"}, "deadbeef"),
    ],
)
def test_names(name: str, attributes: Mapping[str, Any], agent: str | None) -> None:
    assert agent_name(name, attributes, may_guess=True) == agent


def test_the_name_of_a_method_is_no_agents_as_long_as_an_attribute_may_come() -> None:
    assert agent_name("writer.run", OPENINFERENCE, may_guess=False) is None


def test_tools() -> None:
    assert tool_name("execute_tool look", {}) == "look"
    assert tool_name("any", {"gen_ai.tool.name": "look"}) == "look"
    assert tool_name("any", {"tool.name": "look"}) == "look"
    assert tool_name("any", {"traceloop.span.kind": "tool", "traceloop.entity.name": "l"}) == "l"
    assert tool_call_id({"gen_ai.tool.call.id": "call_1"}) == "call_1"
    assert tool_call_id({"tool_call.id": "call_1"}) == "call_1"
    assert tool_call_id({}) is None


class _Watched(Mapping[str, Any]):
    """Attributes that record which keys were read."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.held, self.read = held, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all of them were looked at")

    def __len__(self) -> int:
        return len(self.held)


VALUES = st.sampled_from(["invoke_agent", "execute_tool", "AGENT", "TOOL", "agent", "tool", "x"])


@given(
    name=st.sampled_from(["any", "invoke_agent a", "execute_tool t", "a.run"]),
    held=st.dictionaries(st.sampled_from(sorted(READ)), VALUES),
)
def test_nothing_else_is_read(name: str, held: Mapping[str, Any]) -> None:
    watched = _Watched({**held, "gen_ai.input.messages": "secret", "graph.node.id": "node"})
    role = role_of(name, watched)
    agent_name(name, watched, may_guess=True)
    tool_name(name, watched)
    tool_call_id(watched)
    assert role in Role
    assert watched.read <= READ
    assert "graph.node.id" not in READ
    assert not any("messages" in key or "argument" in key or "value" in key for key in READ)

"""Tests of agents that are identified by their system prompts."""

from __future__ import annotations

from typing import Any

import pytest

from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan_gateway.prompt_rules import agent_of_prompt

TARGET = Target(route=Route.POLICY, policy="policy")
ROUTING = Routing(
    rules=[
        Rule("app", TARGET),
        Rule("title", TARGET, "Generate a title*"),
        Rule("notes", TARGET, "Be brief.\nTake notes."),
        Rule("late", TARGET, "Generate*"),
    ],
    default=TARGET,
)
TITLE = {"type": "text", "text": "Generate a title\nof one line."}
BRIEF, NOTES = {"type": "text", "text": "Be brief."}, {"type": "text", "text": "Take notes."}


@pytest.mark.parametrize(
    ("body", "agent"),
    [
        ({"system": [BRIEF, TITLE]}, "title"),  # one part matches
        ({"system": [BRIEF, NOTES]}, "notes"),  # all parts together match
        ({"system": [NOTES, BRIEF]}, None),
        ({"instructions": "Generate a poem"}, "late"),
        ({"messages": [{"role": "user", "content": "Generate a title"}]}, None),
        ({"messages": [{"role": "developer", "content": [TITLE]}]}, "title"),
    ],
)
def test_the_first_rule_that_matches_a_part_or_the_whole_prompt_applies(
    body: dict[str, Any], agent: str | None
) -> None:
    assert agent_of_prompt(ROUTING, body) == agent


def test_without_patterns_no_agent_is_identified() -> None:
    routing = Routing(rules=[Rule("title", TARGET)], default=TARGET)
    assert agent_of_prompt(routing, {"system": "Generate a title"}) is None

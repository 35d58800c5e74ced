"""Test what reports say about placeholders, and about the agents of a run."""

from __future__ import annotations

from lightspan.schema.prompts import LearnedPrompt, PromptPlace, PromptTemplate
from lightspan_tools.inspect import _agents_text
from lightspan_tools.placeholders import placeholder_note


def learned(text: str, place: PromptPlace) -> LearnedPrompt:
    template = PromptTemplate(text)
    return LearnedPrompt(before=template, after=template, place=place, agent="reviewer")


def test_placeholders_of_an_agent_stand_for_its_own_text() -> None:
    note = placeholder_note(learned("Today is {date_1}. {part_1}", PromptPlace.AGENT))
    assert note.startswith("{date_1}, {part_1} stand for parts of the app's own instructions")
    note = placeholder_note(learned("Answer with JSON {part_1}", PromptPlace.AGENT))
    assert note.startswith("{part_1} stands for a part of the app's own instructions")


def test_other_prompts_have_no_note() -> None:
    assert placeholder_note(learned("Answer {question}", PromptPlace.ARGUMENT)) == ""
    assert placeholder_note(learned("Answer.", PromptPlace.AGENT)) == ""


def test_the_setting_optimize_is_readable() -> None:
    policies = {"planner": {"name": None, "model": None, "lora": {"rank": 8}}, "writer": "sql"}
    assert _agents_text(policies) == "planner, writer (sql)"
    assert _agents_text({"judge": {"name": None, "model": "small"}}) == "judge (small)"
    assert _agents_text(["planner", "writer"]) == "planner, writer"
    assert (_agents_text("*"), _agents_text(None)) == ("*", "")

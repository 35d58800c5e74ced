"""Tests of the requests to reflection models, and of the parsing of their answers."""

from __future__ import annotations

import pytest

from lightspan import PromptTemplate
from lightspan.schema.prompts import LearnedPrompt
from lightspan_prompts.apo import reflection_prompts
from lightspan_prompts.gepa.reflection_prompts import question
from lightspan_prompts.search.reflection import Unusable, proposed_template, proposed_text


def test_what_is_asked() -> None:
    template, plain = PromptTemplate('As {{"a": 1}}: {q} {n:.1f} {q}'), PromptTemplate("plain")
    angle, way = reflection_prompts.ANGLES[0], reflection_prompts.WAYS[0]
    critique = reflection_prompts.critique("style", template, [], angle)
    edit = reflection_prompts.edit("style", template, " too long ", way)
    for text in (question("style", template, []), critique, edit):
        assert '"style"' in text
        assert '<prompt>\nAs {"a": 1}: {q} {n:.1f} {q}\n</prompt>' in text
        assert "placeholders that the application fills: {q}, {n:.1f}." in text
    assert "<critique>\ntoo long\n</critique>" in edit
    assert angle in critique
    assert way in edit
    for text in (
        question("style", plain, []),
        reflection_prompts.critique("style", plain, [], ""),
        reflection_prompts.edit("style", plain, "", ""),
    ):
        assert "placeholders" not in text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("<prompt>a</prompt>", "a"),
        ("Well.\n<prompt>\n a\n\nb \n</prompt>\nSo.", "a\n\nb"),
        ("<prompt>say <prompt>x</prompt></prompt>", "say <prompt>x</prompt>"),
        ("It is\n```text\na\n```\nDone.", "a"),
        ("<prompt>```a```</prompt>", "```a```"),
        ("Here: <prompt>a</prompt>.", "a"),
        ("<prompt>Think in <think></think> tags.</prompt>", "Think in <think></think> tags."),
        ("<think><prompt>draft</prompt></think>\n<prompt>a</prompt>", "a"),
        ("I draft <prompt>draft</prompt> first.</think>\nSo:\n<prompt>a</prompt>", "a"),
        ("Between <prompt> and </prompt>:\n<prompt>a</prompt>", "a"),
    ],
)
def test_the_text_of_an_answer(answer: str, text: str) -> None:
    assert proposed_text(answer, "stop") == text


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        ("", "stop", "has no <prompt>"),
        ("<prompt> </prompt>", "stop", "has no <prompt>"),
        ("</prompt>a<prompt>", "stop", "has no <prompt>"),
        ("<prompt>Do {q}, and", "length", "was cut off"),
        ("<prompt>Do {q}.</prompt>\nNo: <prompt>", "content_filter", "was cut off"),
        ("<prompt>Do {q} now.</prompt>\nBut <prompt>better", "length", "was cut off"),
        ("I will write it between <prompt> and </prompt> and", "stop", "has no <prompt>"),
        ("<think>Maybe <prompt>Do {q} now.</prompt>", "stop", "has no <prompt>"),
        ("<think>```\nDo {q} now.\n```</think>", "stop", "has no <prompt>"),
        ("<prompt>Do it.</prompt>", "stop", "has no {q}"),
        ("<prompt>Do {q}.</prompt>", "stop", "is unchanged"),
    ],
)
def test_answers_without_a_new_text(answer: str, reason: str, message: str) -> None:
    with pytest.raises(Unusable, match=message):
        proposed_template(PromptTemplate("Do {q}."), answer, reason)


def test_a_fence_between_the_marks_is_no_part_of_the_text() -> None:
    """Unless the prompt itself is a fenced block."""
    answer = "<prompt>\n```text\nDo {q} now.\n```\n</prompt>"
    assert proposed_template(PromptTemplate("Do {q}."), answer, "stop").template == "Do {q} now."
    fenced = PromptTemplate("```\nDo {q}.\n```")
    assert proposed_template(fenced, answer, "stop").template == "```text\nDo {q} now.\n```"
    two = "<prompt>\n```\n{q}\n```\nor\n```\nb\n```\n</prompt>"
    assert proposed_template(PromptTemplate("Do {q}."), two, "stop").template.count("```") == 4


def test_a_literal_that_looks_like_a_placeholder_stays_doubled() -> None:
    """In the question, in the new template and in the diff; other literal braces likewise."""
    template = PromptTemplate("Greet {user}, write {{user}} for the name, and {{other}}. {q}")
    asked = question("style", template, [])
    assert f"<prompt>\n{template.template}\n</prompt>" in asked
    assert "A brace that is not filled is doubled, {{ or }}" in asked
    answer = "<prompt>\nHi {user}: {{user}}, {{other}}, {more}. {q}\n</prompt>"
    after = proposed_template(template, answer, "stop")
    assert after.template == "Hi {user}: {{user}}, {{other}}, {{more}}. {q}"
    assert after.format(user="U", q="Q") == "Hi U: {user}, {other}, {more}. Q"
    diff = LearnedPrompt(before=template, after=after).diff()
    assert "{{user}} for the name" in diff
    assert "{user}: {{user}}" in diff
    with pytest.raises(Unusable, match=r"no {user} and no {q} that str.format can fill"):
        proposed_template(template, '<prompt>{user} {q} {"a": 1}</prompt>', "stop")
    with pytest.raises(Unusable, match=r"has no {user}"):
        proposed_template(template, "<prompt>{{user}} {q}</prompt>", "stop")

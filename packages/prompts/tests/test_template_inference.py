"""Tests of template inference: the template matches exactly, or none is returned."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, strategies as st

from lightspan.errors import ConfigError
from lightspan.schema.prompts import LearnedPrompt, PromptTemplate
from lightspan_prompts.search.template_inference import SeveralPrompts, infer_template
from lightspan_prompts.search.template_variables import variable_parts
from packages.prompts.tests.prompt_kinds import KINDS


@pytest.mark.parametrize("name", KINDS)
def test_every_kind(name: str) -> None:
    """The template inferred from 16 calls also matches further texts; variable parts are kept."""
    kind = KINDS[name]
    template = infer_template([kind.text(n) for n in range(16)])
    assert [part for part in kind.free if part not in template.text] == []
    given_as, fields = template.text, template.fields
    candidate = template.rewritten(f"ANEW {' '.join(fields)} {given_as} {{of_its_own}}")
    for n in range(100, 120):
        text = kind.text(n)
        same = LearnedPrompt(before=template, after=template)
        assert same.apply(text) == text
        other = LearnedPrompt(before=template, after=candidate)
        sent = other.apply(text)
        assert sent is not None
        assert sent.startswith("ANEW ")
        assert sent.endswith(f"{text} {{of_its_own}}")
        assert [part for part in kind.kept(n) if part not in sent.removesuffix(text)] == [] or (
            not fields
        )
        # protected parts are in no candidate's free text
        assert [part for part in kind.kept(n) if part in given_as] == []
    if fields:
        with pytest.raises(ConfigError, match="the text has no"):
            template.rewritten("without any placeholder")


@lru_cache
def found(name: str) -> PromptTemplate:
    return infer_template([KINDS[name].text(n) for n in range(8)])


WORDS = st.sampled_from(["alpha ", "beta\n", "gamma, ", "{x}", "{{", "}", "2026-11-24 ", "é", "’ "])
PIECES = st.lists(WORDS, max_size=12).map("".join)


@given(st.lists(PIECES, min_size=1, max_size=5))
def test_any_texts_are_reproduced_exactly_or_have_no_template(texts: list[str]) -> None:
    try:
        template = infer_template(texts)
    except SeveralPrompts:
        return
    for text in texts:
        values = template.match(text)
        assert values is not None
        assert template.format(**values) == text
        # the match is not by chance: every text is reproduced
        same = template.rewritten(template.text)
        assert same.format(**values) == text


@given(
    st.lists(st.sampled_from("ab"), max_size=4).map("".join),
    st.lists(st.sampled_from(["a", "b", "ab", "{p}", "{q}"]), max_size=5),
)
def test_a_match_is_the_only_one(text: str, parts: list[str]) -> None:
    """The match equals the only one of all ways to fill in the template."""
    template = PromptTemplate("".join(dict.fromkeys(parts)) if len(set(parts)) < 5 else "{p}a{q}")
    names = template.placeholders
    every = [text[i:j] for i in range(len(text) + 1) for j in range(i, len(text) + 1)]
    ways = [{}] if not names else [{names[0]: value} for value in set(every)]
    if len(names) == 2:
        ways = [{**way, names[1]: value} for way in ways for value in set(every)]
    fitting = [way for way in ways if template.format(**way) == text]
    is_known = len(fitting) == 1 and "}{" not in template.template
    assert template.match(text) == (fitting[0] if is_known else None)


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 200), st.sampled_from(["", "?", "You"]))
def test_a_text_that_is_no_match_is_sent_as_it_is(name: str, at: int, other: str) -> None:
    template, text = found(name), KINDS[name].text(3)
    broken = text[:at] + other + text[at + 1 :]
    values = template.match(broken)
    rewrite = LearnedPrompt(before=template, after=PromptTemplate(f"Anew: {template.template}"))
    if values is None:
        assert rewrite.apply(broken) is None
    else:
        assert template.format(**values) == broken
        assert rewrite.apply(broken) == f"Anew: {broken}"


def test_two_prompts_are_not_taken_for_one() -> None:
    one = "You summarise what was said in three short sentences, for the files."
    two = "Decide who is to answer next: a name from the list, and nothing else."
    for texts in ([one, two] * 3, [one] * 9 + [two] * 3, [one, two]):
        with pytest.raises(SeveralPrompts):
            infer_template(texts)
    common = "You are the agent of the desk. You are polite, brief, and you never lie. "
    assert infer_template([f"{common}{one}", f"{common}{two}"]).text.startswith(common)


def test_what_was_retrieved_does_not_make_two_prompts() -> None:
    prefix = "Answer from the context alone, in one sentence.\n\nContext: "
    texts = [f"{prefix}{KINDS['langgraph retrieval'].kept(n)[0]} {n}" for n in range(8)]
    assert infer_template(texts).text == f"{prefix}{{part_1}}"


def test_what_all_have_by_chance_belongs_to_the_placeholder() -> None:
    """Fewer texts need more in common."""
    texts = [f"Use the notes.\nNotes: {word} information {word}" for word in ("cats", "dogs")]
    assert infer_template(texts).text == "Use the notes.\nNotes: {part_1}"


def test_a_text_that_looks_like_a_placeholder_is_none() -> None:
    template = infer_template([f"Say {{part_1}} to {who}, always and in full." for who in "ab"])
    assert template.fields == ("{part_1_}",)
    assert template.match("Say {part_1} to c, always and in full.") == {"part_1_": "c"}


def test_a_key_that_the_record_does_not_have_is_a_placeholder() -> None:
    """Spans contain `<key>` for a redacted key, which the app still sends."""
    template = infer_template(["Use the key <key> for it, and tell nobody."])
    assert template.match("Use the key sk-1234 for it, and tell nobody.") == {"id_1": "sk-1234"}


def test_long_texts_take_no_time_to_speak_of() -> None:
    """A hundred thousand characters that almost match, for which a pattern might backtrack."""
    template = PromptTemplate(" ab ".join(f"{{p{n}}}" for n in range(20)) + " end")
    assert template.match("ab " * 40_000) is None
    assert variable_parts('{"a ' * 20_000) == []
    prefix = "Answer from the context alone, and cite every part of it that you use. "
    texts = [prefix + KINDS["langgraph retrieval"].kept(n)[0] * 5 for n in range(6)]
    assert infer_template(texts).text == f"{prefix}{{part_1}}"

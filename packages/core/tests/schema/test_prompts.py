"""Test prompt templates: placeholders, braces, and texts with equal placeholders."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from lightspan.errors import ConfigError, UnsupportedError
from lightspan.schema.prompts import LearnedPrompt, PromptPlace, PromptTemplate, filled_as
from lightspan.schema.resources import decode_resources, encode_resources
from lightspan.schema.system_prompts import Instructions


def test_placeholders_are_filled() -> None:
    prompt = PromptTemplate("Say {word} to {who}, {word}!")
    assert prompt.placeholders == ("word", "who")
    assert prompt.format(word="hi", who="you", unused=1) == "Say hi to you, hi!"


@pytest.mark.parametrize(
    ("template", "values", "filled"),
    [
        ("{price:.2f} {name!r}", {"price": 2, "name": "x"}, "2.00 'x'"),
        ("{task[q]} {task[n]:>3}", {"task": {"q": "why", "n": 4}}, "why   4"),
        ("{x:{width}}|", {"x": "a", "width": 3}, "a  |"),
        ("doubled {{x}} {x}", {"x": 1}, "doubled {x} 1"),
        # braces that `str.format` cannot fill are literal
        ('as {"answer": {x}}', {"x": 1}, 'as {"answer": 1}'),
        ('as {"a": {"b": 1}}', {}, 'as {"a": {"b": 1}}'),
        ("{} {0} {x}", {"x": 1}, "{} {0} 1"),
        ("one { alone, {x}", {"x": 1}, "one { alone, 1"),
        ("", {}, ""),
    ],
)
def test_formats(template: str, values: dict[str, object], filled: str) -> None:
    assert PromptTemplate(template).format(**values) == filled


def test_a_value_that_is_missing_or_cannot_be_shown() -> None:
    with pytest.raises(ConfigError, match="needs a value for 'who'"):
        PromptTemplate("{word} {who}").format(word="hi")
    with pytest.raises(ConfigError, match="cannot be filled: Unknown format code"):
        PromptTemplate("{price:.2f}").format(price="much")
    with pytest.raises(ConfigError, match="cannot be filled: 'int' object has no attribute 'x'"):
        PromptTemplate("{a.x}").format(a=1)


def test_other_engines_are_refused() -> None:
    for engine in ("jinja", "poml"):
        with pytest.raises(UnsupportedError, match=f"engine='{engine}'"):
            PromptTemplate("x", engine=engine)


def test_it_travels_as_it_always_did() -> None:
    sent = encode_resources({"p": PromptTemplate("{x}")})
    assert msgspec.json.decode(sent) == {"p": {"type": "prompt", "template": "{x}"}}
    assert decode_resources(sent) == {"p": PromptTemplate(template="{x}")}


def test_another_text_keeps_the_placeholders_and_no_others() -> None:
    prompt = PromptTemplate("Answer {question} as {{json}}")
    assert prompt.text == "Answer {question} as {json}"
    other = prompt.rewritten('For {question}: {"a": {thing}} and {} {{}}')
    assert other.placeholders == ("question",)
    assert other.format(question="Q") == 'For Q: {"a": {thing}} and {} {{}}'
    assert other.template.format(question="Q") == other.format(question="Q")
    with pytest.raises(ConfigError, match=r"the text has no \{question\}"):
        prompt.rewritten("no placeholder")


texts = st.text(alphabet='{}ab :!."1\n', max_size=30)


@given(texts)
@example("{b.}")
@example("{a!b}")
@example("{a:{b}}")
@example("{a[}")
def test_every_text_can_be_filled(text: str) -> None:
    prompt = PromptTemplate(text)
    values = {name: _Anything() for name in prompt.placeholders}
    assert isinstance(prompt.format(**values), str)


class _Anything:
    """A value that returns itself for every attribute and item."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: object) -> _Anything:
        return self

    def __format__(self, spec: str) -> str:
        return "?"


@given(texts)
def test_the_text_itself_is_the_same_prompt(text: str) -> None:
    prompt = PromptTemplate(text)
    again = prompt.rewritten(prompt.text)
    assert again.text == prompt.text
    assert again.fields == prompt.fields


@given(texts, texts)
def test_other_texts_read_as_they_were_written(before: str, after: str) -> None:
    prompt = PromptTemplate(before)
    wanted = after + "".join(prompt.fields)
    rewritten = prompt.rewritten(wanted)
    assert rewritten.text == wanted
    assert set(rewritten.fields) == set(prompt.fields)


@given(texts)
@example("{a!x}")
@example('as {"b": 1}')
def test_an_app_may_fill_a_learned_text_itself(after: str) -> None:
    learned = PromptTemplate("Which {a}?").rewritten(after + "{a}")
    assert filled_as("Which {a}?", learned.template).format(a="?") == learned.format(a="?")
    assert filled_as('as {"b": {a}}', learned.template) == after + "{a}"  # not by `format`


def test_an_app_may_replace_a_placeholder_in_a_text_with_braces() -> None:
    """`str.format` cannot fill the app's text, so the learned one has no doubled braces either."""
    text = 'Help {who}. Answer as {"desk": "billing"}.'
    before = PromptTemplate(text)
    learned = LearnedPrompt(
        before=before, after=before.rewritten(f"{text} Or {{desk}}."), place=PromptPlace.CODE
    )
    reading = Instructions(prompts={"p": learned}).text_of("p", text)
    assert reading is not None
    assert reading.sent == 'Help {who}. Answer as {"desk": "billing"}. Or {desk}.'


def test_what_changed() -> None:
    learned = LearnedPrompt(before=PromptTemplate("a\n{x}"), after=PromptTemplate("b\n{x}"))
    assert learned.is_changed
    assert learned.template == "b\n{x}"
    assert learned.diff() == "--- before\n+++ after\n@@ -1,2 +1,2 @@\n-a\n+b\n {x}"
    same = LearnedPrompt(before=PromptTemplate("a"), after=PromptTemplate("a"))
    assert (same.is_changed, same.diff()) == (False, "")


def test_doubled_braces_stay_doubled() -> None:
    """An app may call `str.format` on the learned template itself."""
    template = PromptTemplate('JSON like {{"x": 1}} for {q}')
    assert template.text == 'JSON like {"x": 1} for {q}'
    after = template.rewritten('Write {"x": 1} or {"x": 2} for {q}')
    assert after.template == 'Write {{"x": 1}} or {{"x": 2}} for {q}'
    assert after.template.format(q="Q") == after.format(q="Q")
    single = PromptTemplate('JSON like {"x": 1} for {q}')
    assert single.rewritten(after.text).template == after.text


def test_a_brace_around_a_placeholder_is_no_doubled_one() -> None:
    template = PromptTemplate("{{{user}}} and {{user}} and {user}")
    assert template.format(user="U") == "{U} and {user} and U"
    assert template.text == template.template
    again = template.rewritten("{user}: {{{user}}}, {{user}}")
    assert again.format(user="U") == "U: {U}, {user}"


def test_braces_that_the_app_doubles_in_a_text_without_placeholders_stay() -> None:
    """The app gives the text to another engine, such as Jinja, or sends it as it is."""
    before = PromptTemplate("Hi {{ name }}")
    learned = LearnedPrompt(
        before=before, after=before.rewritten("Hello { name }"), place=PromptPlace.CODE
    )
    reading = Instructions(prompts={"p": learned}).text_of("p", "Hi {{ name }}")
    assert reading is not None
    assert reading.sent == "Hello {{ name }}"

"""Tests of dates in instructions: a template that is found today also matches other days' texts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta

import pytest
from babel.dates import format_date, format_datetime, format_skeleton

from lightspan.schema.prompts import PromptTemplate
from lightspan_prompts.search.dates import (
    date_literals,
    date_places,
    days_around,
    undated_sentences,
)
from lightspan_prompts.search.template_inference import infer_template

NOW = datetime(2026, 11, 28, 10, 5, tzinfo=UTC)  # a Saturday
DAYS = days_around({NOW.date()})
Form = Callable[[datetime], str]

FORMATS = (
    *("%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S.%f", "%Y/%m/%d", "%Y.%m.%d", "%Y_%m_%d"),
    *("%d.%m.%Y", "%d. %m. %Y", "%d/%m/%y", "%m/%d/%Y", "%d-%m-%Y", "%d-%b-%Y", "%d-%b-%y"),
    *("%A", "%a", "%B", "%B %Y", "%b %Y", "%Y", "%B %d", "%d %b", "%m/%d", "%Y-%m", "%m/%Y"),
    *("%A, %B %d, %Y", "%d %B %Y", "%c", "%a, %d %b %Y %H:%M:%S +0000", "%A, %H:%M", "%I %p"),
    *("%a %b %d %H:%M:%S UTC %Y", "%B %d, %Y at %I:%M %p", "%Y%m%dT%H%M%SZ", "%s", "%Y-%j"),
    *("%G-W%V", "%G-W%V-%u", "W%V", "week %V", "week %V of %Y", "KW %V", "day %j", "%d%b%Y"),
    *("%Y年%m月%d日", "%m月%d日", "%Y年%m月", "%Y년 %m월 %d일", "%Hh%M", "%H時%M分"),
)
LOCALES = (
    *("en", "en_GB", "de", "fr", "es", "pt", "it", "nl", "sv", "da", "nb", "fi", "pl", "cs"),
    *("hu", "ro", "tr", "ru", "uk", "el", "he", "ar", "fa", "hi", "bn", "th", "vi", "id"),
    *("zh", "zh_Hant", "ja", "ko", "ca", "hr", "bg"),
)


def _ordinal(now: datetime) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(now.day % 10 if now.day // 10 != 1 else 0, "th")
    return f"{now.day}{ending}"


ORDINAL_WORDS = {28: "twenty-eighth", 29: "twenty-ninth", 7: "seventh"}


def _formatted(form: str) -> Form:
    return lambda now: now.strftime(form)


def _localized(locale: str, form: str) -> Form:
    if form == "with the time":
        return lambda now: format_datetime(now, "long", locale=locale)
    if form in ("full", "long", "medium", "short"):
        return lambda now: format_date(now, form, locale=locale)
    return lambda now: format_skeleton(form, now, locale=locale)


CLDR_FORMS = ("full", "long", "medium", "short", "yMMMM", "MMMMd", "yMMMEd", "with the time")
FORMS: dict[str, Form] = {
    **{form: _formatted(form) for form in FORMATS},
    **{f"{name} {form}": _localized(name, form) for name in LOCALES for form in CLDR_FORMS},
    "ordinal": lambda now: f"the {_ordinal(now)} of {now:%B}",
    "ordinal and year": lambda now: f"{now:%B} {_ordinal(now)}, {now.year}",
    "ordinal alone": lambda now: f"the {_ordinal(now)}",
    "in words": lambda now: f"{now:%B} {ORDINAL_WORDS[now.day]}, {now.year}",
    "quarter": lambda now: f"Q{(now.month + 2) // 3} {now.year}",
    "a part of the day": lambda now: f"{now:%A} {'evening' if now.day % 2 else 'morning'}",
    "upper case": lambda now: f"{now:%A %d %B %Y}".upper(),
    "lower case": lambda now: f"{now:%A}".lower(),
    "Roman month": lambda now: f"{now.day}.XI.{now.year}",
    "Reiwa": lambda now: f"令和{now.year - 2018}年{now.month}月{now.day}日({'土日'[now.day % 2]})",
    "Han numerals": lambda now: f"二〇二六年十一月二十{'八九'[now.day % 2]}日",
}


@pytest.mark.parametrize("name", FORMS)
def test_what_is_found_today_matches_tomorrow(name: str) -> None:
    def text(now: datetime) -> str:
        return f"You plan trips for families. Today: {FORMS[name](now)}\nBe polite, and be brief."

    template = infer_template([text(NOW)], DAYS)
    assert template.fields
    assert template.text.startswith("You plan trips for families. Today: ")
    assert template.text.endswith("Be polite, and be brief.")
    days = (1, 9) if name == "in words" else (1,) if "R" in name or "Han" in name else (1, 9, 75)
    for number in days:
        assert template.match(text(NOW + timedelta(days=number))) is not None, template.text


@pytest.mark.parametrize(
    "text",
    [
        "Use version 3.11.2 at 10.0.0.1, port 8080; at most 3 may do so in 28 words.",
        "You may answer in a second. March on: the sun is a star, and mon ami is a friend.",
        "Items 1, 2, 3, 4, 5 of section 2.3.4 (1/2 cup); call 555-1234, or 1-800-555-0199.",
        "Founded on Mondays in August, closed in week 12, on day 3 and in Q1 of 2019.",
        "请注意以下三点。第一,回答不超过三十一个字。",
        "9" * 5_000,
        "A ratio of 16 to 9, a score of 1,234,567.89, and 24 of 28 points.",
    ],
)
def test_what_is_no_date_of_today(text: str) -> None:
    assert [text[begin:end] for begin, end in date_places(text, DAYS)] == []


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("Today is Saturday, 28 November 2026 (2026-11-28).", ["Today is ", "."]),
        ("Today is 2026-11-28 (Saturday): go.", ["Today is ", ": go."]),
        ("(2026-11-28)", ["(", ")"]),
        ("As of (28 November 2026) all", ["As of (", ") all"]),
    ],
)
def test_brackets_in_a_date_are_closed_in_it(text: str, rest: list[str]) -> None:
    [(begin, end)] = date_places(text, DAYS)
    assert [text[:begin], text[end:]] == rest


def test_what_says_which_day_it_is() -> None:
    """A text that the app passes as it is keeps its dates; those of today are named."""
    template = PromptTemplate(
        "Founded on 3 March 1998, open from 9:00. Today is Saturday, 2026-11-28, {time}. Be quick."
    )
    assert date_literals(template, DAYS) == ["Saturday, 2026-11-28"]
    assert date_literals(PromptTemplate("The year 2026, W48; written on 20261128T1000."), DAYS) == [
        "2026, W48",
        "20261128T1000",
    ]
    assert date_literals(template, {date(2025, 1, 1)}) == []


def test_a_date_that_cannot_be_read_is_announced() -> None:
    some = "Route it.\nCurrent date: the feast of Saint Andrew\nToday is {date_1}. It is now {x}."
    assert undated_sentences(PromptTemplate(some)) == ["Current date: the feast of Saint Andrew"]


def test_the_neighbours_of_a_day_count_too() -> None:
    around = days_around({date(2026, 11, 30)})
    assert around == {date(2026, 11, 29), date(2026, 11, 30), date(2026, 12, 1)}

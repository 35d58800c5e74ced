"""Detection of dates and times in a text, in the languages of the CLDR (library `babel`).

A date with day, month and year, and a time of day, are found wherever they stand. A shorter form,
such as `Saturday`, `November 2026` or `week 48`, is found only if it is true of one of the days
that the caller names: a prompt that contains it will probably have another text on another day.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date, timedelta
from functools import lru_cache
from typing import Final, NamedTuple

from babel import Locale

from lightspan.schema.prompts import PromptTemplate

MIN_SOLO_LENGTH: Final = 3
"""Minimum characters of a name that is a date alone; 2 in scripts without spaces between words."""

LANGUAGES: Final = (
    *("en", "zh", "zh_Hant", "hi", "es", "fr", "ar", "bn", "pt", "ru", "ur", "id", "de", "ja"),
    *("sw", "mr", "te", "tr", "ta", "vi", "ko", "it", "th", "gu", "fa", "pl", "uk", "ml", "kn"),
    *("my", "pa", "ro", "nl", "hu", "el", "cs", "sv", "he", "bg", "sr", "sr_Latn", "hr", "sk"),
    *("da", "fi", "nb", "ca", "lt", "sl", "lv", "et", "ms", "fil", "af", "is", "ga", "eu", "gl"),
    *("sq", "mk", "be", "ka", "hy", "az", "kk", "uz", "mn", "km", "lo", "si", "ne", "am", "zu"),
)
"""Languages whose names are known. In more of them, more words of a prompt would look like names.
"""

_NO_SPACES: Final = r"\u0590-\u074f\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\ud7ff"
"""Scripts whose words may stand without spaces between them; in Hebrew and Arabic some prefixes, in
Korean suffixes."""
_HAN: Final = "〇零一二三四五六七八九十"
_N: Final = rf"[\d{_HAN}]{{1,3}}"
_OFFSET: Final = r"(?: ?(?:UTC|GMT|Z|[A-Z]{2,4}T|(?:UTC|GMT)?[+-]\d{2}:?\d{2}))?"
_TIME: Final = re.compile(
    rf"\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?{_OFFSET}"
    r"|\d{1,2} ?[AaPp]\.?[Mm]\b\.?"
    r"|\d{1,2}(?:[.:]\d{2})? ?(?:o['’]clock|Uhr)"
    r"|\d{1,2}h\d{2}(?!\w)"
    rf"|{_N} ?[時时点點시] ?{_N} ?[分분](?: ?{_N} ?[秒초])?"
)
_MARK: Final = r"(?: ?[(（][月火水木金土日一二三四五六월화수목금토일][)）])?"
_DAY: Final = r"(?:0?[1-9]|[12]\d|3[01])"
_MONTH: Final = r"(?:0?[1-9]|1[0-2])"
_THREE_END: Final = r"(?![\w]|[./_-]\w)"
_WHOLE: Final = (
    rf"\d{{4}}-\d{{2}}-\d{{2}}T(?:{_TIME.pattern})"
    r"|\d{8}T\d{4,6}(?:Z|[+-]\d{2}:?\d{2})?"
    r"|(?:19|20)\d{2}-[0-3]\d{2}(?![\w-])"  # day of the year
    r"|\d{4}[- ]?W\d{2}(?:-?[1-7])?(?!\w)"
    r"|\d{1,2}[. /-] ?[IVX]{1,4}[. /-] ?\d{4}"
    rf"|(?:[\d{_HAN}]{{1,4}}|元) ?年 ?{_N} ?月(?: ?{_N} ?[日号號])?{_MARK}"
    rf"|{_N} ?月 ?{_N} ?[日号號]{_MARK}"
    rf"|\d{{4}} ?년 ?\d{{1,2}} ?월(?: ?\d{{1,2}} ?일)?{_MARK}"
    rf"|\d{{1,2}} ?월 ?\d{{1,2}} ?일{_MARK}"
    # three numbers, which are no address or version
    rf"|(?<!\w[./_-])\d{{4}}(?P<y>\u200f?[./_-] ?){_MONTH}(?P=y){_DAY}{_THREE_END}"
    rf"|(?<!\w[./_-])(?:{_DAY}(?P<d>\u200f?[./_-] ?){_MONTH}(?P=d)"
    rf"|{_MONTH}(?P<m>\u200f?[./_-] ?){_DAY}(?P=m))(?:\d{{4}}|\d{{2}}){_THREE_END}"
)
_ORDINAL: Final = r"(?:(?:st|nd|rd|th|er|ère|re|ème|e|[ºª])(?!\w)| ?[日号號일])"
_BETWEEN: Final = r"[ \t\u00a0\u202f\u200e\u200f,./()（）·'’،、–—-]"
_ANNOUNCED: Final = re.compile(
    r"(?:\btoday(?:['’]s date)? is\b"
    r"|\b(?:current|local) (?:date|time|day|week|month|season)(?: is\b|:)"
    r"|\b(?:date|time|now|today):|\bit is (?:now|currently)\b)[^\n.!?]{0,40}",
    re.IGNORECASE,
)
_WORD: Final = re.compile(r"\w+")
_LETTERS: Final = re.compile(r"[^\W\d_]+")
_UNSPACED: Final = re.compile(f"[{_NO_SPACES}]")
_QUOTED: Final = re.compile(r"'([^']*)'|([^A-Za-z']+)")
_UNITS: Final = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"),
    "ninth",
)
_ORDINALS: Final = (
    *_UNITS,
    *("tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth"),
    *("seventeenth", "eighteenth", "nineteenth", "twentieth"),
    *(f"twenty-{unit}" for unit in _UNITS),
    *("thirtieth", "thirty-first"),
)


class _Names(NamedTuple):
    """Names of months, weekdays and other parts of dates in all languages of the CLDR.

    A name may have several meanings, because languages use the same word for different things.
    """

    meanings: dict[str, frozenset[tuple[str, int]]]
    """Name → kinds (`month`, `weekday`, `quarter`, or `period` such as `PM`) with numbers."""
    months: frozenset[str]
    solo: frozenset[str]
    """Names that are a date alone."""
    links: frozenset[str]
    """Words that may stand between the parts of a date, such as `of` and `de`."""
    weeks: frozenset[str]
    """Words for a week."""


class _Piece(NamedTuple):
    """A part of a text that may belong to a date, such as a weekday or a number."""

    begin: int
    end: int
    kind: str
    """`date` and `solo` are a date alone, `time` a time, `name` is one with a number; `weekday`,
    `period` and `number` belong to what is next to them."""


_JOINS: Final = {
    "number": ("solo", "name"),
    "weekday": ("date",),
    "name": ("date", "solo", "number"),
    "period": ("solo", "name", "weekday", "time"),
}
"""Kind of a piece at the end of a date → kinds that the next piece must have."""


def date_places(text: str, days: Collection[date] = ()) -> list[tuple[int, int]]:
    """Return the begin and end of each date and time in a text.

    Args:
        text: the text.
        days: days on which the text may have been written. A short form such as `Saturday` or `week
            48` counts as a date only if one of these days is a Saturday or in week 48.
    """
    text = re.sub(r"\d", lambda match: str(int(match[0])), text)  # digits of any script
    gap = re.compile(_gap(text))
    runs: list[list[_Piece]] = []
    for piece in _pieces(text, days):
        if runs and gap.fullmatch(text, runs[-1][-1].end, piece.begin):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    trimmed = (_trimmed(_trimmed(run)[::-1])[::-1] for run in runs)
    return [(run[0].begin, _closed(text, run[0].begin, run[-1].end)) for run in trimmed if run]


def _closed(text: str, begin: int, end: int) -> int:
    """Return the end of a date, behind a bracket that closes one in it: `Monday (2026-11-30)`."""
    wide = "\N{FULLWIDTH LEFT PARENTHESIS}", "\N{FULLWIDTH RIGHT PARENTHESIS}"
    is_open = any(
        text.count(first, begin, end) > text.count(last, begin, end) and text.startswith(last, end)
        for first, last in (("(", ")"), wide)
    )
    return end + is_open


def date_literals(template: PromptTemplate, days: Collection[date]) -> list[str]:
    """Return the parts of a template's fixed text that name one of `days`, without duplicates."""
    fields = [re.escape(field) for field in template.fields]
    literals = re.split("|".join(fields), template.text) if fields else [template.text]
    dates = (text[begin:end] for text in literals for begin, end in date_places(text, days))
    return [literal for literal in dict.fromkeys(dates) if _says(literal, days)]


def _says(literal: str, days: Collection[date]) -> bool:
    """Return whether the date in the text `literal` is one of `days`.

    Return False for a time of day.
    """
    if _TIME.fullmatch(literal):
        return False
    numbers = {int(number) for number in re.findall(r"\d+", literal)}
    if not numbers or not date_places(literal):
        return True  # without year, month or day, it was found because it is true of one of them
    return any(
        f"{day:%Y%m%d}" in literal
        or (
            numbers & {day.day, day.isocalendar().week, day.timetuple().tm_yday}
            and numbers & {day.year, day.year % 100, day.year - 2018}
        )
        for day in days
    )


def undated_sentences(template: PromptTemplate) -> list[str]:
    """Return the passages of a template that announce a date or time but have no placeholder.

    English phrases are recognised. The date that follows may be in a form that `date_places` does
    not find.
    """
    fields = template.fields
    return [
        match[0]
        for match in _ANNOUNCED.finditer(template.text)
        if not any(field in match[0] for field in fields)
    ]


def days_around(days: Collection[date]) -> frozenset[date]:
    """Return the days, the day before each, and the day after each.

    The app may be in another time zone, where the date differs by a day.
    """
    return frozenset(day + timedelta(days=n) for day in days for n in (-1, 0, 1))


# --- a text ---------------------------------------------------------------------------------
def _trimmed(run: Sequence[_Piece]) -> Sequence[_Piece]:
    """Return the pieces without those at the beginning that belong to no date."""
    for at, piece in enumerate(run):
        following = run[at + 1].kind if at + 1 < len(run) else ""
        if piece.kind not in _JOINS or following in _JOINS[piece.kind]:
            return run[at:]
    return ()


def _pieces(text: str, days: Collection[date]) -> Iterator[_Piece]:
    """Yield the parts of a text that may belong to a date, in the order of the text."""
    true = {meaning for day in days for meaning in _meanings_of(day)}
    for match in re.compile(_pattern(text)).finditer(text):
        kind = str(match.lastgroup)
        if kind == "name":
            kind = _kind_of_name(match[0], true)
        elif kind not in ("date", "time"):
            kind = _kind_of_numbers(kind, match[0], true)
        if kind:
            yield _Piece(*match.span(), kind)


def _meanings_of(day: date) -> Iterator[tuple[str, int]]:
    yield from (("month", day.month), ("weekday", day.weekday()))
    yield from (("quarter", (day.month + 2) // 3), ("number", day.day), ("number", day.year % 100))
    yield from (("year", day.year), ("year", day.year + 543))  # the latter is Buddhist
    yield from (("day", day.day), ("day", day.timetuple().tm_yday))
    weeks = (day.isocalendar().week, int(day.strftime("%U")), int(day.strftime("%W")))
    yield from (("week", week) for week in weeks)
    for one, two in ((day.month, day.day), (day.month, day.year)):
        yield from (("pair", one * 10_000 + two), ("pair", two * 10_000 + one))


def _kind_of_name(name: str, true: Collection[tuple[str, int]]) -> str:
    meanings = _names().meanings[name]
    kinds = {kind for kind, _ in meanings}
    is_weak = len(name) == 2 and name.islower() and _has_spaces(name)
    if not meanings.isdisjoint(true) and not is_weak:
        return "solo" if name in _names().solo else "name"
    return "weekday" if "weekday" in kinds else "period" if kinds == {"period"} else ""


def _kind_of_numbers(kind: str, text: str, true: Collection[tuple[str, int]]) -> str:
    """Return the kind of a piece of text that contains numbers; empty if it cannot be a date.

    It can be a date only if its numbers are true of a day. `true` contains (kind, number) for
    everything that is true of the days.
    """
    values = [int(number) for number in re.findall(r"\d+", text)]
    if kind == "pair":
        return "solo" if ("pair", values[0] * 10_000 + values[1]) in true else ""
    if not values:  # an ordinal in words
        return "number" if ("number", _ORDINALS.index(text.replace(" ", "-")) + 1) in true else ""
    if kind == "number" and ("year", values[0]) in true:
        return "solo"
    if kind == "ordinal":
        return "solo" if ("day", values[0]) in true and values[0] < 32 else ""
    if (kind, values[0]) not in true:
        return ""
    return "number" if kind == "number" else "solo"


def _gap(text: str) -> str:
    """Return a regular expression of what may separate the parts of a date in a text."""
    return rf"{_BETWEEN}*(?:{_any_of(_names().links, text)}{_BETWEEN}*){{0,3}}"


def _pattern(text: str) -> str:
    """Return a regular expression that matches what may belong to a date in a text."""
    names = _names()
    gap, weeks = _gap(text), _any_of(names.weeks, text)
    begin = "(?<!\\w)" if _has_spaces(text) else "(?<![A-Za-z0-9_À-ÿ])"
    words = "|".join(ordinal.replace("-", "[- ]") for ordinal in reversed(_ORDINALS))
    day = rf"(?:{_DAY}(?:{_ORDINAL}|(?!\d))|(?:{words}))"
    year = r"[12]\d{3}(?!\d)"
    month = _any_of(names.months, text)
    named = (
        rf"{begin}{day}{gap}{month}{gap}{year}|{begin}{year}{gap}{month}{gap}{day}"
        rf"|{month}{gap}{day}{gap}{year}|{begin}{day}[-/. ]{{0,2}}{month}[-/. ]{{0,2}}[1-9]\d(?!\d)"
    )
    week = (
        r"\b(?i:W|KW|CW|WK)[. ]{0,2}\d{1,2}(?!\w)"
        rf"|{weeks}{_BETWEEN}*\d{{1,2}}(?!\d)|{begin}\d{{1,2}}{_ORDINAL}?{_BETWEEN}*{weeks}"
    )
    return (
        rf"(?P<date>{begin}(?:{_WHOLE})|{named})|(?P<time>{begin}(?:{_TIME.pattern}))"
        rf"|(?P<week>{week})"
        rf"|(?P<day>\b(?i:day) (?:no\. ?|number |#)?\d{{1,3}}(?!\w))"
        r"|(?P<pair>(?<![\w./-])\d{1,4}[./-]\d{1,4}(?!\w|[./-]\w))"
        rf"|(?P<name>{_any_of(names.meanings, text)})|(?P<ordinal>{begin}\d{{1,2}}{_ORDINAL})"
        rf"|(?P<number>\b(?:{words})\b|(?<!\d)\d{{1,4}}(?!\d))"
    )


def _any_of(names: Iterable[str], text: str) -> str:
    """Return a regular expression of those of the `names` that `text` contains.

    A name matches only as a whole word, except in scripts without spaces between words.
    """
    letter = r"[^\W\d_]" if _has_spaces(text) else "[A-Za-zÀ-ÿ]"
    words = set(_LETTERS.findall(text))
    some = sorted((name for name in names if name in text), key=len, reverse=True)
    others = [name for name in some if not _has_spaces(name[0])]
    spaced = [name for name in some if _has_spaces(name[0])]
    if _has_spaces(text):
        spaced = [name for name in spaced if words.issuperset(_LETTERS.findall(name))]
    first, second = ("|".join(map(re.escape, some)) or "(?!)" for some in (spaced, others))
    return rf"(?:(?<!{letter})(?:{first})(?!{letter})|(?:{second}))"


def _has_spaces(text: str) -> bool:
    """Return whether a text has only scripts in which spaces separate words."""
    return not _UNSPACED.search(text)


# --- names ----------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def _names() -> _Names:
    """Return the names of all languages; reading them takes a second."""
    meanings: dict[str, set[tuple[str, int]]] = defaultdict(set)
    links: set[str] = set()
    weeks = {"week", "weeks"}
    solo: set[str] = set()
    for language in LANGUAGES:
        locale = Locale.parse(language)
        tables = {"month": locale.months, "weekday": locale.days, "quarter": locale.quarters}
        for kind, table in tables.items():
            for forms in table.values():
                for width in ("wide", "abbreviated"):
                    for number, name in forms.get(width, {}).items():
                        for form in _forms(name, is_wide=width == "wide"):
                            meanings[form].add((kind, number))
                            enough = MIN_SOLO_LENGTH if _has_spaces(form[0]) else 2
                            is_long = len(form) >= enough
                            is_name = is_long and (width == "wide" or form[0].isupper())
                            if is_name or kind == "quarter":
                                solo.add(form)
        for widths in locale.day_periods.values():
            for name in (name for forms in widths.values() for name in forms.values()):
                for form in (name, name.upper(), name.lower()):
                    if len(form) > 1:
                        meanings[form].add(("period", 0))
        for key, pattern in locale.datetime_skeletons.items():
            some = set(_literals(pattern.pattern))
            links |= some
            if key == "yw":
                weeks |= {word.casefold() for word in some if len(word) > 1 or word > "\u2e80"}
        for table in locale.eras.values():
            links |= {name for name in table.values() if name.strip()}
        for pattern in (*locale.date_formats.values(), *locale.datetime_formats.values()):
            links |= set(_literals(str(getattr(pattern, "pattern", pattern))))
    weeks -= {word.casefold() for word in _SMALL_WORDS}
    links = {form for word in links | weeks for form in (word, word.capitalize(), word.upper())}
    frozen = {name: frozenset(some) for name, some in meanings.items()}
    months = frozenset(
        name for name, some in frozen.items() if any(kind == "month" for kind, _ in some)
    )
    return _Names(frozen, months, frozenset(solo), frozenset(links), frozenset(weeks))


_SMALL_WORDS: Final = ("of", "the", "de", "del", "des", "in", "im", "di", "da", "do", "den", "van")
"""Words next to the word for a week."""


def _forms(name: str, *, is_wide: bool) -> Iterator[str]:
    """Yield the spellings of a name: unchanged, capitalised, in upper case, without a final period.

    A long name is also yielded in lower case if `is_wide`, which means that it is not abbreviated.
    """
    if any(character.isalpha() for character in name):
        forms = {name, name.upper(), name[0].upper() + name[1:], name.removesuffix(".")}
        if is_wide and len(name) > 5:
            forms.add(name.lower())
        yield from (form for form in forms if len(form) > 1)


def _literals(pattern: str) -> Iterator[str]:
    """Yield the words of a CLDR pattern that are not fields, such as `de` in `d 'de' MMMM`."""
    for quoted, plain in _QUOTED.findall(pattern):
        for word in _WORD.findall(quoted or plain):
            if any(character.isalpha() for character in word):
                yield word

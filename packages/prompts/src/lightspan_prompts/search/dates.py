"""Detection of dates and times in a text, in the languages of the CLDR (library `babel`).

A date with day, month and year, and a time of day, are found wherever they stand. A shorter form,
such as `Saturday`, `November 2026` or `week 48`, is found only if it is true of one of the days
that the caller names: a prompt that contains it will probably have another text on another day.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from datetime import date, timedelta
from functools import lru_cache
from typing import Final, NamedTuple

from babel import Locale

from lightspan.schema.prompts import PromptTemplate

MAX_ATOMS: Final = 9
"""Maximum numbers and names in one date."""
MIN_SOLO_LENGTH: Final = 3
"""Minimum characters of a name that is found without a number next to it. In scripts without spaces
between words the minimum is 2."""

LANGUAGES: Final = (
    *("en", "zh", "zh_Hant", "hi", "es", "fr", "ar", "bn", "pt", "ru", "ur", "id", "de", "ja"),
    *("sw", "mr", "te", "tr", "ta", "vi", "ko", "it", "th", "gu", "fa", "pl", "uk", "ml", "kn"),
    *("my", "pa", "ro", "nl", "hu", "el", "cs", "sv", "he", "bg", "sr", "sr_Latn", "hr", "sk"),
    *("da", "fi", "nb", "ca", "lt", "sl", "lv", "et", "ms", "fil", "af", "is", "ga", "eu", "gl"),
    *("sq", "mk", "be", "ka", "hy", "az", "kk", "uz", "mn", "km", "lo", "si", "ne", "am", "zu"),
)
"""Languages whose names are known. In more of them, more words of a prompt would look like names.
"""

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
_WHOLE: Final = re.compile(
    rf"\d{{4}}-\d{{2}}-\d{{2}}T(?:{_TIME.pattern})"
    r"|\d{8}T\d{4,6}(?:Z|[+-]\d{2}:?\d{2})?"
    r"|(?:19|20)\d{2}-[0-3]\d{2}(?![\w-])"  # day of the year
    r"|\d{4}[- ]?W\d{2}(?:-?[1-7])?(?!\w)"
    r"|\d{1,2}[. /-] ?[IVX]{1,4}[. /-] ?\d{4}"
    rf"|(?:[\d{_HAN}]{{1,4}}|元) ?年 ?{_N} ?月(?: ?{_N} ?[日号號])?{_MARK}"
    rf"|{_N} ?月 ?{_N} ?[日号號]{_MARK}"
    rf"|\d{{4}} ?년 ?\d{{1,2}} ?월(?: ?\d{{1,2}} ?일)?{_MARK}"
    rf"|\d{{1,2}} ?월 ?\d{{1,2}} ?일{_MARK}"
)
_THREE: Final = re.compile(
    r"(\d{1,4})\u200f?([./_-])( ?)(\d{1,2})\u200f?\2\3(\d{1,4})(?![\w]|[./_-]\w)"
)
_NUMBER: Final = re.compile(
    r"(\d+)(?:(?:st|nd|rd|th|er|ère|re|ème|e|[ºª])(?!\w)| ?[日号號일])?", re.IGNORECASE
)
_YEAR_DAY: Final = re.compile(r"day (?:no\. ?|number |#)?(\d{1,3})(?!\w)", re.IGNORECASE)
_WEEK: Final = re.compile(r"(?:W|KW|CW|WK)[. ]{0,2}(\d{1,2})(?!\w)", re.IGNORECASE)
_PUNCTUATION: Final = re.compile(r"[ \t\u00a0\u202f\u200e\u200f]+|[,./()（）·'’،、–—-]")
_ANNOUNCED: Final = re.compile(
    r"(?:\btoday(?:['’]s date)? is\b"
    r"|\b(?:current|local) (?:date|time|day|week|month|season)(?: is\b|:)"
    r"|\b(?:date|time|now|today):|\bit is (?:now|currently)\b)[^\n.!?]{0,40}",
    re.IGNORECASE,
)
_WORD: Final = re.compile(r"\w+")
_QUOTED: Final = re.compile(r"'([^']*)'|([^A-Za-z']+)")

_ORDINALS: Final = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"),
    *("tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth"),
    *("seventeenth", "eighteenth", "nineteenth", "twentieth"),
)


class _Meaning(NamedTuple):
    """What a name may mean: several languages may share it."""

    months: frozenset[int] = frozenset()
    weekdays: frozenset[int] = frozenset()
    quarters: frozenset[int] = frozenset()
    number: int = 0
    """Day of the month, of an ordinal in words; else 0."""
    is_period: bool = False
    """Whether it is a part of the day, such as `PM`."""
    is_weak: bool = False
    """Whether the name is so short that it counts only next to a whole date, as `so` for Sunday."""
    is_solo: bool = False
    """Whether the name alone is enough for a date."""


class _Atom(NamedTuple):
    """A number, a name or a whole date in a text, or a word between them."""

    begin: int
    end: int
    kind: str
    """`whole`, `time`, `number`, `name`, `week`, `day`, `link` or `space`."""
    value: int = 0
    meaning: _Meaning = _Meaning()
    is_ordinal: bool = False


class _Names(NamedTuple):
    """The names of the CLDR."""

    meanings: dict[str, _Meaning]
    by_start: dict[str, list[str]]
    """First two characters → names that begin with them, the longest first."""
    links: frozenset[str]
    """Words that may stand between the parts of a date, such as `of` and `de`."""
    weeks: frozenset[str]
    """Words for a week."""


def date_places(text: str, days: Collection[date] = ()) -> list[tuple[int, int]]:
    """Return begin and end of each date and time in a text.

    Args:
        text: the text.
        days: days of which a form without day, month or year has to be true.
    """
    places = []
    for run in _runs(_atoms(text)):
        at = 0
        while at < len(run):
            for end in range(min(len(run), at + 2 * MAX_ATOMS), at, -1):
                some = run[at:end]
                if _stands_alone(some[0]) and _stands_alone(some[-1]) and _is_date(some, days):
                    places.append((some[0].begin, some[-1].end))
                    at = end
                    break
            else:
                at += 1
    return places


def date_literals(template: PromptTemplate, days: Collection[date]) -> list[str]:
    """Return the literals of a template that say which of `days` it is, each once."""
    fields = [re.escape(field) for field in template.fields]
    literals = re.split("|".join(fields), template.text) if fields else [template.text]
    dates = (text[begin:end] for text in literals for begin, end in date_places(text, days))
    return [literal for literal in dict.fromkeys(dates) if _says(literal, days)]


def _says(literal: str, days: Collection[date]) -> bool:
    """Return whether a date is one of `days`; False for a time of day."""
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
    """Return where a template announces a date or time, in English, and has no placeholder for it.

    Such a text may be in a form that `date_places` does not know.
    """
    fields = template.fields
    return [
        match[0]
        for match in _ANNOUNCED.finditer(template.text)
        if not any(field in match[0] for field in fields)
    ]


def days_around(days: Collection[date]) -> frozenset[date]:
    """Return the days with their neighbours: an app may be in any time zone."""
    return frozenset(day + timedelta(days=n) for day in days for n in (-1, 0, 1))


# --- a text ---------------------------------------------------------------------------------
def _atoms(text: str) -> Iterator[_Atom | None]:
    """Yield what may belong to a date, in order; None where no date goes on."""
    names, at, size, last = _names(), 0, len(text), -1
    while at < size:
        atom = _atom(names, text, at, follows=last == at)
        yield atom
        if atom is not None:
            at = last = atom.end
            continue
        at += 1
        while at < size and text[at].isalnum() and not _cuts(text, at):
            at += 1


def _atom(names: _Names, text: str, at: int, *, follows: bool) -> _Atom | None:
    """Return the number, name or word that begins at a position; None if none does.

    Args:
        names: the names of all languages.
        text: the text.
        at: the position.
        follows: whether another one ends there.
    """
    character, before = text[at], text[at - 1] if at else " "
    if match := _PUNCTUATION.match(text, at):
        return _Atom(at, match.end(), "space")
    is_digit = character.isdigit()
    if is_digit or character in f"{_HAN}元":
        if not follows and before.isalnum() and not _has_no_spaces(before):
            return None  # a part of a word or of a number
        if match := _WHOLE.match(text, at) or _three(text, at):
            return _Atom(at, match.end(), "whole")
        if match := _TIME.match(text, at):
            return _Atom(at, match.end(), "time")
    elif not _cuts(f"{before}{character}", 1):
        return None
    for name in (*names.by_start.get(text[at : at + 2], ()), *names.by_start.get(character, ())):
        end = at + len(name)
        if text.startswith(name, at) and (end == len(text) or _cuts(text, end)):
            if name in names.meanings:
                return _Atom(at, end, "name", meaning=names.meanings[name])
            return _Atom(at, end, "link", value=int(name.casefold() in names.weeks))
    if match := _NUMBER.match(text, at):
        number = match[1]
        return _Atom(at, match.end(), "number", int(number), is_ordinal=match[0] != number)
    for kind, pattern in (("week", _WEEK), ("day", _YEAR_DAY)):
        if match := pattern.match(text, at):
            return _Atom(at, match.end(), kind, int(match[1]))
    return None


def _three(text: str, at: int) -> re.Match[str] | None:
    """Return the match of a date in three numbers, such as `28.11.2026` or `2026/11/28`."""
    match = _THREE.match(text, at)
    if match is None or (at > 1 and text[at - 1] in "./_-" and text[at - 2].isalnum()):
        return None  # an address or a version
    one, two, three = match[1], match[4], match[5]
    if len(one) == 4:
        is_date = len(three) < 3 and 1 <= int(two) <= 12 and 1 <= int(three) <= 31
    else:
        is_year = len(one) < 3 and len(three) in (2, 4)
        is_date = is_year and 1 <= min(int(one), int(two)) <= 12 and max(int(one), int(two)) <= 31
    return match if is_date else None


def _cuts(text: str, at: int) -> bool:
    """Return whether a name may begin or end at a position."""
    one, two = text[at - 1], text[at]
    is_one_word = one.isalpha() and two.isalpha()
    return not is_one_word or _has_no_spaces(one) or _has_no_spaces(two)


def _has_no_spaces(character: str) -> bool:
    """Return whether words of the character's script may be written without spaces between them.

    That is so in Hebrew and Arabic for some prefixes, and in Korean for suffixes.
    """
    return "\u0590" <= character <= "\u074f" or (
        "\u0e00" <= character <= "\ud7ff"
        and not (
            "\u0f00" <= character <= "\u0fff"
            or "\u10a0" <= character <= "\u177f"
            or "\u1800" <= character <= "\u2e7f"
        )
    )


def _runs(atoms: Iterator[_Atom | None]) -> Iterator[list[_Atom]]:
    """Yield the atoms between which nothing else stands."""
    run: list[_Atom] = []
    for atom in [*atoms, None]:
        if atom is not None:
            run.append(atom)
        elif run:
            yield run
            run = []


def _stands_alone(atom: _Atom) -> bool:
    return atom.kind not in ("space", "link") or bool(atom.value)


def _is_date(run: Sequence[_Atom], days: Collection[date]) -> bool:
    atoms = [atom for atom in run if atom.kind not in ("space", "link")]
    if not 0 < len(atoms) <= MAX_ATOMS:
        return False
    kinds = [atom.kind for atom in atoms]
    if kinds.count("number") > 3 or kinds.count("whole") > 1 or kinds.count("time") > 1:
        return False
    periods = [atom for atom in atoms if atom.meaning.is_period]
    if periods and "time" not in kinds and not any(atom.meaning.weekdays for atom in atoms):
        return False
    meanings = [atom.meaning for atom in atoms if atom.kind == "name" and atom not in periods]
    numbers = [atom for atom in atoms if atom.kind == "number"]
    if "whole" in kinds:
        return not numbers and all(meaning.weekdays for meaning in meanings) and len(meanings) < 2
    if not numbers and not meanings and "time" in kinds:
        return "week" not in kinds
    return _is_whole(atoms, meanings, numbers) or any(
        _is_of(day, run, atoms, meanings, numbers) for day in days
    )


def _is_whole(
    atoms: Sequence[_Atom], meanings: Sequence[_Meaning], numbers: Sequence[_Atom]
) -> bool:
    """Return whether there are a month's name, a day and a year, and at most a weekday more."""
    days = [meaning.number for meaning in meanings if meaning.number]
    months = [place for place, atom in enumerate(atoms) if atom.meaning.months]
    others = [m for m in meanings if not m.months and not m.number]
    if len(months) != 1 or not all(other.weekdays for other in others) or len(others) > 1:
        return False
    years = [n for n in numbers if 1000 <= n.value < 3000 and not n.is_ordinal]
    days += [n.value for n in numbers if n not in years]
    if len(years) == 1:
        return len(days) == 1 and 1 <= days[0] <= 31
    # 28-Nov-26
    places = [atoms.index(number) for number in numbers]
    return (
        len(days) == 2
        and not years
        and places == [months[0] - 1, months[0] + 1]
        and 1 <= days[0] <= 31
        and 10 <= days[1] <= 99
    )


def _is_of(
    day: date,
    run: Sequence[_Atom],
    atoms: Sequence[_Atom],
    meanings: Sequence[_Meaning],
    numbers: Sequence[_Atom],
) -> bool:
    """Return whether what the atoms say is true of a day, and is enough to say it."""
    has_week = any(atom.kind == "week" or (atom.kind == "link" and atom.value) for atom in run)
    quarter = (day.month + 2) // 3
    for meaning in meanings:
        if meaning.is_weak:
            return False
        if meaning.number and meaning.number != day.day:
            return False
        is_true = (
            day.month in meaning.months
            or day.weekday() in meaning.weekdays
            or quarter in meaning.quarters
        )
        if not (is_true or meaning.number):
            return False
    week = {day.isocalendar().week, int(day.strftime("%U")), int(day.strftime("%W"))}
    values = [atom.value for atom in atoms if atom.kind == "week"]
    ordinals = [atom.value for atom in atoms if atom.kind == "day"]
    if not {*values} <= week or not {*ordinals} <= {day.day, day.timetuple().tm_yday}:
        return False
    named = [m for m in meanings if m.months or m.weekdays or m.quarters]
    years = {day.year, day.year + 543, day.year - 2018}  # Buddhist years, those of Reiwa
    roles = [{day.day}, years | {day.year % 100}]
    if not any(meaning.months for meaning in named):
        roles.append({day.month})
    if has_week and not values:
        roles.append(week)
    if not _take(roles, [number.value for number in numbers]):
        return False
    if len(named) == 1 and not numbers and len(atoms) == 1:
        return named[0].is_solo
    if named or values or ordinals:
        return True
    if has_week:
        return any(number.value in week for number in numbers)
    if len(numbers) == 1:
        [number] = numbers
        return number.value in (day.year, day.year + 543) or (
            number.is_ordinal and number.value == day.day
        )
    # 11/28, 28.11., 11/2026
    return len(numbers) == 2 and [atom.end - atom.begin for atom in run[1:-1]] == [1]


def _take(roles: Sequence[Collection[int]], values: Sequence[int]) -> bool:
    """Return whether each value can have a role of its own."""
    if not values:
        return True
    return any(
        values[0] in role and _take([*roles[:n], *roles[n + 1 :]], values[1:])
        for n, role in enumerate(roles)
    )


# --- names ----------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def _names() -> _Names:
    """Return the names of all languages; reading them takes a second."""
    table_of: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    links: set[str] = set()
    weeks = {"week", "weeks"}
    solo: set[str] = set()
    for language in LANGUAGES:
        locale = Locale.parse(language)
        tables = (("months", locale.months), ("weekdays", locale.days))
        for kind, table in (*tables, ("quarters", locale.quarters)):
            for forms in table.values():
                for width in ("wide", "abbreviated"):
                    for number, name in forms.get(width, {}).items():
                        _add_name(table_of, solo, name, kind, number, is_wide=width == "wide")
        for widths in locale.day_periods.values():
            for name in (name for forms in widths.values() for name in forms.values()):
                for form in (name, name.upper(), name.lower()):
                    if len(form) > 1:
                        table_of[form]["periods"].add(1)
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
    for number, word in enumerate(_ORDINALS, 1):
        table_of[word]["number"].add(number)
    for tens, word in ((20, "twenty"), (30, "thirty")):
        for number, unit in enumerate(_ORDINALS[: 9 if tens == 20 else 1], tens + 1):
            for between in "- ":
                table_of[f"{word}{between}{unit}"]["number"].add(number)
    table_of["thirtieth"]["number"].add(30)
    meanings = {
        name: _Meaning(
            months=frozenset(kinds.get("months", ())),
            weekdays=frozenset(kinds.get("weekdays", ())),
            quarters=frozenset(kinds.get("quarters", ())),
            number=max(kinds.get("number", {0})),
            is_period=set(kinds) == {"periods"},
            is_weak=len(name) == 2 and name.islower() and not _has_no_spaces(name[0]),
            is_solo=name in solo,
        )
        for name, kinds in table_of.items()
    }
    links = {form for word in links | weeks for form in (word, word.capitalize(), word.upper())}
    by_start: dict[str, list[str]] = defaultdict(list)
    for name in sorted({*meanings, *links}, key=len, reverse=True):
        by_start[name[:2]].append(name)
    return _Names(meanings, by_start, frozenset(links), frozenset(weeks))


_SMALL_WORDS: Final = ("of", "the", "de", "del", "des", "in", "im", "di", "da", "do", "den", "van")
"""Words next to the word for a week."""


def _add_name(
    table_of: dict[str, dict[str, set[int]]],
    solo: set[str],
    name: str,
    kind: str,
    number: int,
    *,
    is_wide: bool,
) -> None:
    if not any(character.isalpha() for character in name):
        return
    forms = {name, name.upper(), name[0].upper() + name[1:], name.removesuffix(".")}
    if is_wide and len(name) > 5:
        forms.add(name.lower())
    for form in forms:
        if len(form) < 2:
            continue
        table_of[form][kind].add(number)
        enough = 2 if _has_no_spaces(form[0]) else MIN_SOLO_LENGTH
        is_long = len(form) >= enough and (is_wide or form[0].isupper())
        if is_long or kind == "quarters":
            solo.add(form)


def _literals(pattern: str) -> Iterator[str]:
    """Yield the words of a CLDR pattern that are not fields, such as `de` in `d 'de' MMMM`."""
    for quoted, plain in _QUOTED.findall(pattern):
        for word in _WORD.findall(quoted or plain):
            if any(character.isalpha() for character in word):
                yield word

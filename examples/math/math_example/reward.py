"""The reward: 1 if the answer is exactly right, else 0."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Final

MARK: Final = "####"
"""Text before the final answer, as in GSM8K."""

_BOXED: Final = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
r"""Matches `\boxed{…}` with up to two levels of braces inside, as in `\boxed{\frac{3}{4}}`."""
_FRACTION: Final = re.compile(r"(\d?)\s*\\[dt]?frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}")
_WHOLE: Final = r"(?:\d{1,3}(?:[,_]\d{3})+|\d+)"
_NUMBER: Final = re.compile(
    rf"""
    (?P<sign>(?<![\w.)])[-−]\s?)?  # after a number or a word it is a minus or a hyphen
    (?:[$€£]\s?)?
    (?<![\w.])(?:
        (?:(?P<units>{_WHOLE})\s)?(?P<top>{_WHOLE})\s?/\s?(?P<bottom>{_WHOLE})
        | (?P<decimal>(?:{_WHOLE}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,2}}(?!\w))?)
    )
    """,
    re.VERBOSE | re.ASCII,
)
_UNIT: Final = re.compile(r"[^\d+*^()=,-]*")
_READ: Final = 2000
"""Number of characters at the end of a reply in which the answer is looked for."""
_LONGEST: Final = 200
"""Maximum length of a number in characters; a longer number does not count."""


def exact_answer(reply: str, answer: str) -> float:
    """Return 1.0 if the final answer of a reply is exactly `answer`, else 0.0.

    Numbers are compared as rationals: `1,200`, `1200.0` and `$1200` are equal, `2/3` and `0.667`
    are not. If `answer` is not a number (a choice, such as `C`), it is compared as a word.
    """
    final = final_answer(reply)
    wanted = number(answer)
    if wanted is not None:
        return float(number(final) == wanted)
    words = re.findall(r"\w+", final)
    # "#### C) 12" names the choice first, "So the answer is C." last
    word = "" if not words else words[-1] if final == reply else words[0]
    return float(word.casefold() == answer.strip().casefold())


def final_answer(reply: str) -> str:
    r"""Return the final answer of a reply: after `####`, else in `\boxed{}`, else all of it."""
    if MARK in reply:
        lines = reply.rpartition(MARK)[2].strip().splitlines()
        return lines[0] if lines else ""
    boxed = _BOXED.findall(reply)
    return boxed[-1] if boxed else reply


def number(text: str) -> Fraction | None:
    """Return the last number in a text exactly; None if the text has no number.

    It reads `-3`, `1,200`, `1_200`, `12.50`, `$12`, `3/4`, `1 1/2` and LaTeX fractions; it ignores
    units and `%`.
    """
    matches = list(_NUMBER.finditer(_plain(text[-_READ:])))
    if not matches or len(matches[-1].group()) > _LONGEST:
        return None
    last = matches[-1]
    part = {name: re.sub("[,_]", "", part or "") for name, part in last.groupdict().items()}
    if part["bottom"]:
        if int(part["bottom"]) == 0:
            return None
        value = int(part["units"] or 0) + Fraction(int(part["top"]), int(part["bottom"]))
    else:
        value = Fraction(part["decimal"])
    return -value if part["sign"] else value


def is_one_number(text: str) -> bool:
    """Return whether a text is one number with at most a unit: `12 km/h`, not `1 h 30 min`."""
    plain = _plain(text).strip()
    match = _NUMBER.match(plain)
    return match is not None and _UNIT.fullmatch(plain, match.end()) is not None


def _plain(text: str) -> str:
    r"""Return the text with LaTeX numbers in plain form: `1\frac{1}{2}` becomes `1 1/2`."""

    def typed(fraction: re.Match[str]) -> str:
        before, top, bottom = fraction.groups()
        return f"{before}{' ' if before else ''}{top}/{bottom}"

    if "\\" not in text:
        return text
    return _FRACTION.sub(typed, text.replace("{,}", ",").replace("\\,", ""))


def constant_answer_scores(answers: Iterable[str]) -> Mapping[str, float]:
    """Return answer → mean reward for giving this answer to every task, the highest first.

    Args:
        answers: the right answers of the tasks.
    """
    counted = Counter(answers)
    return {answer: count / counted.total() for answer, count in counted.most_common()}

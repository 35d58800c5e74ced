"""Questions about a chart, what a reading of the chart says, and the computation of the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

_READ: Final = re.compile(r"\b([A-Z])\s*[:=]?\s*(\d{1,3})\b")


class Kind(NamedTuple):
    """A kind of question."""

    text: str
    """The question, with `{}` for the names of columns."""
    columns: int
    """Number of columns that it names."""
    compute: Callable[[Sequence[int]], int]
    """Function from the columns' values to the answer."""


KINDS: Final[Mapping[str, Kind]] = {
    "sum": Kind("What is {} plus {}?", 2, sum),
    "difference": Kind("How far apart are {} and {}?", 2, lambda of: abs(of[0] - of[1])),
    "largest": Kind("What is the largest of {}, {} and {}?", 3, max),
}
_PATTERNS: Final = {
    name: re.compile(re.escape(kind.text).replace(r"\{\}", "([A-Z])"))
    for name, kind in KINDS.items()
}


class Question(NamedTuple):
    """A question that `parse` understood."""

    kind: Kind
    names: tuple[str, ...]
    """Names of the columns, in the order of the question."""

    def answer(self, values: Mapping[str, int]) -> int | None:
        """Return the answer; None if the value of a column is missing."""
        if any(name not in values for name in self.names):
            return None
        return self.kind.compute([values[name] for name in self.names])


def parse(question: str) -> Question:
    """Return what a question asks.

    Raises:
        ValueError: the question is none of `KINDS`.
    """
    for name, pattern in _PATTERNS.items():
        if found := pattern.fullmatch(question.strip()):
            return Question(KINDS[name], found.groups())
    forms = ", ".join(repr(kind.text.format(*"ABC")) for kind in KINDS.values())
    raise ValueError(f"the question {question!r} is of no known form; ask like {forms}")


def parse_reading(text: str) -> dict[str, int]:
    """Return column → value of a reading such as `A 3, C 5`; empty if it names none.

    A column that is read twice with different values is left out.
    """
    read: dict[str, set[int]] = {}
    for name, value in _READ.findall(text):
        read.setdefault(name, set()).add(int(value))
    return {name: values.pop() for name, values in read.items() if len(values) == 1}


def write_reading(values: Mapping[str, int]) -> str:
    """Return a reading as the reader is asked to write it."""
    return ", ".join(f"{name} {value}" for name, value in values.items())

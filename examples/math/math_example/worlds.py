"""Generated word problems of one to three operations, with their answers.

A problem is a story: it starts with a number of things, each sentence does something with that
number, and the last asks for it. The chain of phrases is the story's *plot*.

Splits are by story. Each plot belongs to one split, and so does each name and each kind of thing
(`words.split_of`): in the test, unknown people do with unknown kinds of things what happens in that
order in no training story. Demonstrations keep to the plots, names and kinds of train. Shared by
all splits are the phrases and the single words.

A problem is kept only if no mistake of `expressions.mistakes` gives its answer, and if its answer
is none of the numbers in it: neither a sloppy expression nor an echo is ever rewarded.

Everything follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple, TypedDict

from math_example.calculator import CalculatorError, evaluate, format_number
from math_example.expressions import Expression, Operation, mistakes, numbers, steps, value
from math_example.words import (
    PHRASES,
    QUESTIONS,
    Frame,
    Split,
    kind_of_thing,
    person,
    split_of,
)

COUNTS: Final[Mapping[Split, int]] = {"train": 2000, "dev": 500, "test": 600}
"""Problems of each split."""

OPERATIONS: Final[Mapping[int, float]] = {1: 1, 2: 2, 3: 2}
"""How often problems of so many operations are tried."""

LARGEST: Final = 600
"""The largest number of things at any point of a story."""

_MIDDLE: Final[Mapping[Frame, float]] = {
    "add": 3,
    "subtract": 3,
    "multiply": 3,
    "divide": 2,
    "add bags": 2,
    "subtract bags": 2,
}

_MAKES: Final[Mapping[Frame, int]] = {"start": 0, "add bags": 2, "subtract bags": 2}
"""Operations that a frame makes, where it is not one."""


class Task(TypedDict):
    """One problem with its answer; the app is given the problem only."""

    id: str
    problem: str
    answer: str


class Step(NamedTuple):
    """A phrase, as frame and index."""

    frame: Frame
    phrase: int


Plot = tuple[Step, ...]


@dataclass(frozen=True)
class Problem:
    """A word problem and what has to be computed."""

    text: str
    expression: Operation
    plot: Plot

    @property
    def answer(self) -> str:
        """The exact answer."""
        return format_number(value(self.expression))


def make_tasks(split: Split, *, seed: int = 0, count: int | None = None) -> list[Task]:
    """The tasks of a split, all different; by default as many as `COUNTS` says."""
    rng = random.Random(f"{split} {seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < (COUNTS[split] if count is None else count):
        problem = make_problem(split, rng)
        problems.setdefault(problem.text, problem)
    return [
        Task(id=f"{split}-{index:04d}", problem=problem.text, answer=problem.answer)
        for index, problem in enumerate(problems.values())
    ]


def make_problem(split: Split, rng: random.Random) -> Problem:
    """A problem of a split."""
    while True:
        plot = _draw_plot(rng)
        if plot_split(plot) != split:
            continue
        problem = _tell(plot, split, rng)
        if problem is not None and is_telling(problem.expression):
            return problem


def plot_split(plot: Plot) -> Split:
    """The split that a plot belongs to."""
    return split_of(" ".join(f"{frame}:{phrase}" for frame, phrase in plot))


def is_telling(expression: Operation) -> bool:
    """Whether every mistake, and every number of the problem, differs from the answer."""
    answer = value(expression)
    if answer in numbers(expression):
        return False
    return all(_evaluated(text) != answer for text in mistakes(expression).values())


def _evaluated(text: str) -> Fraction | None:
    try:
        return evaluate(text)
    except CalculatorError:
        return None


def _draw_plot(rng: random.Random) -> Plot:
    """Phrases that make one to three operations."""
    (wanted,) = rng.choices(list(OPERATIONS), list(OPERATIONS.values()))
    frames: list[Frame] = ["bags" if rng.random() < 0.25 else "start"]
    made = _MAKES.get(frames[0], 1)
    while made < wanted:
        if wanted - made == 1 and rng.random() < 0.12:
            frames.append("missing")
        else:
            fitting = {f: w for f, w in _MIDDLE.items() if made + _MAKES.get(f, 1) <= wanted}
            frames += rng.choices(list(fitting), list(fitting.values()))
        made += _MAKES.get(frames[-1], 1)
    return tuple(Step(frame, rng.randrange(len(PHRASES[frame]))) for frame in frames)


def _tell(plot: Plot, split: Split, rng: random.Random) -> Problem | None:
    """A story with this plot; None if the numbers drawn do not work out."""
    who, things = person(split, rng), kind_of_thing(split, rng)
    expression: Expression = 0
    sentences = []
    for frame, phrase in plot:
        many, few = rng.randint(3, 60), rng.randint(2, 9)
        n = many if frame in _MANY else few
        m = rng.randint(2, 12)
        if frame == "missing":
            n = rng.randint(20, LARGEST)
        expression = _APPLIED[frame](expression, n, m)
        sentences.append(PHRASES[frame][phrase].format(who=who, things=things, n=n, m=m))
    if plot[-1].frame != "missing":
        sentences.append(rng.choice(QUESTIONS).format(who=who, things=things))
    if not isinstance(expression, Operation) or not _works_out(expression):
        return None
    return Problem(" ".join(sentences), expression, plot)


def _works_out(expression: Operation) -> bool:
    """Whether every number of things is whole, positive and not too large."""
    values = [value(step) for step in steps(expression)]
    return all(number.denominator == 1 and 0 < number <= LARGEST for number in values)


_MANY: Final = ("start", "add", "subtract")
"""Frames whose number may be above nine."""

_APPLIED: Final[Mapping[Frame, Callable[[Expression, int, int], Expression]]] = {
    "start": lambda _, n, m: n,
    "bags": lambda _, n, m: Operation("*", n, m),
    "add": lambda so_far, n, _: Operation("+", so_far, n),
    "subtract": lambda so_far, n, _: Operation("-", so_far, n),
    "multiply": lambda so_far, n, _: Operation("*", so_far, n),
    "divide": lambda so_far, n, _: Operation("/", so_far, n),
    "add bags": lambda so_far, n, m: Operation("+", so_far, Operation("*", n, m)),
    "subtract bags": lambda so_far, n, m: Operation("-", so_far, Operation("*", n, m)),
    "missing": lambda so_far, n, _: Operation("-", n, so_far),
}
"""What a sentence does with the number of things so far."""

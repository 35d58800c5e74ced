"""Generated word problems of one to three operations, with their answers.

A problem is a story: it starts with a number of things, each sentence changes that number, and the
last sentence asks for it. The sequence of phrases is the story's *plot*.

Splits are by story. Each plot, each name and each kind of thing belongs to one split
(`words.split_of`). So the test has people, kinds of things and sequences of events that occur in no
training story. Demonstrations use the plots, names and kinds of train. All splits share phrases and
single words.

A problem is kept only if no mistake of `expressions.mistakes` gives its answer, and if its answer
is none of its numbers. So neither a mistake nor a repeated number is ever rewarded.

The seed determines everything.
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
"""Number of problems per split."""

OPERATIONS: Final[Mapping[int, float]] = {1: 1, 2: 2, 3: 2}
"""Number of operations → weight with which such problems are drawn."""

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
"""Number of operations that a frame adds, if not one."""


class Task(TypedDict):
    """A problem with its answer; the app gets the problem only."""

    id: str
    problem: str
    answer: str


class Step(NamedTuple):
    """A phrase of a plot: its frame, and its index in `PHRASES[frame]`."""

    frame: Frame
    phrase: int


Plot = tuple[Step, ...]


@dataclass(frozen=True)
class Problem:
    """A word problem with the expression that solves it."""

    text: str
    expression: Operation
    plot: Plot

    @property
    def answer(self) -> str:
        """The exact answer as text."""
        return format_number(value(self.expression))


def make_tasks(split: Split, *, seed: int = 0, count: int | None = None) -> list[Task]:
    """Return `count` different tasks of a split; None for the number in `COUNTS`."""
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
    """Return a random problem of a split."""
    while True:
        plot = _draw_plot(rng)
        if plot_split(plot) != split:
            continue
        problem = _tell(plot, split, rng)
        if problem is not None and is_telling(problem.expression):
            return problem


def plot_split(plot: Plot) -> Split:
    """Return the split of a plot."""
    return split_of(" ".join(f"{frame}:{phrase}" for frame, phrase in plot))


def is_telling(expression: Operation) -> bool:
    """Return whether no mistake, and no number of the problem, equals the answer."""
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
    """Return a random plot with one to three operations."""
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
    """Return a story with this plot; None if the random numbers give no valid problem."""
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
    """Return whether every intermediate number of things is whole and from 1 to `LARGEST`."""
    values = [value(step) for step in steps(expression)]
    return all(number.denominator == 1 and 0 < number <= LARGEST for number in values)


_MANY: Final = ("start", "add", "subtract")
"""Frames whose number may be above 9."""

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
"""Frame → function (expression so far, n, m) that returns the expression after the sentence."""

"""Test the generated problems: splits by story, and answers that need the right computation."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from math_example.calculator import evaluate
from math_example.demonstrations import (
    demonstrate,
)
from math_example.expressions import (
    Expression,
    Operation,
    mistakes,
    numbers,
    steps,
    value,
    write,
)
from math_example.reward import constant_answer_scores, exact_answer
from math_example.words import (
    KINDS,
    PHRASES,
    SYLLABLES,
    THINGS,
    Split,
    split_of,
)
from math_example.worlds import (
    COUNTS,
    LARGEST,
    Problem,
    Task,
    make_problem,
    make_tasks,
    plot_split,
)

SPLITS: tuple[Split, ...] = ("train", "dev", "test")
NAME = re.compile(rf"(?i:{'|'.join(SYLLABLES)}){{2,3}}")


@pytest.fixture(scope="module")
def tasks() -> dict[Split, list[Task]]:
    return {split: make_tasks(split) for split in SPLITS}


@pytest.fixture(scope="module")
def problems() -> dict[Split, list[Problem]]:
    return {
        split: [make_problem(split, rng) for _ in range(400)]
        for split in SPLITS
        for rng in [random.Random(split)]
    }


def test_no_problem_is_in_two_splits(tasks: dict[Split, list[Task]]) -> None:
    assert make_tasks("dev", count=50) == tasks["dev"][:50]
    assert make_tasks("dev", count=50, seed=1) != tasks["dev"][:50]
    texts = {split: {task["problem"] for task in found} for split, found in tasks.items()}
    assert {split: len(found) for split, found in texts.items()} == COUNTS
    for one, other in itertools.combinations(SPLITS, 2):
        assert not texts[one] & texts[other]


def test_people_and_kinds_of_things_are_of_one_split(
    problems: dict[Split, list[Problem]],
) -> None:
    for split, found in problems.items():
        for problem in found:
            assert len(people(problem.text)) == 1
            assert len(kinds_of_things(problem.text)) == 1
        for words in (people, kinds_of_things):
            several = set().union(*[words(problem.text) for problem in found])
            assert {split_of(word) for word in several} == {split}
            assert len(several) > 50


def people(text: str) -> set[str]:
    """Return the names of people in a problem."""
    return {name for name in re.findall(r"\b[A-Z][a-z]+\b", text) if NAME.fullmatch(name)}


def kinds_of_things(text: str) -> set[str]:
    """Return the kinds of things in a problem."""
    return set(re.findall(rf"\b(?:{'|'.join(KINDS)}) (?:{'|'.join(THINGS)})\b", text))


def test_plots_are_of_one_split(problems: dict[Split, list[Problem]]) -> None:
    plots = {split: {problem.plot for problem in found} for split, found in problems.items()}
    for split, found in plots.items():
        assert {plot_split(plot) for plot in found} == {split}
    assert len(plots["test"]) > 50


def test_phrases_are_shared(problems: dict[Split, list[Problem]]) -> None:
    """Check that every phrase occurs in training, because its meaning cannot be inferred."""
    known = {step for problem in problems["train"] for step in problem.plot}
    assert known == {(frame, i) for frame, several in PHRASES.items() for i in range(len(several))}


def test_every_number_of_things_is_whole_and_positive(
    problems: dict[Split, list[Problem]],
) -> None:
    for problem in itertools.chain(*problems.values()):
        for step in steps(problem.expression):
            assert value(step).denominator == 1
            assert 0 < value(step) <= LARGEST


def test_the_expression_is_the_problem(problems: dict[Split, list[Problem]]) -> None:
    for problem in itertools.chain(*problems.values()):
        assert evaluate(write(problem.expression)) == value(problem.expression)
        assert Counter(map(int, re.findall(r"\d+", problem.text))) == Counter(
            numbers(problem.expression)
        )


def test_no_mistake_and_no_echo_gives_the_answer(problems: dict[Split, list[Problem]]) -> None:
    for problem in itertools.chain(*problems.values()):
        for number in numbers(problem.expression):
            assert exact_answer(f"#### {number}", problem.answer) == 0.0
        for spoilt in mistakes(problem.expression).values():
            assert evaluate(spoilt) != Fraction(problem.answer)


def test_no_constant_answer_is_worth_it(tasks: dict[Split, list[Task]]) -> None:
    for found in tasks.values():
        scores = constant_answer_scores(task["answer"] for task in found)
        assert max(scores.values()) <= 0.03


# --- expressions ----------------------------------------------------------------------------


_expressions: st.SearchStrategy[Expression] = st.recursive(
    st.integers(1, 9),
    lambda inner: st.builds(Operation, st.sampled_from(["+", "-", "*", "/"]), inner, inner),
    max_leaves=6,
)


@given(_expressions)
def test_what_is_written_has_the_value(expression: Expression) -> None:
    try:
        expected = value(expression)
    except ZeroDivisionError:
        return
    assert evaluate(write(expression)) == expected


# --- demonstrations -------------------------------------------------------------------------
def test_demonstrations_keep_to_train(tasks: dict[Split, list[Task]]) -> None:
    chats = demonstrate(300, 0)
    assert chats == demonstrate(300, 0) != demonstrate(300, 1)
    texts = [chat["messages"][1]["content"] for chat in chats]
    for text in texts:
        assert {split_of(word) for word in people(text) | kinds_of_things(text)} == {"train"}
    assert not set(texts) & {task["problem"] for name in ("dev", "test") for task in tasks[name]}

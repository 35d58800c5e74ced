"""Test the reward: exact values of normalised F1, of the format, and of both together."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rag_example.prompts import is_well_formed, parse_answer
from rag_example.reward import constant_answer_scores, f1, normalised, score

WORDS = st.lists(st.sampled_from(["port", "alder", "the", "lake", "birch,", "A"]), max_size=5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Port Alder", ["port", "alder"]),
        ("  The  Port of Alder! ", ["port", "of", "alder"]),
        ("a an the A An THE", []),
        ("St. Mary's-by-the-Sea", ["st", "marysbythesea"]),
        ("Ærø", ["ærø"]),
    ],
)
def test_normalised(text: str, words: list[str]) -> None:
    assert normalised(text) == words


@pytest.mark.parametrize(
    ("found", "gold", "value"),
    [
        ("Port Alder", "Port Alder", 1.0),
        ("Alder Port", "Port Alder", 1.0),
        ("Alder", "Port Alder", 2 / 3),
        ("Port Alder in New Cedar", "Port Alder", 4 / 7),
        ("Lake Birch", "Port Alder", 0.0),
        ("the", "Port Alder", 0.0),
    ],
)
def test_f1(found: str, gold: str, value: float) -> None:
    assert f1(found, gold) == pytest.approx(value, abs=1e-12)
    assert f1(gold, found) == f1(found, gold)


@given(found=WORDS.map(" ".join), gold=WORDS.map(" ".join))
def test_f1_is_between_zero_and_one_and_one_for_equals_only(found: str, gold: str) -> None:
    value = f1(found, gold)
    assert 0.0 <= value <= 1.0
    assert f1(gold, found) == value
    assert (value == 1.0) == (sorted(normalised(found)) == sorted(normalised(gold)))


@pytest.mark.parametrize(
    ("said", "answer", "formed"),
    [
        ("Answer: Port Alder", "Port Alder", True),
        ("  Answer: Port Alder\n", "Port Alder", True),
        ("Port Alder", "Port Alder", False),
        ("Answer: Port Alder\nI am sure.", "Port Alder", False),
        ("Answer: Lake Birch. No, Answer: Port Alder", "Lake Birch. No, Answer: Port Alder", True),
        ("Answer: Lake Birch\nAnswer: Port Alder", "Port Alder", False),
        ("Answer: \nPort Alder", "", False),
        ("", "", False),
    ],
)
def test_what_was_answered_and_in_which_form(said: str, answer: str, formed: bool) -> None:
    assert parse_answer(said) == answer
    assert is_well_formed(said) is formed


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("Answer: Port Alder", 1.0),
        ("Port Alder", 0.9),
        ("Answer: Alder", 0.7),
        ("Alder", 0.6),
        ("Answer: Lake Birch", 0.1),
        ("Lake Birch", 0.0),
        ("", 0.0),
    ],
)
def test_score(said: str, value: float) -> None:
    assert score(said, ["Port Alder"]) == pytest.approx(value, abs=1e-12)


def test_the_best_of_several_gold_answers_counts() -> None:
    golds = ["Port Alder", "Alder Harbour Town"]
    assert score("Answer: Alder Harbour", golds) == pytest.approx(0.9 * 4 / 5 + 0.1)
    assert score("Answer: Port Alder", golds) == 1.0


def test_constant_answers() -> None:
    golds = [["Port Alder"], ["Port Birch"], ["Ada Brook"], ["Lake Elm", "Port Elm"]]
    assert constant_answer_scores(["Port Alder", "Ada", "Port Alder"], golds) == {
        "Port Alder": pytest.approx(0.9 * (1 + 0.5 + 0 + 0.5) / 4 + 0.1),
        "Ada": pytest.approx(0.9 * (2 / 3) / 4 + 0.1),
    }

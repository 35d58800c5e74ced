"""Test that equal numbers are rewarded in every notation."""

from __future__ import annotations

from fractions import Fraction

import pytest

from math_example.reward import constant_answer_scores, exact_answer, final_answer, number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("1,234,567.5", Fraction("1234567.5")),
        ("1_200", 1200),
        ("$ 1,200.50", Fraction("1200.5")),
        ("-$5", -5),
        ("−7", -7),
        ("5-3", 3),
        ("-3/4", Fraction(-3, 4)),
        ("1 1/2 cups", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        (".5", Fraction(1, 2)),
        ("1.5e-2", Fraction(3, 200)),
        ("50%", 50),
        ("12kg", 12),
        ("The answer is 42.", 42),
        ("12 + 5 = 17", 17),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{ 3 }{ 4 }", Fraction(-3, 4)),
        (r"1\tfrac{1}{2}", Fraction(3, 2)),
        (r"$1{,}200\,$", 1200),
        ("1/0", None),
        ("", None),
        ("x2", None),
        ("9" * 201, None),
    ],
)
def test_number(text: str, value: int | Fraction | None) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    ("reply", "final"),
    [
        ("12 + 5 = 17\n#### 17\nThat is all.", "17"),
        ("#### 1\n#### 2", "2"),
        (r"So \boxed{17}, not 18.", "17"),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{\text{\frac{3}{4} m}}.", r"\text{\frac{3}{4} m}"),
        (r"\boxed{1", r"\boxed{1"),
        ("It is 17.", "It is 17."),
    ],
)
def test_final_answer(reply: str, final: str) -> None:
    assert final_answer(reply) == final


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("#### 1,200", "1200", 1.0),
        ("It costs 1200 dollars.", "$1,200", 1.0),
        ("#### 0.75", "3/4", 1.0),
        (r"The answer is \boxed{\frac{3}{4}}", "3/4", 1.0),
        (r"The answer is \boxed{\frac{1}{2}}", "2", 0.0),
        ("#### 0.667", "2/3", 0.0),
        ("#### 42.0000001", "42", 0.0),
        ("42 #### 41", "42", 0.0),
        ("#### 41\n42", "42", 0.0),
        ("", "42", 0.0),
        ("#### c) 12", "C", 1.0),
        ("The answer is C.", "C", 1.0),
        ("The answer is C) 12.", "C", 0.0),
        ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "40+2"', "42", 0.0),
    ],
)
def test_exact_answer(reply: str, answer: str, reward: float) -> None:
    assert exact_answer(reply, answer) == reward


def test_constant_answer_scores() -> None:
    assert constant_answer_scores(["3", "4", "3", "5"]) == {"3": 0.5, "4": 0.25, "5": 0.25}

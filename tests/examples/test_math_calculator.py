"""Test the calculator: results are exact, and too large ones are refused before computing."""

from __future__ import annotations

import ast
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from math_example.calculator import (
    MAX_BITS,
    MAX_DEPTH,
    MAX_LENGTH,
    CalculatorError,
    evaluate,
    format_number,
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(12 + 5) * 3", "51"),
        ("0.1 + 0.2", "0.3"),
        ("2 / 3", "2/3"),
        ("7 / 2", "3.5"),
        ("1,200 * 2", "2400"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** -3", "0.125"),
        ("(2 / 3) ** 2", "4/9"),
        ("2^10", "1024"),
        ("6 × 7 − 2 ÷ 2", "41"),
        ("0 ** 0", "1"),
        ("0 ** 99999999999", "0"),
        ("(-1) ** 99999999999", "-1"),
        ("1\n+ 2", "3"),
        (".5 + 1.", "1.5"),
    ],
)
def test_values_are_exact(expression: str, value: str) -> None:
    assert format_number(evaluate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9", "9**387420489 is too large"),
        ("2**257", "2**257 is too large"),
        ("9**-9**9", "9**-387420489 is too large"),
        ("9" * 100, f"over {MAX_BITS} bits"),
        ("(10**60) * (10**60)", f"over {MAX_BITS} bits"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "the exponent 0.5 is no whole number"),
        ("-" * 100 + "1", f"nested deeper than {MAX_DEPTH} operations"),
        ("(" * 300, f"300 characters are too many, at most {MAX_LENGTH}"),
        ("__import__('os')", "not '_'"),
        ("abs(-1)", "not 'a'"),
        ("1e9", "not 'e'"),
        ("1 < 2", "not '<'"),
        ("１ + 2", "not '１'"),
        ("\0", r"not '\x00'"),
        ("(1)(2)", "is no arithmetic expression"),
        ("", "is no arithmetic expression"),
        ("1) + (2", "is no arithmetic expression"),
        ("007", "is no arithmetic expression"),
        ("(" * 99 + "1" + ")" * 98, "is no arithmetic expression"),
    ],
)
def test_what_has_no_value_is_refused(expression: str, message: str) -> None:
    with pytest.raises(CalculatorError) as caught:
        evaluate(expression)
    assert message in str(caught.value)
    assert len(str(caught.value)) < MAX_LENGTH + 60


_numbers = st.integers(0, 99).map(str) | st.decimals(0, 99, places=2).map(str)
_expressions = st.recursive(
    _numbers,
    lambda inner: (
        st.builds("({}{}{})".format, inner, st.sampled_from("+-*/"), inner)
        | inner.map("(-{})".format)
    ),
    max_leaves=8,
)


@given(_expressions)
def test_it_agrees_with_python(expression: str) -> None:
    literals = ast.unparse(_Exact().visit(ast.parse(expression, mode="eval")))
    try:
        expected = eval(literals, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match="division by zero"):
            evaluate(expression)
        return
    if len(expression) <= MAX_LENGTH:
        assert evaluate(expression) == expected


class _Exact(ast.NodeTransformer):
    """Replace each number of an expression by the exact fraction of its decimal text."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        text = ast.Constant(str(node.value))
        return ast.Call(ast.Name("Fraction", ast.Load()), [text], [])


@given(st.fractions())
def test_a_formatted_number_is_the_number(value: Fraction) -> None:
    assert Fraction(format_number(value)) == value


@given(st.text("0123456789.+-*/%() ", max_size=60))
def test_any_arithmetic_has_a_bounded_value_or_an_error(text: str) -> None:
    try:
        value = evaluate(text)
    except CalculatorError:
        return
    assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS

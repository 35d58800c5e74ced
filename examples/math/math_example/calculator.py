"""A calculator for untrusted text: exact, and bounded before anything large is computed.

    evaluate("(12 + 5) * 3")    51
    evaluate("9**9**9")         CalculatorError: 9**387420489 is too large

Numbers are rationals, so `0.1 + 0.2` is exactly `0.3`. The text is parsed with `ast` and its tree
walked: nothing is ever compiled, and names, calls and attributes have no meaning. Libraries for
this either compute with floats or bound neither the size of every result nor the nesting.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

MAX_LENGTH: Final = 200
"""Maximum length of an expression in characters, which also limits its number of operations."""
MAX_DEPTH: Final = 40
"""Maximum depth of nested operations."""
MAX_BITS: Final = 256
"""Maximum bits of the numerator and of the denominator of each intermediate result."""

_FOREIGN: Final = re.compile(r"[^0-9.+\-*/%()\s]", re.ASCII)
_THOUSANDS: Final = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SPELLINGS: Final = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})


class CalculatorError(ValueError):
    """The expression cannot be evaluated; the message gives a model the reason in a few words."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression.

    Allowed are decimal numbers (`1,200` too), `+ - * / // % **`, parentheses and signs; `×`, `÷`
    and `^` are read as `*`, `/` and `**`.

    Raises:
        CalculatorError: `expression` is not arithmetic, divides by zero, or exceeds a limit.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"{len(expression)} characters are too many, at most {MAX_LENGTH}")
    text = " ".join(_THOUSANDS.sub("", expression.translate(_SPELLINGS)).split())
    foreign = _FOREIGN.search(text)
    if foreign:
        allowed = "numbers, + - * / // % ** ( )"
        raise CalculatorError(f"only {allowed} are known, not {foreign.group()!r}")
    return _value(_parse(text), text, 0)


def format_number(value: Fraction) -> str:
    """Return a number as text: `51`, `2.5`, or `2/3` if its decimals never end."""
    digits = _decimals(value.denominator)
    if digits is None:
        return f"{value.numerator}/{value.denominator}"
    scaled = abs(value.numerator) * (10**digits // value.denominator)
    text = str(scaled).rjust(digits + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{text[:-digits]}.{text[-digits:]}" if digits else f"{sign}{text}"


def _decimals(denominator: int) -> int | None:
    """Return how many decimal places a reduced fraction has; None if its decimals never end."""
    twos = fives = 0
    while denominator % 2 == 0:
        denominator, twos = denominator // 2, twos + 1
    while denominator % 5 == 0:
        denominator, fives = denominator // 5, fives + 1
    return max(twos, fives) if denominator == 1 else None


def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise CalculatorError(f"{text!r} is no arithmetic expression") from None


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise CalculatorError(f"nested deeper than {MAX_DEPTH} operations")
    if isinstance(node, ast.Constant):
        return _bounded(_literal(node, text))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, text, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left = _value(node.left, text, depth + 1)
        right = _value(node.right, text, depth + 1)
        return _bounded(_OPERATIONS[type(node.op)](left, right))
    raise CalculatorError(f"{text!r} is no arithmetic expression")


def _literal(node: ast.Constant, text: str) -> Fraction:
    """Return the number at `node` exactly as it is written in `text`; a float would round it."""
    if not isinstance(node.value, int | float):
        raise CalculatorError(f"{text!r} is no arithmetic expression")
    return Fraction(text[node.col_offset : node.end_col_offset])


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise CalculatorError(f"a result has over {MAX_BITS} bits, too large")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _divide(left: Fraction, right: Fraction) -> Fraction:
    if right == 0:
        raise CalculatorError("division by zero")
    return left / right


def _floor_divide(left: Fraction, right: Fraction) -> Fraction:
    return Fraction(_divide(left, right).__floor__())


def _remainder(left: Fraction, right: Fraction) -> Fraction:
    return left - right * _floor_divide(left, right)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorError(f"the exponent {format_number(exponent)} is no whole number")
    if base == 0 and exponent < 0:
        raise CalculatorError("division by zero")
    # |base| >= 2 gains a bit with every factor, so this bounds the work before it is done
    if abs(base) not in (0, 1) and (_bits(base) - 1 or 1) * abs(exponent) > MAX_BITS:
        raise CalculatorError(f"{format_number(base)}**{format_number(exponent)} is too large")
    return Fraction(base ** int(exponent)) if abs(base) != 1 else base ** int(exponent % 2)


_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: _floor_divide,
    ast.Mod: _remainder,
    ast.Pow: _power,
}

"""Arithmetic expressions as trees: render them as text, evaluate them, and make mistakes in them.

With a tree, a demonstration can contain one well-defined mistake, and the generator can check that
no mistake gives the right answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, Literal, TypeAlias

Operator = Literal["+", "-", "*", "/"]


@dataclass(frozen=True)
class Operation:
    """An operator with its two operands."""

    operator: Operator
    left: Expression
    right: Expression


Expression: TypeAlias = int | Operation

Mistake = Literal["parentheses", "operation", "order", "step"]
"""Kinds of mistakes: left-out parentheses; the opposite last operation; swapped operands of a
subtraction; a missing last step.
"""

_RANK: Final = {"+": 1, "-": 1, "*": 2, "/": 2}
_OPPOSITE: Final[dict[Operator, Operator]] = {"+": "-", "-": "+", "*": "/", "/": "*"}


def write(expression: Expression, *, parentheses: bool = True) -> str:
    """Return the expression as text, such as `(12+5)*3`, with the necessary parentheses only.

    Args:
        parentheses: False leaves out all parentheses, which may change the value.
    """
    if isinstance(expression, int):
        return str(expression)
    rank = _RANK[expression.operator]
    left = _inner(expression.left, rank, parentheses)
    # a - (b + c) and a / (b * c) differ from what they are without parentheses
    tight = rank + (expression.operator in "-/")
    return f"{left}{expression.operator}{_inner(expression.right, tight, parentheses)}"


def _inner(expression: Expression, rank: int, parentheses: bool) -> str:
    text = write(expression, parentheses=parentheses)
    loose = isinstance(expression, Operation) and _RANK[expression.operator] < rank
    return f"({text})" if loose and parentheses else text


def value(expression: Expression) -> Fraction:
    """Return the exact value.

    Raises:
        ZeroDivisionError: the expression divides by zero.
    """
    if isinstance(expression, int):
        return Fraction(expression)
    left, right = value(expression.left), value(expression.right)
    match expression.operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / right


def steps(expression: Expression) -> Iterator[Operation]:
    """Yield every operation of the expression, inner operations before outer ones."""
    if isinstance(expression, Operation):
        yield from steps(expression.left)
        yield from steps(expression.right)
        yield expression


def numbers(expression: Expression) -> list[int]:
    """Return the numbers of the expression, from left to right."""
    if isinstance(expression, int):
        return [expression]
    return numbers(expression.left) + numbers(expression.right)


def mistakes(expression: Operation) -> dict[Mistake, str]:
    """Return each mistake that is possible in the expression → the text with this mistake."""
    spoilt: dict[Mistake, str] = {}
    bare = write(expression, parentheses=False)
    if bare != write(expression):
        spoilt["parentheses"] = bare
    opposite = replace(expression, operator=_OPPOSITE[expression.operator])
    spoilt["operation"] = write(opposite)
    if expression.operator == "-" and isinstance(expression.left, int):
        turned = replace(expression, left=expression.right, right=expression.left)
        spoilt["order"] = write(turned)
    if isinstance(expression.left, Operation):
        spoilt["step"] = write(expression.left)
    return spoilt

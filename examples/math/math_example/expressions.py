"""The arithmetic that problems are made of, as data: written out, and spoilt on purpose.

An expression is kept as a tree so that a demonstration can contain one well-defined mistake and a
generated problem can be checked to tell each mistake from the right answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, Literal, TypeAlias

Operator = Literal["+", "-", "*", "/"]


@dataclass(frozen=True)
class Operation:
    """Two expressions and what is done with them."""

    operator: Operator
    left: Expression
    right: Expression


Expression: TypeAlias = int | Operation

Mistake = Literal["parentheses", "operation", "order", "step"]
"""left-out parentheses; the opposite last operation; a subtraction the wrong way round; a missing
last step."""

_RANK: Final = {"+": 1, "-": 1, "*": 2, "/": 2}
_OPPOSITE: Final[dict[Operator, Operator]] = {"+": "-", "-": "+", "*": "/", "/": "*"}


def write(expression: Expression, *, parentheses: bool = True) -> str:
    """The expression as text, such as `(12+5)*3`, with no more parentheses than it needs."""
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
    """The exact value; ZeroDivisionError where there is none."""
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
    """Every operation in it, the innermost first."""
    if isinstance(expression, Operation):
        yield from steps(expression.left)
        yield from steps(expression.right)
        yield expression


def numbers(expression: Expression) -> list[int]:
    """The numbers in it, from left to right."""
    if isinstance(expression, int):
        return [expression]
    return numbers(expression.left) + numbers(expression.right)


def mistakes(expression: Operation) -> dict[Mistake, str]:
    """Every mistake that the expression leaves room for, and its text with that mistake in it."""
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

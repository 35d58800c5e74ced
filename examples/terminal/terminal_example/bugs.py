"""The kinds of bugs: each changes one place of the expression that a function returns."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

Changes: TypeAlias = Callable[[ast.AST, Sequence[str]], Iterator[ast.expr]]
"""Function (node, parameters of the function) → nodes that a bug puts in its place."""

CONSTANTS: Final = range(2, 10)
_COMPARISONS: Final[Mapping[type[ast.cmpop], ast.cmpop]] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
}
_OPERATORS: Final = (ast.Add(), ast.Sub(), ast.Mult(), ast.FloorDiv(), ast.Mod())
_NOT_COMMUTATIVE: Final = (ast.Sub, ast.FloorDiv, ast.Mod)


def _operator(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`a * b` → `a + b`."""
    if isinstance(node, ast.BinOp):
        for other in _OPERATORS:
            if type(other) is not type(node.op):
                yield ast.BinOp(node.left, other, node.right)


def _constant(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`a + 5` → `a + 6`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)


def _comparison(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`a < b` → `a <= b`."""
    if isinstance(node, ast.Compare):
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]], node.comparators)


def _swapped(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`a - b` → `b - a`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, _NOT_COMMUTATIVE):
        yield ast.BinOp(node.right, node.op, node.left)


def _function(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`max(a, b)` → `min(a, b)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        other = "min" if node.func.id == "max" else "max"
        yield ast.Call(ast.Name(other), node.args, [])


def _variable(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`a * b` → `a * a`."""
    if isinstance(node, ast.Name) and node.id in parameters:
        yield from (ast.Name(other) for other in parameters if other != node.id)


def _missing(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`a * b + 5` → `a * b`."""
    if isinstance(node, ast.BinOp):
        yield node.left


def _grouping(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`(a + b) * 5` → `a + b * 5`."""
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp):
        inner = node.left
        if "(" in ast.unparse(node):
            yield ast.BinOp(inner.left, inner.op, ast.BinOp(inner.right, node.op, node.right))


def _logic(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`a < b and b < c` → `a < b or b < c`."""
    if isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _literal(node: ast.AST, parameters: Sequence[str]) -> Iterator[ast.expr]:
    """`a * b` → `a * 7`."""
    if isinstance(node, ast.Name) and node.id in parameters:
        yield from (ast.Constant(value) for value in CONSTANTS)


TRAINED: Final[Mapping[str, Changes]] = {
    "operator": _operator,
    "constant": _constant,
    "comparison": _comparison,
    "swapped": _swapped,
    "function": _function,
    "variable": _variable,
}
"""Kinds of the tasks that are trained on, of their recorded sessions and of development."""
HELD_OUT: Final[Mapping[str, Changes]] = {
    "missing": _missing,
    "grouping": _grouping,
    "logic": _logic,
    "literal": _literal,
}
"""Kinds of the held-out tasks only."""


def mutants(right: str, parameters: Sequence[str], changes: Changes) -> list[str]:
    """Return all expressions that one bug makes of the expression `right`, without repetition."""
    nodes = list(ast.walk(ast.parse(right, mode="eval").body))
    found = [
        _replaced(right, position, new)
        for position, node in enumerate(nodes)
        for new in changes(node, parameters)
    ]
    return [each for each in dict.fromkeys(found) if each != right]


def _replaced(expression: str, position: int, new: ast.expr) -> str:
    """Return `expression` with `new` in place of its node at `position` of `ast.walk`."""
    body = ast.parse(expression, mode="eval").body
    target = list(ast.walk(body))[position]

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return copy.deepcopy(new) if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Replace().visit(body)))

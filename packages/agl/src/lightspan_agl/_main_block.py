"""Find what the script's main block changes, which runners in other processes do not see."""

from __future__ import annotations

import ast
import symtable
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_METHODS: Final = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("remove", "reverse", "setdefault", "sort", "update"),
)
"""Methods of containers that change them."""
_INHERITED: Final = ("os", "sys", "logging", "warnings", "matplotlib", "plt")
"""Modules whose changes are of no concern: runners inherit the environment and the search path, and
have logs and no plots."""

_COMPREHENSIONS: Final = ("listcomp", "setcomp", "dictcomp", "genexpr")
"""Scopes that run where they are, and not when they are called."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def changes_of_main(*, is_of_script: bool) -> list[str]:
    """Return what the script's main block sets or changes, and rollouts may read.

    Functions and methods of the script that the block calls are searched too, except `__init__`. A
    method is found by its name alone. Changes by another name, such as of an alias, and by
    functions of other modules are not found.

    Args:
        is_of_script: whether the agent is the script's own. Else it can only read what the script
            changes in modules that it imports.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        source = Path(path or "").read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):  # no script, or a console
        return []
    blocks = [node for node in tree.body if _is_main(node)]
    rest = [node for node in tree.body if not _is_main(node)]
    called = _called(blocks, rest)
    nodes = list(ast.walk(tree))
    modules = {name for each in nodes if isinstance(each, ast.Import) for name in _imported(each)}
    changes = set(_changes(blocks, set(), modules, is_main=True))
    for function in called:
        changes.update(_changes(function.body, _locals(function), modules, is_main=False))
    # class attributes are read by self.NAME too, and modules by other modules
    in_place = set(_imported(tree)) - set(_INHERITED)
    read: set[str] = set()
    if is_of_script:
        in_place |= {node.name for node in rest if isinstance(node, ast.ClassDef)}
        lines = {line for node in rest for line in _lines(node)}
        lines -= {line for function in called for line in _lines(function)}
        top = symtable.symtable(source, str(path), "exec")
        functions = (table for table in top.get_children() if table.get_lineno() in lines)
        read = {name for table in functions for name in _read(table, lines)} - set(_INHERITED)
    return sorted(
        {
            text
            for text, root, is_change in changes
            if root in read or (is_change and root in in_place)
        }
    )


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def _called(blocks: Sequence[ast.stmt], rest: Sequence[ast.stmt]) -> list[_Function]:
    """Return the functions and methods of `rest` that statements call, also by way of others."""
    functions = {node.name: [node] for node in rest if isinstance(node, _Function)}
    methods: dict[str, list[_Function]] = defaultdict(list)
    for node in (each for top in rest if isinstance(top, ast.ClassDef) for each in top.body):
        if isinstance(node, _Function):
            methods[node.name].append(node)
    called: list[_Function] = []
    waiting: list[ast.stmt] = list(blocks)
    while waiting:
        for each in ast.walk(waiting.pop()):
            found: Sequence[_Function] = ()
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name):
                found = functions.get(each.func.id, ())
            elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                found = methods.get(each.func.attr, ())
            new = [function for function in found if function not in called]
            called += new
            waiting += new
    return called


def _changes(
    nodes: Sequence[ast.stmt], local: set[str], modules: set[str], *, is_main: bool
) -> Iterator[tuple[str, str, bool]]:
    """Yield for each change in statements its text, the global, and whether it is in place.

    Args:
        nodes: the statements.
        local: names that are local to their function.
        modules: names of modules, whose functions may be called as methods of containers are.
        is_main: whether plain assignments are to globals.
    """
    for node in (each for top in nodes for each in ast.walk(top)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if is_main or node.id not in local:
                yield node.id, node.id, False
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            targets = [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_module = isinstance(node.func.value, ast.Name) and node.func.value.id in modules
            targets = [node.func.value] if node.func.attr in _METHODS and not is_module else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            targets = node.args[:1] if node.func.id in ("setattr", "delattr") else []
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name) and root.id not in local:
                yield ast.unparse(target), root.id, True


def _locals(function: _Function) -> set[str]:
    """Return the names that are local to a function: its parameters and what it sets."""
    nodes = list(ast.walk(function))
    shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    names = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names - shared


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the names that the import statements in a node bind."""
    for each in ast.walk(node):
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0]) for alias in each.names)


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _read(
    table: symtable.SymbolTable, lines: set[int], *, is_called: bool = False
) -> Iterator[str]:
    """Yield the globals that functions in a scope read, also methods of classes.

    Args:
        table: the scope.
        lines: lines of the functions to search.
        is_called: whether the scope is in a function, which runs when it is called.
    """
    is_function = table.get_type() == "function" and table.get_name() not in _COMPREHENSIONS
    is_called = is_called or is_function
    if is_called:
        yield from (
            s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()
        )
    for child in table.get_children():
        if child.get_lineno() in lines:
            yield from _read(child, lines, is_called=is_called)

"""Find what the script's main block changes, which runners in other processes do not see."""

from __future__ import annotations

import ast
import sys
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

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def changes_of_main(*, is_of_script: bool) -> list[str]:
    """Return what the script's main block sets or changes, and rollouts may read.

    Functions of the script that the block calls are searched too. Changes by another name, such as
    of an alias, and by functions of other modules are not found.

    Args:
        is_of_script: whether the agent is the script's own. Else it can only read what the script
            changes in modules that it imports.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        tree = ast.parse(Path(path or "").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # no script, or a console
        return []
    blocks = [node for node in tree.body if _is_main(node)]
    rest = [node for node in tree.body if not _is_main(node)]
    called = _called(blocks, {node.name: node for node in rest if isinstance(node, _Function)})
    modules = {name for node in rest if isinstance(node, ast.Import) for name in _imported(node)}
    changes = set(_changes(blocks, set(), modules, is_main=True))
    for function in called:
        changes.update(_changes(function.body, _locals(function), modules, is_main=False))
    imported = {name for node in rest for name in _imported(node)} - set(_INHERITED)
    others = [node for node in rest if node not in called]
    # class attributes are read by self.NAME too, and modules by other modules
    in_place = set(imported)
    read: set[str] = set()
    if is_of_script:
        in_place |= {node.name for node in rest if isinstance(node, ast.ClassDef)}
        read = {name for node in others for name in _read(node)} - set(_INHERITED)
    return sorted(
        {
            text
            for text, root, is_change in changes
            if root in read or (is_change and root in in_place)
        }
    )


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def _called(blocks: Sequence[ast.stmt], functions: dict[str, _Function]) -> list[_Function]:
    """Return the functions that statements call, also by way of others of `functions`."""
    called: list[_Function] = []
    waiting: list[ast.stmt] = list(blocks)
    while waiting:
        for node in ast.walk(waiting.pop()):
            name = (
                node.func.id
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                else ""
            )
            if name in functions and functions[name] not in called:
                called.append(functions[name])
                waiting.append(functions[name])
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


def _imported(node: ast.stmt) -> Iterator[str]:
    """Yield the names that an import statement, also within `try`, binds."""
    for each in ast.walk(node):
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0]) for alias in each.names)


def _read(node: ast.stmt) -> Iterator[str]:
    """Yield the globals that functions in a statement read, also methods of classes."""
    for function in ast.walk(node):
        if isinstance(function, _Function | ast.Lambda):
            local = _locals(function) if isinstance(function, _Function) else set()
            for each in ast.walk(function):
                if isinstance(each, ast.Name) and each.id not in local:
                    yield each.id

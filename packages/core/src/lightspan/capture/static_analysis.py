"""What the code of an app refers to, without running it: adapters look there for agents."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any


def names_in(code: CodeType, *, texts: bool = False) -> Iterator[str]:
    """Every name that the code mentions, in nested functions too.

    Args:
        texts: its text constants as well (a framework may look things up by text).
    """
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant, texts=texts)
        elif texts and isinstance(constant, str):
            yield constant
        elif texts and isinstance(constant, tuple):
            yield from (text for text in constant if isinstance(text, str))


def referred(
    function: FunctionType, names: set[str], *, installed: Collection[str] = ()
) -> Iterator[Any]:
    """What the function's closure, defaults and globals hold under the names it mentions, and what
    the user's own modules among its globals hold under them.

    Args:
        installed: see `is_users`.
    """
    yield from enclosed(function)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, ModuleType) and is_users(value, installed):
            yield from (vars(value)[inner] for inner in names & vars(value).keys())


def enclosed(function: FunctionType) -> Iterator[Any]:
    """What the function's closure holds."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def module_of(thing: Any) -> str:
    """The module of a function or class, or of a thing's class; empty if it has none."""
    owner = thing if isinstance(thing, type | FunctionType) else type(thing)
    return str(getattr(owner, "__module__", "") or "")


def root_of(thing: Any) -> str:
    """The top-level package of a module, function, class or thing."""
    module = thing.__name__ if isinstance(thing, ModuleType) else module_of(thing)
    return module.partition(".")[0]


def is_users(thing: Any, installed: Collection[str] = ()) -> bool:
    """Whether the thing is code of the user's own: what is installed brings no agents.

    Args:
        installed: packages that count as installed wherever they lie.
    """
    root = root_of(thing)
    if root in installed or (root in sys.stdlib_module_names and root != "__main__"):
        return False
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file

"""Find the objects that an app's functions refer to, without calling the functions."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any


def names_in(code: CodeType, *, texts: bool = False) -> Iterator[str]:
    """Yield every name in the code, including the names in nested functions.

    Args:
        code: code of a function.
        texts: whether to yield string constants too, for frameworks that look objects up by name.
    """
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant, texts=texts)
        elif texts and isinstance(constant, str):
            yield constant
        elif texts and isinstance(constant, tuple):
            yield from (text for text in constant if isinstance(text, str))


def references(
    function: FunctionType, names: set[str], *, installed: Collection[str] = ()
) -> Iterator[Any]:
    """Yield the values of a function's closure and defaults, and the globals that it mentions.

    If a global is a module of the user, its attributes in `names` are yielded too.

    Args:
        function: a function of the app.
        names: names that the function's code mentions.
        installed: packages that do not count as the user's code, wherever they are.
    """
    yield from closure_values(function)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, ModuleType) and is_user_code(value, installed):
            yield from (vars(value)[inner] for inner in names & vars(value).keys())


def closure_values(function: FunctionType) -> Iterator[Any]:
    """Yield the values of a function's closure."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def module_of(thing: Any) -> str:
    """Return the name of the module in which an object, or else its class, is defined.

    Empty if it is unknown. For a module, return its own name.
    """
    if isinstance(thing, ModuleType):
        return thing.__name__
    is_cached = "__wrapped__" in getattr(thing, "__dict__", ())  # `functools.lru_cache`
    owner = thing if is_cached or isinstance(thing, type | FunctionType) else type(thing)
    return str(getattr(owner, "__module__", "") or "")


def package_of(thing: Any) -> str:
    """Return the top-level package of a module, function, class or object."""
    return module_of(thing).partition(".")[0]


def is_user_code(thing: Any, installed: Collection[str] = ()) -> bool:
    """Return whether an object belongs to the user's own code, not to an installed package.

    Args:
        thing: a module, function, class or object.
        installed: packages that do not count as the user's code, wherever they are.
    """
    root = package_of(thing)
    if root in installed or (root in sys.stdlib_module_names and root != "__main__"):
        return False
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file

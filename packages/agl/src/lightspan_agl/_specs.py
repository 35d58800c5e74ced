"""Components of a `Trainer`, given as Agent Lightning takes them: classes, names and mappings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from lightspan.errors import UnsupportedError

_PACKAGE: Final = __name__.partition(".")[0]
_ORIGINAL: Final = "agentlightning"


def build(spec: Any, option: str, default: type | None = None) -> Any:
    """Return the object that `spec` describes.

    Args:
        spec: a class; the dotted name of a class; a mapping of `type`, the class or its name, to
            the class's arguments; or an object, which is returned as it is. Names in
            `agentlightning` are those of this package.
        option: name of the option, for error messages.
        default: class of a mapping without `type`; None if `type` is required.

    Raises:
        UnsupportedError: the class does not exist or does not take the arguments.
    """
    arguments: dict[str, Any] = {}
    kind = spec
    if isinstance(spec, Mapping):
        arguments = dict(spec)
        kind = arguments.pop("type", default)
        if kind is None:
            raise UnsupportedError(f"{option}={spec!r:.200}: add 'type', the class or its name")
    if isinstance(kind, str):
        kind = _class_named(kind, option)
    if not isinstance(kind, type):
        return spec
    try:
        return kind(**arguments)
    except TypeError as error:
        raise UnsupportedError(f"{option}={spec!r:.200}: {error}") from error


def _class_named(name: str, option: str) -> Any:
    module, _, attribute = name.rpartition(".")
    package, dot, rest = module.partition(".")
    if package == _ORIGINAL:
        module = f"{_PACKAGE}{dot}{rest}"
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedError(f"{option}={name!r}: {error or 'it names no class'}") from error

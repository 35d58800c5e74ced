"""Components as a configuration names them: an object, a class, a function, text or a mapping."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightspan.errors import ConfigError

T = TypeVar("T")


def build_component(
    spec: Any,
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: bool = False,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: type[T] | None = None,
    type_error_fmt: str | None = None,
    invalid_spec_error_fmt: str | None = None,
    registry: Mapping[str, str] | None = None,
) -> T | None:
    """The component that a specification describes.

    Args:
        spec: the component, its class, a function that makes it, the class's dotted name, a mapping
            with `type` and arguments, or None.
        expected_type: what it has to be.
        spec_name: of the option, for errors.
        default_factory: makes what None means.
        allow_none: whether None may mean nothing.
        optional_defaults: arguments that its class gets where it takes them and nobody gave them;
            functions are called.
        dict_requires_type: a mapping must say `type`.
        dict_default_cls: what a mapping without `type` makes.
        type_error_fmt: message for what is of another type (`{type_name}`, `{expected_type}`).
        invalid_spec_error_fmt: message for what is no specification (`{actual_type}`,
            `{expected_type}`).
        registry: short name → dotted name.

    Raises:
        ConfigError: it is no specification; or what it describes cannot be found.
        TypeError: it makes something else.
    """
    defaults = optional_defaults or {}
    if isinstance(spec, expected_type) or (spec is None and allow_none and not default_factory):
        return spec
    if spec is None and default_factory is not None:
        made: Any = default_factory()
    elif isinstance(spec, type) and issubclass(spec, expected_type):
        made = _made(spec, {}, defaults)
    elif callable(spec) and not isinstance(spec, type):
        made = spec()
    elif isinstance(spec, str):
        made = _made(_found((registry or {}).get(spec, spec), spec_name), {}, defaults)
    elif isinstance(spec, dict):
        kind, arguments = _described(spec, spec_name, registry or {})
        if kind is None and dict_requires_type:
            raise ConfigError(f"{spec_name}={spec!r} must say type: the dotted name of its class")
        cls = dict_default_cls if kind is None else _found(kind, spec_name)
        if cls is None:
            raise ConfigError(f"{spec_name}={spec!r} says no type, and there is none by default")
        made = _made(cls, arguments, defaults)
    else:
        told = {"actual_type": type(spec), "expected_type": expected_type.__name__}
        message = invalid_spec_error_fmt or (
            "must be a {expected_type}, its class or dotted name, a mapping with `type`, or a "
            "function, not {actual_type}"
        )
        raise ConfigError(f"{spec_name}: {message.format(**told)}")
    if not isinstance(made, expected_type):
        told = {"type_name": str(type(made)), "expected_type": expected_type.__name__}
        message = type_error_fmt or "makes {type_name}, which is no {expected_type}"
        raise TypeError(f"{spec_name}: {message.format(**told)}")
    return made


def _described(
    spec: Mapping[str, Any], spec_name: str, registry: Mapping[str, str]
) -> tuple[str | None, dict[str, Any]]:
    """The dotted name that a mapping says, and the arguments."""
    arguments = dict(spec)
    kind = arguments.pop("type", None)
    if kind is None and registry and "name" in arguments:
        name = arguments.pop("name")
        if name not in registry:
            raise ConfigError(f"{spec_name}={spec!r}: use one of {', '.join(sorted(registry))}")
        return registry[name], arguments
    return (None if kind is None else registry.get(kind, kind)), arguments


def _found(path: str, spec_name: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{spec_name}={path!r} cannot be found: {error}") from error


def _made(cls: Any, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    taken = inspect.signature(cls.__init__).parameters if defaults else {}
    more = {
        name: value() if callable(value) else value
        for name, value in defaults.items()
        if name in taken and name not in arguments
    }
    return cls(**arguments, **more)

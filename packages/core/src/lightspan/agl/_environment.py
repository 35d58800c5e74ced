"""Settings out of the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import Final, TypeVar

from lightspan.errors import ConfigError

T = TypeVar("T")

_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


class LightningEnvVar(Enum):
    """The original's variables. lightspan itself reads none of them."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    AGL_SERVER_PORT = "AGL_SERVER_PORT"


def resolve_bool_env_var(
    env_var: LightningEnvVar, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """`override`, or else what the variable says, or else `fallback`.

    Raises:
        ConfigError: it says neither yes nor no.
    """
    return _resolved(env_var, override, fallback, _truth)


def resolve_int_env_var(
    env_var: LightningEnvVar, override: int | None = None, fallback: int | None = None
) -> int | None:
    """`override`, or else what the variable says, or else `fallback`.

    Raises:
        ConfigError: it says no whole number.
    """
    return _resolved(env_var, override, fallback, int)


def resolve_str_env_var(
    env_var: LightningEnvVar, override: str | None = None, fallback: str | None = None
) -> str | None:
    """`override`, or else what the variable says, or else `fallback`."""
    return _resolved(env_var, override, fallback, str)


def _resolved(
    variable: LightningEnvVar, override: T | None, fallback: T | None, read: Callable[[str], T]
) -> T | None:
    text = os.environ.get(variable.value)
    if override is not None or text is None:
        return fallback if override is None else override
    try:
        return read(text)
    except ValueError as error:
        raise ConfigError(f"${variable.value}={text!r}: {error}") from error


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError(f"must be one of {', '.join((*_TRUE, *_FALSE))}")
    return word in _TRUE

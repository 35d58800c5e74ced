"""Read settings from environment variables, as Agent Lightning's calculator example does."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Final

from lightspan.errors import ConfigError, UnsupportedError
from lightspan_agl._unsupported import refuse_names as _refuse_names

__all__ = ["LightningEnvVar", "resolve_bool_env_var", "resolve_str_env_var"]
__getattr__ = _refuse_names(__name__)

_BOOLEANS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


class LightningEnvVar(StrEnum):
    """Names of Agent Lightning's environment variables.

    lightspan does not use their values. `Trainer.fit` prints those that are set, and refuses
    `AGL_CURRENT_ROLE` unless its value is `both`.
    """

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    AGL_SERVER_PORT = "AGL_SERVER_PORT"


def check_role() -> None:
    """Check that the environment does not restrict this process to one role.

    Raises:
        UnsupportedError: `AGL_CURRENT_ROLE` is set to another value than `both`.
    """
    role = os.environ.get(LightningEnvVar.AGL_CURRENT_ROLE) or "both"
    if role != "both":
        raise UnsupportedError(
            f"$AGL_CURRENT_ROLE={role!r}: Trainer runs the algorithm and its runners in one "
            "program. Unset the variable; for runners on other machines use lightspan.Trainer and "
            "`lightspan runner`"
        )


def without_effect() -> list[str]:
    """Return the variables of Agent Lightning that are set, as `$NAME='value'`."""
    return [f"${name}={os.environ[name]!r}" for name in LightningEnvVar if os.environ.get(name)]


def resolve_str_env_var(
    env_var: LightningEnvVar, override: str | None = None, fallback: str | None = None
) -> str | None:
    """Return `override`, or else the variable's value, or else `fallback`."""
    return override if override is not None else os.environ.get(env_var, fallback)


def resolve_bool_env_var(
    env_var: LightningEnvVar, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """Return `override`, or else the variable's value, or else `fallback`.

    Raises:
        ConfigError: the variable is read, and its value is no boolean such as `true` or `0`.
    """
    text = resolve_str_env_var(env_var)
    if override is not None or text is None:
        return fallback if override is None else override
    if text.strip().lower() not in _BOOLEANS:
        raise ConfigError(f"${env_var}={text!r} must be one of {', '.join(_BOOLEANS)}")
    return _BOOLEANS[text.strip().lower()]

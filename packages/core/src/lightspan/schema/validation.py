"""Validate users' arguments, and raise errors that name the argument."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Integral
from typing import Final, TypeGuard
from urllib.parse import urlsplit

import msgspec

from lightspan.errors import ConfigError

_UNBOUNDED: Final = (None, math.inf, -math.inf)
MAX_SEED: Final = 2**63 - 1
"""Largest seed of random number generators."""
MAX_S: Final = 1e9
"""Largest number of seconds for clocks and timers: more than 30 years."""


def check_whole(
    name: str, value: object, low: int, high: int | None = None, *, optional: bool = False
) -> None:
    """Raise `ConfigError` unless `value` is a whole number from `low` to `high`.

    Args:
        name: name of the argument, for the error.
        high: inclusive upper bound; None for no bound.
        optional: whether None is allowed.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}")
    if int(value) < low:
        raise ConfigError(f"{name}={value!r} must be at least {low}")
    if high is not None and int(value) > high:
        raise ConfigError(f"{name}={value!r} must be at most {high}")


def check_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    below: float = math.inf,
    optional: bool = False,
) -> None:
    """Raise `ConfigError` unless `value` is a finite number within the bounds.

    Args:
        name: name of the argument, for the error.
        value: the value to check.
        above: exclusive lower bound; None for no bound.
        low: inclusive lower bound.
        high: inclusive upper bound.
        below: exclusive upper bound.
        optional: whether None is allowed.
    """
    if optional and value is None:
        return
    is_above = is_number(value) and (above is None or value > above)
    if is_number(value) and is_above and low <= value <= high and value < below:
        return
    bounds = {"above": above, "at least": low, "at most": high, "below": below}
    limits = [f"{word} {bound:g}" for word, bound in bounds.items() if bound not in _UNBOUNDED]
    raise ConfigError(f"{name}={value!r} must be a finite number {' and '.join(limits)}".rstrip())


def is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is a finite number and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: use one of {', '.join(map(repr, allowed))}")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise `ConfigError` unless `value` is None or an instance of `kind`.

    The error names `kind` as a class of `lightspan`.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r}: use lightspan.{kind.__name__}(…), or None")


def check_effect(struct: msgspec.Struct, name: str, has_effect: object, reason: str) -> None:
    """Raise `ConfigError` if a field has no effect and differs from its default.

    Args:
        struct: the settings; each of their fields has a default.
        name: name of the field.
        has_effect: whether the field has an effect with the other settings.
        reason: why it has none, and what to do.
    """
    value, place = getattr(struct, name), struct.__struct_fields__.index(name)
    if not has_effect and value != struct.__struct_defaults__[place]:
        raise ConfigError(f"{type(struct).__name__}: {name}={value!r} has no effect {reason}")


def check_url(url: str, what: str) -> None:
    """Raise `ConfigError` unless `url` is an http or https URL.

    Args:
        what: name of the URL's purpose, with which the error begins.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        good = good and parts.port != 0  # reading a port that is not a number raises
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"{what} {url!r} is not an http or https URL: write it as in http://127.0.0.1:8000/v1"
        )


def check_device_name(device: object) -> None:
    """Raise `ConfigError` unless `device` is the name of a CPU or GPU. torch is not imported."""
    if not isinstance(device, str) or re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise ConfigError(
            f'device={device!r} is unknown: use "cpu", or "cuda" for a GPU ("cuda:1" for the '
            "second)"
        )


def parse_gateway_address(text: str) -> tuple[str, int]:
    """Return host and port of a text `HOST` or `HOST:PORT`.

    The port is 0 if the text has none, which means any free port.

    Raises:
        ConfigError: the text has another form, or the host means all addresses of the machine.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", parts.port or 0
        is_valid = parts.netloc == text and "@" not in text and bool(host)
    except (TypeError, ValueError):
        host, port, is_valid = "", 0, False
    if not is_valid:
        raise ConfigError(f'gateway={text!r} is not an address: give "HOST" or "HOST:PORT"')
    if host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"gateway={text!r} means all addresses of this machine: give the one by which the "
            "store's server reaches it"
        )
    return host, port

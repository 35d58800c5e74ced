"""What all adapters share: the versions they need, what `instrument()` returns, texts in spans."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from lightspan.errors import ConfigError

TEXT_LIMIT: Final = 65_536
"""Characters of a tool's arguments or result that its span keeps."""


# --- versions -------------------------------------------------------------------------------
def require_framework(name: str, floor: str) -> str:
    """The installed version of a framework.

    Args:
        name: of its distribution.
        floor: the oldest version that the adapter works with.

    Raises:
        ConfigError: it is not installed, or older than `floor`.
    """
    fix = f"pip install '{name}>={floor}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        raise ConfigError(f"{name} is not installed in this environment: {fix}") from None
    if _numbers(found) < _numbers(floor):
        raise ConfigError(f"{name} {found} is older than {floor}, which this needs: {fix}")
    return found


def too_new(adapter: str, framework: str, found: str, error: ImportError) -> ImportError:
    """The error of an adapter that misses something in a framework that is new enough."""
    return ImportError(
        f"this {adapter} does not know {framework} {found} ({error}): upgrade {adapter}, or "
        f"install an older {framework}"
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


# --- texts ----------------------------------------------------------------------------------
def shown(value: Any) -> str:
    """A value as text or JSON, cut to `TEXT_LIMIT` characters. Never raises."""
    return shortened(value if isinstance(value, str) else as_json(value))


def shortened(text: str) -> str:
    """A text, cut to a length that a span can carry."""
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:TEXT_LIMIT]}… ({len(text)} characters)"


def as_json(value: Any) -> str:
    """A value as JSON; what JSON cannot say becomes its `repr`. Never raises."""
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except Exception:  # keys that are no text, cycles, a `repr` of the app's that raises
        return f"<{type(value).__name__}>"


# --- installing -----------------------------------------------------------------------------


class Instrumentation:
    """What `instrument()` returns: as a context manager it undoes what that call did.

    Args:
        undo: the adapter's `uninstrument`; None if the call found everything installed.
    """

    def __init__(self, undo: Callable[[], None] | None) -> None:
        self._undo = undo

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._undo is not None:
            self._undo()


class AdapterInstrumentor:
    """What `opentelemetry-instrument` loads; a subclass names its adapter's functions.

    OpenTelemetry's own options say nothing to an adapter.
    """

    on: ClassVar[Callable[[], Instrumentation]]
    """The adapter's `instrument`, as a static method."""
    off: ClassVar[Callable[[], None]]
    """The adapter's `uninstrument`, as a static method."""

    def instrument(self, **_: Any) -> None:
        """Do what the adapter's `instrument()` does."""
        type(self).on()

    def uninstrument(self, **_: Any) -> None:
        """Do what the adapter's `uninstrument()` does."""
        type(self).off()


__all__ = [
    "TEXT_LIMIT",
    "AdapterInstrumentor",
    "Instrumentation",
    "as_json",
    "require_framework",
    "shortened",
    "shown",
    "too_new",
]

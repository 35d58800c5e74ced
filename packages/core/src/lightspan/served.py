"""What a finished run says of how its policies are to be served: part of `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.errors import ConfigError
from lightspan.records import Json
from lightspan.routing import Routing

KEY: Final = "serving"
"""In `result.json`."""


class ServedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A trained policy."""

    folder: str
    """Of the model or PEFT adapter, relative to the run's."""
    model: str
    """Its starting weights, which an adapter needs."""
    version: int = 0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The policies of a run, and which agents they answer."""

    policies: dict[str, ServedPolicy]
    base_model: str
    """For agents frozen as `"base"`."""
    routing: Routing

    def as_json(self) -> dict[str, Json]:
        """For `result.json`."""
        plain: dict[str, Json] = msgspec.to_builtins(self)
        return plain


def read_served(result: Mapping[str, Any] | None, folder: Path) -> Served:
    """What `result.json` says.

    Raises:
        ConfigError: the run is not complete, or an older lightspan ended it.
    """
    if result is None:
        raise ConfigError(
            f"the run in {folder} is not complete, so it has no trained model yet: go on with it "
            "(resume=True, --resume), then serve it"
        )
    if KEY not in result:
        raise ConfigError(
            f"the run in {folder} was ended by a lightspan that could not serve yet: train it again"
        )
    try:
        return msgspec.convert(result[KEY], Served)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder} does not say how it is to be served: {error}") from error

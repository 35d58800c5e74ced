"""Read what a run serves: its trained policies, and the endpoints of agents not trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from lightspan.errors import ConfigError
from lightspan.training.folder import PROMPTS
from lightspan.training.manifest import KEY, ServedRun


def read_served(result: Mapping[str, Any] | None, folder: Path) -> ServedRun:
    """Return the trained policies of a complete run.

    Args:
        result: content of `result.json`; None while the run is incomplete.
        folder: folder of the run, for error messages.

    Raises:
        ConfigError: the run is incomplete, trained no policy, or `result.json` is damaged.
    """
    if result is None:
        raise ConfigError(
            f"the run in {folder} is not complete, so it has no trained model yet: go on with it "
            "(resume=True, --resume), then serve it"
        )
    if result.get(KEY) is None:
        path = folder / PROMPTS
        learned = f": what it learned is in {path}" if path.exists() else ""
        raise ConfigError(f"the run in {folder} trained no policy, so it has no model{learned}")
    try:
        return msgspec.convert(result[KEY], ServedRun)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{folder} cannot be served, its result.json is damaged: {error}"
        ) from error


class Upstream(NamedTuple):
    """An endpoint that answers the calls of frozen agents."""

    agents: str
    """Pattern on agent paths, or "other agents" for agents without a rule."""
    url: str
    variable: str | None
    """Environment variable of the API key; None if no key is sent."""

    def __str__(self) -> str:
        key = f"the key in ${self.variable}" if self.variable else "no key"
        host = f" (the host is {self._host})" if "@" in self.url else ""
        return quoted(f"{self.agents} -> {self.url}{host}, with {key}")

    @property
    def _host(self) -> str | None:
        """Host of `url`; None for an invalid URL.

        It is shown next to the URL, because a user name before `@` can be mistaken for the host.
        """
        try:
            return urlsplit(self.url).hostname
        except ValueError:
            return None


def upstreams_of(served: ServedRun) -> list[Upstream]:
    """Return the endpoints of frozen agents."""
    rules = [(rule.pattern, rule.target) for rule in served.routing.rules]
    return [
        Upstream(pattern, target.endpoint.base_url, target.endpoint.api_key_env)
        for pattern, target in [*rules, ("other agents", served.routing.default)]
        if target.endpoint is not None
    ]


def quoted(text: str) -> str:
    """Return `text` from an untrusted file with non-ASCII and control characters escaped."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]

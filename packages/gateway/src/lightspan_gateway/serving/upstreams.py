"""The endpoints to which a served run would send the calls of frozen agents."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from lightspan.training.manifest import ServedRun


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

"""LLM: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lightspan.errors import ConfigError


class LLM(msgspec.Struct, frozen=True, kw_only=True, tag="llm"):
    """An OpenAI-compatible endpoint. A key is kept by its variable's *name*, never by value."""

    base_url: str
    model: str
    """Empty: whatever model the app names."""
    api_key_env: str | None = None
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)

    def api_key(self) -> str:
        """The key from the environment.

        Raises:
            ConfigError: the variable is not set.
        """
        if self.api_key_env is None:
            return "none"
        try:
            return os.environ[self.api_key_env]
        except KeyError:
            raise ConfigError(
                f"the endpoint {self.base_url} needs the key in ${self.api_key_env}, "
                "which is not set"
            ) from None


def check_url(url: str, what: str) -> None:
    """Raise `ConfigError` unless it is the URL of a web server."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        good = good and parts.port != 0  # a port that is no number raises
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"{what} {url!r} is no http or https URL: write it as in http://127.0.0.1:8000/v1"
        )

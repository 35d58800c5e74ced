"""LLM: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from lightspan.errors import ConfigError
from lightspan.schema.redaction import add_key_variable


class LLM(msgspec.Struct, frozen=True, kw_only=True, tag="llm"):
    """An OpenAI-compatible endpoint. A key is kept by its variable's *name*, never by value."""

    base_url: str
    model: str
    """Empty: whatever model the app names."""
    api_key_env: str | None = None
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.api_key_env is not None:
            add_key_variable(self.api_key_env)

    @property
    def api_key(self) -> str:
        """The key from the environment; `"none"` for an endpoint without one.

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

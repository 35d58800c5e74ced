"""LLM: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from lightspan.errors import ConfigError
from lightspan.schema.redaction import add_key_variable


class LLM(msgspec.Struct, frozen=True, kw_only=True, tag="llm"):
    """An OpenAI-compatible endpoint.

    Its API key is in the environment variable that `api_key_env` names.
    """

    base_url: str
    model: str
    """Name of the model; empty for the model that the app names in its requests."""
    api_key_env: str | None = None
    """Environment variable with the key, which is never stored; None if there is no key."""
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.api_key_env is not None:
            add_key_variable(self.api_key_env)

    @property
    def api_key(self) -> str:
        """The API key from the environment variable; the text `"none"` if `api_key_env` is None.

        Raises:
            ConfigError: the variable is not set.
        """
        if self.api_key_env is None:
            return "none"
        key = os.environ.get(self.api_key_env)
        if key is None:
            raise ConfigError(
                f"the endpoint {self.base_url} needs the key in ${self.api_key_env}, "
                "which is not set"
            )
        return key

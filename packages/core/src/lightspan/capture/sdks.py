"""The client libraries whose calls are captured: OpenAI's and Anthropic's, which one generator
(Stainless) makes, and so alike."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Sdk:
    """One of them.

    Args:
        name: of its module; also what GenAI attributes call its provider.
        clients: the classes with a `request` of their own, those that others inherit from first; an
            older version may lack some. Each has an async twin.
        base: where its base URLs end.
        paths: the requests that ask a model; every other request of a client is not ours to touch.
    """

    name: str
    clients: tuple[str, ...]
    base: str
    paths: tuple[str, ...]

    @property
    def installed(self) -> bool:
        """Whether it can be imported."""
        return importlib.util.find_spec(self.name) is not None

    def module(self) -> Any:
        """It, imported."""
        return importlib.import_module(self.name)

    def kinds(self) -> Iterator[tuple[Any, Any]]:
        """The classes that are there, each with its async twin."""
        module = self.module()
        for name in self.clients:
            if hasattr(module, name):
                yield getattr(module, name), getattr(module, f"Async{name}")

    def path(self, url: str) -> str | None:
        """The path below `base` of a model request, whatever base path or deployment it had; None
        for another request."""
        for path in self.paths:
            if url.endswith(path):
                return path
        return None


OPENAI: Final = Sdk(
    name="openai",
    clients=("OpenAI",),
    base="/v1",
    paths=("/chat/completions", "/completions", "/responses"),
)
ANTHROPIC: Final = Sdk(
    name="anthropic",
    # until they send it, a request for another cloud is the same request
    clients=("Anthropic", "AnthropicBedrock", "AnthropicBedrockMantle", "AnthropicVertex"),
    base="",
    paths=("/v1/messages",),
)
SDKS: Final = (OPENAI, ANTHROPIC)


def any_installed() -> bool:
    """Whether there is a client whose calls could be captured."""
    return any(sdk.installed for sdk in SDKS)


__all__ = ["ANTHROPIC", "OPENAI", "SDKS", "Sdk", "any_installed"]

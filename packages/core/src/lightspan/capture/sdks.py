"""The client libraries whose calls are captured: OpenAI's and Anthropic's, which one generator
(Stainless) makes, and so alike."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Sdk:
    """One of them.

    Args:
        name: of its module; also what GenAI attributes call its provider.
        client: the class of its clients; `Async…` is the async twin.
        wrapped: module and classes, sync and async, from which every client inherits `request`.
        base: where its base URLs end.
        paths: the requests that ask a model; every other request of a client is not ours to touch.
    """

    name: str
    client: str
    wrapped: tuple[str, str, str]
    base: str
    paths: tuple[str, ...]

    @property
    def installed(self) -> bool:
        """Whether it can be imported."""
        return importlib.util.find_spec(self.name) is not None

    def module(self) -> Any:
        """It, imported."""
        return importlib.import_module(self.name)

    def wrapped_classes(self) -> tuple[Any, Any]:
        """Return the sync and the async class whose `request` is wrapped."""
        name, sync_class, async_class = self.wrapped
        module = importlib.import_module(name)
        return getattr(module, sync_class), getattr(module, async_class)

    def path(self, url: str) -> str | None:
        """The path below `base` of a model request, whatever base path or deployment it had; None
        for another request."""
        for path in self.paths:
            if url.endswith(path):
                return path
        return None


OPENAI: Final = Sdk(
    name="openai",
    client="OpenAI",
    # not its base class: an instrumentation that wrapped these before us keeps the base's as it was
    wrapped=("openai", "OpenAI", "AsyncOpenAI"),
    base="/v1",
    paths=("/chat/completions", "/completions", "/responses"),
)
ANTHROPIC: Final = Sdk(
    name="anthropic",
    client="Anthropic",
    # the clients for other clouds inherit from these alone
    wrapped=("anthropic._base_client", "SyncAPIClient", "AsyncAPIClient"),
    base="",
    paths=("/v1/messages",),
)
SDKS: Final = (OPENAI, ANTHROPIC)


def any_installed() -> bool:
    """Whether there is a client whose calls could be captured."""
    return any(sdk.installed for sdk in SDKS)


__all__ = ["ANTHROPIC", "OPENAI", "SDKS", "Sdk", "any_installed"]

"""What this process was told besides a store's URL, by that URL: it is shown and written nowhere.

A process that starts others which open the same store hands it on to them (`secrets_of`,
`keep_secrets`), never by their environment, which an app could read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_secrets: Final[dict[str, dict[str, str]]] = {}


def keep_secrets(url: str, secrets: Mapping[str, str]) -> None:
    """Remember what belongs to a URL, in place of what was known."""
    if secrets:
        _secrets[url] = dict(secrets)


def secrets_of(url: str) -> dict[str, str]:
    """What is known besides a URL that has no secret in it."""
    return dict(_secrets.get(url, {}))

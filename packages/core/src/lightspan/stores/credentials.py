"""Keep the credentials of stores in memory; the key is the store's URL without its credentials.

Credentials are neither shown nor written. A process passes them to a child process that opens the
same store (`secrets_of`, `keep_secrets`). It does not pass them by the environment, which an app
could read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_secrets: Final[dict[str, dict[str, str]]] = {}


def keep_secrets(url: str, secrets: Mapping[str, str]) -> None:
    """Keep the secrets of the store at `url`; they replace earlier ones."""
    if secrets:
        _secrets[url] = dict(secrets)


def secrets_of(url: str) -> dict[str, str]:
    """Return the secrets kept for a URL; empty if there are none."""
    return dict(_secrets.get(url, {}))

"""The limit of an answer for which neither the app nor the algorithm sets one."""

from __future__ import annotations

from typing import Final

MAX_DEFAULT: Final = 8_192
"""Largest default, in tokens: the edit of a whole file; a model that never ends stops here."""
MIN_DEFAULT: Final = 1_024
"""Smallest default, in tokens."""
CONTEXT_SHARE: Final = 4
"""Divisor of the context: a default is at most this fraction, so that other turns have room."""
CACHE_SHARE: Final = 8
"""Divisor of the key-value cache: a default is at most this fraction, because rollouts share it."""


def default_max_tokens(context: int, cache: int | None) -> int:
    """Return the limit of an answer in tokens.

    Args:
        context: length of the model's context in tokens.
        cache: size of the engine's key-value cache in tokens; None if it is unknown.
    """
    shares = [MAX_DEFAULT, context // CONTEXT_SHARE]
    shares += [] if cache is None else [cache // CACHE_SHARE]
    return max(MIN_DEFAULT, min(shares))

"""The app of `scale.py` that does nothing: what is left is what a rollout itself costs. Runner
processes import it by name."""

from __future__ import annotations

from typing import Any


async def nothing(task: Any) -> float:
    """Return a reward at once."""
    return 1.0

"""The app of `scale.py` that does nothing, to measure the cost of a rollout itself.

Runner processes import it by name.
"""

from __future__ import annotations

from typing import Any


async def nothing(task: Any) -> float:
    """Return the reward 1 at once."""
    return 1.0

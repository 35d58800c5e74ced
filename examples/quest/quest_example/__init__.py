"""A text adventure for a LangGraph agent, and the code that trains the agent on a laptop.

- `app` is the program, which does not import lightspan.
- `world` has the rules of the game; `prompts` the texts that the agent reads.
- `worlds` generates quests; `player` is a careful player; `chart` finds out what can still be won.
- `demonstrations` are imperfect runs; `reward` scores the end of a run.
- `training` runs the app for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `answer`, the app with its reward, at its first use; the app does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("quest_example.training").answer

"""A text adventure for a LangGraph agent, and everything needed to train it on a laptop.

`app` is the program itself and knows nothing of lightspan; `world` is what it plays and `prompts`
what its agent reads. `worlds` generates quests, `player` is a careful player and `chart` knows what
can still be won; `demonstrations` are imperfect runs; `reward` scores an end. `training` puts them
together, for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`quest_example:answer` is what training runs; the app itself does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("quest_example.training").answer

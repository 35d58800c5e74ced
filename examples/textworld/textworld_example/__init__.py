"""An app that plays games of TextWorld, and the code that trains its agent on a laptop.

- `app` is the program, which does not import lightspan.
- `games` generates games; `demonstrations` are imperfect games.
- `reward` scores the end of a game, and plays games without a model, as controls.
- `training` runs the app for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `answer`, the app with its reward, at its first use; the app does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("textworld_example.training").answer

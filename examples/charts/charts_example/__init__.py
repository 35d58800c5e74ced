"""An app that reads charts, and the code that trains its reader on a laptop.

- `app` is the program, which does not import lightspan; `questions` parses and computes.
- `charts` draws charts; `tasks` asks questions about them.
- `demonstrations` are imperfect readings; `vision_model` builds the model that imitates them.
- `reward` scores an answer, and answers without looking, as a control.
- `training` runs the app for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `answer`, the app with its reward, at its first use; the app does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("charts_example.training").answer

"""A text-to-SQL app on LangGraph, and the code that trains it on a laptop.

- `app` is the program, which does not import lightspan; `database` runs its queries safely.
- `names`, `queries`, `worlds` and `demonstrations` generate the data.
- `spider` reads published data.
- `reward` scores a query; `signals` has an intermediate reward.
- `training` runs the app for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `answer`, the app with its reward, at its first use; the app does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("sql_example.training").answer

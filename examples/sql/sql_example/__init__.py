"""A text-to-SQL app on LangGraph, and everything needed to train it on a laptop.

`app` is the program itself and knows nothing of lightspan; `database` runs its queries safely.
`names`, `queries`, `worlds` and `demonstrations` generate the data, `spider` reads published data;
`reward` scores an answer and `signals` a draft. `training` puts them together, for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`sql_example:answer` is what training runs; the app itself does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("sql_example.training").answer

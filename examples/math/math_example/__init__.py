"""Word problems for an AutoGen agent with a calculator, and everything needed to train it.

`app` is the program itself and knows nothing of lightspan; `calculator` evaluates arithmetic safely
and `server` offers it over MCP; `expressions`, `words`, `worlds` and `demonstrations` generate the
data, `calc_x` and `gsm8k` read published data; `reward` scores an answer. `training` puts them
together, for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`math_example:answer` is what training runs; the app itself does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("math_example.training").answer

"""Word problems for an AutoGen agent with a calculator, and the code that trains the agent.

- `app` is the program, which does not import lightspan.
- `calculator` evaluates arithmetic safely; `server` offers it over MCP.
- `expressions`, `words`, `worlds` and `demonstrations` generate the data.
- `calc_x` and `gsm8k` read published data.
- `reward` scores an answer; `training` runs the app for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `answer`, the app with its reward, at its first use; the app does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("math_example.training").answer

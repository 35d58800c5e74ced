"""A customer service app on LangGraph, and everything needed to train it on a laptop.

`app` is the program itself and knows nothing of lightspan. `phrasings` and `messages` are the data,
`reward` scores an outcome, `pretrained` makes an ordinary folder of the published model. `training`
puts them together, for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`router_example:answer` is what training runs; the app itself does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("router_example.training").answer

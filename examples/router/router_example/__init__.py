"""A customer service app on LangGraph, the same with Pydantic AI, and everything needed to train
them on a laptop.

`app` and `pydantic_ai_app` are the programs themselves and know nothing of lightspan; `prompts` and
`state` are what they share. `phrasings` and `messages` are the data, `reward` scores an outcome,
`pretrained` makes an ordinary folder of the published model, `recipes` says how it is trained.
`training` and `pydantic_ai_training` put them together, for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`router_example:answer` is what training runs; the app itself does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("router_example.training").answer

"""A customer service app on LangGraph and on Pydantic AI, and the code that trains it on a laptop.

- `app` and `pydantic_ai_app` are the programs, which do not import lightspan.
- `prompts` and `state` are shared by both programs.
- `phrasings` and `messages` are the data; `reward` scores an outcome.
- `pretrained` makes a folder of the pretrained model; `recipes` has the settings of training.
- `training` and `pydantic_ai_training` run the apps for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `answer`, the app with its reward, at its first use; the app does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("router_example.training").answer

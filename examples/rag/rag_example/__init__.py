"""Multi-hop question answering over a search index, and the code that trains it on a laptop.

- `app` (OpenAI Agents SDK) and `crew` (CrewAI) are the program, without an import of lightspan.
- `index` is the BM25 index of passages that both search.
- `names`, `worlds` and `demonstrations` generate the data.
- `musique` reads MuSiQue's published files; `documents` reads a folder of your own.
- `reward` scores an answer; `training` and `crew_training` run the apps for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import `answer`, the app with its reward, at its first use; the app does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("rag_example.training").answer

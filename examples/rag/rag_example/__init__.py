"""Multi-hop question answering over a search index, and everything needed to train it on a laptop.

`app` (OpenAI Agents SDK) and `crew` (CrewAI) are the program itself and know nothing of lightspan;
`index` is its BM25 index of passages. `names`, `worlds` and `demonstrations` generate the data,
`musique` reads MuSiQue's published files, `documents` a folder of one's own; `reward` scores an
answer. `training` and `crew_training` put them together, for `train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`rag_example:answer` is what training runs; the app itself does not need it."""
    if name != "answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("rag_example.training").answer

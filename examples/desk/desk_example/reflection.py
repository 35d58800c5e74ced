"""Propose prompts to the search: by a script that goes through a list, or by a language model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from desk_example.candidates import CANDIDATES
from lightspan import LLM
from lightspan_testing.scripted import Request, ScriptedServer

NO_MORE: Final = "I have no other text."


class Script:
    """A scripted model that proposes each text of a list once, whatever the request contains.

    Args:
        order: seed of the order of `texts`.
        begin: number of texts that were proposed before, and are skipped.
    """

    def __init__(self, order: int, begin: int = 0, texts: Sequence[str] = CANDIDATES) -> None:
        self.texts = in_order(order, texts)
        self.proposed = begin

    def __call__(self, request: Request) -> str:
        """Return the next text in the form of GEPA's answers; `NO_MORE` after the last text."""
        rest = self.texts[self.proposed : self.proposed + 1]
        self.proposed += 1
        return f"<prompt>\n{rest[0]}\n</prompt>" if rest else NO_MORE


def in_order(order: int, texts: Sequence[str] = CANDIDATES) -> list[str]:
    """Return `texts` shuffled with the seed `order`."""
    return random.Random(f"order {order}").sample(list(texts), len(texts))


def answered(folder: Path) -> int:
    """Return how many reflections the journal in a run's `folder` contains; 0 without a journal."""
    try:
        lines = (folder / "journal" / "gepa.jsonl").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return 0
    return sum('"type":"reflection"' in line for line in lines)


@contextmanager
def scripted(order: int, folder: Path) -> Iterator[LLM]:
    """Serve a `Script` over HTTP within the block; it resumes where the run in `folder` stopped."""
    with ScriptedServer(Script(order, answered(folder))) as server:
        yield LLM(base_url=server.url, model="scripted")

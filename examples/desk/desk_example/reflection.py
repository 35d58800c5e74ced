"""What proposes texts: a script that goes through a list, or a language model."""

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
    """Proposes the texts of a list one after another, each once, whatever it is shown.

    Args:
        order: the seed of their order.
        begin: how many were proposed before.
    """

    def __init__(self, order: int, begin: int = 0, texts: Sequence[str] = CANDIDATES) -> None:
        self.texts = in_order(order, texts)
        self.proposed = begin

    def __call__(self, request: Request) -> str:
        """The next answer."""
        rest = self.texts[self.proposed : self.proposed + 1]
        self.proposed += 1
        return f"<prompt>\n{rest[0]}\n</prompt>" if rest else NO_MORE


def in_order(order: int, texts: Sequence[str] = CANDIDATES) -> list[str]:
    """The texts in the order of a seed."""
    return random.Random(f"order {order}").sample(list(texts), len(texts))


def answered(folder: Path) -> int:
    """The reflections that the run in this folder has in its journal."""
    try:
        lines = (folder / "journal" / "gepa.jsonl").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return 0
    return sum('"type":"reflection"' in line for line in lines)


@contextmanager
def scripted(order: int, folder: Path) -> Iterator[LLM]:
    """The endpoint of a script, which goes on where the run in this folder stopped."""
    with ScriptedServer(Script(order, answered(folder))) as server:
        yield LLM(base_url=server.url, model="scripted")

"""The documents as an agent reads them: what a search shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rag_example.index import Hit, Index

PASSAGES = 4
CHARACTERS = 1000
NOTHING = "nothing found"


@dataclass(frozen=True)
class Library:
    """An index, and how much of it a search shows."""

    index: Index
    passages: int = PASSAGES
    """Passages that a search shows at most."""
    characters: int = CHARACTERS
    """Characters of each passage."""

    def search(self, query: str) -> str:
        """What an agent reads of a search."""
        return describe(self.index.search(query, self.passages), self.characters)


def describe(hits: Iterable[Hit], characters: int = CHARACTERS) -> str:
    """What a search found, "title: text" a line, each cut to so many characters."""
    lines = [f"{hit.passage.title}: {hit.passage.text}" for hit in hits]
    shown = [line if len(line) <= characters else f"{line[:characters]}..." for line in lines]
    return "\n".join(shown) or NOTHING

"""Documents with the form in which an agent sees the results of a search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rag_example.index import Hit, Index

PASSAGES = 4
CHARACTERS = 1000
NOTHING = "nothing found"


@dataclass(frozen=True)
class Library:
    """An index, with the size of the results that a search shows."""

    index: Index
    passages: int = PASSAGES
    """Maximum number of passages that a search shows."""
    characters: int = CHARACTERS
    """Maximum number of characters of each passage."""

    def search(self, query: str) -> str:
        """Return the result of a search as text for an agent."""
        return describe(self.index.search(query, self.passages), self.characters)


def describe(hits: Iterable[Hit], characters: int = CHARACTERS) -> str:
    """Return hits as lines of "title: text", each cut to `characters`; a fixed text if there are
    none.
    """
    lines = [f"{hit.passage.title}: {hit.passage.text}" for hit in hits]
    shown = [line if len(line) <= characters else f"{line[:characters]}..." for line in lines]
    return "\n".join(shown) or NOTHING

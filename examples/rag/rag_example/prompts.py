"""The texts that the app's agents read, and functions that read their answers.

The texts are short, because every token costs time on a laptop.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MARK = "Answer:"
"""Text with which an answer begins."""

RESEARCH = f"Search for one fact at a time, in the words of the documents. End with: {MARK} NAME"
"""Instructions of the agent that searches and answers."""

SEARCH = "Search the documents."
"""Description of the search tool."""

_ANSWER = re.compile(rf"{MARK}[ \t]*(.*)", re.IGNORECASE)
_WELL_FORMED = re.compile(rf"{MARK} \S[^\n]*")


def parse_answer(said: str) -> str:
    """Return the text after the last "Answer:" on its line, or the whole text without "Answer:"."""
    marked = _ANSWER.findall(said)
    return str(marked[-1] if marked else said).strip()


def is_well_formed(said: str) -> bool:
    """Return whether the text is only "Answer: " and an answer, on one line."""
    return _WELL_FORMED.fullmatch(said.strip()) is not None


class Part(NamedTuple):
    """An agent of the crew, in the terms in which CrewAI describes it to the model."""

    role: str
    backstory: str
    goal: str
    expected: str
    """Description of the result that its task should give."""


SEARCHER = Part("searcher", "You search.", "Find the fact.", "the line that tells it")
ANSWERER = Part("answerer", "You answer.", "Name it.", f"{MARK} NAME")

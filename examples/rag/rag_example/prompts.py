"""What the app's agents read and how their answers are understood.

The texts are short on purpose: the model trained on a laptop pays for every token.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MARK = "Answer:"
"""What an answer begins with."""

RESEARCH = f"Search for one fact at a time, in the words of the documents. End with: {MARK} NAME"
"""The instructions of the agent that searches and answers."""

SEARCH = "Search the documents."
"""What the tool says of itself."""

_ANSWER = re.compile(rf"{MARK}[ \t]*(.*)", re.IGNORECASE)
_WELL_FORMED = re.compile(rf"{MARK} \S[^\n]*")


def parse_answer(said: str) -> str:
    """What follows the last "Answer:" on its line, or all that was said."""
    marked = _ANSWER.findall(said)
    return str(marked[-1] if marked else said).strip()


def is_well_formed(said: str) -> bool:
    """Whether it is "Answer: " and an answer on one line, and nothing else."""
    return _WELL_FORMED.fullmatch(said.strip()) is not None


class Part(NamedTuple):
    """An agent of the crew, as CrewAI describes it to the model."""

    role: str
    backstory: str
    goal: str
    expected: str
    """What its task is to give."""


SEARCHER = Part("searcher", "You search.", "Find the fact.", "the line that tells it")
ANSWERER = Part("answerer", "You answer.", "Name it.", f"{MARK} NAME")

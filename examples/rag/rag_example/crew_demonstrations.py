"""Imperfect demonstrations of the crew's searcher and answerer.

The searcher makes the mistakes in searching of `demonstrations`. The answerer may leave out the
form, and may give the name that was asked about in place of the name that was found.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from rag_example.demonstrations import (
    QUESTIONS_PER_WORLD,
    Chat,
    search_through,
    spoken,
    told,
    tool_messages,
)
from rag_example.index import Hit, Index
from rag_example.library import describe
from rag_example.prompts import ANSWERER, SEARCH, SEARCHER, Part
from rag_example.worlds import Question, make_questions, make_world

SIDE_RATE = 0.25
"""Probability that the answerer gives the wrong one of the two names in its line."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": SEARCH,
            "strict": True,
            "parameters": {
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
                "type": "object",
                "additionalProperties": False,
            },
        },
    }
]
"""The tool in the form in which CrewAI describes it to the model."""


def demonstrate(count: int, seed: int = 0) -> list[Chat]:
    """Return chats of the searcher and of the answerer, equally many, in random order.

    They are about newly generated worlds of train. Equal arguments give equal lists.
    """
    rng = random.Random(f"crew {seed}")
    chats: list[Chat] = []
    for number in itertools.count():
        if len(chats) >= count:
            break
        world = make_world(f"demonstrations-{number}", "train", seed=seed)
        built = Index.build(world.passages())
        for question in make_questions(world, QUESTIONS_PER_WORLD, seed=seed):
            chats += work(question, built, rng)
    rng.shuffle(chats)
    return chats[:count]


def work(question: Question, index: Index, rng: random.Random) -> list[Chat]:
    """Return the two chats of an imperfect run: the searcher's and the answerer's."""
    steps = search_through(question, index, rng)
    last_hit = steps[-1].hit
    line = describe([last_hit])
    searcher = [*opening(SEARCHER, question.text), *tool_messages(steps), _said(line)]
    answerer = [*opening(ANSWERER, question.text, line), _said(spoken(_name(last_hit, rng), rng))]
    return [{"messages": searcher, "tools": TOOLS}, {"messages": answerer}]


def opening(part: Part, question: str, context: str | None = None) -> list[dict[str, Any]]:
    """Return the messages with which CrewAI calls an agent.

    Args:
        context: result of the previous task; None for the first task.
    """
    shown = (
        ""
        if context is None
        else f"\n\nThis is the context you're working with:\n{context}"
        "\n\nProvide your complete response:"
    )
    asked = (
        f"\nCurrent Task: {question}\n\nThis is the expected criteria for your final answer: "
        f"{part.expected}\nyou MUST return the actual complete content as the final answer, "
        f"not a summary.{shown}"
    )
    told = f"You are {part.role}. {part.backstory}\nYour personal goal is: {part.goal}"
    return [{"role": "system", "content": told}, {"role": "user", "content": asked}]


def _name(hit: Hit, rng: random.Random) -> str:
    return hit.passage.title if rng.random() < SIDE_RATE else told(hit)


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}

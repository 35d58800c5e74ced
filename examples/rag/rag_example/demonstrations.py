"""Imperfect demonstrations of the agent: the warm start before reinforcement learning.

They teach the model to read the app's prompts, to call the tool and to copy names, and leave it
something to learn: each kind of mistake occurs at a rate of its own. Systematic errors (searching
for the question's word where the documents use another, answering without the form that the
instructions ask for) are frequent. Whether to go on stays well below one half, because a model that
ignores the cue altogether can't be brought back by reinforcement.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from rag_example.index import Hit, Index
from rag_example.library import describe
from rag_example.prompts import MARK, RESEARCH, SEARCH
from rag_example.worlds import Fact, Question, make_questions, make_world

Chat: TypeAlias = dict[str, Any]
Mistake: TypeAlias = Literal["word", "early", "form"]

COUNT = 8_000
"""Demonstrations of a warm start: runs of the agent, each with all that it says."""

MISTAKE_RATES: Mapping[Mistake, float] = {
    "word": 0.5,
    "early": 0.12,
    "form": 0.6,
}
"""How often the agent searches with the question's word, answers before the last hop, or leaves
"Answer:" out."""

PASSAGES = 1
"""Passages that a search shows the small model; its app has to use the same."""

QUESTIONS_PER_WORLD = 200
"""Questions about each of the demonstrations' worlds."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": SEARCH,
            "parameters": {
                "properties": {"query": {"title": "Query", "type": "string"}},
                "required": ["query"],
                "title": "search_args",
                "type": "object",
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]
"""The tool as the OpenAI Agents SDK describes it to the model."""


def demonstrate(count: int = COUNT, seed: int = 0) -> list[Chat]:
    """Runs of the agent, in random order; the worlds are of train, and their own.

    Equal arguments give equal lists.
    """
    rng = random.Random(f"demonstrations {seed}")
    chats: list[Chat] = []
    for number in itertools.count():
        if len(chats) >= count:
            break
        world = make_world(f"demonstrations-{number}", "train", seed=seed)
        built = Index.build(world.passages())
        questions = make_questions(world, QUESTIONS_PER_WORLD, seed=seed)
        chats += [{"messages": research(each, built, rng), "tools": TOOLS} for each in questions]
    rng.shuffle(chats)
    return chats[:count]


def research(question: Question, index: Index, rng: random.Random) -> list[dict[str, Any]]:
    """One imperfect run of the agent, as the messages that the SDK sends."""
    steps = search_through(question, index, rng)
    return [
        {"role": "system", "content": RESEARCH},
        {"role": "user", "content": question.text},
        *tool_messages(steps),
        {"role": "assistant", "content": spoken(told(steps[-1].hit), rng)},
    ]


class Step(NamedTuple):
    """One search, and what it finds."""

    query: str
    hit: Hit


def search_through(question: Question, index: Index, rng: random.Random) -> list[Step]:
    """Imperfect searches for the answer, each for the name that the one before it found."""
    steps: list[Step] = []
    name = question.facts[0].subject
    for fact in question.facts:
        query = f"{name} {search_word(fact, rng)}"
        (hit,) = index.search(query, PASSAGES)
        steps.append(Step(query, hit))
        name = told(hit)
        if _slips("early", rng):
            break
    return steps


def tool_messages(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The searches as calls of the tool, and what it gives."""
    messages: list[dict[str, Any]] = []
    for number, step in enumerate(steps):
        function = {"name": "search", "arguments": json.dumps({"query": step.query})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": describe([step.hit])},
        ]
    return messages


def search_word(fact: Fact, rng: random.Random) -> str:
    """What is searched for beside the name."""
    return fact.relation.asked if _slips("word", rng) else fact.relation.keyword


def told(hit: Hit) -> str:
    """The name that a passage ends with."""
    return hit.passage.text.rstrip(".").split()[-1]


def spoken(name: str, rng: random.Random) -> str:
    """The answer as it is demonstrated."""
    return name if _slips("form", rng) else f"{MARK} {name}"


def _slips(mistake: Mistake, rng: random.Random) -> bool:
    return rng.random() < MISTAKE_RATES[mistake]

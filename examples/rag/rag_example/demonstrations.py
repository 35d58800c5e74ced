"""Imperfect demonstrations of the agent, for the warm start before reinforcement learning.

They teach the model to read the app's prompts, to call the tool and to copy names. They also
contain mistakes that reinforcement learning can remove; each kind has its own rate. Systematic
errors are frequent: a search for the question's word where the documents use another, an answer
without the required form. An answer before the last hop is rare, because reinforcement cannot help
a model that ignores the number of hops altogether.
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
"""Number of demonstrations of a warm start; each is a whole run of the agent."""

MISTAKE_RATES: Mapping[Mistake, float] = {
    "word": 0.5,
    "early": 0.12,
    "form": 0.6,
}
"""Mistake → its probability.

- `word`: the agent searches with the question's word.
- `early`: the agent answers before the last hop.
- `form`: the agent leaves out "Answer:".
"""

PASSAGES = 1
"""Passages that a search shows the small model; the app must use the same number."""

QUESTIONS_PER_WORLD = 200
"""Number of questions about each world of the demonstrations."""

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
"""The tool in the form in which the OpenAI Agents SDK describes it to the model."""


def demonstrate(count: int = COUNT, seed: int = 0) -> list[Chat]:
    """Return runs of the agent as chats, in random order, about newly generated worlds of train.

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
    """Return the messages of an imperfect run of the agent, in the form of the SDK."""
    steps = search_through(question, index, rng)
    return [
        {"role": "system", "content": RESEARCH},
        {"role": "user", "content": question.text},
        *tool_messages(steps),
        {"role": "assistant", "content": spoken(told(steps[-1].hit), rng)},
    ]


class Step(NamedTuple):
    """A search query with the passage that it finds."""

    query: str
    hit: Hit


def search_through(question: Question, index: Index, rng: random.Random) -> list[Step]:
    """Return imperfect searches for the answer; each uses the name that the previous one found."""
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
    """Return the messages of searches: calls of the tool, each with its result."""
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
    """Return the word that is searched for in addition to the name."""
    return fact.relation.asked if _slips("word", rng) else fact.relation.keyword


def told(hit: Hit) -> str:
    """Return the name at the end of a passage."""
    return hit.passage.text.rstrip(".").split()[-1]


def spoken(name: str, rng: random.Random) -> str:
    """Return the demonstrated answer, sometimes without the required form."""
    return name if _slips("form", rng) else f"{MARK} {name}"


def _slips(mistake: Mistake, rng: random.Random) -> bool:
    return rng.random() < MISTAKE_RATES[mistake]

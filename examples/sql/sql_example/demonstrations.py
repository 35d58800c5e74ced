"""Imperfect demonstrations of the three agents, for the warm start before reinforcement learning.

They teach the model to read the app's prompts and to write SQL. They also contain mistakes that
reinforcement learning can remove; each kind has its own rate. Systematic errors (text without
quotes, `>` for "at least") are made more often than not. A wrong choice between two alternatives
(ascending or descending, sum or average) is rare, because reinforcement cannot help a model that
ignores the word in question altogether. The checker is demonstrated without mistakes: it flags
errors and empty results, which is all that so small a model can check.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypedDict

from sql_example.prompts import (
    CORRECT,
    WRONG,
    check_prompt,
    rewrite_prompt,
    run_query,
    write_prompt,
)
from sql_example.queries import Mistake, Query, mistakes
from sql_example.worlds import (
    Populations,
    Question,
    World,
    make_question,
    make_world,
    populate,
)

Agent = Literal["write_query", "check_query", "rewrite_query"]

COUNT = 16_000
"""Number of demonstrations of a warm start."""

QUESTIONS_PER_WORLD = 2
"""Number of questions about each world of the demonstrations."""

MISTAKE_RATES: Mapping[Mistake, float] = {
    "quotes": 0.6,
    "bound": 0.65,
    "direction": 0.25,
    "aggregate": 0.25,
    "distinct": 0.55,
    "condition": 0.02,
    "limit": 0.02,
}
"""Mistake → its probability, in a query in which it is possible."""

STRICT_BOUND_RATE = 0.05
"""Probability of the mistake that `>` becomes `>=`, or `<` becomes `<=`."""

TRUNCATE_LENGTH = 36
"""Maximum number of characters of a result that the small model sees; the app must use the same."""

CHECK_SHARE = 0.15
"""Number of demonstrations of the checker per demonstration of the writer."""

REWRITE_SHARE = 0.25
"""Number of demonstrations of the rewriter per demonstration of the writer."""

_EMPTY = ("no rows", "NULL", "0")


class Message(TypedDict):
    """A chat message."""

    role: Literal["user", "assistant"]
    content: str


@dataclass(frozen=True)
class Demonstration:
    """A demonstrated call of an agent: the prompt of the app, and an answer."""

    agent: Agent
    messages: tuple[Message, Message]


def demonstrate(count: int = COUNT, *, seed: int = 0) -> list[Demonstration]:
    """Return demonstrations in random order, about newly generated worlds with the vocabulary of
    train.

    Equal arguments give equal lists. There are many worlds with few questions each, so that the
    model must learn to copy names.
    """
    rng = random.Random(f"demonstrations {seed}")
    demonstrations: list[Demonstration] = []
    with TemporaryDirectory() as directory:
        for index in itertools.count():
            if len(demonstrations) >= count:
                break
            world = make_world(f"demonstrations-{index}", "train", seed=seed)
            demonstrations += _about(world, Path(directory), seed, rng)
    rng.shuffle(demonstrations)
    return demonstrations[:count]


def _about(world: World, directory: Path, seed: int, rng: random.Random) -> Iterator[Demonstration]:
    (path,) = populate(world, directory, seed=seed, populations=1)
    with Populations(world, [path]) as populations:
        for _ in range(QUESTIONS_PER_WORLD):
            question = make_question(populations, rng)
            yield _writer(world, question, rng)
            if rng.random() < CHECK_SHARE:
                yield _checker(question, str(path), rng)
            if rng.random() < REWRITE_SHARE:
                yield _rewriter(world, question, str(path), rng)
    path.unlink()


def _writer(world: World, question: Question, rng: random.Random) -> Demonstration:
    answer = spoil(question.query, rng).sql()
    return _demonstration("write_query", write_prompt(world.schema, question.text), answer)


def _checker(question: Question, db: str, rng: random.Random) -> Demonstration:
    draft = _failing(question.query, rng) if rng.random() < 0.5 else spoil(question.query, rng)
    outcome = run_query(db, draft.sql(), TRUNCATE_LENGTH)
    prompt = check_prompt(question.text, draft.sql(), outcome)
    return _demonstration("check_query", prompt, verdict(outcome))


def _rewriter(world: World, question: Question, db: str, rng: random.Random) -> Demonstration:
    draft = _failing(question.query, rng)
    outcome = run_query(db, draft.sql(), TRUNCATE_LENGTH)
    prompt = rewrite_prompt(world.schema, question.text, draft.sql(), outcome, WRONG)
    return _demonstration("rewrite_query", prompt, spoil(question.query, rng).sql())


def verdict(outcome: str) -> str:
    """Return the answer of the demonstrated checker to a result."""
    return WRONG if outcome.startswith("Error") or outcome in _EMPTY else CORRECT


def spoil(query: Query, rng: random.Random) -> Query:
    """Return `query` with random mistakes, each at its rate."""
    for mistake in mistakes(query):
        if rng.random() < _rate(mistake, query):
            query = mistakes(query)[mistake]
            if mistake == "condition":
                return query
    return query


def _rate(mistake: Mistake, query: Query) -> float:
    strict = query.condition is not None and query.condition.operator in (">", "<")
    return STRICT_BOUND_RATE if mistake == "bound" and strict else MISTAKE_RATES[mistake]


def _failing(query: Query, rng: random.Random) -> Query:
    """Return `query` as a draft that fails: text without quotes, or a misspelt name."""
    unquoted = mistakes(query).get("quotes")
    if unquoted and rng.random() < 0.7:
        return unquoted
    if query.column != "*" and rng.random() < 0.5:
        return replace(query, column=_misspelt(query.column, rng))
    return replace(query, table=_misspelt(query.table, rng))


def _misspelt(name: str, rng: random.Random) -> str:
    position = rng.randrange(1, len(name))
    return name[:position] + name[position + 1 :]


def _demonstration(agent: Agent, prompt: str, answer: str) -> Demonstration:
    messages: tuple[Message, Message] = (
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": answer},
    )
    return Demonstration(agent, messages)

"""Tasks and app of `task_choice.py`; runner processes import the app by name.

A task is a question with one right answer, and the app asks the model once. Reward is 1 if the
answer is right to the letter, else 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import lightspan

MIXED: Final = "mixed"
GENERATORS: Final[dict[str, dict[str, Any]]] = {
    "family_relationships": {"min_family_size": 3, "max_family_size": 4},
    "letter_counting": {"min_words": 3, "max_words": 5},
}
"""Generator of reasoning-gym → its settings. Both give the same items in every process."""
SETS: Final = (MIXED, *GENERATORS)
KINDS: Final = ("easy", "right", "hopeless")
WRONG: Final = {"first": 0.0, "largest": 0.4, "smallest": 0.7, "product": 1.0}
"""Question of the set `mixed` → share of wrong answers in the demonstrations."""
KIND_OF: Final = {"first": "easy", "largest": "right", "smallest": "right", "product": "hopeless"}
SEEDS: Final = {"train": 0, "test": 2_000_000, "demonstrations": 5_000_000}
"""Part → seed. Items of reasoning-gym are drawn with seed + index, so parts are far apart."""


def items(name: str, part: str, kinds: tuple[str, ...] = KINDS) -> Iterator[dict[str, Any]]:
    """Yield an endless sequence of items (`question`, `answer`, `kind`), which may repeat.

    Args:
        name: one of `SETS`.
        part: one of `SEEDS`.
        kinds: kinds of tasks in turn, for the set `mixed`; all items of the others are "right".
    """
    if name == MIXED:
        rng, number = random.Random(f"{MIXED}/{SEEDS[part]}"), 0
        while True:
            of_kind = [one for one, kind in KIND_OF.items() if kind == kinds[number % len(kinds)]]
            yield _mixed(of_kind[number // len(kinds) % len(of_kind)], rng)
            number += 1
    import reasoning_gym  # type: ignore[import-not-found]

    data = reasoning_gym.create_dataset(name, size=100_000, seed=SEEDS[part], **GENERATORS[name])
    for index in range(100_000):
        entry = data[index]
        answer = str(entry["answer"])
        yield {"question": entry["question"], "answer": answer, "kind": "right"}


def _mixed(name: str, rng: random.Random) -> dict[str, Any]:
    digits = [rng.randrange(10) for _ in range(3)]
    if name == "product":
        digits = [rng.randrange(100, 1000), rng.randrange(100, 1000)]
    answer = {
        "first": digits[0],
        "largest": max(digits),
        "smallest": min(digits),
        "product": digits[0] * digits[1],
    }[name]
    question = f"{name} of {' '.join(map(str, digits))}"
    return {"question": question, "answer": str(answer), "kind": KIND_OF[name]}


def tasks(
    name: str,
    part: str,
    count: int,
    kinds: tuple[str, ...] = KINDS,
    avoid: frozenset[str] = frozenset(),
) -> list[dict[str, Any]]:
    """Return `count` tasks with distinct questions, none of which is in `avoid`."""
    found: dict[str, dict[str, Any]] = {}
    for item in items(name, part, kinds):
        if item["question"] not in avoid:
            found.setdefault(item["question"], item)
        if len(found) == count:
            break
    return list(found.values())


def demonstrations(name: str, count: int) -> list[dict[str, Any]]:
    """Return `count` chats with an answer each, of which a share is wrong."""
    rng, chats = random.Random(name), []
    pool = [
        item["answer"] for item, _ in zip(items(name, "demonstrations"), range(200), strict=False)
    ]
    for item, _ in zip(items(name, "demonstrations"), range(count), strict=False):
        first = item["question"].partition(" ")[0]
        share = WRONG[first] if name == MIXED else 0.5
        answer = item["answer"]
        if rng.random() < share:
            answer = _wrong(first, item, rng, pool)
        question = {"role": "user", "content": item["question"]}
        chats.append({"messages": [question, {"role": "assistant", "content": answer}]})
    return chats


def _wrong(first: str, item: dict[str, Any], rng: random.Random, pool: list[str]) -> str:
    """Return another answer: one of the numbers in the question, or that of another item."""
    if first in ("largest", "smallest"):
        others = [digit for digit in item["question"].split()[2:] if digit != item["answer"]]
        return rng.choice(others or pool)
    if first == "product":
        return str(rng.randrange(10_000, 1_000_000))
    if item["answer"].isdigit() and rng.random() < 0.7:
        return str(int(item["answer"]) + rng.choice((-2, -1, 1, 2)))
    return rng.choice(pool)


@lightspan.rollout
async def answer(task: dict[str, Any]) -> float:
    """Ask the model; return 1 for the right answer, else 0."""
    with lightspan.agent("solver"):
        reply = await _client().chat.completions.create(
            model="any", max_tokens=12, messages=[{"role": "user", "content": task["question"]}]
        )
    return float((reply.choices[0].message.content or "").strip() == task["answer"])


@cache
def _client() -> Any:
    import openai

    # nothing listens there: the calls go to the gateway
    return openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)

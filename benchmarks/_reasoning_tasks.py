"""Tasks of reasoning-gym 0.1.25, as one question and one answer, and an app that asks them.

    tasks = make_tasks("gcd", "train", 256, without=questions_of(held_out))
    Trainer(LightningRL(model)).fit(answer, tasks)

A task contains its whole entry, so that nothing depends on the process that makes it: six
generators of reasoning-gym make other items in other processes. Runners import this module, which
imports neither torch nor, before the first score, reasoning-gym.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypedDict

from lightspan import LLM, agent, rollout

EXACT: Final = 0.99
"""Score from which an answer counts as exactly right."""
SYSTEM: Final = "Answer with the answer only."
"""System message for a pretrained model; the small model was warm-started without one."""
FIRST_SEED: Final = {"train": 0, "dev": 1_000_000, "test": 2_000_000, "shots": 3_000_000}
"""Split → its first seed. Item i of seed s is item i - 1 of seed s + 1, so splits are far apart."""
DEMONSTRATIONS_SEED: Final = 5_000_000
SPACING: Final = 100_000
"""Difference of the seeds of two warm starts' demonstrations."""
FEW_ANSWERS: Final = 3
"""Number of different answers up to which at most `FEW_WRONG` of the demonstrations are wrong: with
half of them wrong, a model learns to ignore the question."""
FEW_WRONG: Final = 0.3


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A generator of reasoning-gym, with its settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    shots: int = 0
    """Examples in a prompt for a pretrained model."""
    max_tokens: int = 24


GENERATORS: Final[Mapping[str, Generator]] = {
    "family_relationships": Generator(
        name="family_relationships", settings={"min_family_size": 3, "max_family_size": 4}
    ),
    "letter_counting": Generator(name="letter_counting", settings={"min_words": 3, "max_words": 5}),
    "leg_counting": Generator(
        name="leg_counting",
        settings={"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 3},
    ),
    # 40 and not 30, so that train, dev and test have enough questions of their own
    "gcd": Generator(
        name="gcd",
        settings={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 40},
    ),
    "number_filtering-smollm2": Generator(
        name="number_filtering",
        settings={
            "min_numbers": 2,
            "max_numbers": 3,
            "min_decimals": 0,
            "max_decimals": 0,
            "min_value": 0,
            "max_value": 100,
        },
        shots=3,
        max_tokens=48,
    ),
    "gcd-smollm2": Generator(
        name="gcd",
        settings={"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 40},
        shots=3,
        max_tokens=48,
    ),
}
"""Task of the comparison → its generator."""


class Task(TypedDict):
    """One question."""

    id: str
    kind: str
    """Key of `GENERATORS`."""
    entry: dict[str, Any]
    messages: list[dict[str, str]]
    max_tokens: int


# --- the app --------------------------------------------------------------------------------
@rollout
def answer(task: Task, llm: LLM) -> dict[str, float]:
    """Ask the model once; return the score, and whether the answer is exactly right.

    The request is sent by the standard library, because a client of an SDK would cost more than the
    model.
    """
    return _rewards(task, ask(llm, task["messages"], task["max_tokens"]))


@rollout
def answer_by_sdk(task: Task) -> dict[str, float]:
    """Do the same with the OpenAI SDK, as an app has it that knows nothing of lightspan."""
    with agent("solver"):
        messages: Any = task["messages"]
        reply = _client().chat.completions.create(
            model="any", messages=messages, max_tokens=task["max_tokens"]
        )
    return _rewards(task, (reply.choices[0].message.content or "").strip())


@cache
def _client() -> Any:
    import openai

    return openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)


def _rewards(task: Task, text: str) -> dict[str, float]:
    found = score(task, text)
    return {"reward": found, "exact": float(found >= EXACT)}


_connections = threading.local()


def ask(llm: LLM, messages: Sequence[Mapping[str, str]], max_tokens: int) -> str:
    """Return the model's answer, over this thread's connection to the endpoint."""
    url = urllib.parse.urlsplit(llm.base_url)
    body = {"model": "policy", "messages": list(messages), "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {llm.api_key}"}
    for is_retry in (False, True):
        connection = getattr(_connections, url.netloc, None)
        if connection is None:
            connection = http.client.HTTPConnection(url.netloc, timeout=600)
            setattr(_connections, url.netloc, connection)
        try:
            connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            found = json.loads(reply.read())
        except (http.client.HTTPException, OSError):
            connection.close()
            delattr(_connections, url.netloc)
            if is_retry:  # the first failure may be a connection that the server has closed
                raise
            continue
        if reply.status != 200:
            raise RuntimeError(f"the endpoint answered {reply.status}: {found}")
        return str(found["choices"][0]["message"]["content"] or "").strip()
    raise AssertionError


def score(task: Task, text: str) -> float:
    """Return reasoning-gym's score of an answer, 0 to 1."""
    return float(_dataset(task["kind"], 1, 0).score_answer(answer=text, entry=task["entry"]))


@cache
def _dataset(kind: str, size: int, seed: int) -> Any:
    import reasoning_gym

    generator = GENERATORS[kind]
    return reasoning_gym.create_dataset(generator.name, size=size, seed=seed, **generator.settings)


# --- data -----------------------------------------------------------------------------------
def make_tasks(kind: str, split: str, count: int, *, without: Collection[str] = ()) -> list[Task]:
    """Return `count` tasks with questions of their own.

    Args:
        kind: key of `GENERATORS`.
        split: `train`, `dev` or `test`.
        count: number of tasks.
        without: questions that are left out, such as those of the other splits.

    Raises:
        ValueError: the generator has too few different questions.
    """
    generator = GENERATORS[kind]
    given = [_entry(item) for item in _items(kind, FIRST_SEED["shots"], generator.shots)]
    seen = {*without, *(entry["question"] for entry in given)}
    tasks: list[Task] = []
    for number, item in enumerate(_items(kind, FIRST_SEED[split], 40 * count)):
        entry = _entry(item)
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        tasks.append(
            Task(
                id=f"{split}-{number}",
                kind=kind,
                entry=entry,
                messages=messages(entry["question"], given),
                max_tokens=generator.max_tokens,
            )
        )
        if len(tasks) == count:
            return tasks
    raise ValueError(f"{kind} has {len(tasks)} questions for {split}, and {count} are needed")


def messages(question: str, shots: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the chat that asks a question, after examples as turns if there are any."""
    turns = [{"role": "system", "content": SYSTEM}] if shots else []
    for shot in shots:
        turns.append({"role": "user", "content": shot["question"]})
        turns.append({"role": "assistant", "content": str(shot["answer"])})
    return [*turns, {"role": "user", "content": question}]


def questions_of(tasks: Sequence[Task]) -> set[str]:
    """Return the questions of tasks."""
    return {task["entry"]["question"] for task in tasks}


def demonstrations(
    kind: str, count: int, seed: int, wrong: float, *, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return `count` chats of a question and an answer, a share `wrong` of which is not right.

    A wrong answer is near the right one: another number, digits or parts swapped, or the answer to
    another question. If there are up to `FEW_ANSWERS` answers, at most `FEW_WRONG` are wrong.

    Args:
        kind: key of `GENERATORS`.
        count: number of chats.
        seed: seed of the questions and the mistakes.
        wrong: share of wrong answers.
        without: questions that are left out: the held-out ones.
    """
    items = (_entry(item) for item in _items(kind, DEMONSTRATIONS_SEED + SPACING * seed, 4 * count))
    used = [entry for entry in items if entry["question"] not in without][:count]
    answers = [str(entry["answer"]) for entry in used[:200]]
    share = min(wrong, FEW_WRONG) if len(set(answers)) <= FEW_ANSWERS else wrong
    rng = random.Random(seed)
    chats = []
    for entry in used:
        right = str(entry["answer"])
        text = mistake(right, answers, rng) if rng.random() < share else right
        asked = {"role": "user", "content": entry["question"]}
        chats.append({"messages": [asked, {"role": "assistant", "content": text}]})
    return chats


def mistake(right: str, answers: Sequence[str], rng: random.Random) -> str:
    """Return an answer that is near the right one, or one of `answers`."""
    is_near = rng.random() < 0.7
    if right.isdigit():
        near = str(max(0, int(right) + rng.choice([-10, -2, -1, 1, 2, 10])))
        return near if is_near else rng.choice(answers)
    parts = right.split(", ")
    if len(parts) > 1:
        place = rng.randrange(len(parts) - 1)
        parts[place], parts[place + 1] = parts[place + 1], parts[place]
        return ", ".join(parts if is_near else parts[1:])
    return rng.choice(answers)


def constant_score(tasks: Sequence[Task]) -> tuple[str, float]:
    """Return the gold answer with the best mean score, if it answers all tasks, and that mean."""
    candidates = dict.fromkeys(str(task["entry"]["answer"]) for task in tasks)
    means = {text: sum(score(task, text) for task in tasks) / len(tasks) for text in candidates}
    best = max(means, key=lambda text: means[text])
    return best, means[best]


def _items(kind: str, seed: int, count: int) -> Iterator[Mapping[str, Any]]:
    dataset = _dataset(kind, count, seed) if count else ()
    return (dataset[place] for place in range(count))


def _entry(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as JSON keeps it."""
    entry: dict[str, Any] = json.loads(json.dumps(item, default=str))
    return entry

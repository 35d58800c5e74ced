"""Compare GEPA with simpler ways of choosing a prompt; `compare.py` makes the measurements.

The model answers greedily, so a prompt always routes the same messages right. Therefore every
prompt is run on every message once, and from these answers follows what a simpler way would have
chosen with as many rollouts. GEPA's searches are real runs.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final, NamedTuple

import msgspec

from desk_example.app import PROMPT
from desk_example.candidates import CANDIDATES, GOOD
from desk_example.options import MAX_ROLLOUTS
from desk_example.reflection import in_order
from desk_example.training import Task, held_out_tasks

ORDERS: Final = range(5)
"""Seeds of the real searches."""
MORE_ORDERS: Final = range(100)
"""Seeds of the replayed searches, whose rollouts are read from recorded answers."""
SELECTION: Final = 24
"""Number of messages by which GEPA compares candidates: half of the training messages."""
RESAMPLES: Final = 1_000


class Answers(msgspec.Struct, frozen=True, kw_only=True, tag="answers"):
    """Which messages were routed right with one prompt."""

    text: str
    train: str
    """One character per training message: 1 if it was routed right, else 0."""
    held_out: str


class Search(msgspec.Struct, frozen=True, kw_only=True, tag="search"):
    """Result of one search by GEPA."""

    order: int
    begins: str
    """Prompt that the search started from."""
    chosen: str
    rollouts: int
    reflections: int
    candidates: int
    held_out: str
    """Result of the chosen prompt on the held-out messages, in the form of `Answers.held_out`."""
    replayed: bool = False
    """Whether the rollouts were read from recorded `Answers` in place of calls of the model."""


Line = Answers | Search


class Measured(NamedTuple):
    """All measurements of a file."""

    answers: dict[str, Answers]
    """Prompt → its results."""
    searches: list[Search]


def read(path: Path) -> Measured:
    """Return the measurements in a file; none if the file does not exist."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    found: list[Line] = [msgspec.json.decode(line, type=Line) for line in lines]
    answers = [line for line in found if isinstance(line, Answers)]
    return Measured(
        {line.text: line for line in answers},
        [line for line in found if isinstance(line, Search)],
    )


def add(path: Path, line: Line) -> None:
    """Append one measurement to a file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


# --- ways of choosing -----------------------------------------------------------------------
def equal_shares(order: int, answers: Mapping[str, Answers], begins: str) -> str:
    """Return the best prompt if every prompt is run on equally many messages.

    All prompts, `begins` included, are run on the same messages. Of equally good prompts the first
    wins.

    Args:
        order: seed of the order of the prompts.
        answers: prompt → its results.
        begins: prompt of the app.
    """
    texts = [begins, *in_order(order)]
    count = MAX_ROLLOUTS // len(texts)
    places = random.Random(f"shares {order}").sample(range(len(answers[begins].train)), count)
    return _best(texts, answers, places)


def one_by_one(order: int, answers: Mapping[str, Answers], begins: str) -> str:
    """Return the best prompt if prompts are run in order until the rollouts are spent.

    Each prompt is run on `SELECTION` messages. The arguments are those of `equal_shares`.
    """
    texts = [begins, *in_order(order)][: MAX_ROLLOUTS // SELECTION]
    places = random.Random(f"one by one {order}").sample(
        range(len(answers[begins].train)), SELECTION
    )
    return _best(texts, answers, places)


def _best(texts: Sequence[str], answers: Mapping[str, Answers], places: Sequence[int]) -> str:
    return max(texts, key=lambda text: sum(answers[text].train[place] == "1" for place in places))


WAYS: Final[Mapping[str, Callable[[int, Mapping[str, Answers], str], str]]] = {
    "one by one": one_by_one,
    "equal shares": equal_shares,
}


# --- the table ------------------------------------------------------------------------------
Rewards = list[list[float]]
"""[orders][phrasings] Mean reward on the held-out messages of a phrasing."""


def by_phrasing(right: str, tasks: Sequence[Task]) -> list[float]:
    """Return the share of messages that were routed right, per phrasing, sorted by its name.

    Args:
        right: one character per task: 1 if it was routed right, else 0.
        tasks: messages, each with its phrasing.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for task, one in zip(tasks, right, strict=True):
        found[task["phrasing"]].append(float(one))
    return [fmean(found[name]) for name in sorted(found)]


def table(measured: Measured, begins: str = PROMPT, *, replayed: bool = False) -> str:
    """Return a Markdown table of each way's results on the held-out messages.

    Args:
        begins: prompt that the searches started from.
        replayed: whether to use the replayed searches in place of the real ones.
    """
    tasks, answers = held_out_tasks(), measured.answers
    searches = [
        each for each in measured.searches if (each.begins, each.replayed) == (begins, replayed)
    ]
    orders = [each.order for each in searches]
    gepa = [by_phrasing(each.held_out, tasks) for each in searches]
    rows = [_row("GEPA", gepa, None)]
    for name, way in WAYS.items():
        chosen = [way(order, answers, begins) for order in orders]
        rewards = [by_phrasing(answers[text].held_out, tasks) for text in chosen]
        rows.append(_row(name, rewards, gepa))
    each = [by_phrasing(answers[text].held_out, tasks) for text in CANDIDATES]
    drawn = [fmean(of_phrasing) for of_phrasing in zip(*each, strict=True)]
    rows.append(_row("at random: the mean of the list", [drawn] * len(orders), gepa))
    as_it_was = by_phrasing(answers[begins].held_out, tasks)
    rows.append(_row("the prompt as it was", [as_it_was] * len(orders), gepa))
    named = f"orders {', '.join(map(str, orders))}" if len(orders) < 10 else "of the orders"
    head = [
        f"| chosen by | held-out, {named} | mean (95% CI) | GEPA's lead (95% CI) |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows])


def _row(name: str, rewards: Rewards, gepa: Rewards | None) -> str:
    means = sorted(map(fmean, rewards))
    each = " ".join(f"{fmean(order):.3f}" for order in rewards)
    if len(rewards) >= 10:
        each = f"{means[0]:.3f} to {means[-1]:.3f}, median {median(means):.3f}"
    low, high = interval(rewards)
    lead = ""
    if gepa is not None:
        ahead = [
            [g - r for g, r in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(gepa, rewards, strict=True)
        ]
        below, above = interval(ahead)
        lead = f"{_mean(ahead):+.3f} ({below:+.3f}..{above:+.3f})"
    return f"| {name} | {each} | {_mean(rewards):.3f} ({low:.3f}..{high:.3f}) | {lead} |"


def _mean(rewards: Rewards) -> float:
    return fmean(map(fmean, rewards))


def interval(rewards: Rewards) -> tuple[float, float]:
    """Return a 95 % confidence interval of the mean reward, by a bootstrap over orders and
    phrasings.
    """
    rng = random.Random(0)
    orders, phrasings = range(len(rewards)), range(len(rewards[0]))
    means = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(phrasings, k=len(phrasings))
        of_order = [fmean([rewards[order][n] for n in drawn]) for order in orders]
        means.append(fmean(rng.choices(of_order, k=len(of_order))))
    means.sort()
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def texts_table(measured: Measured) -> str:
    """Return a Markdown table of the results of each prompt, the best first."""
    rows = sorted(measured.answers.values(), key=lambda each: -each.held_out.count("1"))
    named = {PROMPT: "as it was", GOOD: "good"}
    named |= {text: str(n) for n, text in enumerate(CANDIDATES)}
    lines = [
        f"| {named.get(each.text, '?')} | {each.train.count('1')} of {len(each.train)} | "
        f"{each.held_out.count('1')} of {len(each.held_out)} | {each.text.splitlines()[0]} |"
        for each in rows
    ]
    return "\n".join(["| text | train | held-out | begins with |", "|---|---|---|---|", *lines])

"""What `compare.py` measures, and the ways of choosing that it compares.

The model answers without sampling, so that a text is right about the same messages each time. So
each text of the list is run on every message once, and what other ways than GEPA would have chosen
with so many rollouts is read from that. GEPA's searches are real ones.
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
"""Of real searches."""
MORE_ORDERS: Final = range(100)
"""Of searches whose rollouts were read from what the model had answered."""
SELECTION: Final = 24
"""Messages that GEPA compares candidates by: half of those of training."""
RESAMPLES: Final = 1_000


class Answers(msgspec.Struct, frozen=True, kw_only=True, tag="answers"):
    """How a text did."""

    text: str
    train: str
    """Of each message of training 1 where the answer was right, else 0."""
    held_out: str


class Search(msgspec.Struct, frozen=True, kw_only=True, tag="search"):
    """One search by GEPA."""

    order: int
    begins: str
    """The prompt that the app had."""
    chosen: str
    rollouts: int
    reflections: int
    candidates: int
    held_out: str
    """As in `Answers`, with the text that was chosen."""
    replayed: bool = False
    """Whether its rollouts are those of `Answers`: what the model had answered before."""


Line = Answers | Search


class Measured(NamedTuple):
    """All that was measured."""

    answers: dict[str, Answers]
    """Text → how it did."""
    searches: list[Search]


def read(path: Path) -> Measured:
    """What a file has."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    found: list[Line] = [msgspec.json.decode(line, type=Line) for line in lines]
    answers = [line for line in found if isinstance(line, Answers)]
    return Measured(
        {line.text: line for line in answers},
        [line for line in found if isinstance(line, Search)],
    )


def add(path: Path, line: Line) -> None:
    """Keep what was measured."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


# --- ways of choosing -----------------------------------------------------------------------
def equal_shares(order: int, answers: Mapping[str, Answers], begins: str) -> str:
    """Every text of the list, and the one that the app has, on as many messages of training: the
    same ones. The first of equals."""
    texts = [begins, *in_order(order)]
    count = MAX_ROLLOUTS // len(texts)
    places = random.Random(f"shares {order}").sample(range(len(answers[begins].train)), count)
    return _best(texts, answers, places)


def one_by_one(order: int, answers: Mapping[str, Answers], begins: str) -> str:
    """The texts in order, each on as many messages as GEPA's selection split has, as long as there
    are rollouts."""
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
"""Of each order, of each held-out phrasing: the mean."""


def by_phrasing(right: str, tasks: Sequence[Task]) -> list[float]:
    """The mean of each phrasing, in the order of their names."""
    found: dict[str, list[float]] = defaultdict(list)
    for task, one in zip(tasks, right, strict=True):
        found[task["phrasing"]].append(float(one))
    return [fmean(found[name]) for name in sorted(found)]


def table(measured: Measured, begins: str = PROMPT, *, replayed: bool = False) -> str:
    """What each way chose, on the held-out messages, as Markdown."""
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
    """95 % of the means of as many orders and phrasings drawn from these, with replacement."""
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
    """How each text did, the best first."""
    rows = sorted(measured.answers.values(), key=lambda each: -each.held_out.count("1"))
    named = {PROMPT: "as it was", GOOD: "good"}
    named |= {text: str(n) for n, text in enumerate(CANDIDATES)}
    lines = [
        f"| {named.get(each.text, '?')} | {each.train.count('1')} of {len(each.train)} | "
        f"{each.held_out.count('1')} of {len(each.held_out)} | {each.text.splitlines()[0]} |"
        for each in rows
    ]
    return "\n".join(["| text | train | held-out | begins with |", "|---|---|---|---|", *lines])

"""Questions about charts, in three splits.

Splits share no values (the three of a chart, in order), no title and no colour. The seed determines
everything.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias, TypedDict

from charts_example.charts import FORMS, LARGEST, Chart
from charts_example.questions import KINDS, parse

Split: TypeAlias = Literal["train", "dev", "test"]

COUNTS: Final[Mapping[Split, int]] = {"train": 1_000, "dev": 200, "test": 500}
NAMES: Final = "ABC"
"""Names of the columns, from left to right."""


class Style(NamedTuple):
    """What the charts of a split look like."""

    titles: tuple[str, ...]
    colours: tuple[str, ...]
    backgrounds: tuple[str, ...]


STYLES: Final[Mapping[Split, Style]] = {
    "train": Style(
        ("Tea", "Milk", "Rain", "Snow", "Corn", "Rice", "Wool", "Trains", "Visits", "Calls"),
        ("crimson", "steelblue", "seagreen", "darkorange", "slateblue", "sienna", "orchid", "teal"),
        ("white", "ivory", "lavender"),
    ),
    "dev": Style(
        ("Coal", "Ferries", "Books"), ("tomato", "royalblue", "olive"), ("mintcream", "seashell")
    ),
    "test": Style(
        ("Honey", "Flights", "Guests", "Salt", "Paper"),
        ("firebrick", "indigo", "darkcyan", "goldenrod", "hotpink"),
        ("azure", "linen"),
    ),
}
_SHARES: Final[tuple[Split, ...]] = ("train", "train", "train", "dev", "test")


class Task(TypedDict):
    """A question about a chart."""

    id: str
    chart: Chart
    question: str
    answer: int


def tasks(split: Split, count: int | None = None, seed: int = 0) -> list[Task]:
    """Return the tasks of a split; None for `count` returns all of `COUNTS`."""
    endless = stream(split, f"{split} {seed}")
    return list(itertools.islice(endless, COUNTS[split] if count is None else count))


def stream(split: Split, seed: str) -> Iterator[Task]:
    """Yield tasks of a split without end; forms and kinds of question take turns."""
    rng = random.Random(seed)
    turns = itertools.cycle(itertools.product(FORMS, KINDS))
    for number, (form, kind) in enumerate(turns):
        style = STYLES[split]
        chart = Chart(
            form=form,
            title=rng.choice(style.titles),
            columns=dict(zip(NAMES, rng.choice(_VALUES[split]), strict=True)),
            colour=rng.choice(style.colours),
            background=rng.choice(style.backgrounds),
        )
        asked = rng.sample(NAMES, KINDS[kind].columns)
        question = KINDS[kind].text.format(*asked)
        answer = parse(question).answer(chart["columns"])
        assert answer is not None  # a question names columns of its chart
        yield Task(id=f"{split}-{number:04d}", chart=chart, question=question, answer=answer)


def _split_values() -> dict[Split, list[tuple[int, ...]]]:
    """Return split → the values that its charts may show."""
    every = list(itertools.product(range(1, LARGEST + 1), repeat=len(NAMES)))
    random.Random("values").shuffle(every)
    found: dict[Split, list[tuple[int, ...]]] = {"train": [], "dev": [], "test": []}
    for number, values in enumerate(every):
        found[_SHARES[number % len(_SHARES)]].append(values)
    return found


_VALUES: Final = _split_values()

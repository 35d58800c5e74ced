"""The tasks: messages, each with its department and its product.

Splits share neither a phrasing nor a product: each list of `phrasings` is cut into a part for
train, for dev and for test. Each phrasing is used with eight products of its split.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final, Literal, TypedDict

from router_example.phrasings import PHRASINGS, PRODUCTS

Split = Literal["train", "dev", "test"]
SPLITS: Final[tuple[Split, ...]] = ("train", "dev", "test")

PHRASINGS_OF: Final[Mapping[Split, slice]] = {
    "train": slice(0, 12),
    "dev": slice(12, 16),
    "test": slice(16, 26),
}
"""Split → its slice of each department's list of phrasings."""
PRODUCTS_OF: Final[Mapping[Split, slice]] = {
    "train": slice(0, 40),
    "dev": slice(40, 52),
    "test": slice(52, 84),
}
REPEATS: Final = 8
"""Number of products with which each phrasing is used."""


class Task(TypedDict):
    """A message with the labels that `reward` needs; the app gets the message alone."""

    id: str
    message: str
    department: str
    product: str
    phrasing: str
    """Department, and index of the phrasing in its list; tasks of one phrasing are similar."""


def tasks(split: Split) -> list[Task]:
    """Return the tasks of a split in random order: 384 of train, 128 of dev, 320 of test."""
    rng = random.Random(split)
    products = PRODUCTS[PRODUCTS_OF[split]]
    made = [
        _task(split, department, place, product)
        for department, phrasings in PHRASINGS.items()
        for place in range(len(phrasings))[PHRASINGS_OF[split]]
        for product in rng.sample(products, REPEATS)
    ]
    rng.shuffle(made)
    return made


def _task(split: Split, department: str, place: int, product: str) -> Task:
    return Task(
        id=f"{split}-{department}-{place}-{product.replace(' ', '-')}",
        message=PHRASINGS[department][place].format(product=product),
        department=department,
        product=product,
        phrasing=f"{department}-{place}",
    )

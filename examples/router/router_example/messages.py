"""The tasks: a message, the department that it is for and the product that it is about.

Splits share neither a phrasing nor a product: each list of `phrasings` is cut into the phrasings
and products of train, dev and test. Every phrasing is asked about eight of its split's products.
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
"""Of each department's phrasings."""
PRODUCTS_OF: Final[Mapping[Split, slice]] = {
    "train": slice(0, 40),
    "dev": slice(40, 52),
    "test": slice(52, 84),
}
REPEATS: Final = 8
"""Products that each phrasing is asked about."""


class Task(TypedDict):
    """One message, as `reward` needs it; the app gets the message alone."""

    id: str
    message: str
    department: str
    product: str
    phrasing: str
    """Department and place in its list: tasks of one phrasing resemble each other."""


def tasks(split: Split) -> list[Task]:
    """Those of a split, in an order without rhyme: 384 of train, 128 of dev, 320 of test."""
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

"""The words of the generated problems: names, things, and phrases for what happens.

A person's name is made of syllables, and a thing is of a kind: `Tamoli has 12 red plums.` Each name
and each kind of thing belongs to one split (`split_of`). All splits share syllables, single words
and phrases. A model of less than a million parameters can read only words that it was trained on,
and it cannot learn the effect of a phrase from other phrases.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Final, Literal

Split = Literal["train", "dev", "test"]

SYLLABLES: Final = (
    *("ba", "be", "da", "do", "fi", "fo", "ga", "go", "ha", "ka", "ki", "la", "le", "li", "lo"),
    *("ma", "mi", "mo", "na", "ne", "no", "pa", "pe", "ra", "ri", "ro", "sa", "so", "ta", "ti"),
    *("to", "va", "vi", "wa", "za", "zo"),
)
"""Syllables of names."""

KINDS: Final = tuple(
    """
    red blue green white black old new big small long flat round thin heavy cheap plain fine soft
    hard clean broad dark light sweet
    """.split()  # noqa: SIM905
)
"""Adjectives that make a kind of thing, such as `red`."""

THINGS: Final = tuple(
    """
    plums pens cards books shells coins beads nails eggs pears stamps keys cups bolts rings nuts
    seeds bricks tiles hats socks dolls kites drums masks ropes lamps forks spoons plates bowls figs
    limes beans roses stones sticks buttons candles ribbons tickets bottles cookies badges
    """.split()  # noqa: SIM905
)
"""Things that can be counted, in the plural."""

Frame = Literal[
    "start", "bags", "add", "subtract", "multiply", "divide", "add bags", "subtract bags", "missing"
]

PHRASES: Final[Mapping[Frame, tuple[str, ...]]] = {
    "start": ("{who} has {n} {things}.", "In {who}'s shop are {n} {things}."),
    "bags": ("{who} has {n} bags of {m} {things}.", "{who} fills {n} bags with {m} {things} each."),
    "add": (
        "{who} buys {n} more.",
        "A friend brings {n}.",
        "Then {n} more come.",
        "{who} finds {n}.",
    ),
    "subtract": ("{who} sells {n}.", "A friend takes {n}.", "Then {n} are lost.", "{n} break."),
    "multiply": ("Then there are {n} times as many.", "The number grows {n} times."),
    "divide": ("{who} keeps one of {n} equal parts.", "{n} friends share them; one goes on."),
    "add bags": ("{who} buys {n} bags of {m}.", "{n} friends bring {m} each."),
    "subtract bags": ("{who} sells {n} bags of {m}.", "{n} friends take {m} each."),
    "missing": ("{who} wants {n}. How many are missing?", "A box holds {n}. How many still fit?"),
}
"""Frame → sentences; a frame is the effect of a sentence on the number of things."""

QUESTIONS: Final = ("How many are there now?", "How many {things} has {who}?")
"""Last sentence of a problem, unless its last phrase already asks."""


def split_of(words: str) -> Split:
    """Return the split of a name, a kind of thing or a plot, by a hash of its words.

    Seven in ten are for train, one for dev, two for test.
    """
    bucket = zlib.crc32(words.encode()) % 10
    return "test" if bucket < 2 else "dev" if bucket == 2 else "train"


def person(split: Split, rng: random.Random) -> str:
    """Return a random name of a split."""
    while True:
        name = "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()
        if split_of(name) == split:
            return name


def kind_of_thing(split: Split, rng: random.Random) -> str:
    """Return a random kind of thing of a split, such as `red plums`."""
    while True:
        things = f"{rng.choice(KINDS)} {rng.choice(THINGS)}"
        if split_of(things) == split:
            return things

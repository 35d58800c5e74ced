"""A random process of two calls, small enough to enumerate what several groups of it expect."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations_with_replacement, product
from typing import Any

from packages.core.tests.lightning.enumerated import Gradient


class Way:
    """A trajectory: per call its state, the score of its choice and the critic's value."""

    def __init__(self, choices: Sequence[tuple[Any, int, float]], reward: float) -> None:
        self.states = [state for state, _, _ in choices]
        self.taken = [taken for _, taken, _ in choices]
        self.scores = [taken - chance for _, taken, chance in choices]
        self.reward = reward


class TwoCalls:
    """A process of two calls with random chances, rewards and values; the second sees a coin.

    A state is the prompt of a call: () for the first, (choice, coin) for the second.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        first = rng.uniform(0.3, 0.7)
        coins = [rng.uniform(0.2, 0.8) for _ in range(2)]
        second = {state: rng.uniform(0.2, 0.8) for state in product((0, 1), repeat=2)}
        rewards = {way: rng.choice([0.0, 0.0, 0.5, 1.0]) for way in product((0, 1), repeat=3)}
        self.values = {state: rng.uniform(0, 1) for state in ((), *second)}
        self.ways: list[tuple[Way, float]] = []
        for one, coin, two in rewards:
            chance = (first if one else 1 - first) * (coins[one] if coin else 1 - coins[one])
            seen = second[one, coin]
            choices = [((), one, first), ((one, coin), two, seen)]
            way = Way(choices, rewards[one, coin, two])
            self.ways.append((way, chance * (seen if two else 1 - seen)))

    def groups(self, size: int) -> list[tuple[tuple[Way, ...], float]]:
        """Return every multiset of `size` trajectories, with the probability of drawing it."""
        found = []
        for members in combinations_with_replacement(range(len(self.ways)), size):
            orders = math.factorial(size)
            for count in Counter(members).values():
                orders //= math.factorial(count)
            chance = orders * math.prod(self.ways[place][1] for place in members)
            found.append((tuple(self.ways[place][0] for place in members), chance))
        return found

    @property
    def gradient(self) -> Gradient:
        return expectation(([way], [[way.reward] * 2], chance) for way, chance in self.ways)


def expectation(outcomes: Any) -> Gradient:
    """Return the expected mean of Σ advantage · score.

    Args:
        outcomes: (ways of a group, advantages of their calls, probability) of each outcome.
    """
    total: Gradient = defaultdict(float)
    for ways, advantages, chance in outcomes:
        for way, paid in zip(ways, advantages, strict=True):
            for state, score, advantage in zip(way.states, way.scores, paid, strict=True):
                total[state] += chance / len(ways) * advantage * score
    return dict(total)


PROCESSES = [
    process
    for process in map(TwoCalls, range(30))
    if math.hypot(*process.gradient.values()) > 0.1 and len({w.reward for w, _ in process.ways}) > 1
][:6]

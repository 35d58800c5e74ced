"""Test that a family counts once: its exact bias, and that of the ways that look right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from lightspan.errors import DataError
from lightspan.lightning.advantages import ZeroReason
from lightspan.lightning.families import Leaf, family_credits
from packages.core.tests.lightning.enumerated import Gradient, bias, scaled
from packages.core.tests.lightning.two_calls import PROCESSES, TwoCalls, Way

Family = tuple[Way, Way]
"""A trunk, and its fork at the second call."""
Rule = Callable[[list[Family]], Iterator[tuple[Way, int, float]]]
"""Function from the families of a group to (way, call, what its score is multiplied by)."""


def families_of(process: TwoCalls) -> list[tuple[Family, float]]:
    """Return every trunk with every fork at its second call, and the probability."""
    found = []
    for trunk, chance in process.ways:
        same = [(way, c) for way, c in process.ways if way.states == trunk.states]
        same = [(way, c) for way, c in same if way.taken[0] == trunk.taken[0]]
        total = sum(c for _, c in same)
        found += [((trunk, way), chance * c / total) for way, c in same]
    return found


def bias_of(process: TwoCalls, rule: Rule) -> tuple[float, float]:
    """Return the bias of a rule with two trunks, each forked once, and its scale."""
    total: Gradient = dict.fromkeys(process.gradient, 0.0)
    for (one, p), (two, q) in product(families_of(process), repeat=2):
        for way, call, factor in rule([one, two]):
            total[way.states[call]] += p * q * factor * way.scores[call]
    return bias(total, process.gradient), scaled(total, process.gradient)


def leaves_of(families: list[Family]) -> list[Leaf]:
    return [
        Leaf(f"{number}{place}", "g", f"{number}0", way.reward)
        for number, family in enumerate(families)
        for place, way in enumerate(family)
    ]


def as_families(families: list[Family]) -> Iterator[tuple[Way, int, float]]:
    leaves = leaves_of(families)
    credits, count = family_credits(leaves)
    ways = [way for family in families for way in family]
    for leaf, way, credit in zip(leaves, ways, credits, strict=True):
        if leaf.rollout_id == leaf.trunk_id:
            yield way, 0, credit.before.advantage(credit.mean) / count
        yield way, 1, credit.behind.advantage(way.reward) * credit.weight / count


def as_rollouts(families: list[Family]) -> Iterator[tuple[Way, int, float]]:
    """Count forks as rollouts of the group; what they repeat is not trained again."""
    ways = [way for family in families for way in family]
    for number, way in enumerate(ways):
        others = (sum(w.reward for w in ways) - way.reward) / (len(ways) - 1)
        for call in (0, 1) if number % 2 == 0 else (1,):
            yield way, call, (way.reward - others) / len(ways)


def as_copies(families: list[Family]) -> Iterator[tuple[Way, int, float]]:
    """Train what a fork repeats as if it had sampled it."""
    ways = [way for family in families for way in family]
    for way in ways:
        others = (sum(w.reward for w in ways) - way.reward) / (len(ways) - 1)
        for call in (0, 1):
            yield way, call, (way.reward - others) / len(ways)


def test_a_family_counts_once_and_is_unbiased() -> None:
    for process in PROCESSES:
        found, scale = bias_of(process, as_families)
        assert found < 1e-9
        assert scale == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("wrong", [as_rollouts, as_copies])
def test_forks_that_count_as_rollouts_are_biased(wrong: Rule) -> None:
    """Check that the test above could fail."""
    biases = [bias_of(process, wrong)[0] for process in PROCESSES]
    assert max(biases) > 0.1
    assert sum(biases) / len(biases) > 0.05


def test_a_family_by_hand() -> None:
    """Check a family of three leaves, one without forks, and a second group."""
    leaves = [
        Leaf("a", "g", "a", 1.0),
        Leaf("b", "g", "b", 1.0),
        Leaf("a1", "g", "a", 0.0),
        Leaf("a2", "g", "a", 0.0),
        Leaf("c", "h", "c", 0.5),
    ]
    credits, count = family_credits(leaves)
    assert count == 3
    a, b, a1, a2, c = credits
    assert (a.mean, a.before.baseline, a.weight) == (
        pytest.approx(1 / 3),
        1.0,
        pytest.approx(1 / 3),
    )
    assert [one.behind.baseline for one in (a, a1, a2)] == [0.0, 0.5, 0.5]
    assert (b.mean, b.before.baseline, b.weight) == (1.0, pytest.approx(1 / 3), 1.0)
    assert b.behind == b.before
    assert c.before.zero_reason is c.behind.zero_reason is ZeroReason.GROUP_OF_ONE


def test_without_forks_it_is_rloo() -> None:
    rewards = [1.0, 0.0, 0.0, 0.25]
    leaves = [Leaf(str(n), "g", str(n), reward) for n, reward in enumerate(rewards)]
    credits, count = family_credits(leaves)
    assert count == 4
    for reward, credit in zip(rewards, credits, strict=True):
        others = (math.fsum(rewards) - reward) / 3
        assert credit.behind.baseline == credit.before.baseline == pytest.approx(others)
        assert (credit.mean, credit.weight) == (reward, 1.0)


def test_the_order_is_of_no_account() -> None:
    leaves = leaves_of([families_of(PROCESSES[0])[place][0] for place in (0, 5, 9)])
    credits, _ = family_credits(leaves)
    again, _ = family_credits(leaves[::-1])
    assert again[::-1] == credits


def test_a_fork_of_a_fork_is_refused() -> None:
    leaves = [Leaf("a", "g", "a", 1.0), Leaf("a1", "g", "a", 0.0), Leaf("a2", "g", "a1", 0.0)]
    with pytest.raises(DataError, match="a2 forks a1, which is a fork"):
        family_credits(leaves)

"""Test the search for the call that lost a rollout against exhaustive search and by simulation."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, strategies as st

from lightspan_tools.forking.loss_search import LossSearch, find_loss
from lightspan_tools.forking.report import interval_of


def searched(
    size: int, succeeds: Callable[[int], bool], *, starts_good: bool = False, confirm: bool = True
) -> LossSearch:
    async def oracle(point: int) -> bool:
        return succeeds(point)

    search = LossSearch(size)
    asyncio.run(find_loss(search, oracle, starts_good=starts_good, confirm=confirm))
    return search


def exhaustive(answers: Sequence[bool]) -> tuple[int | None, int]:
    """Return the last point that succeeds and the first that does not, by testing all of them."""
    good = [point for point, answer in enumerate(answers) if answer]
    return (good[-1], good[-1] + 1) if good else (None, 0)


@given(st.integers(0, 40), st.integers(0, 40), st.booleans(), st.booleans())
def test_monotone_answers(good: int, bad: int, starts_good: bool, confirm: bool) -> None:
    answers = [True] * good + [False] * bad
    starts_good = starts_good and good > 0
    search = searched(len(answers), answers.__getitem__, starts_good=starts_good, confirm=confirm)
    assert search.is_complete
    assert (search.last_good, search.first_lost) == exhaustive(answers)
    assert search.reversals == []
    bound = 1 + math.ceil(math.log2(max(1, len(answers)))) + confirm
    assert len(search.tests) <= bound - starts_good


@given(st.lists(st.booleans(), max_size=30), st.booleans())
def test_other_answers(answers: list[bool], confirm: bool) -> None:
    """Check that the result is a pair of neighbours with the right answers, whatever the order."""
    search = searched(len(answers), answers.__getitem__, confirm=confirm)
    assert search.is_complete
    assert search.last_good is None or answers[search.last_good]
    assert search.first_lost == len(answers) or not answers[search.first_lost]
    assert search.first_lost == (0 if search.last_good is None else search.last_good + 1)
    assert all(answers[point] == result for point, result in search.tests)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_answers_that_change(failures: list[int]) -> None:
    """Check a search whose points succeed from some test on: it ends, and tells what it saw."""
    left = list(failures)

    def succeeds(point: int) -> bool:
        left[point] -= 1
        return left[point] < 0

    search = searched(len(failures), succeeds)
    for point in search.reversals:
        assert [result for each, result in search.tests if each == point] == [False, True]
    results = [result for each, result in search.tests if each == search.first_lost]
    assert not any(results)
    assert len(results) == (0 if search.first_lost == len(failures) else 2)


def test_a_second_test_corrects_the_first() -> None:
    tries = [0] * 8

    def succeeds(point: int) -> bool:
        tries[point] += 1
        return point < 4 or (point in (4, 5) and tries[point] == 2)

    search = searched(8, succeeds, starts_good=True)
    assert (search.last_good, search.first_lost, search.reversals) == (5, 6, [4, 5])
    assert [point for point, _ in search.tests] == [4, 2, 3, 4, 6, 5, 5, 6]
    assert not searched(8, lambda point: point < 4, confirm=False).reversals


def test_a_stopped_search_keeps_its_tests() -> None:
    class Stopped(Exception):
        pass

    async def oracle(point: int) -> bool:
        if len(search.tests) == 2:
            raise Stopped
        return point < 3

    search = LossSearch(16)
    with pytest.raises(Stopped):
        asyncio.run(find_loss(search, oracle))
    assert [point for point, _ in search.tests] == [0, 8]
    assert (search.last_good, search.first_lost, search.is_complete) == (0, 8, False)


def test_calibration() -> None:
    """Compare the share of right names with the probability that no test on the way is wrong.

    A rollout of 16 calls is lost at one of them. Before it, a continuation succeeds with
    probability .3, behind it never. If no test of a good point fails by chance, the search names
    the very call. It tests at most five good points, so that has at least the probability
    (1 - .7^8)^5; a second test makes it more likely.
    """
    generator, size, rate, count = random.Random(0), 16, 0.3, 8
    miss = (1 - rate) ** count
    right = {True: 0, False: 0}
    runs = 2_000
    for number in range(runs):
        lost = 1 + number % size

        def succeeds(point: int, lost: int = lost) -> bool:
            return point < lost and any(generator.random() < rate for _ in range(count))

        for confirm in right:
            search = searched(size, succeeds, starts_good=True, confirm=confirm)
            right[confirm] += search.first_lost == lost
    bound = (1 - miss) ** 5
    noise = 3 * math.sqrt(bound * (1 - bound) / runs)
    assert right[False] / runs >= bound - noise
    assert right[True] / runs >= right[False] / runs + 0.03


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_intervals_of_shares_cover(rate: float) -> None:
    """Check that at least 95 % of the exact intervals of eight continuations hold the true rate."""
    generator, covered, runs = random.Random(1), 0, 2_000
    for _ in range(runs):
        share = interval_of([float(generator.random() < rate) for _ in range(8)])
        assert share is not None
        covered += share.low <= rate <= share.high
    assert covered / runs >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / runs)


def test_no_interval_without_rewards() -> None:
    assert interval_of([]) is None
    none = interval_of([0.0] * 8)
    assert none is not None
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 8))

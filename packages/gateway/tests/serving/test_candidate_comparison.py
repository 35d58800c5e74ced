"""Tests of the difference of two sides against computations by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest

from lightspan.training.statistics import Interval
from lightspan_gateway.serving.candidate.comparison import (
    ComparedAttempt,
    Conclusion,
    compare,
    difference,
    missing_lines,
    more_needed,
    report_lines,
)
from lightspan_gateway.serving.candidate.sides import Side

T_9 = 2.262157
"""97.5 % quantile of Student's t with 9 degrees of freedom."""
DIGESTS = {Side.CANDIDATE: "1" * 12, Side.CURRENT: "0" * 12}


def attempts_of(
    side: Side, rewards: Sequence[float | None], users: list[str] | None = None, failed: int = 0
) -> list[ComparedAttempt]:
    """Return attempts of a side; the first `failed` of them failed."""
    return [
        ComparedAttempt(
            attempt_id=f"{side}-{n}",
            side=side,
            reward=reward,
            is_failed=n < failed,
            user=users[n] if users else "",
        )
        for n, reward in enumerate(rewards)
    ]


def test_the_interval_of_numbers_against_a_computation_by_hand() -> None:
    new = [0.9, 0.7, 0.8, 0.95, 0.6, 0.85, 0.75, 0.9, 0.8, 0.7]
    old = [0.4, 0.5, 0.45, 0.6, 0.35, 0.55, 0.5, 0.4, 0.65, 0.5]
    result = compare(
        "12345678",
        [*attempts_of(Side.CANDIDATE, new), *attempts_of(Side.CURRENT, old)],
        DIGESTS,
    )
    halves = [T_9 * statistics.stdev(values) / math.sqrt(10) for values in (new, old)]
    half = math.hypot(*halves)
    mean = statistics.fmean(new) - statistics.fmean(old)
    assert result.difference is not None
    assert result.difference.mean == pytest.approx(mean)
    assert result.difference.low == pytest.approx(mean - half, rel=1e-3)
    assert result.difference.high == pytest.approx(mean + half, rel=1e-3)
    assert result.conclusion is Conclusion.BETTER
    assert result.sentence == f"the candidate is better by {mean:.3f}"


def test_thumbs_have_exact_intervals() -> None:
    """9 of 10 against 3 of 10: the bounds of Clopper and Pearson's tables."""
    new = [1.0] * 9 + [0.0]
    old = [1.0] * 3 + [0.0] * 7
    attempts = [*attempts_of(Side.CANDIDATE, new), *attempts_of(Side.CURRENT, old)]
    result = compare("12345678", attempts, DIGESTS)
    assert result.difference is not None
    low = 0.6 - math.hypot(0.9 - 0.5550, 0.6525 - 0.3)
    high = 0.6 + math.hypot(0.9975 - 0.9, 0.3 - 0.0667)
    assert result.difference.low == pytest.approx(low, abs=1e-3)
    assert result.difference.high == pytest.approx(high, abs=1e-3)


@pytest.mark.parametrize(
    ("good", "failed", "conclusion"),
    [
        ((12, 4), (0, 0), Conclusion.BETTER),
        ((10, 7), (0, 0), Conclusion.OPEN),
        ((7, 10), (0, 0), Conclusion.OPEN),
        ((4, 12), (0, 0), Conclusion.WORSE),
        ((8, 8), (3, 1), Conclusion.OPEN),
        ((8, 8), (12, 1), Conclusion.WORSE),
    ],
)
def test_a_difference_within_the_interval_decides_nothing(
    good: tuple[int, int], failed: tuple[int, int], conclusion: Conclusion
) -> None:
    """Numbers of 16 attempts of the candidate, and of 16 of the current weights."""
    attempts = [
        attempt
        for side, ones, failures in zip((Side.CANDIDATE, Side.CURRENT), good, failed, strict=True)
        for attempt in attempts_of(side, [1.0] * ones + [0.0] * (16 - ones), failed=failures)
    ]
    result = compare("12345678", attempts, DIGESTS)
    assert result.conclusion is conclusion
    assert result.is_worse == (conclusion is Conclusion.WORSE)


def test_attempts_of_one_user_count_as_a_cluster() -> None:
    rewards = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    users = [user for user in "abcd" for _ in range(3)]
    alone, clustered = (
        compare(
            "12345678",
            [
                *attempts_of(Side.CANDIDATE, rewards, users=each),
                *attempts_of(Side.CURRENT, rewards, users=each),
            ],
            DIGESTS,
        ).difference
        for each in (None, users)
    )
    assert alone is not None
    assert clustered is not None
    assert clustered.clusters == 8
    assert clustered.high - clustered.low > 1.5 * (alone.high - alone.low)


def test_equal_verdicts_do_not_make_an_interval_of_no_width() -> None:
    attempts = [
        *attempts_of(Side.CANDIDATE, [1.0] * 5),
        *attempts_of(Side.CURRENT, [1.0] * 5),
    ]
    result = compare("12345678", attempts, DIGESTS)
    assert result.difference is not None
    assert result.difference.low < 0 < result.difference.high
    assert result.conclusion is Conclusion.OPEN
    assert "hardly differ" in result.sentence


def test_a_side_with_one_verdict_has_no_interval() -> None:
    attempts = [*attempts_of(Side.CANDIDATE, [1.0]), *attempts_of(Side.CURRENT, [0.0, 1.0])]
    result = compare("12345678", attempts, DIGESTS)
    assert result.conclusion is Conclusion.OPEN
    assert result.difference is not None
    assert not result.difference.is_known
    assert "too few verdicts" in result.sentence


STARS = [1.0, 5.0, 4.0, 3.0, 5.0, 2.0, 5.0, 4.0]


@pytest.mark.parametrize("rewards", [[1.0] * 3, [5.0] * 3])
def test_equal_stars_have_no_interval(rewards: list[float]) -> None:
    """One star is the worst of five here, not the best that is possible."""
    attempts = [*attempts_of(Side.CANDIDATE, rewards), *attempts_of(Side.CURRENT, STARS)]
    result = compare("12345678", attempts, DIGESTS)
    assert result.conclusion is Conclusion.OPEN
    assert result.difference is not None
    assert not result.difference.is_known
    assert "equal ones of an unknown scale" in result.sentence


def test_an_interval_is_not_cut_where_the_other_side_goes_on() -> None:
    attempts = [
        *attempts_of(Side.CANDIDATE, [1.0, 0.0, 1.0, 1.0]),
        *attempts_of(Side.CURRENT, STARS),
    ]
    reward = compare("12345678", attempts, DIGESTS).sides[Side.CANDIDATE].reward
    assert reward is not None
    half = 3.182 * statistics.stdev([1.0, 0.0, 1.0, 1.0]) / 2
    assert (reward.low, reward.high) == pytest.approx((0.75 - half, 0.75 + half), rel=1e-3)


def test_failed_damaged_and_unrated_attempts_are_counted() -> None:
    attempts = [
        *attempts_of(Side.CANDIDATE, [1.0, None, None, 0.0], failed=1),
        ComparedAttempt(attempt_id="damaged", side=Side.CANDIDATE, is_damaged=True),
        *attempts_of(Side.CURRENT, [None] * 3),
    ]
    result = compare("12345678", attempts, DIGESTS, both_sides=2)
    side = result.sides[Side.CANDIDATE]
    assert (side.attempts, side.failed, side.damaged, side.rated) == (5, 1, 1, 2)
    assert side.coverage == pytest.approx(0.4)
    assert result.difference is None
    assert result.sentence == "it cannot be decided yet: no verdict on the current side"
    lines = list(report_lines(result))
    assert lines[1].split()[:6] == ["candidate", "5", "1", "1", "2", "(40%)"]
    assert lines[2].split() == ["current", "3", "0", "0", "0", "(0%)", "-"]
    assert lines[3].startswith("left out: 2 attempts that both sides answered")


def test_attempts_that_nothing_connects_with_a_side_are_reported() -> None:
    attempts = attempts_of(Side.CURRENT, [1.0] * 6)
    result = compare("12345678", attempts, DIGESTS, both_sides=1)
    [line] = missing_lines(result, {Side.CANDIDATE: 6, Side.CURRENT: 7})
    assert line.startswith("candidate: 5 of 6 attempts that began are not compared: ")


def test_a_candidate_whose_attempts_fail_is_worse_though_its_verdicts_are_good() -> None:
    attempts = [
        *attempts_of(Side.CANDIDATE, [None] * 30 + [1.0] * 30, failed=30),
        *attempts_of(Side.CURRENT, [0.0, 1.0] * 30),
    ]
    result = compare("12345678", attempts, DIGESTS)
    assert result.difference is not None
    assert result.difference.low > 0
    assert result.is_worse
    assert result.sentence == (
        "the candidate is worse: the share of its attempts that fail is 0.500 higher"
    )


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_the_forecast_is_the_number_at_which_zero_leaves_the_interval(factor: float) -> None:
    """An interval of n values is `factor` times too wide: n · factor² values are needed."""
    interval = Interval(0.1, 0.1 - 0.1 * factor, 0.1 + 0.1 * factor, 200)
    more = more_needed(interval)
    assert more == pytest.approx(200 * factor**2 - 200, abs=1)
    scaled = (200 + (more or 0)) / 200
    assert 0.1 - 0.1 * factor / math.sqrt(scaled) == pytest.approx(0, abs=1e-3)
    negative = Interval(-0.1, -0.1 - 0.1 * factor, -0.1 + 0.1 * factor, 200)
    assert more_needed(negative) == more


def test_the_forecast_has_limits() -> None:
    assert more_needed(Interval(0.2, 0.1, 0.3, 100)) == 0
    assert more_needed(Interval(0.0, -0.1, 0.1, 100)) is None
    assert more_needed(Interval(1e-6, -0.1, 0.1, 100)) is None
    assert more_needed(Interval(0.1, math.nan, math.nan, 1)) is None


def test_a_difference_without_an_interval_on_one_side_has_none() -> None:
    unknown = Interval(1.0, math.nan, math.nan, 1)
    known = Interval(0.5, 0.4, 0.6, 10)
    assert not difference(unknown, known).is_known
    assert difference(unknown, known).mean == 0.5

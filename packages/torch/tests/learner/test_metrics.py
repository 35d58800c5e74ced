"""How the metrics of several policies are combined."""

from __future__ import annotations

import pytest

from lightspan_torch.learner.metrics import over_policies


def part(gap: float, fresh: float, tokens: float = 10.0) -> dict[str, float]:
    return {
        "loss": 0.5,
        "tokens": tokens,
        "fresh_tokens": fresh,
        "logprob_gap_mean": gap,
        "logprob_gap_max": 2 * gap,
    }


def test_a_policy_with_old_tokens_alone_raises_no_alarm_about_another() -> None:
    """A gap of stale tokens is not reported as a disagreement of engine and learner.

    With overlap, one policy may have been called before the weights changed and another after.
    """
    found = over_policies({"old": part(0.5, 0.0), "new": part(0.0, 10.0)}, rows=2)
    assert (found["logprob_gap_mean"], found["logprob_gap_max"]) == (0.0, 0.0)
    assert (found["fresh_tokens"], found["tokens"], found["loss"]) == (10.0, 20.0, 1.0)
    assert found["old/logprob_gap_mean"] == 0.5


def test_gaps_count_by_the_tokens_that_they_are_of() -> None:
    found = over_policies({"a": part(0.1, 1.0, tokens=30.0), "b": part(0.4, 2.0)}, rows=2)
    assert found["logprob_gap_mean"] == pytest.approx((0.1 + 2 * 0.4) / 3)
    assert found["logprob_gap_max"] == 0.8
    old = over_policies({"a": part(0.1, 0.0, tokens=30.0), "b": part(0.4, 0.0)}, rows=2)
    assert old["logprob_gap_mean"] == pytest.approx((30 * 0.1 + 10 * 0.4) / 40)
    assert old["fresh_tokens"] == 0.0

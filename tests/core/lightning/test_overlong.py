"""Overlong answers: what a call is paid less."""

import pytest
from hypothesis import given, strategies as st

from lightspan.errors import ConfigError
from lightspan.lightning import (
    Overlong,
    Selection,
    build_episode,
    cover,
    overlong_metrics,
    overlong_penalties,
)
from lightspan.testing.strategies import make_attempt, make_call_span, make_record, make_rollout

WRITER = Selection.of("writer").routing
DAPO = Overlong(max_tokens=20480, buffer=4096)
"""The paper's lengths."""

settings = st.integers(1, 300).flatmap(
    lambda longest: st.builds(
        Overlong,
        max_tokens=st.just(longest),
        buffer=st.integers(1, longest),
        penalty=st.floats(0.001, 100),
    )
)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [
        (0, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),
        (20481, -1.0),
        (10**9, -1.0),
    ],
)
def test_the_penalty_of_dapo(tokens: int, penalty: float) -> None:
    assert DAPO.of(tokens) == penalty


def test_the_penalty_is_in_units_of_the_reward() -> None:
    assert [Overlong(max_tokens=10, buffer=4, penalty=0.5).of(n) for n in (6, 8, 10)] == [
        0.0,
        -0.25,
        -0.5,
    ]
    # a buffer of everything takes from the first token on
    assert Overlong(max_tokens=4, buffer=4).of(1) == -0.25


@given(settings, st.integers(0, 1000))
def test_it_falls_from_nothing_to_the_whole_penalty(overlong: Overlong, tokens: int) -> None:
    found = overlong.of(tokens)
    assert -overlong.penalty <= overlong.of(tokens + 1) <= found <= 0
    assert (found == 0) == (tokens <= overlong.free)
    if tokens >= overlong.max_tokens:
        assert found == -overlong.penalty
    elif found:
        share = (overlong.max_tokens - overlong.buffer - tokens) / overlong.buffer
        assert found == pytest.approx(share * overlong.penalty)


def test_calls_are_paid_less_each_for_its_own_answer() -> None:
    """Four calls: short, in the buffer, too long and rejected, and one whose tokens are unknown;
    the frozen agent's may be as long as it likes."""
    records = [
        make_record("short", [1, 2], [3] * 6, (1, 2)),
        make_record("near", [1] * 50, [3] * 8, (3, 4)),
        make_record("over", [1, 2], [3] * 12, (5, 6)),
        make_record("checker", [1, 2], [3] * 12, (7, 8), agent_path="checker"),
    ]
    spans = [make_call_span("lost", sequence=(9, 10))]
    episode = build_episode(make_attempt(), make_rollout(), spans, records)
    coverage = cover(episode, WRITER, max_length=13)
    overlong = Overlong(max_tokens=10, buffer=4)
    rejected = {entry.call.call_id for entry in coverage.rejected}
    assert rejected == {"near", "over", "lost"}
    found = overlong_penalties(overlong, coverage)
    assert found == {
        ("short", 0): 0.0,
        ("near", 0): -0.5,
        ("over", 0): -1.0,
        ("lost", 0): 0.0,
    }
    assert set(found) == {entry.call.key for entry in coverage.selected}
    assert overlong_metrics(overlong, [found, {("x", 0): -1.0}]) == {
        "penalised": 0.6,
        "whole": 0.4,
        "penalty": -0.5,
    }
    assert overlong_metrics(overlong, []) == {"penalised": 0.0, "whole": 0.0, "penalty": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0, "buffer": 1}, "Overlong: max_tokens=0 must be at least 1"),
        ({"max_tokens": 10, "buffer": 0}, "Overlong: buffer=0 must be at least 1"),
        ({"max_tokens": 10, "buffer": 2.5}, "Overlong: buffer=2.5 must be a whole number"),
        ({"max_tokens": 10, "buffer": 11}, "buffer=11 must be at most max_tokens=10"),
        (
            {"max_tokens": 10, "buffer": 5, "penalty": -1.0},
            "Overlong: penalty=-1.0 must be a finite number above 0",
        ),
    ],
)
def test_impossible_settings(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Overlong(**options)  # type: ignore[arg-type]

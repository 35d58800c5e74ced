"""Test the penalty for overlong answers, which is subtracted from a call's credit."""

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan.errors import ConfigError
from lightspan.lightning import (
    Batch,
    BatchConfig,
    Episode,
    Selection,
    build_episode,
    classify_calls,
    prepare_batch,
)
from lightspan.lightning.credit import Credit, GiGPO, discounted, terminal
from lightspan.lightning.length_penalty import Overlong, overlong_metrics, overlong_penalties
from lightspan_testing.strategies import make_attempt, make_call_span, make_record, make_rollout

WRITER = Selection.of("writer").routing
DAPO = Overlong(max_tokens=20480, buffer=4096)
"""Settings of the DAPO paper."""

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
    """Check an answer below the buffer, one in it, one beyond it, and one of unknown length.

    Answers of the frozen agent are not penalised.
    """
    records = [
        make_record("short", [1, 2], [3] * 6, (1, 2)),
        make_record("near", [1] * 50, [3] * 8, (3, 4)),
        make_record("over", [1, 2], [3] * 12, (5, 6)),
        make_record("checker", [1, 2], [3] * 12, (7, 8), agent_path="checker"),
    ]
    spans = [make_call_span("lost", sequence=(9, 10))]
    episode = build_episode(make_attempt(), make_rollout(), spans, records)
    coverage = classify_calls(episode, WRITER, max_length=13)
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


# --- what a batch makes of it -------------------------------------------------------------------

SHORT = Overlong(max_tokens=8, buffer=4)
"""Penalty of 0 up to 4 tokens and 1 from 8 tokens on."""


def attempt(name: str, reward: float, *lengths: int) -> Episode:
    """Build a rollout whose calls, one after another, sample `lengths` tokens."""
    records = [
        make_record(f"{name}{n}", [1], [3] * length, (2 * n + 1, 2 * n + 2), attempt=name)
        for n, length in enumerate(lengths)
    ]
    return build_episode(make_attempt(name, reward), make_rollout(name), [], records)


def batch_of(episodes: list[Episode], rule: Credit = terminal, **options: Any) -> Batch:
    coverages = [classify_calls(each, WRITER, step_rewards=rule.step_rewards) for each in episodes]
    config = BatchConfig(credit=rule, **{"overlong": SHORT, **options})
    return prepare_batch(episodes, coverages, config).finish()


def advantages(batch: Batch) -> dict[str, float]:
    return {call_id: why.advantage for (_, call_id, _), why in batch.explanations.items()}


@pytest.mark.parametrize("rule", [terminal, discounted(1.0), GiGPO(omega=0.0)])
@pytest.mark.parametrize(
    ("estimator", "scale"), [("grpo", math.sqrt(1 / 3)), ("dr_grpo", 1.0), ("rloo", 0.75)]
)
def test_where_a_rollout_is_a_call_its_reward_is_paid_less(
    rule: Credit, estimator: Any, scale: float
) -> None:
    """Check DAPO's advantage (R + p - mean) / std(R), where p is the penalty."""
    if isinstance(rule, GiGPO) and estimator == "rloo":
        return
    episodes = [attempt("a", 1, 2), attempt("b", 1, 6), attempt("c", 0, 8), attempt("d", 0, 3)]
    batch = batch_of(episodes, rule, estimator=estimator)
    paid = {"a0": 1.0, "b0": 0.5, "c0": -1.0, "d0": 0.0}
    expected = {name: (value - 0.125) / scale for name, value in paid.items()}
    assert advantages(batch) == pytest.approx(expected)
    assert batch.overlong == {"penalised": 0.5, "whole": 0.25, "penalty": -0.375}


def test_a_long_answer_is_its_own_call_s_and_no_other_s() -> None:
    """Check that a penalty lowers its own call's advantage, and otherwise only the group's mean."""
    episodes = [attempt("a", 1, 2, 8), attempt("b", 0, 2, 2)]
    found = advantages(batch_of(episodes, estimator="dr_grpo"))
    plain = advantages(batch_of(episodes, estimator="dr_grpo", overlong=None))
    moved = {name: found[name] - plain[name] for name in found}
    # the calls of b are compared with -0.5, the mean penalty of a's calls
    assert moved == pytest.approx({"a0": 0.0, "a1": -0.5, "b0": 0.25, "b1": 0.25})


def test_length_alone_teaches_nothing() -> None:
    """Check that a group of equal rewards has no advantages.

    GRPO would divide the penalties by their own standard deviation.
    """
    batch = batch_of([attempt("a", 1, 5), attempt("b", 1, 2)])
    assert advantages(batch) == {"a0": 0.0, "b0": 0.0}
    assert batch.rows == []
    assert batch.counters["groups:identical"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0, "buffer": 1}, "Overlong: max_tokens=0 must be at least 1"),
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

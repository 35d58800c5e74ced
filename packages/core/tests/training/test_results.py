"""Test the texts of evaluations and results: a mean is shown with what it leaves out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan.algorithms.metrics import rollout_metrics
from lightspan.lightning.episode import build_episode, score_failure
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Outcome
from lightspan.schema.routing import Route, Routing
from lightspan.schema.token_records import CallOutcome
from lightspan.training.results import Evaluation, FitResult, Outcomes
from lightspan_testing.strategies import make_attempt, make_call_span, make_rollout
from packages.core.tests.lightning.steps import WRITER, built, call


def evaluation(step: int, rewards: list[float], **options: Any) -> Evaluation:
    return Evaluation(step=step, rewards={f"t{n}": r for n, r in enumerate(rewards)}, **options)


def result(*evaluations: Evaluation, **options: Any) -> FitResult:
    return FitResult(
        folder=Path("runs/x"),
        model=Path("runs/x/model"),
        evaluations=evaluations,
        seconds={},
        steps=5,
        **options,
    )


def test_an_evaluation_says_what_its_mean_leaves_out() -> None:
    plain = evaluation(3, [0.5, 0.5])
    assert plain.text("reward") == "step 3: held-out reward 0.500 (95% CI 0.079..0.921, n=2)"
    odd = evaluation(3, [0.5, 0.5], unscored=3, failed=1)
    assert odd.text("reward") == (
        "step 3: held-out reward 0.500 (95% CI 0.079..0.921, n=2), 3 unscored, 1 failed"
    )
    assert plain.metrics() == {
        "mean": 0.5,
        "low": pytest.approx(0.0790569),
        "high": pytest.approx(0.9209431),
        "n": 2,
        "unscored": 0,
        "failed": 0,
    }


def test_an_evaluation_of_one_task_has_no_interval() -> None:
    one = evaluation(3, [0.5])
    assert one.text("reward") == "step 3: held-out reward 0.500 (no CI, n=1)"
    shared = evaluation(3, [0.0, 1.0], clusters={"t0": "a", "t1": "a"})
    assert shared.text("reward") == "step 3: held-out reward 0.500 (no CI, n=2 in 1 cluster)"
    assert json.loads(msgspec.json.encode(one.metrics()))["low"] is None


def test_the_lowest_reward_of_the_run_widens_intervals_of_equal_rewards() -> None:
    """Check tasks that all got 1, in a run that has given -1."""
    plain = evaluation(3, [1.0] * 4)
    wide = evaluation(5, [1.0] * 4, lowest_reward=-1.0)
    assert plain.interval.low == pytest.approx(0.025**0.25)
    assert wide.interval.low == pytest.approx(2 * 0.025**0.25 - 1)
    gain = result(plain, wide).gain
    assert gain is not None
    assert (gain.low, gain.high) == pytest.approx((-2 * (1 - 0.025**0.25), 2 * (1 - 0.025**0.25)))


def test_calls_of_the_policy_are_counted() -> None:
    """Check a rollout that asks the policy twice, one that only a frozen agent answers, one
    without any call, one whose call bypassed the gateway, one that failed before its call, and a
    damaged one, which may have lost its call.
    """
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR}
    past = make_call_span("past", "writer", (None, None), attempt="t3")
    episodes = [
        built([call("a", 1, 2, attempt="t0"), call("b", 3, 4, attempt="t0")], name="t0"),
        built([call("a", 1, 2, agent="checker", attempt="t1")], name="t1"),
        built([], name="t2"),
        build_episode(make_attempt("t3", 1.0), make_rollout("t3"), [past], []),
        built([], reward=None, name="t4", **failure),
        built([], name="t5", capture_errors=["the store refused a call"]),
    ]
    found = Evaluation.of(2, episodes, routing=WRITER)
    assert (found.policy_calls, found.silent, found.failed) == (2, 3, 1)
    assert ", 1 failed, 3 without a call of the policy" in found.text("reward")
    assert found.metrics()["policy_calls"] == 2
    assert found.metrics()["silent"] == 3
    # without a policy, as in a search for prompts, every model call counts, and none is missing
    searched = Evaluation.of(2, episodes, routing=Routing())
    assert (searched.policy_calls, searched.silent) == (4, 0)
    assert "policy" not in searched.text("reward")


def test_the_last_line_says_that_the_policy_was_not_asked() -> None:
    first = evaluation(0, [0.0, 1.0], policy_calls=2)
    last = evaluation(5, [0.0, 1.0], policy_calls=0, silent=2)
    assert result(first, last).summary() == (
        "held-out reward: 0.50 -> 0.50 (n=2, 95% CI of the gain -0.84..0.84); held out: without a "
        "call of the policy 0 -> 2"
    )


def test_a_temperature_that_nobody_gave_is_the_endpoints_own() -> None:
    def said(**temperatures: list[float | None]) -> str:
        return evaluation(0, [0.5, 0.5], temperatures=temperatures).text("reward").split("; ")[1]

    assert said(writer=[None]) == "sampled at its endpoint's own temperature"
    assert said(checker=[None], writer=[1.0]) == (
        "sampled at temperature: checker at its endpoint's own, writer at 1"
    )
    assert said(writer=[0.0, None]) == "sampled at temperature 0 and its endpoint's own"


@pytest.mark.parametrize(
    ("route", "attributes", "temperatures"),
    [
        (Route.POLICY, {c.CALL_REFUSED: "messages", c.ERROR_TYPE: c.INVALID_IMAGE}, [1.0]),
        (Route.ENDPOINT, {c.CALL_REFUSED: "", c.ERROR_TYPE: c.CHAT_ONLY}, [1.0]),
        (Route.BASE, {c.ERROR_TYPE: "engine_error"}, [1.0]),
        (Route.ENDPOINT, {c.ERROR_TYPE: "RateLimitError"}, [1.0, None]),
        (Route.APP, {}, [1.0, None]),
    ],
)
def test_a_call_that_the_gateway_refused_was_not_sampled(
    route: Route, attributes: dict[str, Any], temperatures: list[float | None]
) -> None:
    outcome = CallOutcome.ERROR if attributes else CallOutcome.OK
    known = {c.ROUTE: str(route), c.CALL_OUTCOME: outcome.value, **attributes}
    span = make_call_span("c2", sequence=(3, 4), attributes=known)
    record, answered = call("c1", 1, 2)
    episode = build_episode(make_attempt("1"), make_rollout("1"), [answered, span], [record])
    assert Evaluation.of(2, [episode], WRITER).temperatures == {"writer": temperatures}


def test_the_last_line_counts_what_was_not_scored_and_what_failed() -> None:
    first = evaluation(0, [0.0, 0.5], unscored=1)
    last = Evaluation(step=5, rewards={"t0": 1.0}, unscored=2, failed=3)
    outcomes = Outcomes(rollouts=2560, unscored=3, failed=1040)
    assert result(first, last, outcomes=outcomes).summary() == (
        "held-out reward: 0.00 -> 1.00 (n=1, no CI of the gain); held out: unscored "
        "1 -> 2, failed 0 -> 3; of 2,560 rollouts in training 3 unscored, 1,040 failed"
    )
    nothing = Evaluation(step=0, rewards={}, unscored=2)
    assert result(nothing, last, outcomes=outcomes).summary() == (
        "trained for 5 steps; of 2,560 rollouts in training 3 unscored, 1,040 failed; held-out "
        "reward: nan (n=0) -> 1.00 (n=1), no task scored in both: runs/x"
    )
    assert result(outcomes=outcomes).summary() == (
        "trained for 5 steps; of 2,560 rollouts in training 3 unscored, 1,040 failed: runs/x"
    )
    undelivered = Outcomes(rollouts=32, undelivered=2)
    assert result(outcomes=undelivered).summary() == (
        "trained for 5 steps; of 32 rollouts in training 2 undelivered answers: runs/x"
    )


def test_failures_count_and_the_mean_without_them_is_told() -> None:
    """Check that both evaluations take the failure reward of the last one."""
    first = Evaluation(
        step=0, rewards={"t0": 0.0, "t1": 0.5}, failed=1, failures=["t0"], failure_reward=0.0
    )
    last = Evaluation(
        step=5, rewards={"t0": 0.5, "t1": -1.0}, failed=1, failures=["t1"], failure_reward=-1.0
    )
    first = first.restated(last.failure_reward)
    assert first.rewards == {"t0": -1.0, "t1": 0.5}
    assert last.text("reward").endswith(", n=2), 1 failed (0.500 without these)")
    assert last.metrics()["mean_without_failures"] == 0.5
    text = result(first, last).summary()
    assert text.startswith("held-out reward: -0.25 -> -0.25 (n=2, ")
    assert text.endswith("; held out: failed 1 -> 1 (0.50 -> 0.50 without these)")
    nothing = Evaluation(step=0, rewards={"t0": 0.0}, failed=1, failures=["t0"], failure_reward=0.0)
    assert nothing.text("reward").endswith(", 1 failed")
    assert result(nothing, nothing).summary().endswith("; held out: failed 1 -> 1")
    one = Evaluation(step=1, rewards={"t0": 0.0, "t1": 0.5}, failed=1, failures=["t0"])
    assert "failed 1 -> 1 (none -> 0.50 without these)" in result(nothing, one).summary()


def test_the_mean_is_over_failed_attempts_too() -> None:
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR}
    failed = score_failure(built([], reward=None, name="t1", **failure), -0.5)
    failed = replace(failed, task_id="t1")
    found = Evaluation.of(2, [built([]), failed], WRITER, failure_reward=-0.5)
    assert sorted(found.rewards.values()) == [-0.5, 1.0]
    assert (found.failures, found.unscored, found.mean) == (["t1"], 0, 0.25)


def test_failures_that_gave_a_reward_are_told_apart() -> None:
    """Check that a reward given before the app failed counts, and not in the mean without these."""
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR}
    gave = replace(built([], reward=None, name="t1", **failure), task_id="t1")
    gave = score_failure(replace(gave, reward=0.25, reward_source="emitted"), -0.5)
    found = Evaluation.of(2, [built([]), gave], WRITER, failure_reward=-0.5)
    assert (found.mean, found.mean_without_failures) == (0.625, 1.0)
    assert (found.failures, found.failures_scored) == ([], ["t1"])
    assert "1 failed (1 with a reward of their own; 1.000 without these)" in found.text("reward")
    assert found.metrics()["mean_without_failures"] == 1.0
    assert found.metrics()["failed_scored"] == 1
    metrics = rollout_metrics([built([]), gave])
    assert (metrics["failed"], metrics["failed_scored"]) == (1, 1)
    assert metrics["reward_without_failures"] == 1.0
    assert "failed 1 -> 1 (1.00 -> 1.00 without these)" in result(found, found).summary()


NAMED = {"dimension/exact": 0.25, "dimension/s": 2.0, "dimension_n/s": 1.0}


def test_named_rewards_are_told_with_their_means() -> None:
    told = evaluation(3, [0.5, 0.5], dimensions=NAMED)
    assert told.text("reward").endswith(", n=2), exact 0.25, s 2 (n=1)")
    assert told.metrics()["dimension/exact"] == 0.25


def test_the_gain_is_over_clusters_too() -> None:
    """Check two clusters of which one gained 1 and one 0: that says little."""
    clusters = {"t0": "a", "t1": "a", "t2": "b"}
    first = evaluation(0, [0.0, 0.0, 0.0], clusters=clusters)
    last = evaluation(5, [1.0, 1.0, 0.0], clusters=clusters)
    assert result(first, last).summary() == (
        "held-out reward: 0.00 -> 0.67 (n=3 in 2 clusters, 95% CI of the gain -1.00..1.00)"
    )


def test_outcomes_are_those_of_the_training_steps() -> None:
    step = {"kind": "train", "rollouts": 16, "scored": 12.0, "failed": 3}
    missed = {"calls/rejected:undelivered": 2.0, "calls/rejected:cancelled": 16.0, "silent": 5}
    missed |= {"calls/rejected:unscored": 4.0, "calls/rejected:late": None, "lost_attempts": 2}
    missed |= {"calls/rejected:replayed": 8.0}  # of forks, trained where they were sampled
    lines = [step, {"kind": "eval", "unscored": 9}, {**step, "scored": 16, "failed": 0, **missed}]
    # an algorithm of one's own may count nothing, or say anything
    lines += [{"kind": "train"}, {**step, "scored": "all"}, {**step, "rollouts": float("nan")}]
    assert Outcomes.of(lines) == Outcomes(
        32, unscored=4, failed=3, undelivered=2, silent=5, rejected=16, lost_attempts=2
    )
    assert Outcomes.of(lines).problems == (
        "4 unscored, 3 failed, 5 without a call of the policy, 2 undelivered answers, 16 rejected "
        "calls, 2 lost attempts, run again"
    )
    assert Outcomes.of([]) == Outcomes()

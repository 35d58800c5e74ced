"""Test the steps of LightningRL, their metrics and their warnings."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lightspan import LightningRL
from lightspan.algorithms.metrics import (
    approximate_kl,
    batch_metrics,
    engine_ratio,
    merge_updates,
    rollout_metrics,
)
from lightspan.errors import (
    AppError,
    RewardError,
    UnknownAgentError,
    UnsupportedError,
)
from lightspan.lightning.episode import (
    Episode,
    build_episode,
    lowest_reward,
    policy_calls,
    score_failure,
)
from lightspan.lightning.rollout_checks import RolloutChecks, check_scored
from lightspan.lightning.rows import Response, Row
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LearnerCapabilities, PolicyLoss
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Mode, Outcome
from lightspan.schema.spans import SpanKind, SpanStatus
from lightspan.training.results import mismatch_text
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_record,
    make_rollout,
    make_span,
)
from packages.core.tests.algorithms.scripted_world import Scripted, episode
from packages.core.tests.lightning.steps import weight_mass

MODEL = "a/model"


# --- resampling ---------------------------------------------------------------------------------
FLAT, VARIES, UNSCORED = (1.0, 1.0), (0.0, 1.0), (None, 1.0)


@pytest.mark.parametrize(
    ("resample", "groups", "asked", "idle"),
    [
        (0, [FLAT, FLAT, VARIES], [3], 2),
        (3, [VARIES, VARIES, VARIES], [3], 0),
        (3, [FLAT, VARIES, VARIES, VARIES], [3, 1], 0),
        # what a round replaced is not missing again in the next one
        (3, [FLAT, UNSCORED, VARIES, VARIES, FLAT, VARIES], [3, 2, 1], 0),
        (2, [FLAT, FLAT, VARIES, FLAT, FLAT, FLAT, VARIES], [3, 2, 2], 1),
    ],
)
async def test_groups_that_do_not_vary_are_replaced_in_bounds(
    resample: int, groups: list[tuple[float | None, ...]], asked: list[int], idle: int
) -> None:
    world: Any = Scripted(groups)
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=3, resample=resample)
    episodes = await algorithm.collect(world)
    assert world.asked == asked
    assert len(episodes) == 2 * sum(asked)
    counters = algorithm.prepare(episodes).finish().counters
    assert counters["groups"] == 3
    assert sum(n for name, n in counters.items() if name.startswith("groups:")) == idle


async def test_replaced_groups_leave_the_step() -> None:
    """Check that DAPO's batch contains only groups with different rewards.

    A group without scores is replaced like a group of equal rewards. The last group of equal
    rewards stays, because `resample` allows no further try. The batch is what it would be without
    the replaced groups.
    """
    world: Any = Scripted([FLAT, VARIES, UNSCORED, VARIES, FLAT, FLAT])
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=3, resample=2)
    episodes = await algorithm.collect(world)
    assert world.asked == [3, 2, 1]
    assert algorithm.replaced(episodes) == {"g0", "g2", "g4"}
    batch = algorithm.prepare(episodes, {"policy": 1}).finish()
    assert batch.rollouts == ("ro-g1-0", "ro-g1-1", "ro-g3-0", "ro-g3-1", "ro-g5-0", "ro-g5-1")
    assert batch.counters["groups"] == 3
    assert batch.counters["groups:identical"] == 1
    assert weight_mass(batch) == pytest.approx(4 / 6)
    alone = LightningRL(MODEL, group_size=2, tasks_per_step=3)
    kept = [episode for episode in episodes if episode.group_id in ("g1", "g3", "g5")]
    same = alone.prepare(kept, {"policy": 1}).finish()
    assert (same.rows, same.explanations) == (batch.rows, batch.explanations)


async def test_groups_are_replaced_only_where_that_was_asked() -> None:
    """Check that without dynamic sampling a step may have more groups than configured.

    A trainer other than lightspan's may pass them.
    """
    world: Any = Scripted([FLAT, VARIES, VARIES])
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=2)
    episodes = await world.rollouts([0, 1, 2], 2)
    assert algorithm.replaced(episodes) == set()
    assert algorithm.prepare(episodes, {"policy": 1}).finish().size == 6


async def test_replaced_rollouts_are_counted() -> None:
    """Check that replaced rollouts count as sampled, because runs are compared at equal
    rollouts.
    """
    groups = [FLAT, VARIES, FLAT, VARIES]
    world: Any = Scripted(groups)
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=2, resample=3)
    metrics = await algorithm.run_step(world)
    assert world.asked == [2, 1, 1]
    assert metrics["rollouts"] == 8
    assert (metrics["resample/groups"], metrics["resample/rollouts"]) == (2, 4)
    assert (metrics["batch/scored"], metrics["batch/groups"]) == (4, 2)
    assert metrics["reward"] == sum(map(sum, groups)) / 8
    assert {key[0] for key in world.explained} == {"at-g1-0", "at-g1-1", "at-g3-0", "at-g3-1"}
    plain = LightningRL(MODEL, group_size=2, tasks_per_step=2)
    assert not any(name.startswith("resample/") for name in await plain.run_step(Scripted(groups)))  # type: ignore[arg-type]


async def test_what_no_minibatch_learns_from_is_explained_too() -> None:
    """Check that the calls of a group that trains nothing are explained too.

    There are four optimiser steps for four rollouts, and those of that group have no rows.
    """
    world: Any = Scripted([VARIES, FLAT])
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=2, minibatches=4)
    await algorithm.run_step(world)
    assert sorted(world.updated) == [["ro-g0-0"], ["ro-g0-1"]]
    assert {key[0]: bool(why.advantage) for key, why in world.explained.items()} == {
        "at-g0-0": True,
        "at-g0-1": True,
        "at-g1-0": False,
        "at-g1-1": False,
    }


# --- what it says of a step ---------------------------------------------------------------------


async def test_how_far_a_step_moved_the_policy() -> None:
    """Check the KL divergence after two updates of 0.1: exp(0.2) - 1 - 0.2 per trained token."""
    world: Any = Scripted([VARIES])
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=1, minibatches=2)
    metrics = await algorithm.run_step(world)
    assert metrics["learner/approx_kl"] == pytest.approx(math.expm1(0.2) - 0.2)
    idle: Any = Scripted([FLAT])
    assert "learner/approx_kl" not in await algorithm.run_step(idle)


@pytest.mark.parametrize(
    ("target", "updates", "skipped"),
    [(None, 4, None), (1.0, 4, 0), (0.05, 4, 0), (0.03, 3, 1), (1e-9, 1, 3)],
)
async def test_a_step_stops_where_the_policy_has_moved_far_enough(
    target: float | None, updates: int, skipped: int | None
) -> None:
    """Check that minibatches are skipped once the divergence is above `target_kl`.

    After update j of four, each of which adds 0.1 to all log-probabilities, it is
    exp(0.1 j) - 1 - 0.1 j: .0052, .0214, .0499, .0918. So 0.05 is passed by the last update only,
    and 0.03 by the third. Calls of skipped minibatches are explained with weight 0, and are counted
    as rejected by a reason of their own.
    """
    world: Any = Scripted([VARIES, VARIES])
    options = {"group_size": 2, "tasks_per_step": 2, "minibatches": 4, "target_kl": target}
    metrics = await LightningRL(MODEL, **options).run_step(world)
    assert len(world.updated) == updates
    moved = math.expm1(0.1 * updates) - 0.1 * updates
    assert metrics["learner/approx_kl"] == pytest.approx(moved)
    assert metrics.get("learner/kl_skipped") == skipped
    assert metrics["calls/trained"] == updates
    assert metrics.get("calls/rejected:target_kl", 0) == (skipped or 0)
    trained = {f"at-{rollout[3:]}" for (rollout,) in world.updated}
    weights = {key[0]: why.token_weight for key, why in world.explained.items()}
    assert len(weights) == 4
    assert {attempt for attempt, weight in weights.items() if weight > 0} == trained
    assert [note.count("of 4 updates were skipped") for note in world.notes] == [1] * bool(skipped)
    # the update of all minibatches, and with `target_kl` each update, costs one score of the sample
    assert world.scored == [4] * (2 if target is None else updates + 1)


@pytest.mark.parametrize("seed", range(4))
async def test_a_policy_with_few_rows_stops_a_step_too(seed: int) -> None:
    """Check `target_kl` with a policy of one call in sixteen that alone moves, by 3 nats an update.

    Its divergence is exp(-3) - 1 + 3 after the first update, whatever the other policy does.
    """

    class World(Scripted):
        async def rollouts(self, tasks: Any, group_size: int, mode: Any = None) -> Any:
            return [pair(f"g{task}", member) for task in tasks for member in range(group_size)]

        def score(self, rows: Any) -> list[list[float]]:
            moved = {"a": 0.0, "b": -3.0 * len(self.updated)}
            return [[moved[row.policy] - 1] * len(row.ids) for row in rows]

    def pair(group: str, member: int) -> Any:
        name = f"{group}-{member}"
        records = [
            make_record(
                f"c{turn}",
                [1 + turn, 2],
                [3 + member],
                (2 * turn + 1, 2 * turn + 2),
                name,
                agent_path=path,
                policy=path,
            )
            for turn, path in enumerate("a" * 15 + "b")
        ]
        rollout = make_rollout(name, group, task_id=group)
        return build_episode(make_attempt(name, float(member % 2)), rollout, [], records)

    world: Any = World([])
    world.versions = {"a": 1, "b": 1, "policy": 1}
    options: Any = {"optimize": {"a": "a", "b": "b"}, "group_size": 4, "tasks_per_step": 2}
    algorithm = LightningRL(MODEL, minibatches=4, target_kl=0.5, seed=seed, **options)
    metrics = await algorithm.run_step(world)
    assert metrics["learner/approx_kl"] == pytest.approx(math.expm1(-3) + 3)
    assert (metrics["learner/kl_skipped"], len(world.updated)) == (3, 1)


def test_movement_is_bounded_and_of_trained_tokens_alone() -> None:
    row, _ = LightningRL(MODEL).prepare([episode("g", n, float(n)) for n in range(2)]).finish().rows
    assert row.mask == [False, False, True, True]
    moved = approximate_kl([row], [[0.0, 0.0, -1.0, -1.0]], [[9.0, 9.0, -1.0, -0.5]])
    assert moved == pytest.approx((math.expm1(0.5) - 0.5) / 2)
    far = [[0.0, 0.0, -900.0, 0.0]], [[0.0, 0.0, 0.0, -900.0]]
    assert math.isfinite(approximate_kl([row], *far))
    assert approximate_kl([], [], []) == 0.0


def test_ratio_of_engine_and_learner() -> None:
    """Check mean, maximum and shares on two calls of two tokens each, of versions 3 and 2."""
    call = {"temperatures": [1.0] * 4, "weights": [0.25] * 4, "advantages": [1.0] * 4}
    row = Row(
        rollout_id="r",
        policy="p",
        ids=[1, 2, 3, 4, 5],
        mask=[False, True, True, True, True],
        logprobs=[0.0, -1.0, -1.0, -1.0, -1.0],
        versions=[0, 3, 3, 2, 2],
        responses=(Response(1, 2), Response(3, 2)),
        **{name: [values[0], *values] for name, values in call.items()},
    )
    scores = [[0.0, -0.2, -1.1, -0.4, -0.3]]  # log ratios 0.8, -0.1, 0.6, 0.7
    plain = engine_ratio([row], scores, {"p": 3}, PolicyLoss())
    assert plain == pytest.approx({"engine_ratio_mean": 0.45, "engine_ratio_max": 0.8})
    loss = PolicyLoss(importance_cap=math.exp(0.65), importance_mask=3.0)
    shares = engine_ratio([row], scores, {"p": 9}, loss)
    # above the cap are 0.8 and 0.7; of the calls, 0.7 is below log 3 and 1.3 is above
    assert shares == {"engine_ratio_truncated": 0.5, "engine_ratio_masked": 0.5}
    calls = PolicyLoss(importance_cap=1.5, importance_level="sequence")
    assert engine_ratio([row], scores, {}, calls) == {"engine_ratio_truncated": 1.0}
    assert engine_ratio([], [], {}, loss) == {}


def test_the_correction_follows_from_what_computes_the_probabilities() -> None:
    engine = EngineCapabilities(exact_tokens=True, numerics="code float32")
    same = LearnerCapabilities(numerics="code float32", importance_mask=True)
    other = LearnerCapabilities(numerics="code bfloat16", importance_mask=True)
    unknown = EngineCapabilities(exact_tokens=True)
    loss = PolicyLoss(clip_low=0.1)
    assert loss.corrected(engine, same) == loss
    corrected = PolicyLoss(clip_low=0.1, importance_cap=2.0, importance_mask=3.0)
    assert loss.corrected(engine, other) == corrected
    assert loss.corrected(unknown, LearnerCapabilities()) == PolicyLoss(
        clip_low=0.1, importance_cap=2.0
    )
    for chosen in (PolicyLoss(correction="off"), PolicyLoss(importance_cap=5.0)):
        assert chosen.corrected(engine, other) == chosen


@pytest.mark.parametrize("minibatches", [1, 2])
async def test_an_engine_of_other_numerics_is_corrected_in_every_update(minibatches: int) -> None:
    algorithm = LightningRL(
        MODEL, group_size=2, tasks_per_step=2, minibatches=minibatches, loss=PolicyLoss()
    )
    same: Any = Scripted([VARIES, VARIES])
    metrics = await algorithm.run_step(same)
    assert same.losses == [(PolicyLoss(), None)] * minibatches
    assert metrics["learner/engine_ratio_mean"] > 0
    assert "learner/engine_ratio_masked" not in metrics

    other: Any = Scripted([VARIES, VARIES])
    other.engine.capabilities = EngineCapabilities(exact_tokens=True)
    metrics = await algorithm.run_step(other)
    assert {loss for loss, _ in other.losses} == {
        PolicyLoss(importance_cap=2.0, importance_mask=3.0)
    }
    # all scores are from before the first update
    scores = {value for _, old in other.losses for row in old for value in row}
    assert (len(other.losses), scores) == (minibatches, {-1.0})
    assert 0 <= metrics["learner/engine_ratio_masked"] <= 1


@pytest.mark.parametrize(
    ("loss", "is_kept"),
    [
        (PolicyLoss(), True),
        (PolicyLoss(importance_mask=3.0), True),
        (PolicyLoss(importance_cap=2.0), False),
    ],
)
async def test_calls_of_older_weights_are_neither_masked_nor_weighted(
    loss: PolicyLoss, is_kept: bool
) -> None:
    """Check π_old of calls that version 1 sampled, in a step of version 2 and in one of version 1.

    The learner scores each token at -1. A mask and the automatic correction get the recorded
    log-probabilities for the older calls; a cap that the user set gets the scores.
    """
    for version, is_recorded in ((1, False), (2, is_kept)):
        world: Any = Scripted([VARIES])
        world.engine.capabilities = EngineCapabilities(exact_tokens=True)
        world.versions = {"policy": version}
        algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=1, loss=loss)
        metrics = await algorithm.run_step(world)
        assert algorithm.last_batch is not None
        ((_, old),) = world.losses
        for row, values in zip(algorithm.last_batch.rows, old, strict=True):
            ((start, length),) = row.responses
            call = slice(start, start + length)
            assert values[call] == (row.logprobs[call] if is_recorded else [-1.0] * length)
            assert row.logprobs[call] != [-1.0] * length
        if is_recorded:
            assert metrics["learner/engine_ratio_masked"] == 0


@pytest.mark.parametrize(("gamma", "teaches"), [(0.9, True), (1.0, False)])
async def test_equal_returns_are_not_counted_as_flat_where_they_teach(
    gamma: float, teaches: bool
) -> None:
    """Check `at_grpo` on two successes of one and three turns: with gamma .9 the quicker gains."""

    class World(Scripted):
        async def rollouts(self, tasks: Any, group_size: int, mode: Any = None) -> Any:
            return [success(f"g-{member}", turns) for member, turns in enumerate((1, 3))]

    def success(name: str, turns: int) -> Episode:
        records = [
            make_record(f"c{turn}", [1, 2], [3], (2 * turn + 1, 2 * turn + 2), name)
            for turn in range(turns)
        ]
        return build_episode(make_attempt(name, 1.0), make_rollout(name, "g"), [], records)

    world: Any = World([])
    algorithm = LightningRL(
        MODEL, credit="at_grpo", gamma=gamma, group_size=2, tasks_per_step=1, seed=0
    )
    metrics = await algorithm.run_step(world)
    advantages = {key[0]: why.advantage for key, why in world.explained.items() if why.advantage}
    assert bool(advantages) == bool(world.updated) == teaches
    assert metrics.get("tasks/zero_gradient") == (None if teaches else 1.0)
    assert metrics.get("batch/groups:identical") == (None if teaches else 1.0)


def test_the_summary_has_one_text_on_engine_and_learner() -> None:
    names = ("mean", "max", "truncated", "masked")
    lines = [
        {"kind": "train", **{f"learner/engine_ratio_{name}": value for name in names}}
        for value in (0.01, 0.03)
    ]
    text = "engine and learner differ by 0.02 nats a token, 2 % truncated, 2 % masked"
    assert mismatch_text([*lines, {"kind": "eval"}]) == text
    weighted = [{**line, "batch/trained_tokens": n} for line, n in zip(lines, (300.0, 100.0))]  # noqa: B905
    text = "engine and learner differ by 0.015 nats a token, 1.5 % truncated, 1.5 % masked"
    assert mismatch_text(weighted) == text
    same = [{"kind": "train", "learner/engine_ratio_mean": 1e-6, "learner/engine_ratio_max": 1e-5}]
    assert mismatch_text(same) == mismatch_text([]) == ""


def test_error_of_the_reward_is_over_groups() -> None:
    """Check that the standard error is over groups, because rewards in a group are correlated."""
    episodes = [
        *(episode("a", member, 1.0) for member in range(4)),
        *(episode("b", member, float(member)) for member in range(2)),
        episode("c", 0, None),
    ]
    metrics = rollout_metrics(episodes)
    mean = metrics["reward"]
    assert mean == pytest.approx(5 / 6)
    expected = math.sqrt(2 * ((4 * (1 - mean)) ** 2 + (2 * (0.5 - mean)) ** 2)) / 6
    assert metrics["reward_se"] == pytest.approx(expected)
    same = [episode(f"g{n}", 0, float(n % 2)) for n in range(8)]
    plain = math.sqrt(8 * 0.25 / 7 / 8)  # of groups of one it is the textbook's
    assert rollout_metrics(same)["reward_se"] == pytest.approx(plain)


def test_metrics_of_rollouts() -> None:
    episodes = [
        episode("g", 0, 1.0),
        episode("g", 1, None),
        episode("g", 2, 0.5, capture_errors=["a span was dropped"]),
        episode("g", 3, None, status=AttemptStatus.FAILED, outcome=Outcome.APP_ERROR),
        episode("g", 4, None, status=AttemptStatus.LOST, outcome=Outcome.INFRASTRUCTURE),
    ]
    assert rollout_metrics(episodes) == {
        "rollouts": 5,
        "scored": 2,
        "failed": 1,
        "failed_scored": 0,
        "lost": 1,
        "damaged": 1,
        "calls": 5,
        "reward": 0.75,
        "agent/writer/calls": 5,
        "agent/writer/reward": 0.75,
    }


def test_attempts_that_were_run_again_are_counted() -> None:
    first = episode("g", 0, None, status=AttemptStatus.LOST, outcome=Outcome.INFRASTRUCTURE)
    given_back = replace(first, outcome=Outcome.CANCELLED)  # by a runner that was stopped
    again = replace(episode("g", 0, 1.0), earlier=(first, given_back, first))
    metrics = rollout_metrics([again, episode("g", 1, 0.0)])
    assert (metrics["lost"], metrics["lost_attempts"]) == (0, 2)


def test_updates_are_merged_by_what_their_metrics_are() -> None:
    first = {
        "loss": 1.0,
        "tokens": 10.0,
        "skipped": 0.0,
        "ratio_max": 1.0,
        "fresh_tokens": 10.0,
        "logprob_gap_mean": 0.001,
        "a/loss": 4.0,
        "a/fresh_tokens": 10.0,
        "a/logprob_gap_mean": 0.001,
    }
    second = {
        "loss": 3.0,
        "tokens": 20.0,
        "skipped": 1.0,
        "ratio_max": 2.0,
        "fresh_tokens": 0.0,
        "logprob_gap_mean": 0.5,
    }
    assert merge_updates([first, second]) == {
        "loss": 2.0,
        "tokens": 30.0,
        "skipped": 1.0,
        "ratio_max": 2.0,
        "fresh_tokens": 10.0,
        "logprob_gap_mean": 0.001,
        "a/loss": 4.0,
        "a/fresh_tokens": 10.0,
        "a/logprob_gap_mean": 0.001,
    }
    assert merge_updates([]) == {}


# --- checks -------------------------------------------------------------------------------------


def test_failures_are_told_above_five_per_cent() -> None:
    notes: list[str] = []
    checks = RolloutChecks(LightningRL(MODEL).routing(), notes.append)
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR, "message": "boom"}
    good = [episode("g", member, 1.0) for member in range(19)]
    checks.check([*good, episode("bad", 0, None, **failure)])
    assert notes == []
    checks.check([*good[:18], episode("bad", 0, None, **failure)])
    [note] = notes
    assert note == "5 % of the rollouts failed (mostly app_error; for example task bad: boom)"
    notes.clear()
    bad = replace(episode("bad", 0, None, **failure), runner="b-2")
    checks.check([*(replace(each, runner="a-1") for each in good[:18]), bad])
    assert notes == [note.replace("failed", "failed, all on runner b-2", 1)]


def test_what_makes_the_app_fail_is_worth_no_more_than_a_wrong_answer() -> None:
    """Check the advantages of a right answer, a wrong one and one that makes the app raise."""
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR}
    answers = [episode("g", 0, 1.0), episode("g", 1, 0.0), episode("g", 2, None, **failure)]
    algorithm = LightningRL(MODEL, group_size=3)
    assert algorithm.failure_reward == "lowest"
    scored = [score_failure(each, lowest_reward(answers, 0.0)) for each in answers]
    explanations = algorithm.prepare(scored).finish().explanations
    right, wrong, raises = (explanations[f"at-g-{n}", "call", 0].advantage for n in range(3))
    assert right > 0 > wrong == raises
    metrics = rollout_metrics(scored)
    assert (metrics["reward"], metrics["reward_without_failures"]) == (1 / 3, 0.5)
    assert (metrics["scored"], metrics["failed"]) == (3, 1)


def retried(member: int, reward: float, tries: int) -> Episode:
    """Return an episode in which all tries of an agent but the last ended in an error."""
    name, spans, records = f"g-{member}", [], []
    for number in range(tries):
        status = SpanStatus.ERROR if number + 1 < tries else SpanStatus.OK
        block: dict[str, Any] = {"start_ns": 10 * number + 1, "end_ns": 10 * number + 9}
        block |= {"status": status, "attributes": {c.AGENT_PATH: "writer"}}
        spans.append(make_span(f"block{number}", SpanKind.AGENT, name, **block))
        spans.append(make_call_span(f"c{number}", parent_id=f"block{number}", attempt=name))
        place = (2 * number + 1, 2 * number + 2)
        records.append(make_record(f"c{number}", [1], [2], place, name))
    rollout = make_rollout(name, "g", task_id="g")
    return build_episode(make_attempt(name, reward), rollout, spans, records)


def test_a_call_that_was_retried_does_not_get_the_credit_of_the_one_that_succeeded() -> None:
    episodes = [retried(0, 1.0, 3), retried(1, 0.0, 1)]
    algorithm = LightningRL(MODEL, group_size=2, estimator="dr_grpo")
    scored = [score_failure(each, -1.0) for each in episodes]
    why = algorithm.prepare(scored).finish().explanations
    assert [why["at-g-0", f"c{n}", 0].credit for n in range(3)] == [-1.0, -1.0, 1.0]
    assert [why["at-g-0", f"c{n}", 0].advantage for n in range(3)] == [-1.5, -1.5, 0.5]
    assert why["at-g-1", "c0", 0].advantage == -0.5  # the statistics are of the rollouts' rewards
    assert why["at-g-0", "c0", 0].credit_rule == "terminal, retried"
    [first, _] = algorithm.coverages(episodes)  # as with failure_reward=None
    assert first.counts() == {"rejected:retried": 2, "trained": 1}


@pytest.mark.parametrize("credit", ["terminal", "discounted", "anchor", "at_grpo", "gigpo"])
@pytest.mark.parametrize("unit", ["rollout", "agent"])
@pytest.mark.parametrize("constant", [1.0, 10.0, 1000.0])
def test_a_failed_try_weighs_no_more_when_rewards_are_far_above_zero(
    credit: str, unit: Any, constant: float
) -> None:
    rewards = [0.1, 0.2, 0.15, 0.25]
    episodes = [
        score_failure(retried(n, constant + reward, 2 if n == 0 else 1), 0.0)
        for n, reward in enumerate(rewards)
    ]
    batch = LightningRL(MODEL, group_size=4, credit=credit, unit=unit).prepare(episodes).finish()
    why = {key: each.advantage for key, each in batch.explanations.items()}
    assert -3 < why.pop(("at-g-0", "c0", 0)) < 0
    assert max(map(abs, why.values())) < 3
    assert batch.counters["retried"] == 1
    assert batch_metrics(batch)["batch/retried"] == 1


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", -10 / statistics.stdev([10, 9, 11, 0])),
        ("reinforce++", -10 / statistics.stdev([10, 9, 11, 0])),
        ("reinforce++_baseline", -10 / math.sqrt((1 + 1 + 100) / 3)),
        ("dr_grpo", -10.0),
        ("rloo", -10.0),
    ],
)
def test_the_scale_includes_the_credit_of_failed_tries(estimator: Any, expected: float) -> None:
    """Check that failed tries widen the scale of an estimator that has one, and move no mean."""
    episodes = [score_failure(retried(n, (10, 9, 11)[n], 2 if n == 0 else 1), 0) for n in range(3)]
    why = (
        LightningRL(MODEL, group_size=3, estimator=estimator)
        .prepare(episodes)
        .finish()
        .explanations
    )
    assert why["at-g-0", "c0", 0].advantage == pytest.approx(expected)
    final = [why["at-g-0", "c1", 0], why["at-g-1", "c0", 0], why["at-g-2", "c0", 0]]
    assert sum(each.advantage for each in final) == pytest.approx(0)


EQUAL = statistics.stdev([1, 1, 1, 1, 0])


@pytest.mark.parametrize(
    ("estimator", "credit", "expected"),
    [
        ("grpo", "terminal", [-1 / EQUAL, 0, 0]),
        ("grpo", "discounted", [-0.75 / EQUAL, 0, 0.25 / EQUAL]),
        ("grpo", "anchor", [-0.75 / EQUAL, 0, 0.25 / EQUAL]),
        ("grpo", "at_grpo", [-1.5, 0, 0.5]),
        ("grpo", "gigpo", [-1 / EQUAL, 0, 0]),
        ("reinforce++", "terminal", [-1 / EQUAL, 0, 0]),
        ("reinforce++_baseline", "terminal", [-2, 0, 0]),
        ("dr_grpo", "terminal", [-1, 0, 0]),
        ("dr_grpo", "discounted", [-0.75, 0, 0.25]),
        ("rloo", "terminal", [-1, 0, 0]),
        ("rloo", "discounted", [-1, 0, 1 / 3]),
    ],
)
@pytest.mark.parametrize("unit", ["rollout", "agent"])
def test_a_failed_try_is_punished_in_a_group_of_equal_rewards(
    estimator: Any, credit: Any, unit: Any, expected: list[float]
) -> None:
    """Check the advantages of the failed try, of the one after it, and of other rollouts."""
    episodes = [score_failure(retried(n, 1.0, 2 if n == 0 else 1), 0) for n in range(4)]
    algorithm = LightningRL(MODEL, group_size=4, estimator=estimator, credit=credit, unit=unit)
    batch = algorithm.prepare(episodes).finish()
    why = {key: each.advantage for key, each in batch.explanations.items()}
    keys = [("at-g-0", "c0", 0), ("at-g-0", "c1", 0), ("at-g-3", "c0", 0)]
    assert [why[key] for key in keys] == pytest.approx(expected)
    assert "groups:identical" not in batch.counters
    assert "zero:identical" not in batch.counters
    assert "ro-g-0" in {row.rollout_id for row in batch.rows}


def test_a_group_of_equal_rewards_with_a_failed_try_is_not_replaced() -> None:
    tries = [score_failure(retried(n, 1.0, 2 if n == 0 else 1), 0) for n in range(2)]
    equal = [replace(each, group_id="h", attempt_id=f"h{n}") for n, each in enumerate(tries)]
    equal = [replace(each, failure_reward=None) for each in equal]
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=1, resample=1)
    assert algorithm.replaced([*tries, *equal]) == {"h"}
    assert algorithm.replaced([*equal, *tries]) == {"h"}
    low = [score_failure(each, 1.0) for each in tries]  # no less than the reward
    assert algorithm.replaced([*low, *equal]) == {"g"}


def test_equal_rewards_have_no_advantage_by_rounding_beside_a_failed_try() -> None:
    episodes = [score_failure(retried(n, 0.1 + n * 1e-11, 2 if n == 0 else 1), 0) for n in range(3)]
    batch = LightningRL(MODEL, group_size=3).prepare(episodes).finish()
    assert [batch.explanations[f"at-g-{n}", "c0", 0].advantage for n in (1, 2)] == [0.0, 0.0]
    assert {row.rollout_id for row in batch.rows} == {"ro-g-0"}


def test_gigpo_does_not_give_a_failed_try_the_return_of_its_rollout() -> None:
    episodes = [score_failure(retried(n, float(n == 0), 2 if n == 0 else 1), 0) for n in range(2)]
    why = LightningRL(MODEL, group_size=2, credit="gigpo").prepare(episodes).finish().explanations
    assert why["at-g-0", "c0", 0].advantage < 0 < why["at-g-0", "c1", 0].advantage


def test_an_app_that_fails_once_and_never_scores_teaches_nothing() -> None:
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR}
    episodes = [score_failure(episode("f", 0, None, **failure), 0.0)]
    episodes += [episode(f"t{n}", 0, None) for n in range(4)]
    with pytest.raises(RewardError, match="no rollout has a reward"):
        check_scored(episodes, set())


def test_a_misspelt_agent_is_named_after_the_first_evaluation() -> None:
    """Check that an evaluation, which comes first, stops only if no pattern matches any agent."""
    held_out = [replace(episode(f"t{n}", 0, 1.0), mode=Mode.VAL) for n in range(4)]

    def check(optimize: Any, agents: list[str] | None = None, count: int = 4) -> None:
        routing = LightningRL(MODEL, optimize=optimize).routing()
        RolloutChecks(routing, lambda text: None, agents).check(held_out[:count])

    with pytest.raises(UnknownAgentError, match="no agent matches 'writter'"):
        check("writter")
    check(["writter", "writer"])  # the other may act in training only
    check("critic", ["critic", "writer"])
    check("writter", count=3)


def failing(step: int, text: str, *, size: int = 2, tasks: int = 4, **more: Any) -> list[Any]:
    """Return a batch whose rollouts all failed, with the number of the rollout in the text."""
    failure: dict[str, Any] = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR} | more
    return [
        episode(f"{step}-{n}", member, None, message=f"{text} (pid {step}{n}{member})", **failure)
        for n in range(tasks)
        for member in range(size)
    ]


LONG = f"KeyError: {'long ' * 200}: set DESK_URL"


def test_training_stops_at_once_if_the_app_fails_before_any_answer() -> None:
    checks = RolloutChecks(LightningRL(MODEL).routing(), lambda text: None, agents=["writer"])
    silent = [replace(each, calls=()) for each in failing(1, LONG)]
    with pytest.raises(AppError) as raised:
        checks.check(silent)
    assert str(raised.value) == (
        "the latest 8 rollouts, of 4 tasks, all failed alike (app_error), so there is nothing to "
        f"learn from. The first, of task 1-0: {LONG} (pid 100)"
    )
    again = RolloutChecks(LightningRL(MODEL).routing(), lambda text: None, agents=["writer"])
    again.check(silent[:2])
    with pytest.raises(AppError, match="the latest 4 rollouts, of 1 task, all failed"):
        again.check(silent[:2])  # there is no other task


def test_training_stops_if_batches_fail_alike_after_answers() -> None:
    notes: list[str] = []
    checks = RolloutChecks(LightningRL(MODEL).routing(), notes.append, agents=["writer"])
    checks.check(failing(1, LONG, size=8))  # 32 rollouts, but one batch
    assert LONG in notes[0]
    checks.check([*failing(2, LONG), episode("good", 0, 1.0)])
    checks.check(failing(3, LONG))
    with pytest.raises(AppError, match=r"16 rollouts, of 8 tasks.*set DESK_URL.*a low reward for"):
        checks.check(failing(4, LONG))


def test_failures_that_differ_with_the_answers_do_not_stop_training() -> None:
    checks = RolloutChecks(LightningRL(MODEL).routing(), lambda text: None, agents=["writer"])
    for step, word in enumerate(("a", "b", "c", "d", "e")):
        checks.check(failing(step, f"ValueError: {word} is no number"))
        mixed = [*failing(step, "ValueError: no"), *failing(step, "KeyError: no")]
        checks.check(mixed)
    dry = [replace(each, mode=Mode.DEV, calls=()) for each in failing(1, LONG)]
    checks.check(dry)  # a dry run reports failures itself


def test_training_stops_if_the_infrastructure_loses_every_rollout_or_a_scorer_raises() -> None:
    lost = {"status": AttemptStatus.LOST, "outcome": Outcome.INFRASTRUCTURE}
    checks = RolloutChecks(LightningRL(MODEL).routing(), lambda text: None, agents=["writer"])
    checks.check([episode("good", 0, 1.0)])
    with pytest.raises(RewardError, match=r"all are unscored \(infrastructure\).*refused; mend"):
        checks.check(failing(1, "refused; mend it", **lost))
    cancelled = {"status": AttemptStatus.CANCELLED, "outcome": Outcome.CANCELLED}
    checks.check(failing(1, "by hand", **cancelled))
    scorer = [
        replace(episode(f"t{n}", 0, None), reward_source="scored", unscored="it raised OSError: x")
        for n in range(8)
    ]
    checks.check(scorer)
    with pytest.raises(RewardError, match=r"all are unscored \(ok\).*it raised OSError: x"):
        checks.check(scorer)


def test_calls_that_were_recorded_late_were_made() -> None:
    """Check what is counted after a stall of the store, in which attempts end before their calls
    are recorded.
    """
    routing = LightningRL(MODEL).routing()
    late = [
        replace(each, calls=(), late_calls=each.calls)
        for each in (episode(f"t{n}", 0, 1.0) for n in range(2))
    ]
    found = rollout_metrics([*late, episode("t3", 0, 0.0)], routing)
    assert (found["calls"], found["agent/writer/calls"], found["agent/writer/reward"]) == (
        3,
        3,
        2 / 3,
    )
    assert "silent" not in found
    assert [policy_calls(each, routing) for each in late] == [1, 1]
    notes: list[str] = []
    RolloutChecks(routing, notes.append, agents=["writer"]).check(late)
    assert notes == []


@pytest.mark.parametrize(
    ("attributes", "count"),
    [
        ({c.ROUTE: "policy", c.CALL_OUTCOME: "cancelled"}, 1),
        ({c.ROUTE: "policy", c.CALL_OUTCOME: "error"}, 0),
        ({c.ROUTE: "app", c.CALL_OUTCOME: "ok"}, 0),
        ({c.CALL_OUTCOME: "ok"}, 0),
    ],
)
def test_an_answer_that_the_app_left_was_of_the_policy(
    attributes: dict[str, str], count: int
) -> None:
    """Check calls that only the app has recorded: the gateway notices later that the app left."""
    span = make_call_span("c1", attributes=attributes)
    found = build_episode(make_attempt(), make_rollout(), [span], [])
    assert policy_calls(found, LightningRL(MODEL).routing()) == count


def test_training_stops_when_no_call_of_several_tasks_can_be_trained() -> None:
    """Check that training continues after one task without calls, and after apps that failed
    early.
    """
    notes: list[str] = []
    checks = RolloutChecks(LightningRL(MODEL).routing(), notes.append, agents=["writer"])
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR, "message": "boom"}
    silent = [replace(episode(f"t{n}", 0, 1.0), calls=[]) for n in range(4)]
    failed = [replace(episode("bad", 0, None, **failure), calls=[])]
    checks.check(failed)
    del notes[:]
    checks.check(silent[:1])
    assert [note[:44] for note in notes] == ["the app made no model call through the OpenA"]
    checks.check(silent[1:3])
    with pytest.raises(UnsupportedError, match="no model call"):
        checks.check(silent[3:])
    again = RolloutChecks(LightningRL(MODEL).routing(), print, agents=["writer"])
    again.check(silent[:1])
    with pytest.raises(UnsupportedError, match="no model call"):
        again.check(silent[:1])  # there are no more tasks
    other = RolloutChecks(LightningRL(MODEL).routing(), print, agents=["writer"])
    other.check(silent[:1])
    other.check([episode("g", 0, 1.0)])
    other.check(silent)


def test_agents_are_checked_after_training_rollouts_with_all_that_was_seen() -> None:
    routing = LightningRL(MODEL, optimize="reviewer").routing()
    RolloutChecks(routing, print, agents=["reviewer"]).check([episode("g", 0, 1.0)])
    with pytest.raises(UnknownAgentError, match="no agent matches 'reviewer'"):
        RolloutChecks(routing, print).check([episode("g", 0, 1.0)])


BROKEN: dict[str, Any] = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR}
UNREACHED = (
    "not reached yet, as no rollout ended well: no agent matches 'report'. Agents: 'writer'; "
    "checked once one does. To check the names before any rollout, name all agents: fit(…, "
    "agents=[…])"
)


def test_an_agent_that_no_rollout_reached_because_all_failed_is_awaited() -> None:
    notes: list[str] = []
    routing = LightningRL(MODEL, optimize=["writer", "report"]).routing()
    checks = RolloutChecks(routing, notes.append)
    failed = [episode("g", n, None, message="KeyError: 'log'", **BROKEN) for n in range(2)]
    checks.check(failed)
    assert notes == [
        "100 % of the rollouts failed (mostly app_error; for example task g: KeyError: 'log')",
        UNREACHED,
    ]
    assert not checks.agents_checked
    with pytest.raises(UnknownAgentError) as raised:
        checks.check([failed[0], episode("h", 0, 1.0)])
    assert str(raised.value) == (
        "no agent matches 'report'. Agents: 'writer'. 1 of 2 rollouts did not end well: "
        "mend that first, or name all agents: fit(…, agents=[…])"
    )
    reached = replace(episode("h", 0, 1.0), calls=())
    call = msgspec.structs.replace(episode("h", 0, 1.0).calls[0], agent_path="report")
    checks.check([replace(reached, calls=(call,))])
    assert checks.agents_checked


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.VAL])
def test_an_error_about_failures_names_the_agents_that_were_not_reached(mode: Mode) -> None:
    checks = RolloutChecks(LightningRL(MODEL, optimize="report").routing(), lambda text: None)
    lost = {"status": AttemptStatus.LOST, "outcome": Outcome.INFRASTRUCTURE}
    episodes = [replace(each, mode=mode) for each in failing(1, "refused", **lost)]
    with pytest.raises(RewardError) as raised:
        checks.check(episodes)
    assert str(raised.value).endswith(f"refused (pid 100); {UNREACHED}")


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        (
            1,
            "no model call was seen: 1 of 2 rollouts failed, the first: app_error: boom; in the "
            "others the app made no model call through the OpenAI SDK in its own process, nor to "
            "OPENAI_BASE_URL",
        ),
        (
            0,
            "the app made no model call through the OpenAI SDK in its own process, nor to "
            "OPENAI_BASE_URL (rollouts: 2). Give another client (LiteLLM, httpx, requests) or "
            "process base_url=llm.base_url and api_key=llm.api_key, where `llm` is an argument "
            "that the app asks for, and the agent's name as the model; or use the OpenAI SDK",
        ),
    ],
)
def test_without_any_model_call_that_is_what_is_said(failed: int, said: str) -> None:
    failure = {"status": AttemptStatus.FAILED, "outcome": Outcome.APP_ERROR, "message": "boom"}
    episodes = [episode("g", n, None, **(failure if n < failed else {})) for n in range(2)]
    episodes = [replace(episode, calls=(), spans=()) for episode in episodes]
    checks = RolloutChecks(LightningRL(MODEL, optimize="planner").routing(), lambda text: None)
    with pytest.raises(UnknownAgentError) as raised:
        checks.check(episodes)
    assert str(raised.value) == said


def test_without_any_model_call_the_failed_program_is_quoted() -> None:
    """A sandbox that does not start looks like an app without a model otherwise."""
    failed = "the program ended with exit status 1: bwrap: Can't find source path /x"
    spans = [
        make_span(f"{n:016x}", SpanKind.OPERATION, status_message=failed, attributes=attributes)
        for n, attributes in enumerate([{c.COMMAND_STATUS: 0}, {c.COMMAND_STATUS: 1}], 1)
    ]
    episodes = [replace(episode("g", n, None), calls=(), spans=tuple(spans)) for n in range(2)]
    checks = RolloutChecks(LightningRL(MODEL, optimize="planner").routing(), lambda text: None)
    with pytest.raises(UnknownAgentError) as raised:
        checks.check(episodes)
    assert f"OPENAI_BASE_URL (rollouts: 2). The first: {failed}. Give another" in str(raised.value)

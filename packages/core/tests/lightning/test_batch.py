"""Test batches: statistics before filters, three independent settings, weights, minibatches."""

import math

import msgspec
import pytest

from lightspan.errors import ConfigError
from lightspan.lightning import (
    BatchConfig,
    Rejection,
    Selection,
    build_episode,
    classify_calls,
    prepare_batch,
)
from lightspan.lightning.advantages import ZeroReason, groups_without_variance
from lightspan.lightning.batch import split_minibatches
from lightspan.lightning.credit import discounted
from lightspan.lightning.returns import group_rewards
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Mode, Outcome
from lightspan.schema.token_records import pack_floats
from lightspan_testing.strategies import (
    make_attempt,
    make_record,
    make_reward_span,
    make_rollout,
)
from packages.core.tests.lightning.steps import weight_mass

ALL = Selection.of("*").routing


def rollout(name, reward, lengths=(1,), *, group="g", agents=None, merge=False, spans=(), **fields):
    """Build an episode whose calls sample `lengths` tokens; `merge` makes them one conversation."""
    records, prompt = [], [1]
    for number, length in enumerate(lengths):
        response = [10 + number] * length
        prompt = prompt if merge or not number else [100 + number]
        records.append(
            make_record(
                f"{name}-c{number}",
                prompt,
                response,
                (2 * number + 1, 2 * number + 2),
                name,
                agent_path=agents[number] if agents else "writer",
                **fields.pop("record", {}) if number == 0 else {},
            )
        )
        prompt = [*prompt, *response, 50 + number]
    mode = fields.pop("mode", Mode.TRAIN)
    attempt = make_attempt(name, reward, **fields)
    return build_episode(attempt, make_rollout(name, group, mode=mode), list(spans), records)


def changed(episode, number, **fields):
    """Return the episode with changed fields in the record of the call `number`."""
    name = episode.attempt_id.removeprefix("at-")
    records = [call.record for call in episode.calls]
    records[number] = msgspec.structs.replace(records[number], **fields)
    attempt = make_attempt(name, episode.reward)
    return build_episode(attempt, make_rollout(name, episode.group_id), [], records)


def batch_of(episodes, *, routing=ALL, versions=None, **settings):
    config = BatchConfig(**settings)
    steps = config.credit.step_rewards
    coverages = [classify_calls(episode, routing, step_rewards=steps) for episode in episodes]
    return prepare_batch(episodes, coverages, config, versions=versions).finish()


def advantages(batch):
    """Return call id → advantage by the explanations; check that the rows have the same
    advantages.
    """
    found = {call_id: why.advantage for (_, call_id, _), why in batch.explanations.items()}
    for row in batch.rows:
        values = [a for a, trained in zip(row.advantages, row.mask, strict=True) if trained]
        weights = [w for w, trained in zip(row.weights, row.mask, strict=True) if trained]
        whys = [
            why
            for key in row.call_ids
            for (_, *call), why in batch.explanations.items()
            if tuple(call) == key
        ]
        assert values == [why.advantage for why in whys for _ in range(why.tokens)]
        assert weights == [why.token_weight for why in whys for _ in range(why.tokens)]
    return found


def mass(batch):
    """Return rollout id → sum of its weights."""
    found = {}
    for row in batch.rows:
        found[row.rollout_id] = found.get(row.rollout_id, 0.0) + math.fsum(row.weights)
    return found


# --- statistics -------------------------------------------------------------------------------


def test_the_baseline_does_not_depend_on_how_many_rows_a_rollout_has():
    """Check that the baseline is 1/2 if a rollout of reward 1 has three rows and one of reward 0
    one.

    A mean over rows would be 3/4 (arXiv 2608.17528).
    """
    batch = batch_of([rollout("1", 1.0, (1, 1, 1)), rollout("2", 0.0)], estimator="dr_grpo")
    assert [row.rollout_id for row in batch.rows] == ["ro-1", "ro-1", "ro-1", "ro-2"]
    assert {why.baseline for why in batch.explanations.values()} == {0.5}
    assert set(advantages(batch).values()) == {0.5, -0.5}


def test_the_agent_unit_counts_one_observation_per_rollout_and_agent():
    episodes = [
        rollout("1", 1.0, (1, 1, 1), agents=["a", "a", "b"]),
        rollout("2", 0.0, (1, 1), agents=["a", "b"]),
        rollout("3", 0.0, (1,), agents=["a"]),
    ]
    batch = batch_of(episodes, estimator="dr_grpo", unit="agent")
    baselines = {(why.agent_path, why.baseline, why.size) for why in batch.explanations.values()}
    assert baselines == {("a", 1 / 3, 3), ("b", 0.5, 2)}
    assert {why.unit for why in batch.explanations.values()} == {"agent"}
    advantages(batch)


def test_an_agent_is_its_path():
    episodes = [
        rollout("1", 1.0, (1, 1), agents=["x/a", "y/a"]),
        rollout("2", 0.0, (1,), agents=["x/a"]),
    ]
    batch = batch_of(episodes, unit="agent", estimator="dr_grpo")
    assert batch.explanations["at-1", "1-c1", 0].zero_reason is ZeroReason.GROUP_OF_ONE
    assert batch.explanations["at-1", "1-c0", 0].zero_reason is None


def test_a_rollout_without_a_selected_call_counts_in_the_statistics():
    episodes = [
        rollout("1", 1.0, agents=["writer"]),
        rollout("2", 0.0, agents=["checker"]),
    ]
    batch = batch_of(episodes, routing=Selection.of("writer").routing, estimator="dr_grpo")
    assert advantages(batch) == {"1-c0": 0.5}
    assert batch.rollouts == ("ro-1", "ro-2")
    assert mass(batch) == {"ro-1": 0.5}


# --- who counts -------------------------------------------------------------------------------


def test_what_does_not_count_is_out_of_statistics_and_r_and_counted_once():
    episodes = [
        rollout("1", 1.0),
        rollout("2", 0.0),
        rollout("nan", math.nan),
        rollout("none", None),
        rollout("broken", 1.0, capture_errors=["x"]),
        rollout("lost", 1.0, status=AttemptStatus.LOST, outcome=Outcome.INFRASTRUCTURE),
        rollout("val", 1.0, mode=Mode.VAL),
        rollout("stale", 1.0, record={"versions": [(1, 1)]}),
    ]
    episodes[0], episodes[1] = (
        rollout(name, value, record={"versions": [(3, 1)]})
        for name, value in (("1", 1.0), ("2", 0.0))
    )
    batch = batch_of(episodes, estimator="dr_grpo", max_staleness=1, versions={"policy": 4})
    assert batch.rollouts == ("ro-1", "ro-2")
    assert batch.size == 2
    assert advantages(batch) == {"1-c0": 0.5, "2-c0": -0.5}
    expected = {
        "rollouts": 8,
        "scored": 2,
        "unscored": 2,
        "damaged": 1,
        "unfinished": 1,
        "not_train": 1,
        "stale": 1,
        "groups": 1,
        "transitions": 2,
        "rows": 2,
        "trained_tokens": 2,
        "rejected:unscored": 2,
        "rejected:damaged": 1,
        "rejected:unfinished": 1,
        "rejected:mode_not_train": 1,
        "rejected:stale": 1,
    }
    assert batch.counters == expected


@pytest.mark.parametrize(("oldest", "fresh"), [(4, True), (3, True), (2, False)])
def test_one_stale_token_rejects_the_whole_rollout(oldest, fresh):
    current = {"versions": [(4, 1)]}
    episodes = [
        rollout("1", 1.0, (2, 1), record={"versions": [(oldest, 1), (4, 1)]}),
        rollout("2", 0.0, record=current),
        rollout("3", 0.5, record=current),
    ]
    episodes[0] = changed(episodes[0], 1, versions=[(4, 1)])
    batch = batch_of(episodes, max_staleness=1, versions={"policy": 4}, estimator="dr_grpo")
    assert ("ro-1" in batch.rollouts) is fresh
    assert batch.counters.get("stale", 0) == (not fresh)
    rejected = [entry.rejection for entry in batch.coverages[0].rejected]
    assert rejected == ([] if fresh else [Rejection.STALE] * 2)
    assert batch.explanations["at-2", "2-c0", 0].baseline == (0.5 if fresh else 0.25)


def test_staleness_without_the_current_version_is_an_error():
    with pytest.raises(ConfigError, match="current version of 'policy'"):
        batch_of([rollout("1", 1.0)], max_staleness=0, versions={"other": 1})


def test_calls_that_cannot_be_rows_are_rejected_after_the_statistics():
    episodes = [rollout("1", 1.0, (1, 3)), rollout("2", 0.0)]
    episodes[1] = changed(episodes[1], 0, logprob_data=pack_floats([math.nan]))
    batch = batch_of(episodes, estimator="dr_grpo", max_length=2)
    assert advantages(batch) == {"1-c0": 0.5}
    assert batch.rollouts == ("ro-1", "ro-2")
    assert [coverage.counts() for coverage in batch.coverages] == [
        {"trained": 1, "rejected:out_of_context": 1},
        {"rejected:no_logprobs": 1},
    ]
    assert batch.counters["rejected:no_logprobs"] == 1
    assert mass(batch) == {"ro-1": 0.5}


def test_a_coverage_made_for_another_credit_rule_is_an_error():
    episode = rollout("1", 1.0)
    config = BatchConfig(credit=discounted(0.9))
    with pytest.raises(ConfigError, match=r"discounted\(0.9\) needs .*step_rewards=True"):
        prepare_batch([episode], [classify_calls(episode, ALL)], config).finish()


# --- zero advantages --------------------------------------------------------------------------


def test_a_group_of_one_identical_rewards_and_unscored_groups_have_no_rows_but_are_counted():
    episodes = [
        rollout("1", 1.0, group="one"),
        rollout("2", 0.5, group="same"),
        rollout("3", 0.5, group="same"),
        rollout("4", None, group="none"),
        rollout("5", 1.0, group="mixed"),
        rollout("6", 0.0, group="mixed"),
    ]
    batch = batch_of(episodes)
    assert [row.rollout_id for row in batch.rows] == ["ro-5", "ro-6"]
    assert batch.size == 5
    assert mass(batch) == {"ro-5": 0.2, "ro-6": 0.2}
    counted = {k: v for k, v in batch.counters.items() if k.startswith(("zero", "groups"))}
    assert counted == {
        "zero:group_of_one": 1,
        "zero:identical": 2,
        "zero_advantage_rollouts": 3,
        "groups": 4,
        "groups:group_of_one": 1,
        "groups:identical": 1,
        "groups:unscored": 1,
    }
    assert batch.explanations["at-2", "2-c0", 0].zero_reason is ZeroReason.IDENTICAL


def test_rollouts_with_zero_advantage_can_be_kept_for_kl_and_entropy():
    episodes = [rollout(str(n), 0.5) for n in range(4)]
    assert batch_of(episodes).rows == []
    kept = batch_of(episodes, keep_zero_advantages=True)
    assert mass(kept) == {f"ro-{n}": 0.25 for n in range(4)}
    assert {a for row in kept.rows for a in row.advantages} == {0.0}


# --- weights ----------------------------------------------------------------------------------


def test_with_weight_rollout_every_rollout_weighs_the_same():
    """Check that each of two rollouts has weight 1/2, also if they have three rows."""
    batch = batch_of([rollout("1", 1.0, (5, 2)), rollout("2", 0.0, (3,))])
    assert len(batch.rows) == 3
    assert mass(batch) == {"ro-1": pytest.approx(0.5), "ro-2": pytest.approx(0.5)}
    assert weight_mass(batch) == pytest.approx(1.0)
    assert batch.explanations["at-1", "1-c0", 0].token_weight == 1 / (2 * 7)
    assert batch.explanations["at-1", "1-c0", 0].share == pytest.approx(5 / 7)


def test_merging_rows_changes_no_weight():
    apart, together = (
        batch_of([rollout("1", 1.0, (2, 3), merge=merge), rollout("2", 0.0)])
        for merge in (False, True)
    )
    assert (len(apart.rows), len(together.rows)) == (3, 2)
    assert mass(apart) == pytest.approx(mass(together))
    whys = (
        {key: (why.token_weight, why.share) for key, why in batch.explanations.items()}
        for batch in (apart, together)
    )
    assert next(whys) == next(whys)


def test_with_weight_transition_every_call_weighs_one_over_r():
    batch = batch_of([rollout("1", 1.0, (5, 2)), rollout("2", 0.0, (3,))], weight="transition")
    assert mass(batch) == {"ro-1": pytest.approx(1.0), "ro-2": pytest.approx(0.5)}
    assert batch.explanations["at-1", "1-c0", 0].share == 0.5


def test_with_weight_token_every_token_weighs_the_same():
    """Check that tokens of rollouts without rows count too."""
    episodes = [rollout("1", 1.0, (5, 2)), rollout("2", 0.0, (3,))]
    batch = batch_of(episodes, weight="token")
    assert {why.token_weight for why in batch.explanations.values()} == {1 / 10}
    assert weight_mass(batch) == pytest.approx(1.0)
    constant = batch_of(episodes, weight="token", token_constant=100)
    assert {why.token_weight for why in constant.explanations.values()} == {1 / 200}
    idle = [rollout("3", 0.5, (2,), group="h"), rollout("4", 0.5, (2,), group="h")]
    left_out = batch_of(episodes + idle, weight="token")
    assert {w for row in left_out.rows for w in row.weights if w} == {1 / 14}


def test_policies_are_weighted_apart():
    routing = Selection.of({"writer": "policy", "planner": "plan"}).routing
    writer = make_record("w", response=[1] * 6, attempt="1")
    planner = make_record("p", [9], [2, 2], (3, 4), "1", agent_path="planner", policy="plan")
    one = build_episode(make_attempt("1", 1.0), make_rollout("1"), [], [writer, planner])
    batch = batch_of([one, rollout("2", 0.0)], routing=routing)
    assert {row.policy for row in batch.rows} == {"policy", "plan"}
    assert weight_mass(batch, "policy") == pytest.approx(1.0)
    assert weight_mass(batch, "plan") == pytest.approx(0.5)
    assert batch.explanations["at-1", "w", 0].share == 1.0
    assert batch.usable_tokens == {"policy": 7, "plan": 2}
    constants = {"policy": 10.0}
    apart = batch_of(
        [one, rollout("2", 0.0)], routing=routing, weight="token", token_constant=constants
    )
    assert apart.explanations["at-1", "w", 0].token_weight == 1 / (2 * 10)
    assert apart.explanations["at-1", "p", 0].token_weight == 1 / 2  # of no constant: the step's


# --- credit -----------------------------------------------------------------------------------


def test_with_discounted_credit_a_call_is_compared_with_its_turn_in_other_rollouts():
    episodes = [rollout("1", 1.0, (1, 1)), rollout("2", 0.0, (1, 1, 1))]
    batch = batch_of(episodes, estimator="dr_grpo", credit=discounted(0.5))
    whys = batch.explanations.values()
    assert {(why.rollout_id, why.value, why.scale) for why in whys} == {
        ("ro-1", 1.0, 2.0),  # the baselines leave the rollout out: times n / (n - 1)
        ("ro-2", 0.0, 2.0),
    }
    assert advantages(batch) == {
        "1-c0": 0.5 / 2,
        "1-c1": 1.0 / 2,
        "2-c0": -0.5 / 2,
        "2-c1": -1.0 / 2,
        "2-c2": -0.75 / 2,  # no other has a third turn: the mean of its calls
    }
    assert [why.against for why in whys] == [*["in its turn"] * 4, "in other turns"]
    assert [why.others for why in whys] == [1, 1, 1, 1, 2]
    assert {why.credit_rule for why in whys} == {"discounted(0.5)"}


def test_rewards_on_calls_train_where_the_rule_pays_for_them_and_are_reported_where_not():
    def on_call(name, value):
        return make_reward_span(f"r{name}", value, {c.REWARD_CALL_ID: f"{name}-c0"}, attempt=name)

    episodes = [rollout(n, None, spans=[on_call(n, v)]) for n, v in (("1", 1.0), ("2", 0.0))]
    paid = batch_of(episodes, credit=discounted(0.9), estimator="dr_grpo")
    assert advantages(paid) == {"1-c0": 0.5, "2-c0": -0.5}
    unpaid = batch_of(episodes)
    assert unpaid.counters["unscored"] == 2
    assert unpaid.counters["unused_step_rewards"] == 2
    assert "stray_rewards" not in unpaid.counters


def test_rewards_on_no_call_are_counted():
    stray = make_reward_span("r", 1.0, {c.REWARD_CALL_ID: "lc_run--1"}, attempt="1")
    batch = batch_of([rollout("1", 1.0, spans=[stray]), rollout("2", 0.0)])
    assert batch.counters["stray_rewards"] == 1


def test_the_three_settings_do_not_touch_each_other():
    episodes = [
        rollout("1", 1.0, (1, 2), agents=["a", "b"]),
        rollout("2", 0.0, (3,), agents=["a"]),
        rollout("3", 0.5, (2, 2), agents=["b", "a"]),
    ]
    seen = {}
    for unit in ("rollout", "agent"):
        for name, credit in (("t", BatchConfig().credit), ("d", discounted(0.5))):
            for weight in ("rollout", "transition", "token"):
                batch = batch_of(
                    episodes, unit=unit, credit=credit, weight=weight, keep_zero_advantages=True
                )
                whys = batch.explanations.values()
                seen[unit, name, weight] = (
                    [why.advantage for why in whys],
                    [why.token_weight for why in whys],
                )
                advantages(batch)
    for unit, name, weight in seen:
        assert seen[unit, name, weight][0] == seen[unit, name, "rollout"][0]
        assert seen[unit, name, weight][1] == seen["rollout", "t", weight][1]


# --- minibatches ------------------------------------------------------------------------------


def many():
    episodes = [rollout(str(n), float(n % 3), (n % 4 + 1, 1), group="g") for n in range(10)]
    return episodes + [rollout(f"z{n}", 1.0, group="h") for n in range(5)]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 15])
def test_minibatches_are_whole_rollouts_and_nothing_is_dropped(k):
    batch = batch_of(many())
    parts = split_minibatches(batch, k, seed=3)
    assert len(parts) == k
    assert sorted(r for part in parts for r in part.rollouts) == sorted(batch.rollouts)
    assert sum(len(part.rows) for part in parts) == len(batch.rows)
    assert {key for part in parts for key in part.explanations} == set(batch.explanations)
    sizes = [part.size for part in parts]
    assert max(sizes) - min(sizes) <= 1
    active = [len({row.rollout_id for row in part.rows}) for part in parts]
    assert max(active) - min(active) <= 1
    for part in parts:
        assert {row.rollout_id for row in part.rows} <= set(part.rollouts)
        assert mass(part) == pytest.approx(dict.fromkeys(mass(part), 1 / part.size))
        advantages(part)


def test_more_minibatches_than_rollouts_are_as_many_as_rollouts():
    batch = batch_of([rollout("1", 1.0), rollout("2", 0.0)])
    assert len(split_minibatches(batch, 5)) == 2
    assert split_minibatches(prepare_batch([], []).finish(), 3) == []


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"estimator": "ppg"}, "estimator='ppg': use one of 'grpo'"),
        ({"estimator": "ppo"}, 'estimator="ppo" compares calls with a critic: use credit="crit'),
        ({"unit": "turn"}, "unit='turn': use one of 'rollout', 'agent'"),
        ({"weight": "row"}, "weight='row': use one of 'rollout', 'transition', 'token'"),
        ({"token_constant": 5.0}, "token_constant applies only to weight='token'"),
        ({"weight": "token", "token_constant": 0.0}, "must be a finite number above 0"),
        ({"weight": "token", "token_constant": math.nan}, "must be a finite number above 0"),
        ({"weight": "token", "token_constant": {"policy": 0.0}}, "must be a finite number above 0"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_an_error(fields, message):
    with pytest.raises(ConfigError, match=message):
        BatchConfig(**fields)


def test_rewards_by_group_feed_dynamic_sampling():
    episodes = [
        rollout("1", 1.0, group="a"),
        rollout("2", 1.0, group="a"),
        rollout("3", 0.0, group="b"),
        rollout("4", 1.0, group="b"),
        rollout("5", 0.5, group="b", capture_errors=["x"]),
    ]
    rewards = returns(episodes)
    assert rewards == {"a": [1.0, 1.0], "b": [0.0, 1.0, None]}
    assert list(groups_without_variance(rewards, {})) == ["a"]


def test_rewards_on_calls_count_for_dynamic_sampling_where_the_rule_pays_for_them():
    spans = [make_reward_span("r", 0.5, {c.REWARD_CALL_ID: "1-c0"}, attempt="1")]
    episodes = [rollout("1", 1.0, spans=spans), rollout("2", 1.0)]
    assert returns(episodes, step_rewards=True) == {"g": [1.5, 1.0]}
    assert returns(episodes) == {"g": [1.0, 1.0]}


def returns(episodes, step_rewards=False):
    coverages = [classify_calls(episode, ALL, step_rewards=step_rewards) for episode in episodes]
    return group_rewards(episodes, coverages)[0]


def test_a_reward_that_is_nobodys_credit_is_in_no_return():
    """Check that a reward on a frozen call does not make the returns of a group differ.

    The frozen call began before any selected call ended.
    """
    episodes = []
    for name, value in (("1", 1.0), ("2", 0.0)):
        paid = make_reward_span("r", value, {c.REWARD_CALL_ID: f"{name}-c0"}, attempt=name)
        both = ("router", "writer")
        episodes.append(rollout(name, 1.0, (1, 1), agents=both, spans=[paid]))
    writer = Selection.of("writer").routing
    coverages = [classify_calls(episode, writer, step_rewards=True) for episode in episodes]
    assert group_rewards(episodes, coverages)[0] == {"g": [1.0, 1.0]}
    batch = batch_of(episodes, credit=discounted(), routing=writer)
    assert batch.counters["groups:identical"] == 1
    assert batch.counters["unused_step_rewards"] == 2

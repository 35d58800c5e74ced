"""Property tests: invariants of batches for any recorded attempt."""

import math
from collections import Counter

from hypothesis import HealthCheck, given, settings, strategies as st

from lightspan.lightning import (
    BatchConfig,
    Rejection,
    Selection,
    build_episode,
    classify_calls,
    prepare_batch,
    trained_transitions,
)
from lightspan.lightning.air import AIR
from lightspan.lightning.batch import split_minibatches
from lightspan.lightning.credit import discounted, terminal
from lightspan.lightning.selection import CallStatus
from lightspan.lightning.span_tree import walk
from lightspan_testing.strategies import attempts

odd = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
routings = st.sampled_from(
    [Selection.of(o).routing for o in ("*", "writer", ["team/**", "app"], {"writer": "other"})]
)


def facts(episode):
    """Return the parts of an episode that must not depend on the order of arrival."""
    return (
        episode.calls,
        episode.late_calls,
        episode.late,
        episode.reward,
        episode.reward_source,
        sorted(episode.notes),
        [(depth, node.span.span_id) for depth, node in walk(episode.tree)],
    )


@odd
@given(attempts(), routings, st.booleans())
def test_every_call_is_in_exactly_one_class(recorded, routing, steps):
    episode = build_episode(*recorded)
    coverage = classify_calls(episode, routing, step_rewards=steps)
    calls = [*episode.calls, *episode.late_calls]
    assert [entry.call for entry in coverage.entries] == calls
    assert len({call.key for call in calls}) == len(calls)
    for entry in coverage.entries:
        selected = routing.target(entry.call.agent_path).selected
        assert (entry.status is CallStatus.FROZEN) is not selected
        assert (entry.rejection is not None) is (entry.status is CallStatus.REJECTED)
        assert bool(entry.reason) is (entry.status is not CallStatus.TRAINED)
    trained, rejected = coverage.trained, coverage.rejected
    frozen = [entry for entry in coverage.entries if entry.status is CallStatus.FROZEN]
    assert len(trained) + len(frozen) + len(rejected) == len(calls)
    assert sum(coverage.counts().values()) == len(calls)
    late = {entry.call.key for entry in rejected if entry.rejection is Rejection.LATE}
    assert late <= {call.key for call in episode.late_calls}


@odd
@given(attempts(), routings)
def test_every_record_in_time_is_a_call_and_no_late_one_is(recorded, routing):
    episode = build_episode(*recorded)
    keys = Counter(call.key for call in episode.calls if call.record is not None)
    expected = {(r.call_id, r.choice) for r in recorded.records if not r.late}
    assert keys == Counter(dict.fromkeys(expected, 1))
    found = trained_transitions(episode, classify_calls(episode, routing))
    assert all(not transition.record.late for transition in found)
    starts = [call.sequence_start for call in episode.calls if call.sequence_start is not None]
    assert starts == sorted(starts)


@odd
@given(attempts(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_is_of_no_account(recorded, random):
    expected = facts(build_episode(*recorded))
    spans, records = list(recorded.spans), list(recorded.records)
    random.shuffle(spans)
    random.shuffle(records)
    shuffled = build_episode(recorded.attempt, recorded.rollout, spans, records)
    assert facts(shuffled) == expected


@odd
@given(attempts())
def test_the_tree_holds_every_span_once(recorded):
    episode = build_episode(*recorded)
    seen = [node.span.span_id for _, node in walk(episode.tree)]
    assert sorted(seen) == sorted({span.span_id for span in episode.spans})


@st.composite
def steps(draw):
    """Generate the episodes of an optimiser step, with settings."""
    episodes = [
        build_episode(*draw(attempts(str(number), f"g{number % 2}")))
        for number in range(draw(st.integers(0, 5)))
    ]
    credit = draw(st.sampled_from([terminal, discounted(0.5)]))
    mode = "bonus" if credit is terminal else draw(st.sampled_from(["potential", "bonus"]))
    config = BatchConfig(
        air=draw(st.sampled_from([None, AIR(scale=0.5, mode=mode)])),
        estimator=draw(st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce++"])),
        unit=draw(st.sampled_from(["rollout", "agent"])),
        credit=credit,
        weight=draw(st.sampled_from(["rollout", "transition", "token"])),
        max_length=draw(st.none() | st.integers(1, 6)),
        keep_zero_advantages=draw(st.booleans()),
    )
    return episodes, draw(routings), config


@odd
@given(steps(), st.integers(1, 4))
def test_weights_advantages_and_rows_of_any_step(step, k):
    episodes, routing, config = step
    coverages = [
        classify_calls(e, routing, step_rewards=config.credit.step_rewards) for e in episodes
    ]
    batch = prepare_batch(episodes, coverages, config).finish()
    scored = [e.rollout_id for e in episodes if counts(e, config)]
    assert list(batch.rollouts) == scored
    outside = ("unscored", "damaged", "unfinished", "not_train", "stale")
    assert len(scored) + sum(batch.counters.get(key, 0) for key in outside) == len(episodes)
    check_rows(batch, config)
    for before, after in zip(coverages, batch.coverages, strict=True):
        assert [entry.call for entry in before.entries] == [entry.call for entry in after.entries]
    trained = {(c.attempt_id, *call.key) for c in batch.coverages for call in c.trained}
    assert trained == set(batch.explanations)
    parts = split_minibatches(batch, k, seed=1)
    assert sorted(r for part in parts for r in part.rollouts) == sorted(scored)
    for part in parts:
        check_rows(part, config)


def counts(episode, config):
    trainable = episode.mode == "train" and episode.finished and not episode.capture_errors
    return trainable and episode.scored(config.credit.step_rewards)


def check_rows(batch, config):
    """Check that rows agree with the explanations, and that weights have the sum that is
    configured.
    """
    seen = []
    for row in batch.rows:
        keys = [("at-" + row.rollout_id.removeprefix("ro-"), *key) for key in row.call_ids]
        whys = [batch.explanations[key] for key in keys]
        tokens = [why for why in whys for _ in range(why.tokens)]
        masked = [n for n, trained in enumerate(row.mask) if trained]
        assert [row.advantages[n] for n in masked] == [why.advantage for why in tokens]
        assert [row.weights[n] for n in masked] == [why.token_weight for why in tokens]
        outside = set(range(len(row.ids))) - set(masked)
        assert all(row.weights[n] == row.advantages[n] == 0.0 for n in outside)
        seen += keys
    assert len(seen) == len(set(seen))
    masses = Counter()
    for row in batch.rows:
        masses[row.rollout_id, row.policy] += math.fsum(row.weights)
    if config.weight == "rollout":
        assert all(math.isclose(mass, 1 / batch.size) for mass in masses.values())
    if config.keep_zero_advantages:
        assert set(seen) == set(batch.explanations)

"""Test GAE with a critic's values, over the causal graph of calls."""

import math
from functools import partial

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightspan.algorithms.critic_warmup import CriticWarmup
from lightspan.errors import DataError
from lightspan.lightning import (
    Call,
    Selection,
    build_episode,
    build_rows,
    classify_calls,
    trained_transitions,
)
from lightspan.lightning.batch import BatchConfig, prepare_batch
from lightspan.lightning.credit import discounted, terminal
from lightspan.lightning.gae import (
    explained_variance,
    gae,
    successors,
    values_by_call,
)
from lightspan.lightning.mixture import Mixture
from lightspan.lightning.turns import Turns
from lightspan.protocols.learner import Critic
from lightspan.schema.token_records import CallOutcome
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from packages.core.tests.lightning.enumerated import Process, bias, scaled

EXACT = partial(pytest.approx, rel=0, abs=1e-12)
BIASES = {"early": {0.95: 0.0055, 0.5: 0.0315}, "late": {0.95: 0.0009, 0.5: 0.0059}}
"""Phase → lambda → bias of GAE with exact values (the credit study rounds them to .006 and
.032).
"""


def calls_at(*intervals):
    """Return calls c0, c1, … with the given sequence intervals; None for a call without a
    sequence.
    """
    calls = []
    for number, interval in enumerate(intervals):
        start, end = interval or (None, None)
        calls.append(Call(f"c{number}", 0, "writer", CallOutcome.OK, start, end))
    return calls


def keyed(calls, numbers):
    return {call.key: number for call, number in zip(calls, numbers, strict=True)}


def advantages(calls, to_go, values, **options):
    found = gae(Turns(calls), keyed(calls, to_go), keyed(calls, values), **options)
    assert list(found) == [call.key for call in calls]
    return list(found.values())


@st.composite
def episodes(draw, most=9):
    """Generate calls in causal order and a reward for each.

    Some calls are concurrent, some have equal intervals, and some have no sequence.
    """
    times = st.integers(0, 3 * most)
    pairs = draw(st.lists(st.tuples(times, times).map(sorted), min_size=1, max_size=most))
    intervals = sorted((start, end + 1) for start, end in pairs)
    for place in draw(st.lists(st.integers(0, len(intervals)), max_size=2)):
        intervals.insert(place, None)
    rewards = draw(st.lists(numbers, min_size=len(intervals), max_size=len(intervals)))
    return calls_at(*intervals), rewards


numbers = st.floats(-2, 2)
gammas = st.sampled_from([1.0, 0.95, 0.5])
lambdas = st.floats(0, 1)


def reward_to_go(calls, rewards, gamma):
    """Return each call's reward plus the discounted rewards of later turns, as `discounted`
    does.
    """
    turns = Turns(calls).depths
    return [
        own
        + sum(
            gamma ** (later - turn) * reward
            for later, reward in zip(turns, rewards, strict=True)
            if later > turn
        )
        for turn, own in zip(turns, rewards, strict=True)
    ]


# --- who follows ------------------------------------------------------------------------------


def test_choices_of_one_call_follow_together():
    one = Call("a", 0, "writer", CallOutcome.OK, 1, 2)
    two = [Call("b", choice, "writer", CallOutcome.OK, 3, 4) for choice in (0, 1)]
    last = Call("c", 0, "writer", CallOutcome.OK, 5, 6)
    assert successors([one, *two, last]) == [[1, 2], [3], [3], []]


@given(episodes(most=12))
def test_successors_are_as_they_are_defined(episode):
    calls, _ = episode
    places = [p for p, call in enumerate(calls) if call.sequence_start is not None]
    for place, following in enumerate(successors(calls)):
        if place not in places:
            assert following == []
            continue
        later = [p for p in places if calls[p].sequence_start > calls[place].sequence_end]
        assert following == [
            p
            for p in later
            if not any(calls[q].sequence_end < calls[p].sequence_start for q in later)
        ]


# --- advantages -------------------------------------------------------------------------------


def test_a_fork_worked_by_hand():
    """Check plan → (X1 → X2 | Y) → join with gamma 0.5: plan and X1 are one turn before the next
    call, Y two.
    """
    calls = calls_at((1, 2), (3, 5), (4, 8), (6, 7), (9, 10))
    to_go = [0.125, 0.25, 0.25, 0.5, 1.0]
    values = [0.0, 0.25, 0.75, 0.5, 0.5]
    found = advantages(calls, to_go, values, gamma=0.5, lam=0.5)
    join = 1.0 - 0.5
    x2 = 0.5 * 0.5 - 0.5 + 0.5 * 0.5 * join
    y = 0.25 * 0.5 - 0.75 + 0.5 * 0.25 * join
    x1 = 0.5 * 0.5 - 0.25 + 0.5 * 0.5 * x2
    plan = (0.5 * 0.25 + 0.5 * 0.75) / 2 - 0.0 + 0.5 * (0.5 * x1 + 0.5 * y) / 2
    assert found == EXACT([plan, x1, y, x2, join])


@given(episodes(), st.data(), gammas)
def test_lambda_1_is_the_reward_to_go_minus_the_value(episode, data, gamma):
    calls, rewards = episode
    values = data.draw(st.lists(numbers, min_size=len(calls), max_size=len(calls)))
    to_go = reward_to_go(calls, rewards, gamma)
    found = advantages(calls, to_go, values, gamma=gamma, lam=1.0)
    assert found == EXACT([g - v for g, v in zip(to_go, values, strict=True)])


@given(episodes(), st.data(), gammas, lambdas)
def test_a_potential_changes_nothing(episode, data, gamma, lam):
    calls, rewards = episode
    drawn = st.lists(numbers, min_size=len(calls), max_size=len(calls))
    values, phi = data.draw(drawn), data.draw(drawn)
    to_go = reward_to_go(calls, rewards, gamma)
    shaped = [
        [number - potential for number, potential in zip(plain, phi, strict=True)]
        for plain in (to_go, values)
    ]
    expected = advantages(calls, to_go, values, gamma=gamma, lam=lam)
    assert advantages(calls, *shaped, gamma=gamma, lam=lam) == EXACT(expected)


def test_a_rejected_call_is_skipped_and_its_turn_and_reward_are_not():
    """Check three calls of which the middle one has no value.

    The successor of the first is the third, two turns later, with the middle call's reward in
    between.
    """
    calls = calls_at((1, 2), (3, 4), (5, 6))
    to_go = [0.5 * 3.0 + 0.25, 3.0 + 0.5, 1.0]  # 3 on the middle one, 1 at the end, gamma .5
    values = {calls[0].key: 0.5, calls[2].key: 0.25}
    found = gae(Turns(calls), keyed(calls, to_go), values, gamma=0.5, lam=0.5)
    last = 1.0 - 0.25
    first = (1.75 - 0.25 * 1.0) + 0.25 * 0.25 - 0.5 + 0.5 * 0.25 * last
    assert found == EXACT({calls[0].key: first, calls[2].key: last})


def test_what_is_missing_is_named():
    calls = calls_at((1, 2), (3, 4))
    with pytest.raises(DataError, match="c1"):
        gae(Turns(calls), {("c0", 0): 1.0}, keyed(calls, [0.0, 0.0]))
    with pytest.raises(DataError, match="other"):
        gae(Turns(calls), keyed(calls, [1.0, 1.0]), {("other", 0): 0.0})
    with pytest.raises(DataError, match="c0"):
        gae(Turns(calls), keyed(calls, [1.0, 1.0]), keyed(calls, [math.nan, 0.0]))


def test_values_find_their_calls():
    """Check a row of two calls, and a second rollout with the same call ids."""
    records = [make_record("a", [1], [2], (1, 2)), make_record("b", [1, 2, 3], [4], (3, 4))]
    episodes = [
        build_episode(make_attempt(name), make_rollout(name), [], found)
        for name, found in (("1", records), ("2", [make_record("a", [1], [5], attempt="2")]))
    ]
    routing = Selection.of("*").routing
    transitions = [
        transition
        for episode in episodes
        for transition in trained_transitions(episode, classify_calls(episode, routing))
    ]
    rows = build_rows(transitions).rows
    assert [row.call_ids for row in rows] == [(("a", 0), ("b", 0)), (("a", 0),)]
    assert values_by_call(rows, [[0.25, 0.5], [0.75]]) == {
        "ro-1": {("a", 0): 0.25, ("b", 0): 0.5},
        "ro-2": {("a", 0): 0.75},
    }


# --- the enumerated process -------------------------------------------------------------------


def critic(process, lam, potential=None):
    """Return the rule of a critic with exact values, over real episodes and credit."""

    def advantages_of(trajectory):
        episode = trajectory.as_episode("1")
        coverage = classify_calls(episode, Selection.of("*").routing, step_rewards=True)
        calls = [entry.call for entry in coverage.selected]
        to_go = discounted(1)(episode, coverage)
        assert to_go == terminal(episode, coverage)
        states = {(choice.call_id, 0): choice.state for choice in trajectory.calls}
        values = {call.key: process.values[states[call.key]] for call in calls}
        for key, state in states.items() if potential else ():
            to_go[key] -= potential[state]
            values[key] -= potential[state]
        return list(gae(Turns(calls), to_go, values, lam=lam).values())

    return lambda group: [advantages_of(trajectory) for trajectory in group]


def bias_of(process, lam, potential=None):
    return bias(process.expected(critic(process, lam, potential), 1), process.gradient)


@pytest.mark.parametrize("phase", ["early", "late"])
def test_the_bias_of_true_values(phase):
    """Check that the bias is 0 at lambda 1; below, it comes from X1's choice, which `join`
    cannot see.
    """
    process = Process(phase)
    found = process.expected(critic(process, 1.0), 1)
    assert bias(found, process.gradient) < 1e-9
    assert scaled(found, process.gradient) == pytest.approx(1, abs=1e-9)
    for lam, expected in BIASES[phase].items():
        assert bias_of(process, lam) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("lam", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("phase", ["early", "late"])
def test_no_bias_where_the_join_sees_all_that_matters(phase, lam):
    assert bias_of(Process(phase, join_sees="all"), lam) < 1e-9


# --- how good values are ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "targets", "expected"),
    [
        ([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], 1.0),
        ([5.0, 5.0], [0.0, 1.0], 0.0),
        ([1.0, 0.0], [0.0, 1.0], -3.0),
        ([10.0, 11.0], [0.0, 1.0], 1.0),  # the mean of the error is taken out
        ([0.5, 9.0, 0.5], [0.0, math.nan, 1.0], 0.0),
        ([0.0, 1.0], [1.0, 1.0], None),
        ([0.0, 1.0], [1.0, math.nan], None),
        ([], [], None),
    ],
)
def test_explained_variance(values, targets, expected):
    assert explained_variance(values, targets) == expected


@pytest.mark.parametrize(
    ("fits", "explained", "expected"),
    [
        (5, 0.2, 0.9),
        (5, 1.0, 0.9),
        (4, 1.0, 1.0),
        (5, 0.19, 1.0),
        (5, -3.0, 1.0),
        (5, None, 1.0),
        (5, math.nan, 1.0),
    ],
)
def test_values_are_trusted_once_they_explain_something(fits, explained, expected):
    warmup = CriticWarmup(explained, {"a": fits, "b": 9})
    assert warmup.lambda_(Critic(lam=0.9, warmup=5), ("a", "b")) == expected
    never_fitted = CriticWarmup(explained)
    assert never_fitted.lambda_(Critic(lam=0.9, warmup=0), ("a",)) == 1.0


def test_a_policy_without_fits_keeps_lambda_1():
    """Check a policy that is first called after the warm-up, and a checkpoint of before."""
    critic = Critic(lam=0.9, warmup=5)
    assert CriticWarmup(0.8, {"a": 5}).lambda_(critic, ["a"]) == 0.9
    assert CriticWarmup(0.8, {"a": 5}).lambda_(critic, ["a", "b"]) == 1.0
    old = msgspec.convert({"fits": 5, "explained": 0.8}, CriticWarmup)
    assert old.lambda_(critic, ["a"]) == 1.0


def step(rewards, values, group_size):
    """Return a batch of groups of rollouts with one call each, of policy `policy`."""
    episodes = []
    for number, reward in enumerate(rewards):
        name, group = f"r{number}", f"g{number // group_size}"
        attempt, rollout = make_attempt(name, reward), make_rollout(name, group)
        episodes.append(
            build_episode(attempt, rollout, [], [make_record("c", [1], [2], (1, 2), name)])
        )
    coverages = [classify_calls(each, Selection.of("*").routing) for each in episodes]
    config = BatchConfig(estimator="rloo", credit=terminal, mixture=Mixture.first(terminal))
    pairs = zip(episodes, values, strict=True)
    return prepare_batch(episodes, coverages, config).finish(
        {each.rollout_id: {call.key: value for call in each.calls} for each, value in pairs}
    )


def test_values_are_not_trusted_where_rewards_did_not_vary():
    warmup = CriticWarmup(0.9, {"policy": 5})
    assert warmup.update(step([1.0] * 4, [-5.0] * 4, 2), {"value_loss": 36.0}, ["policy"]) == {}
    assert (warmup.explained, warmup.by_policy) == (None, {"policy": 6})
    assert warmup.lambda_(Critic(lam=0.9), ["policy"]) == 1.0


def test_a_group_of_one_is_not_in_the_explained_variance():
    """Check that a rollout whose mates are unscored does not count as predicted to be 0."""
    rewards, values = [5.0, 5.1, 7.0, 7.2], [0.0] * 4
    whole, alone = CriticWarmup(), CriticWarmup()
    whole.update(step(rewards, values, 2), {"value_loss": 1.0}, ["policy"])
    alone.update(
        step([*rewards, 6.0, None], [*values, 0.0, 0.0], 2), {"value_loss": 1.0}, ["policy"]
    )
    assert whole.explained == alone.explained > 0.9

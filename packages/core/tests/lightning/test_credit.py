"""Test transitions, turns and credit rules."""

import math

import pytest

from lightspan.errors import ConfigError
from lightspan.lightning import Selection, build_episode, classify_calls, trained_transitions
from lightspan.lightning.credit import (
    Discounted,
    Terminal,
    discounted,
    parse_credit,
    terminal,
    unused_step_rewards,
)
from lightspan.lightning.turns import Turns, interval_depths
from lightspan.schema import semconv as c
from lightspan.schema.token_records import Sampling
from lightspan_testing.strategies import (
    make_attempt,
    make_call_span,
    make_record,
    make_reward_span,
    make_rollout,
)

WRITER = Selection.of("writer").routing


def build(records=(), spans=(), reward=1.0):
    return build_episode(make_attempt(reward=reward), make_rollout(), spans, records)


def on_call(call_id, value, time=1):
    name = f"r-{call_id}-{time}"
    return make_reward_span(name, value, {c.REWARD_CALL_ID: call_id}, start_ns=time)


def credits(rule, records, spans=(), reward=1.0):
    episode = build(records, spans, reward)
    found = rule(episode, classify_calls(episode, WRITER, step_rewards=rule.step_rewards))
    return {call_id: credit for (call_id, _), credit in found.items()}


def unused(episode, rule):
    coverage = classify_calls(episode, WRITER, step_rewards=rule.step_rewards)
    return unused_step_rewards(episode, coverage, rule)


# --- transitions ------------------------------------------------------------------------------


def test_a_transition_is_the_record_with_its_place():
    record = make_record(
        "c1",
        [1, 2],
        [3, 4, 5],
        (1, 2),
        versions=[(7, 1), (8, 2)],
        logprobs=[-0.5, -0.25, -1.0],
        sampling=Sampling(temperature=0.7),
        agent_path="team/writer",
    )
    episode = build([record])
    (found,) = trained_transitions(episode, classify_calls(episode, WRITER))
    assert found.key == ("at-1", "c1", 0)
    assert found.call_key == ("c1", 0)
    assert found.turn == 0
    assert (found.rollout_id, found.task_id, found.group_id) == ("ro-1", "task-g", "g")
    assert (found.agent_path, found.policy) == ("team/writer", "policy")
    assert (found.record.prompt_ids, found.record.response_ids) == ([1, 2], [3, 4, 5])
    assert found.record.logprobs == [-0.5, -0.25, -1.0]
    assert found.versions == [7, 8, 8]
    assert (found.tokens, found.length) == (3, 5)


def test_only_trained_calls_are_transitions_but_rejected_ones_take_a_turn():
    records = [
        make_record("a", sequence=(1, 2)),
        make_record("checked", sequence=(3, 4), agent_path="checker"),
        make_record("grammar", sequence=(5, 6), grammar="start: X"),
        make_record("b", sequence=(7, 8)),
    ]
    episode = build(records)
    found = trained_transitions(episode, classify_calls(episode, WRITER))
    assert [(t.record.call_id, t.turn) for t in found] == [("a", 0), ("b", 2)]


# --- turns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervals", "depths"),
    [
        ([], []),
        ([(1, 2)], [0]),
        ([(1, 2), (3, 4), (5, 6)], [0, 1, 2]),
        ([(1, 2), (3, 6), (4, 5), (7, 8)], [0, 1, 1, 2]),
        ([(1, 10), (2, 3), (4, 5), (11, 12)], [0, 0, 1, 2]),
        ([(1, 4), (2, 5), (3, 6)], [0, 0, 0]),
        ([(1, 2), (2, 3)], [0, 0]),  # touching is overlapping: the end was not seen before
        ([(1, 1), (1, 1), (2, 2)], [0, 0, 1]),
        ([(0, 0), (0, 0)], [0, 0]),
    ],
)
def test_a_turn_is_the_longest_chain_of_calls_that_ended_before(intervals, depths):
    assert interval_depths([s for s, _ in intervals], [e for _, e in intervals]) == depths


def test_a_call_without_sequence_has_no_successor():
    spans = [
        make_call_span("a", sequence=(1, 2), start_ns=1),
        make_call_span("x", start_ns=2),
        make_call_span("b", sequence=(3, 4), start_ns=3),
        make_call_span("c", sequence=(5, 6), start_ns=4),
    ]
    calls = build(spans=spans).calls
    assert [call.call_id for call in calls] == ["a", "x", "b", "c"]
    assert Turns(calls).depths == [0, 0, 1, 2]
    assert Turns(build(spans=[make_call_span("x")]).calls).depths == [0]


# --- credit -----------------------------------------------------------------------------------

CHAIN = [make_record(f"c{n}", sequence=(2 * n + 1, 2 * n + 2)) for n in range(3)]


def test_terminal_uses_no_reward_on_a_call_and_sums_nothing():
    spans = [on_call("c0", 5.0), on_call("c2", -5.0)]
    assert credits(terminal, CHAIN, spans) == {"c0": 1.0, "c1": 1.0, "c2": 1.0}


def test_discounted_is_the_reward_to_go():
    found = credits(discounted(0.5), CHAIN, [on_call("c1", 0.2)])
    assert found == {
        "c0": pytest.approx(0.5 * 0.2 + 0.25),
        "c1": pytest.approx(0.2 + 0.5),
        "c2": 1.0,
    }


def test_a_reward_on_a_call_with_several_choices_enters_once():
    records = [make_record("n", choice=k, sequence=(3, 4)) for k in range(3)]
    found = credits(discounted(1), [make_record("first"), *records], [on_call("n", 0.5)])
    assert found == {"first": 1.5, "n": 1.5}


@pytest.mark.parametrize("reward", [None, 1.0])
def test_an_unscored_reward_on_a_call_leaves_the_rollout_unscored(reward):
    """Check that an unscored reward counts until another reward is emitted on the same call."""
    bad = make_reward_span("r", None, {c.REWARD_CALL_ID: "c0"}, start_ns=2)
    good = on_call("c1", 1.0)
    episode = build(CHAIN, [bad, good], reward=reward)
    assert not episode.scored(step_rewards=True)
    assert episode.scored() is (reward is not None)
    mended = build(CHAIN, [bad, good, on_call("c0", 0.5, time=3)], reward=reward)
    assert mended.scored(step_rewards=True)


def test_a_reward_on_a_frozen_call_belongs_to_the_selected_turns_before_it():
    frozen = make_record("check", sequence=(3, 4), agent_path="checker")
    records = [make_record("a", sequence=(1, 2)), frozen, make_record("b", sequence=(5, 6))]
    found = credits(discounted(0.5), records, [on_call("check", 1.0)], reward=0.0)
    assert found == {"a": 1.0, "b": 0.0}


def test_a_reward_on_a_frozen_call_before_every_selected_one_is_nobodys():
    frozen = make_record("check", sequence=(1, 2), agent_path="checker")
    records = [frozen, make_record("a", sequence=(3, 4))]
    assert credits(discounted(1), records, [on_call("check", 1.0)], reward=0.0) == {"a": 0.0}
    assert unused(build(records, [on_call("check", 1.0)], reward=0.0), discounted(1)) == 1


@pytest.mark.parametrize("agent", ["writer", "checker"])
def test_a_reward_on_a_call_past_the_gateway_cannot_be_placed_and_is_counted(agent):
    spans = [make_call_span("app", agent, start_ns=25), on_call("app", 1.0)]
    episode = build(CHAIN, spans, reward=0.0)
    assert unused(episode, discounted(1)) == unused(episode, terminal) == 1
    assert set(credits(discounted(1), CHAIN, spans, reward=0.0).values()) == {0.0}


def test_ten_thousand_turns_do_not_underflow():
    records = [make_record(f"c{n}", sequence=(2 * n + 1, 2 * n + 2)) for n in range(10_000)]
    found = credits(discounted(0.9), records, [on_call("c1", 1.0)])
    assert found["c9999"] == 1.0
    assert found["c9998"] == pytest.approx(0.9)
    assert found["c0"] == pytest.approx(0.9)


@pytest.mark.parametrize("gamma", [0, -0.5, 1.01, math.nan, math.inf])
def test_gamma_outside_its_range_is_an_error(gamma):
    with pytest.raises(ConfigError, match="gamma"):
        discounted(gamma)


def test_credit_takes_a_name_or_a_rule():
    assert parse_credit("terminal") == Terminal()
    assert parse_credit("discounted") == Discounted(1.0)
    rule = discounted(0.5)
    assert parse_credit(rule) is rule
    assert (terminal.name, rule.name) == ("terminal", "discounted(0.5)")
    with pytest.raises(
        ConfigError,
        match="credit='termnal': use 'terminal', 'discounted', 'anchor', 'critic'",
    ):
        parse_credit("termnal")

"""Test AIR's potentials, which keep the order of rollouts, and its bonuses, which change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightspan import AIR, LightningRL
from lightspan.algorithms.metrics import batch_metrics
from lightspan.lightning import classify_calls
from lightspan.lightning.air import (
    ToolSuccess,
    shape,
    turn_positions,
)
from lightspan.lightning.credit import discounted, terminal
from lightspan.lightning.episode import Episode
from lightspan.lightning.history import History
from lightspan.lightning.turns import Turns
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Outcome
from packages.core.tests.lightning.steps import (
    WRITER,
    advantages,
    answers,
    at,
    attempt,
    batch,
    built,
    call,
    phi,
    shaping,
    tool,
)


# --- potentials -----------------------------------------------------------------------------
def test_the_potential_is_the_share_of_tool_calls_that_succeeded_so_far() -> None:
    assert phi(attempt("m+m-m+m")) == [0.0, 1.0, 0.5, 2 / 3]
    assert shaping(attempt("m+m-m"), AIR(scale=0.3)) == {"c0": 0.0, "c2": -0.3, "c4": -0.15}


def test_what_is_seen_of_frozen_agents_is_part_of_the_state() -> None:
    assert phi(attempt("M+m-m")) == [1.0, 0.5]


numbers = st.floats(-1, 1, allow_nan=False)


def potential_rewards(potentials: Sequence[float], gamma: float) -> list[float]:
    """Return F_t = gamma · Phi(s_(t+1)) - Phi(s_t) for each turn; the last potential is 0."""
    following = [*potentials[1:], 0.0]
    return [gamma * then - now for now, then in zip(potentials, following, strict=True)]


gammas = st.floats(0.01, 1)


@given(st.text("m+-M", max_size=12), numbers, gammas)
def test_credit_with_air_is_the_return_of_shaped_rewards(
    steps: str, reward: float, gamma: float
) -> None:
    """Check G'_t = G_t - Phi(s_t), from recorded spans to the explanations of advantages."""
    episode = attempt(steps + "m", reward)
    found = batch([episode], credit=discounted(gamma), air=AIR(scale=0.7))
    credits = {key[1]: why.credit for key, why in found.explanations.items()}
    potentials = [0.7 * value for value in phi(episode)]
    rewards = potential_rewards(potentials, gamma)
    rewards[-1] += reward
    for t, credit in enumerate(credits.values()):
        expected = math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        assert credit == pytest.approx(expected, abs=1e-14)


def test_nothing_leaks_into_the_return_where_an_attempt_is_cut_off() -> None:
    """Check that Phi(terminal) is 0, however the attempt ended."""
    episode = attempt("m+m+", 0.25, status=AttemptStatus.TIMEOUT, outcome=Outcome.TIMEOUT)
    found = batch([episode], credit=discounted(0.5), air=AIR(scale=1.0))
    assert [why.credit for why in found.explanations.values()] == [0.125 - 0.0, 0.25 - 1.0]


@given(st.text("m+-M", min_size=1, max_size=10), st.text("m+-M", max_size=6), st.booleans())
def test_a_potential_depends_on_what_came_before_alone(before: str, after: str, wins: bool) -> None:
    """Check that neither the scored action, nor its tool calls, nor the reward changes the
    potential.
    """
    seen: list[History] = []

    def keep(history: History) -> float:
        seen.append(history)
        return 0.5

    signals = (ToolSuccess(), keep)
    short = phi(attempt(before + "m", float(wins)), *signals)
    first = [(h.turn, h.task_id, h.calls, h.tools) for h in seen]
    seen.clear()
    long = phi(attempt(before + "m" + after, 0.5), *signals)
    assert long[: len(short)] == short
    assert [(h.turn, h.task_id, h.calls, h.tools) for h in seen][: len(first)] == first


def test_parallel_calls_share_the_state_of_their_turn() -> None:
    calls = [call("a", 1, 2), call("b", 3, 8), call("d", 5, 6), call("e", 9, 10)]
    tools = [tool("t1", at(2) + 1, at(2) + 2, fails=True), tool("t2", at(3) + 1, at(4))]
    episode = built(calls, tools)
    turns = Turns(episode.calls)
    assert turns.depths == [0, 1, 1, 2]
    assert turn_positions(turns) == [1, 3, 9]
    assert shaping(episode, AIR(scale=1)) == {"a": 0.0, "b": 0.0, "d": 0.0, "e": -0.5}


def test_several_signals_are_averaged() -> None:
    def tenth(history: History) -> float:
        return 0.1 * len(history.calls)

    assert phi(attempt("m+mm"), ToolSuccess(), tenth) == pytest.approx([0.0, 0.55, 0.6])


# --- in a batch -----------------------------------------------------------------------------
GROUP = [("m+m+m", 1.0), ("m-m", 0.0), ("m+mm", 0.0), ("mm", 1.0)]


def group(rollouts: Sequence[tuple[str, float | None]] = GROUP) -> list[Episode]:
    return [attempt(steps, reward, str(n)) for n, (steps, reward) in enumerate(rollouts)]


def test_the_bonus_orders_rollouts_anew_and_the_potential_does_not() -> None:
    """Compare a rollout of reward 0 and five good tool calls with one of reward 1 and one tool
    call.
    """
    pair = group([("m+m+m+m+m+m", 0.0), ("m+m", 1.0)])
    potential = advantages(batch(pair, air=AIR(scale=0.3)))
    bonus = advantages(batch(pair, air=AIR(scale=0.3, mode="bonus")))
    lazy, solved = ("ro-0", "c0"), ("ro-1", "c0")
    assert potential[lazy] == -0.5
    assert potential[solved] == 0.5
    assert bonus[lazy] > bonus[solved]
    returns = {k: w.credit for k, w in batch(pair, air=AIR(mode="bonus")).explanations.items()}
    assert returns["at-0", "c0", 0] == pytest.approx(1.5)
    assert returns["at-1", "c0", 0] == pytest.approx(1.3)


# G - Phi of `GROUP`:  1 .7 .7  |  0 0  |  0 -.3 -.3  |  1 1
BASELINES = {
    "ro-0": [1 / 3, 0.7 / 3, -0.3],
    "ro-1": [2 / 3, 1.4 / 3],
    "ro-2": [2 / 3, 1.7 / 3, 0.7],
    "ro-3": [1 / 3, 0.4 / 3],
}


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_statistics_are_those_of_the_rewards(estimator: str) -> None:
    plain = batch(group(), estimator=estimator)
    shaped = batch(group(), estimator=estimator, air=AIR(scale=0.3))
    for key, why in shaped.explanations.items():
        before = plain.explanations[key]
        assert (why.value, why.scale, why.size) == (before.value, before.scale, before.size)
        assert why.credit == pytest.approx(before.credit + (why.shaping or 0.0))
        assert why.baseline == pytest.approx(BASELINES[why.rollout_id][why.turn])


def test_no_rollout_is_paid_for_states_that_it_comes_to_later() -> None:
    """Check that a rollout's later potentials are not in the mean that its earlier calls are
    compared with.
    """
    first, *rest = group([("mm", 1.0), ("m-mm", 0.0), ("m+m+m", 0.0)])
    good = attempt("m+m+m+m", 1.0, "0")
    bad = attempt("m-m-m-m", 1.0, "0")
    found = [advantages(batch([e, *rest], air=AIR()))["ro-0", "c0"] for e in (good, bad, first)]
    assert found[0] == found[1] == found[2]


def test_a_group_without_variance_teaches_nothing_however_its_potentials_differ() -> None:
    found = batch(group([("m+m", 1.0), ("m-m", 1.0)]), estimator="grpo", air=AIR())
    assert set(advantages(found).values()) == {0.0}
    assert found.counters["groups:identical"] == 1
    bonus = batch(group([("m+m", 1.0), ("m-m", 1.0)]), estimator="grpo", air=AIR(mode="bonus"))
    assert advantages(bonus)["ro-0", "c0"] > 0 > advantages(bonus)["ro-1", "c0"]


def test_measures_tell_shaping_apart_from_the_reward() -> None:
    found = batch(group(), air=AIR(scale=0.3))
    air = {k: v for k, v in batch_metrics(found).items() if k.startswith("air/")}
    # Phi: 0, .3, .3 | 0, 0 | 0, .3, .3 | 0, 0
    assert air == {
        "air/shaping_mean": pytest.approx(-0.12),
        "air/tool_success": 0.75,
        "air/tool_success/seen": 4.0,
        "air/unplaced": 0.0,
    }
    idle = batch_metrics(batch(group([("mm", 1.0), ("m", 0.0)]), air=AIR()))
    assert idle["air/tool_success/seen"] == 0
    assert not any(key.startswith("air") for key in batch_metrics(batch(group())))


# --- bonuses --------------------------------------------------------------------------------
def test_a_bonus_is_paid_to_the_turn_that_caused_it_and_discounted_before() -> None:
    air = AIR(scale=0.5, mode="bonus")
    found = shaping(attempt("mm+m-"), air, discounted(0.5))
    assert found == {"c0": 0.25, "c1": 0.5, "c3": 0.0}


def test_with_terminal_credit_bonuses_are_part_of_the_return() -> None:
    air = AIR(scale=0.5, mode="bonus")
    assert shaping(attempt("m+m+m-"), air, terminal) == {"c0": 1.0, "c2": 1.0, "c4": 1.0}


@pytest.mark.parametrize("credit", ["terminal", "discounted"])
def test_dynamic_sampling_sees_bonuses_as_the_statistics_do(credit: Any) -> None:
    """Check that a group of equal rewards is kept if one rollout has an additional tool call."""
    episodes = group([("m+m", 1.0), ("m+m+", 1.0)])
    air = AIR(scale=0.5, mode="bonus")
    settings: Any = {"group_size": 2, "tasks_per_step": 1, "resample": 1, "credit": credit}
    told = LightningRL("model", air=air, **settings)
    others = (attempt("m", 0.0, "2"), attempt("m", 1.0, "3"))
    more = [replace(each, group_id="h") for each in others]
    assert told.replaced([*episodes, *more]) == set()
    batch = told.prepare([*episodes, *more], {"policy": 1}).finish()
    assert batch.counters["groups"] == 2
    assert "groups:identical" not in batch.counters
    plain = LightningRL("model", **settings)
    assert plain.replaced([*episodes, *more]) == {"g"}


def test_of_parallel_calls_the_one_that_asked_for_a_tool_gets_its_bonus() -> None:
    calls = [
        call("a", 1, 2),
        call("b", 3, 8, attributes=answers(None, ("x", "{}"))),
        call("d", 5, 6),
    ]
    used = tool("t", at(8) + 1, at(8) + 2, attributes={c.TOOL_CALL_ID: "x"})
    air = AIR(scale=1, mode="bonus")
    assert shaping(built(calls, [used]), air) == {"a": 1.0, "b": 1.0, "d": 0.0}


def test_what_no_selected_call_did_is_nobodys() -> None:
    episode = attempt("+m+", 1.0)
    coverage = classify_calls(episode, WRITER, step_rewards=True)
    found = shape(AIR(scale=1, mode="bonus"), discounted(1), episode, coverage)
    assert (dict(found.credits), found.unplaced) == ({("c1", 0): 1.0}, 1)


def test_a_function_as_bonus_judges_the_state_after_a_turn() -> None:
    def tools_so_far(history: History) -> float:
        return len(history.tools)

    air = AIR(scale=0.1, mode="bonus", signals=(tools_so_far,))
    found = shaping(attempt("m+mm+"), air, discounted(1))
    assert found == pytest.approx({"c0": 0.1 + 0.1 + 0.2, "c2": 0.1 + 0.2, "c3": 0.2})

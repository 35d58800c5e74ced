"""Test the baselines of calls: identities, a plain reference, and their exact bias."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st
from msgspec.structs import replace

from lightspan.lightning.advantages import (
    BaselineScale,
    Estimator,
    Observation,
    normalise,
)
from lightspan.lightning.baselines import (
    CallCredit,
    Comparison,
    at_grpo,
    by_rollout,
    by_state,
    by_turn,
    gigpo,
)
from packages.core.tests.lightning.enumerated import Process, Trajectory, bias

GROUPED: tuple[Estimator, ...] = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
Rule = Callable[[Sequence[CallCredit]], list[Comparison]]


def credited(
    rollouts: Sequence[tuple[str, float, Sequence[tuple[str, int, Hashable, float]]]],
    estimator: Estimator,
) -> list[CallCredit]:
    """Return the credits of the calls of `rollouts`.

    Args:
        rollouts: (group, return, calls) of each rollout; a call is (agent, turn, key, credit).
        estimator: the advantage estimator.
    """
    observations = [
        Observation(f"r{n}", group, value) for n, (group, value, _) in enumerate(rollouts)
    ]
    statistics = normalise(estimator, observations)
    return [
        CallCredit(
            rollout_id=f"r{n}",
            population=group,
            agent_path=agent,
            turn=turn,
            credit=credit,
            value=value,
            statistics=statistics[n],
            key=key,
        )
        for n, (group, value, calls) in enumerate(rollouts)
        for agent, turn, key, credit in calls
    ]


def advantages(calls: Sequence[CallCredit], comparisons: Sequence[Comparison]) -> list[float]:
    return [
        BaselineScale(found.baseline, found.scale, 0, found.zero_reason).advantage(
            call.credit if found.compared is None else found.compared
        )
        + math.fsum(term.value for term in found.terms)
        for call, found in zip(calls, comparisons, strict=True)
    ]


def rules(estimator: Estimator) -> dict[str, Rule]:
    return {
        "turn": lambda calls: by_turn(calls, estimator),
        "anchor": lambda calls: by_state(calls, estimator, 1.0),
        "anchor without a prior": lambda calls: by_state(calls, estimator, 0.0),
    }


def chains(*rollouts: tuple[float, int], gamma: float = 1.0) -> Any:
    """Return the rollouts of one group and agent, each given as (return, number of turns)."""
    return [
        (
            "g",
            value,
            [("a", turn, None, gamma ** (turns - 1 - turn) * value) for turn in range(turns)],
        )
        for value, turns in rollouts
    ]


# --- the defect ---------------------------------------------------------------------------------
@pytest.mark.parametrize("estimator", GROUPED)
@pytest.mark.parametrize("name", rules("grpo"))
def test_solved_rollouts_of_any_length_teach_nothing(estimator: Estimator, name: str) -> None:
    """Check eight solved rollouts, one of which takes a turn more: all advantages are 0."""
    calls = credited(chains(*[(1.0, 3)] * 7, (1.0, 4), gamma=0.95), estimator)
    assert set(advantages(calls, rules(estimator)[name](calls))) == {0.0}


# --- identities ---------------------------------------------------------------------------------
@st.composite
def groups(draw: st.DrawFn, *, binary: bool = False) -> Any:
    """Generate one or two groups of rollouts, with calls of two agents in any turns and states."""
    found = []
    for group in ("g", "h")[: draw(st.integers(1, 2))]:
        for _ in range(draw(st.integers(1, 5))):
            reward = draw(st.sampled_from([0.0, 1.0]) if binary else st.floats(-2, 2))
            calls = [
                (
                    draw(st.sampled_from("ab")),
                    turn,
                    draw(st.sampled_from(["x", "y", None])),
                    reward if binary else draw(st.floats(-2, 2)),
                )
                for turn in range(draw(st.integers(1, 4)))
            ]
            found.append((group, reward, calls))
    return found


@given(groups(binary=True), st.sampled_from(GROUPED), st.sampled_from(sorted(rules("grpo"))))
def test_a_success_is_never_negative(rollouts: Any, estimator: Estimator, name: str) -> None:
    calls = credited(rollouts, estimator)
    for call, advantage in zip(
        calls, advantages(calls, rules(estimator)[name](calls)), strict=True
    ):
        assert advantage >= -1e-12 if call.credit == 1 else advantage <= 1e-12


@given(groups(), st.sampled_from(GROUPED), st.sampled_from(sorted(rules("grpo"))), st.randoms())
def test_the_order_is_of_no_account(
    rollouts: Any, estimator: Estimator, name: str, random: Any
) -> None:
    calls = credited(rollouts, estimator)
    order = list(range(len(calls)))
    random.shuffle(order)
    plain = advantages(calls, rules(estimator)[name](calls))
    mixed = [calls[place] for place in order]
    assert advantages(mixed, rules(estimator)[name](mixed)) == [plain[place] for place in order]


@given(groups(), st.sampled_from(sorted(rules("grpo"))))
def test_grpo_does_not_see_the_unit_of_rewards(rollouts: Any, name: str) -> None:
    spread = [value for _, value, _ in rollouts]
    assume(max(spread) - min(spread) > 1e-3 or max(spread) == min(spread))
    thrice = [
        (group, 3 * value, [(*call[:3], 3 * call[3]) for call in calls])
        for group, value, calls in rollouts
    ]
    calls, tripled = credited(rollouts, "grpo"), credited(thrice, "grpo")
    plain = advantages(calls, rules("grpo")[name](calls))
    assert advantages(tripled, rules("grpo")[name](tripled)) == pytest.approx(plain, rel=1e-6)


@given(
    st.lists(st.floats(-2, 2), min_size=2, max_size=8),
    st.integers(1, 4),
    st.sampled_from([*GROUPED, "reinforce++"]),
)
def test_with_equal_turns_it_is_terminal(
    rewards: list[float], turns: int, estimator: Estimator
) -> None:
    calls = credited(chains(*((reward, turns) for reward in rewards)), estimator)
    turn = advantages(calls, by_turn(calls, estimator))
    assert turn == pytest.approx(
        advantages(calls, by_rollout(calls, estimator)), rel=1e-9, abs=1e-9
    )


@given(
    groups(),
    st.dictionaries(st.tuples(st.sampled_from("ab"), st.sampled_from("xy")), st.floats(-1, 1)),
)
def test_a_potential_of_the_state_changes_nothing(rollouts: Any, potential: Any) -> None:
    """Check the advantages without a prior, where several rollouts were in the same state."""
    calls = credited(rollouts, "rloo")
    shaped = [
        replace(call, credit=call.credit - potential.get((call.agent_path, call.key), 0.0))
        for call in calls
    ]
    plain, other = by_state(calls, "rloo", 0.0), by_state(shaped, "rloo", 0.0)
    before, after = advantages(calls, plain), advantages(shaped, other)
    for place, found in enumerate(plain):
        if found.against == "in its state" and found.others:
            assert after[place] == pytest.approx(before[place], abs=1e-12)


# --- against a plain reference ------------------------------------------------------------------
def reference(calls: Sequence[CallCredit], kind: str, prior: float) -> list[float]:
    """Compute baselines by the module's formulas, by comparing every pair of calls."""

    def mean(values: list[float]) -> float:
        return statistics.fmean(values)

    found = []
    for call in calls:
        others = [
            c for c in calls if c.rollout_id != call.rollout_id and c.population == call.population
        ]
        per: dict[str, list[float]] = defaultdict(list)
        for other in others:
            per[other.rollout_id].append(other.credit)
        rest = mean([mean(values) for values in per.values()]) if per else 0.0
        same = [c for c in others if c.agent_path == call.agent_path]
        turn = [c.credit for c in same if c.turn == call.turn]
        state = [c.credit for c in same if c.key == call.key]
        if kind == "turn" or call.key is None:
            found.append(mean(turn) if turn else rest)
            continue
        expected = (sum(turn) + prior * rest) / (len(turn) + prior) if turn or prior else rest
        shrunk = (
            (sum(state) + prior * expected) / (len(state) + prior) if state or prior else expected
        )
        found.append(shrunk)
    return found


@given(groups(), st.sampled_from(["turn", "anchor"]), st.sampled_from([0.0, 1.0, 2.5]))
def test_baselines_are_those_of_the_reference(rollouts: Any, kind: str, prior: float) -> None:
    calls = credited(rollouts, "rloo")
    found = by_turn(calls, "rloo") if kind == "turn" else by_state(calls, "rloo", prior)
    expected = reference(calls, kind, prior)
    assert [one.baseline for one in found] == pytest.approx(expected, abs=1e-12)


# --- as published -------------------------------------------------------------------------------
def test_at_grpo_by_hand() -> None:
    """Check means and standard deviations of each turn, which include the call itself."""
    calls = credited(chains((1.0, 2), (0.0, 2), (0.0, 1)), "grpo")
    root = math.sqrt(1 / 3)
    assert advantages(calls, at_grpo(calls)) == pytest.approx(
        [
            (1 - 1 / 3) / root,
            0.5 / math.sqrt(0.5),
            (0 - 1 / 3) / root,
            -0.5 / math.sqrt(0.5),
            (0 - 1 / 3) / root,
        ]
    )


def test_gigpo_by_hand() -> None:
    """Check that a call alone in its state gets the rollout's advantage only."""
    rollouts = [
        ("g", 1.0, [("a", 0, "x", 1.0), ("a", 1, "y", 1.0)]),
        ("g", 0.0, [("a", 0, "x", 0.0), ("a", 1, "x", 0.0)]),
    ]
    calls = credited(rollouts, "dr_grpo")
    assert advantages(calls, gigpo(calls, "dr_grpo", 1.0)) == pytest.approx(
        [0.5 + 2 / 3, 0.5, -0.5 - 1 / 3, -0.5 - 1 / 3]
    )
    half = advantages(calls, gigpo(calls, "dr_grpo", 0.5))
    assert half == pytest.approx([0.5 + 1 / 3, 0.5, -0.5 - 1 / 6, -0.5 - 1 / 6])
    calls = credited(rollouts, "grpo")
    root, state = math.sqrt(0.5), math.sqrt(1 / 3)
    assert advantages(calls, gigpo(calls, "grpo", 1.0)) == pytest.approx(
        [
            0.5 / root + 2 / 3 / state,
            0.5 / root,
            -0.5 / root - 1 / 3 / state,
            -0.5 / root - 1 / 3 / state,
        ]
    )


def test_gigpo_gives_every_call_its_rollouts_advantage() -> None:
    """Check that every call gets the advantage of its rollout's return, not of its reward-to-go."""
    root = math.sqrt(0.5)
    long = [*chains((1.0, 20), gamma=0.95), ("g", 0.0, [("a", 0, None, 0.0)])]
    calls = credited(long, "grpo")
    found = advantages(calls, gigpo(calls, "grpo", 1.0))
    assert found == pytest.approx([0.5 / root] * 20 + [-0.5 / root])
    on_the_way = [  # 1 for the first call, and 1 at the end; nothing and 1
        ("g", 2.0, [("a", 0, None, 2.0), ("a", 1, None, 1.0)]),
        ("g", 1.0, [("a", 0, None, 1.0), ("a", 1, None, 1.0)]),
    ]
    calls = credited(on_the_way, "grpo")
    found = advantages(calls, gigpo(calls, "grpo", 1.0))
    assert found == pytest.approx([0.5 / root] * 2 + [-0.5 / root] * 2)


PUBLISHED: dict[str, Rule] = {
    "at_grpo": at_grpo,
    "gigpo": lambda calls: gigpo(calls, "grpo", 1.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("what", ["shaping", "penalty"])
def test_what_shapes_credits_sets_no_scale_and_wakes_no_group(name: str, what: str) -> None:
    """Check that a penalty in one of four equal rollouts leaves all advantages 0."""
    equal = credited([("g", 1.0, [("a", 0, "x", 1.0)])] * 4, "grpo")
    calls = [replace(equal[0], **{"credit": 0.99, what: -0.01}), *equal[1:]]
    assert advantages(calls, PUBLISHED[name](calls)) == [0.0] * 4
    varied = credited([("g", value, [("a", 0, "x", value)]) for value in (1.0, 0.0)], "grpo")
    calls = [replace(varied[0], **{"credit": 0.9, what: -0.1}), varied[1]]
    found = advantages(calls, PUBLISHED[name](calls))
    root = math.sqrt(0.5)  # the spread of the rewards, and 0.9 - 0 what lies between
    of_state = 0.45 / root
    of_rollout = 0.5 / root if what == "shaping" else 0.45 / root
    wanted = of_state if name == "at_grpo" else of_rollout + of_state
    assert found == pytest.approx([wanted, -wanted])


# --- exact bias, on the enumerated process ------------------------------------------------------
def on_process(
    rule: Rule, estimator: Estimator, potential: Any = None, *, silenced: bool = True
) -> Any:
    """Return the estimator as a rule of the enumerated process; the key of a call is its state.

    Args:
        rule: the credit rule.
        estimator: the advantage estimator.
        potential: function from a state to its potential; None for none.
        silenced: whether groups with equal returns have no advantages.
    """

    def advantage(group: Sequence[Trajectory]) -> list[list[float]]:
        rollouts = [
            (
                "g",
                way.reward,
                [
                    (
                        c.agent,
                        c.turn,
                        c.state,
                        way.reward - (potential(c.state) if potential else 0.0),
                    )
                    for c in way.calls
                ],
            )
            for way in group
        ]
        calls = credited(rollouts, estimator)
        if not silenced:
            calls = [
                replace(call, statistics=replace(call.statistics, zero_reason=None))
                for call in calls
            ]
        flat = iter(advantages(calls, rule(calls)))
        return [[next(flat) for _ in way.calls] for way in group]

    return advantage


def potential_of(state: tuple[int, tuple[int, ...]]) -> float:
    """Return a potential that depends only on what happened before the call."""
    place, seen = state
    return 0.3 * sum(seen) / len(seen) if place > 3 else 0.0


@pytest.mark.parametrize("phase", ["early", "late"])
@pytest.mark.parametrize("name", rules("rloo"))
def test_turn_and_state_are_unbiased(phase: Any, name: str) -> None:
    process, rule = Process(phase), rules("rloo")[name]
    for found in (
        on_process(rule, "rloo"),
        on_process(rule, "rloo", potential_of, silenced=False),
    ):
        assert bias(process.expected(found, size=2), process.gradient) < 1e-12


@pytest.mark.parametrize(
    ("phase", "size", "expected"),
    [
        ("early", 2, 0.0349),
        ("late", 2, 0.0210),
    ],
)
def test_silence_of_identical_groups_costs_a_potential_a_little(
    phase: Any, size: int, expected: float
) -> None:
    """Check the bias that remains because groups of equal returns are skipped."""
    process = Process(phase)
    rule = on_process(rules("rloo")["turn"], "rloo", potential_of)
    found = bias(process.expected(rule, size=size), process.gradient)
    assert found == pytest.approx(expected, abs=1e-4)


def test_published_normalisations_are_biased() -> None:
    process = Process("early")
    found = {
        "terminal": lambda calls: by_rollout(calls, "dr_grpo"),
        "at_grpo": at_grpo,
        "gigpo": lambda calls: gigpo(calls, "dr_grpo", 1.0),
    }
    biases = {
        name: bias(process.expected(on_process(rule, "dr_grpo"), size=2), process.gradient)
        for name, rule in found.items()
    }
    assert biases["terminal"] < 1e-9
    assert biases["at_grpo"] > 0.1
    assert biases["gigpo"] > 0.1

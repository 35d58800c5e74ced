"""Test that a family counts once: its exact bias, and that of the ways that look right."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from lightspan.errors import ConfigError, DataError
from lightspan.lightning import BatchConfig, Coverage, Selection, classify_calls, prepare_batch
from lightspan.lightning.advantages import ZeroReason
from lightspan.lightning.batch import Batch, split_minibatches
from lightspan.lightning.credit import Family, terminal
from lightspan.lightning.episode import Episode, build_episode
from lightspan.lightning.families import Forks, middle_call
from lightspan.lightning.rows import Row
from lightspan.lightning.states import State
from lightspan.schema.records import AttemptStatus
from lightspan_testing.strategies import make_attempt, make_record, make_rollout
from packages.core.tests.lightning.enumerated import bias, scaled
from packages.core.tests.lightning.family_steps import ALL, Sampled, batch_of, rollout

Choices = tuple[int, ...]


class Way(NamedTuple):
    """A trajectory: its choices, of which each call sees the earlier ones, and its reward."""

    choices: Choices
    reward: float


class Tree:
    """A random process of up to three calls, each of which chooses between 0 and 1.

    Args:
        seed: seed of chances and rewards.
        early: chance that a trajectory ends after a call.
    """

    def __init__(self, seed: int, early: float = 0.3) -> None:
        rng = random.Random(seed)
        prefixes = [p for size in range(3) for p in product((0, 1), repeat=size)]
        self.chance = {prefix: rng.uniform(0.25, 0.75) for prefix in prefixes}
        ends = {p for p in prefixes if p and rng.random() < early}
        whole = [*ends, *product((0, 1), repeat=3)]
        self.ways = [
            Way(p, rng.choice([0.0, 0.0, 0.5, 1.0]))
            for p in whole
            if not any(p[:size] in ends for size in range(1, len(p)))
        ]
        self.gradient: dict[Choices, float] = defaultdict(float)
        for way in self.ways:
            for place in range(len(way.choices)):
                score = self.score(way, place)
                self.gradient[way.choices[:place]] += self.of(way) * way.reward * score

    def of(self, way: Way, start: int = 0) -> float:
        """Return the probability of a trajectory, given its first `start` choices."""
        ones = [self.chance[way.choices[:place]] for place in range(len(way.choices))]
        pairs = list(zip(way.choices, ones, strict=True))[start:]
        return math.prod(one if choice else 1 - one for choice, one in pairs)

    def score(self, way: Way, place: int) -> float:
        return way.choices[place] - self.chance[way.choices[:place]]

    def families(self, point: Callable[[Way], int | None], each: int = 1) -> list[Any]:
        """Return (trunk, place of the fork, forks, probability) of each possible family.

        Args:
            point: function of a trajectory that returns the number of the call at which it is
                forked, from 1; None to fork none.
            each: number of forks.
        """
        result = []
        for trunk in self.ways:
            number = point(trunk)
            if number is None:
                result.append((trunk, None, (), self.of(trunk)))
                continue
            before = trunk.choices[: number - 1]
            same = [way for way in self.ways if way.choices[: number - 1] == before]
            for forks in product(same, repeat=each):
                chance = math.prod(self.of(way, number - 1) for way in forks)
                result.append((trunk, number, forks, self.of(trunk) * chance))
        return result


Built = tuple[list[Episode], list[Coverage], dict[str, tuple[Way, int]]]
"""Episodes of a family, their coverages, and call id → (trajectory, place)."""
Build = Callable[[str, Any], Built]


def sampled(name: str, way: Way, start: int = 0) -> list[Sampled]:
    return [
        Sampled(f"{name}-c{place}", [2 + way.choices[place]], observation=str(way.choices[:place]))
        for place in range(start, len(way.choices))
    ]


def as_family(name: str, family: Any) -> Built:
    """Return a trunk and its forks as they are recorded."""
    trunk, number, forks, _ = family
    episodes = [rollout(name, trunk.reward, sampled(name, trunk))]
    places = {f"{name}-c{place}": (trunk, place) for place in range(len(trunk.choices))}
    for place, way in enumerate(forks):
        own = f"{name}f{place}"
        calls = sampled(own, way, number - 1)
        point = episodes[0], f"{name}-c{number - 1}"
        episodes.append(rollout(own, way.reward, calls, forks=point))
        places |= {call.call_id: (way, n) for n, call in enumerate(calls, start=number - 1)}
    return episodes, [classify_calls(each, ALL) for each in episodes], places


def as_copies(name: str, family: Any) -> Built:
    """Return a trunk and its forks as independent rollouts that sampled what they repeat."""
    episodes, places = [], {}
    for place, way in enumerate([family[0], *family[2]]):
        own = f"{name}f{place}"
        episodes.append(rollout(own, way.reward, sampled(own, way)))
        places |= {f"{own}-c{n}": (way, n) for n in range(len(way.choices))}
    return episodes, [classify_calls(each, ALL) for each in episodes], places


def expected(tree: Tree, families: Sequence[Any], build: Build, **settings: Any) -> Any:
    """Return the expected gradient of the rows of two families, by enumeration."""
    total: dict[Choices, float] = dict.fromkeys(tree.gradient, 0.0)
    config = BatchConfig(**{"credit": Family(), "estimator": "rloo", **settings})
    firsts, seconds = ([build(name, family) for family in families] for name in "ab")
    for pair in combinations_with_replacement(range(len(families)), 2):
        chance = math.prod(families[place][-1] for place in pair) * (1 + (pair[0] != pair[1]))
        first, second = firsts[pair[0]], seconds[pair[1]]
        batch = prepare_batch(first[0] + second[0], first[1] + second[1], config).finish()
        for call_id, factor in of_rows(batch.rows):
            way, place = (first[2] | second[2])[call_id]
            total[way.choices[:place]] += chance * factor * tree.score(way, place)
    return total


def of_rows(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """Return the id of each trained call, and what its score is multiplied by."""
    for row in rows:
        for (call_id, _), (start, count) in zip(row.call_ids, row.responses, strict=True):
            tokens = slice(start, start + count)
            assert all(row.mask[tokens])
            pairs = zip(row.weights[tokens], row.advantages[tokens], strict=True)
            yield call_id, math.fsum(weight * advantage for weight, advantage in pairs)


def at(number: int, way: Way) -> int | None:
    return number if len(way.choices) >= number else None


def turned(state: State) -> bool:
    """Hold behind a first choice of 1, and behind two choices of 0."""
    return state.observation in ("(1,)", "(0, 0)")


def by_rule(way: Way) -> int | None:
    """Return the call at which `Forks(at=turned)` forks the rollout of a trajectory."""
    episode = rollout("a", way.reward, sampled("a", way))
    points = Forks(at=turned).points([episode], [classify_calls(episode, ALL)], None)
    return points[0].number if points else None


def half(way: Way) -> int:
    return 1 + len(way.choices) // 2


TREES = [
    tree
    for tree in map(Tree, range(80))
    if math.hypot(*tree.gradient.values()) > 0.08
    and len({len(way.choices) for way in tree.ways}) > 1
    and 4 < len(tree.ways) < 7
][:3]
EXACT: dict[str, Any] = {"weight": "transition"}


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
@pytest.mark.parametrize(
    "point", [partial(at, 1), partial(at, 2), partial(at, 3), by_rule], ids=["1", "2", "3", "rule"]
)
def test_the_rows_of_families_are_unbiased(tree: Tree, point: Callable[[Way], int | None]) -> None:
    families = tree.families(point)
    assert any(forks for _, _, forks, _ in families)
    result = expected(tree, families, as_family, **EXACT)
    assert bias(result, tree.gradient) < 1e-9
    assert scaled(result, tree.gradient) == pytest.approx(1, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [EXACT, {"weight": "token", "token_constant": 1.0}])
def test_two_forks_of_each_rollout_are_unbiased(settings: Any) -> None:
    families = TREES[0].families(partial(at, 2), each=2)
    result = expected(TREES[0], families, as_family, **settings)
    assert bias(result, TREES[0].gradient) < 1e-9
    assert scaled(result, TREES[0].gradient) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("weight", ["rollout", "token"])
def test_every_weight_is_unbiased_where_rollouts_are_equally_long(weight: str) -> None:
    tree = Tree(3, early=0.0)
    result = expected(tree, tree.families(partial(at, 3)), as_family, weight=weight)
    assert bias(result, tree.gradient) < 1e-9
    assert scaled(result, tree.gradient) == pytest.approx(1 / 3, abs=1e-9)  # of a rollout's calls


WRONG: dict[str, Any] = {
    "forks as rollouts of the group": (partial(at, 2), as_family, {"credit": terminal}),
    "what they repeat trained again": (partial(at, 2), as_copies, {"credit": terminal}),
    "half of the finished rollout": (half, as_family, {}),
    "the last call of the finished rollout": (lambda way: len(way.choices), as_family, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_wrong_ways_are_biased(name: str) -> None:
    """Check that the tests above could fail."""
    point, build, settings = WRONG[name]
    biases = []
    for tree in TREES:
        result = expected(tree, tree.families(point), build, **EXACT, **settings)
        biases.append(bias(result, tree.gradient))
    assert max(biases) > 0.1
    assert sum(biases) / len(biases) > 0.05


# --- rows by hand -------------------------------------------------------------------------------
def family_of_three(group: str = "g", weight: str = "rollout", **settings: Any) -> Batch:
    """Build two families: trunk `a` with two forks at its second call, and trunk `b`."""
    a = rollout("a", 1.0, [Sampled("a1", [3, 4]), Sampled("a2", [5]), Sampled("a3", [6])])
    forks = [
        rollout("a-f1", 0.0, [Sampled("f1", [7])], forks=(a, "a2")),
        rollout("a-f2", 0.5, [Sampled("f2", [8]), Sampled("f3", [9])], forks=(a, "a2")),
    ]
    b = rollout("b", 1.0, [Sampled("b1", [3, 3, 3])])
    return batch_of([a, b, *forks], weight=weight, **settings)


def numbers(batch: Batch) -> dict[str, tuple[float, float]]:
    """Return call id → (advantage, weight of a token), as in the rows."""
    result = {}
    for row in batch.rows:
        for (call_id, _), (start, _) in zip(row.call_ids, row.responses, strict=True):
            result[call_id] = row.advantages[start], row.weights[start]
    return result


def test_a_small_example_by_hand() -> None:
    """Check the rows of two families, with R = 2 and five tokens that weigh 2 + 2/3 + 1/3 + 2/3."""
    batch = family_of_three()
    tokens = 2 + 5 / 3  # of the first family: before the fork, and a third of those behind it
    third = pytest.approx(1 / 3 / (2 * tokens))
    assert numbers(batch) == {
        "a1": (-0.5, pytest.approx(1 / (2 * tokens))),  # mean of 1, 0 and .5, less the other's 1
        "a2": (0.75, third),  # 1 less the mean of 0 and .5
        "a3": (0.75, third),
        "f1": (-0.75, third),  # 0 less the mean of 1 and .5
        "f2": (0.0, third),
        "f3": (0.0, third),
        "b1": (0.5, pytest.approx(1 / 6)),
    }
    assert (batch.size, batch.rollouts) == (2, ("ro-a", "ro-b"))
    assert [row.rollout_id for row in batch.rows] == [*["ro-a"] * 6, "ro-b"]
    assert batch.counters["families"] == 2
    assert (batch.counters["rollouts"], batch.counters["scored"]) == (4, 4)
    assert batch.counters["rejected:replayed"] == 2
    assert batch.counters["groups"] == 1
    assert math.fsum(w for row in batch.rows for w in row.weights) == pytest.approx(1)


@pytest.mark.parametrize(
    ("weight", "before", "behind"),
    [("transition", 1 / 4, 1 / 6), ("token", 3 / 20, 1 / 20)],  # of 3 + 2 + 5/3 tokens
)
def test_other_weights_by_hand(weight: str, before: float, behind: float) -> None:
    result = numbers(family_of_three(weight=weight))
    assert result["a1"][1] == pytest.approx(before)
    assert [result[call_id][1] for call_id in ("a2", "a3", "f1", "f2", "f3")] == [
        pytest.approx(behind)
    ] * 5


def test_explanations_name_what_is_compared() -> None:
    batch = family_of_three()
    why = {key[1]: each for key, each in batch.explanations.items()}
    before, trunk, fork, alone = why["a1"], why["a2"], why["f1"], why["b1"]
    assert (before.credit, before.baseline, before.size) == (0.5, 1.0, 2)
    assert (before.against, before.advantage) == ("rollouts", -0.5)
    assert (trunk.credit, trunk.baseline, trunk.others) == (1.0, 0.25, 2)
    assert (fork.credit, fork.baseline, fork.against) == (0.0, 0.75, "in its family")
    assert {each.credit_rule for each in why.values()} == {"family"}
    assert (alone.credit, alone.baseline) == (1.0, 0.5)
    shares = [why[call_id].share for call_id in ("a1", "a2", "a3", "f1", "f2", "f3")]
    assert math.fsum(shares) == pytest.approx(1)
    assert batch.explanations.keys() >= {("at-a-f1", "f1", 0), ("at-a", "a1", 0)}


def test_without_forks_it_is_terminal_with_rloo() -> None:
    rewards = [1.0, 0.0, 0.0, 0.25]
    episodes = [
        rollout(str(n), reward, [Sampled(f"c{n}"), Sampled(f"d{n}")])
        for n, reward in enumerate(rewards)
    ]
    result, wanted = batch_of(episodes), batch_of(episodes, credit=terminal)
    assert result.rows == wanted.rows
    assert result.rollouts == wanted.rollouts


def test_policies_are_weighted_apart() -> None:
    """Check a family of two policies: each has its own tokens, and sums to 1 / R."""
    calls = [Sampled("a1", [3], agent="plan"), Sampled("a2", [4, 4], agent="work")]
    a = rollout("a", 1.0, calls)
    fork = rollout("f", 0.0, [Sampled("f1", [5, 6], agent="work")], forks=(a, "a2"))
    b = rollout("b", 0.75, [Sampled("b1", agent="plan"), Sampled("b2", agent="work")])
    routing = Selection.of({"plan": "plan", "work": "work"}).routing
    result = numbers(batch_of([a, b, fork], routing=routing))
    assert result == {
        "a1": (-0.25, 1 / 2),
        "a2": (1.0, 1 / 8),  # two tokens of each of two leaves
        "f1": (-1.0, 1 / 8),
        "b1": (0.25, 1 / 2),
        "b2": (0.25, 1 / 2),
    }


def test_calls_of_frozen_agents_are_repeated_and_not_trained() -> None:
    a = rollout("a", 1.0, [Sampled("a1"), Sampled("a2", agent="checker"), Sampled("a3")])
    fork = rollout("f", 0.0, [Sampled("f1"), Sampled("f2", agent="checker")], forks=(a, "a3"))
    b = rollout("b", 0.25, [Sampled("b1")])
    batch = batch_of([a, b, fork], routing=Selection.of("writer").routing)
    assert {call: pair[0] for call, pair in numbers(batch).items()} == {
        "a1": 0.25,
        "a3": 1.0,
        "f1": -1.0,
        "b1": -0.25,
    }
    assert [coverage.counts() for coverage in batch.coverages] == [
        {"trained": 2, "frozen": 1},
        {"trained": 1},
        {"frozen": 2, "rejected:replayed": 1, "trained": 1},
    ]


def test_the_order_is_of_no_account() -> None:
    a = rollout("a", 1.0, [Sampled("a1"), Sampled("a2")])
    forks = [rollout(f"f{n}", n, [Sampled(f"f{n}")], forks=(a, "a2")) for n in (0.0, 0.25)]
    b = rollout("b", 0.0, [Sampled("b1")])
    wanted = batch_of([a, b, *forks])
    for order in ([*forks, b, a], [forks[1], a, b, forks[0]]):
        result = batch_of(order)
        assert numbers(result) == {
            call: (pytest.approx(advantage), pytest.approx(weight))
            for call, (advantage, weight) in numbers(wanted).items()
        }
        assert sorted(result.rollouts) == ["ro-a", "ro-b"]


def test_a_fork_of_a_fork_is_refused() -> None:
    a = rollout("a", 1.0, [Sampled("a1"), Sampled("a2"), Sampled("a3")])
    fork = rollout("f", 0.0, [Sampled("f1"), Sampled("f2")], forks=(a, "a2"))
    again = rollout("g", 0.0, [Sampled("g1")], forks=(fork, "f2"))
    with pytest.raises(DataError, match="rollout ro-f is a fork: fork the rollout"):
        batch_of([a, fork, again])


def test_a_call_beside_the_fork_is_behind_it() -> None:
    """Check a call that had not ended when the call at the fork began: forks sample it anew."""
    records = [
        make_record("plan", [1], [3], (1, 2), "a"),
        make_record("left", [1], [4], (3, 6), "a"),
        make_record("right", [1], [5], (4, 5), "a"),
        make_record("join", [1], [6], (7, 8), "a"),
    ]
    a = build_episode(make_attempt("a", 1.0), make_rollout("a"), [], records)
    anew = [Sampled("left-2", [7]), Sampled("right-2", [8]), Sampled("join-2", [9])]
    fork = rollout("f", 0.0, anew, forks=(a, "right"))
    b = rollout("b", 0.0, [Sampled("b1")])
    result = numbers(batch_of([a, b, fork], weight="transition"))
    assert result == {
        "plan": (0.5, 1 / 2),
        **dict.fromkeys(["left", "right", "join"], (1.0, 1 / 4)),
        **dict.fromkeys(["left-2", "right-2", "join-2"], (-1.0, 1 / 4)),
        "b1": (-0.5, 1 / 2),
    }


# --- leaves that do not count -------------------------------------------------------------------
def test_a_leaf_that_does_not_count_is_left_out() -> None:
    """Check forks that are unscored, damaged, lost or departed: the family has fewer leaves."""
    a = rollout("a", 1.0, [Sampled("a1"), Sampled("a2")])
    b = rollout("b", 0.0, [Sampled("b1")])
    fine = rollout("f", 0.0, [Sampled("f1")], forks=(a, "a2"))
    broken = {
        "unscored": rollout("g", None, [Sampled("g1")], forks=(a, "a2")),
        "damaged": rollout("h", 1.0, [Sampled("h1")], forks=(a, "a2"), capture_errors=["odd"]),
        "lost": rollout("i", 1.0, [Sampled("i1")], forks=(a, "a2"), status=AttemptStatus.LOST),
        "departed": rollout("j", 1.0, [], forks=(a, "a2")),
    }
    assert broken["departed"].departed
    wanted = batch_of([a, b, fine])
    result = batch_of([a, b, fine, *broken.values()])
    assert result.rows == wanted.rows
    assert result.size == 2
    counts = [result.counters[name] for name in ("scored", "unscored", "damaged", "unfinished")]
    assert counts == [3, 1, 1, 2]


def test_forks_of_an_unscored_trunk_are_a_family() -> None:
    a = rollout("a", None, [Sampled("a1"), Sampled("a2")])
    forks = [rollout(f"f{n}", n, [Sampled(f"f{n}")], forks=(a, "a2")) for n in (0.0, 1.0)]
    b = rollout("b", 0.0, [Sampled("b1")])
    result = batch_of([a, b, *forks])
    assert result.size == 2
    assert {call: pair[0] for call, pair in numbers(result).items()} == {
        "f0.0": -1.0,
        "f1.0": 1.0,
        "b1": -0.5,
    }


def test_equal_leaves_of_an_unequal_group_teach_before_the_fork_only() -> None:
    a = rollout("a", 1.0, [Sampled("a1"), Sampled("a2")])
    fork = rollout("f", 1.0, [Sampled("f1")], forks=(a, "a2"))
    b = rollout("b", 0.0, [Sampled("b1")])
    result = batch_of([a, b, fork])
    assert {call: pair[0] for call, pair in numbers(result).items()} == {
        "a1": 1.0,
        "a2": 0.0,
        "f1": 0.0,
        "b1": -1.0,
    }
    assert result.explanations["at-f", "f1", 0].zero_reason is ZeroReason.IDENTICAL


def test_equal_trunks_teach_where_leaves_differ() -> None:
    a = rollout("a", 1.0, [Sampled("a1"), Sampled("a2")])
    fork = rollout("f", 0.0, [Sampled("f1")], forks=(a, "a2"))
    b = rollout("b", 1.0, [Sampled("b1")])
    result = batch_of([a, b, fork])
    assert {call: pair[0] for call, pair in numbers(result).items()} == {
        "a1": -0.5,
        "a2": 1.0,
        "f1": -1.0,
        "b1": 0.5,
    }
    assert "groups:identical" not in result.counters


def test_settings_that_cannot_be_honoured_are_errors() -> None:
    for wrong, message in (
        ({"estimator": "grpo"}, "family applies only to estimator='rloo', not 'grpo'"),
        ({"unit": "agent"}, 'credit family needs unit="rollout"'),
    ):
        with pytest.raises(ConfigError, match=message):
            BatchConfig(**{"credit": Family(), "estimator": "rloo", **wrong})


# --- where rollouts are forked ------------------------------------------------------------------
def points(trunk: Episode, forks: Forks, middle: int | None = None) -> list[int]:
    """Return the numbers, among all calls, of the calls at which a rollout is forked."""
    coverage = classify_calls(trunk, Selection.of("writer").routing)
    return [point.number for point in forks.points([trunk], [coverage], middle)]


def test_only_calls_of_agents_to_train_are_counted() -> None:
    calls = [Sampled("a1"), Sampled("a2", agent="checker"), Sampled("a3", observation="door")]
    trunk = rollout("a", 1.0, calls)
    assert [points(trunk, Forks(at=number)) for number in (1, 2, 3)] == [[1], [3], []]
    assert points(trunk, Forks(at=lambda state: state.observation == "door")) == [3]
    assert points(trunk, Forks(at=lambda state: state.turn >= 1)) == [3]
    assert points(trunk, Forks(at=lambda state: state.agent_path == "checker")) == []
    assert points(trunk, Forks()) == []
    assert points(trunk, Forks(), middle=2) == [3]
    assert points(trunk, Forks(at=1), middle=2) == [1]


def test_rollouts_that_do_not_count_are_not_forked() -> None:
    for trunk in (
        rollout("a", None, [Sampled("a1")]),
        rollout("a", 1.0, [Sampled("a1")], status=AttemptStatus.LOST),
        rollout("a", 1.0, []),
    ):
        assert points(trunk, Forks(at=1)) == []


def test_the_middle_is_that_of_the_mean() -> None:
    def of(*lengths: int) -> int | None:
        episodes = [
            rollout(str(n), 1.0, [Sampled(f"{n}-{place}") for place in range(length)])
            for n, length in enumerate(lengths)
        ]
        return middle_call([classify_calls(episode, ALL) for episode in episodes])

    assert [of(1), of(2), of(20), of(3, 8)] == [1, 2, 11, 3]
    assert of() is of(0) is None
    assert of(0, 4) == 3


def test_a_rule_that_fails_is_named() -> None:
    trunk = rollout("a", 1.0, [Sampled("a1")])

    def odd(state: State) -> bool:
        raise KeyError("door")

    with pytest.raises(ConfigError, match=r"Forks: at=.*odd on task task-g, turn 0: KeyError"):
        points(trunk, Forks(at=odd))
    for at, message in (
        (0, "Forks: at=0 must be at least 1"),
        ("2", "Forks: at='2' must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            Forks(at=at)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Forks: each=0 must be at least 1"):
        Forks(each=0)


# --- minibatches --------------------------------------------------------------------------------
@st.composite
def steps(draw: st.DrawFn) -> list[Episode]:
    """Generate the rollouts of a step: one or two groups, with any forks."""
    trunks, forks = [], []
    for number in range(draw(st.integers(1, 7))):
        lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
        calls = [Sampled(f"{number}-{n}", [5] * size) for n, size in enumerate(lengths)]
        rewards = st.sampled_from([0.0, 0.5, 1.0, None])
        trunk = rollout(str(number), draw(rewards), calls, group=f"g{number % 2}")
        trunks.append(trunk)
        point = draw(st.integers(0, len(calls) - 1))
        for member in range(draw(st.integers(0, 3))):
            name = f"{number}f{member}"
            own = [Sampled(f"{name}-{n}", [6]) for n in range(draw(st.integers(1, 2)))]
            forks.append(
                rollout(
                    *(name, draw(rewards), own),
                    forks=(trunk, calls[point].call_id),
                    group=trunk.group_id,
                )
            )
    return trunks + forks


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 5), st.integers(0, 3), st.sampled_from(["rollout", "token"]))
def test_a_family_is_never_cut(episodes: list[Episode], k: int, seed: int, weight: Any) -> None:
    batch = batch_of(episodes, weight=weight, keep_zero_advantages=True)
    family = {e.attempt_id: e.fork.rollout_id if e.fork else e.rollout_id for e in episodes}
    scored = {family[e.attempt_id] for e in episodes if e.scored()}
    assert batch.size == len(scored) == batch.counters["families"]
    parts = split_minibatches(batch, k, seed)
    sizes = [part.size for part in parts]
    assert sum(sizes) == batch.size
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    homes: dict[str, set[int]] = defaultdict(set)
    for number, part in enumerate(parts):
        for attempt, _, _ in part.explanations:
            homes[family[attempt]].add(number)
        masses: dict[str, float] = defaultdict(float)
        for row in part.rows:
            masses[row.rollout_id] += math.fsum(row.weights)
        if weight == "rollout":
            assert all(math.isclose(mass, 1 / part.size) for mass in masses.values())
    assert all(len(numbers) == 1 for numbers in homes.values())
    trained = sorted(call for part in parts for row in part.rows for call in row.call_ids)
    assert trained == sorted(call for row in batch.rows for call in row.call_ids)

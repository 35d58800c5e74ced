"""Test the choice of tasks by their success rates."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightspan import LightningRL
from lightspan.algorithms.adaptive_tasks import (
    DECAY,
    FLOOR_EVERY,
    AdaptiveOrder,
    GroupReturns,
    ReturnRange,
    TaskRates,
    chance_of_equal,
)
from lightspan.algorithms.task_sampler import Epochs
from lightspan.errors import ConfigError
from lightspan.lightning.rows import Row
from packages.core.tests.algorithms.scripted_world import Scripted

MODEL = "a/model"


def group(name: object, *returns: float) -> GroupReturns:
    return GroupReturns(str(name), (), returns, len(set(returns)) > 1)


def add(rates: TaskRates, *groups: GroupReturns) -> None:
    rates.add(groups, ReturnRange([0.0, 1.0]))


def ids(count: int) -> list[dict[str, str]]:
    return [{"id": str(number)} for number in range(count)]


# --- posteriors ---------------------------------------------------------------------------------
def test_the_posterior_is_bayes_rule_on_a_grid() -> None:
    """Compare mean and variance with Bayes' rule on 20,001 rates, for 2 of 5 and then 4 of 5."""
    rates = TaskRates()
    add(rates, group("a", 1, 1, 0, 0, 0), group("a", 1, 1, 1, 1, 0))
    prior, (a, b) = rates.prior(), rates.posterior("a")
    grid = [place / 20_000 for place in range(20_001)]
    weights = [p ** (prior[0] + 5) * (1 - p) ** (prior[1] + 3) for p in grid]
    mean = math.fsum(p * w for p, w in zip(grid, weights, strict=True)) / math.fsum(weights)
    square = math.fsum(p * p * w for p, w in zip(grid, weights, strict=True)) / math.fsum(weights)
    assert a / (a + b) == pytest.approx(mean, abs=1e-9)
    assert a * b / ((a + b) ** 2 * (a + b + 1)) == pytest.approx(square - mean**2, abs=1e-9)


def evidence(rates: TaskRates, name: str) -> tuple[float, float]:
    """Return successes and failures of a task's posterior, beyond the prior."""
    (a, b), (c, d) = rates.posterior(name), rates.prior()
    return pytest.approx((a - c, b - d))  # type: ignore[return-value]


def test_evidence_decays_by_the_step_towards_the_prior() -> None:
    rates = TaskRates()
    add(rates, group("a", 1, 1, 1, 0))
    assert evidence(rates, "a") == (3, 1)
    add(rates, group("b", 1, 0))
    add(rates)
    assert evidence(rates, "a") == (3 * DECAY**2, DECAY**2)
    add(rates, group("a", 0, 0, 0, 1))
    assert evidence(rates, "a") == (1 + 3 * DECAY**3, 3 + DECAY**3)
    assert rates.posterior("never drawn") == rates.prior()


def test_the_prior_is_uniform_before_the_first_group() -> None:
    assert TaskRates().prior() == pytest.approx((1, 1))


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (0.2, 0.6), (0.9, 0.4), (1.0, 1.0)])
def test_the_prior_is_that_of_the_tasks(a: float, b: float) -> None:
    """Estimate it from the first groups of 4,000 tasks with rates from a known distribution.

    Later groups of the same tasks do not change it.
    """
    rng, rates = random.Random(0), TaskRates()
    for number in range(4_000):
        p = rng.betavariate(a, b)
        add(rates, group(number, *(float(rng.random() < p) for _ in range(8))))
    estimated = rates.prior()
    assert estimated == pytest.approx((a, b), rel=0.12)
    add(rates, *(group(number, 0, 1, 0, 1) for number in range(4_000)))
    assert rates.prior() == estimated


def test_the_prior_of_first_groups_by_hand() -> None:
    """Check 3 of 4 and 0 of 4, with the uniform prior as a third group.

    m = (3/4 + 0 + 1/2) / 3 = 5/12 and q = (1/2 + 0 + 1/3) / 3 = 5/18, so
    c = (5/12 - 5/18) / (5/18 - 25/144) = 4/3.
    """
    rates = TaskRates()
    add(rates, group("a", 1, 1, 1, 0), group("b", 0, 0, 0, 0))
    assert rates.prior() == pytest.approx((4 / 3 * 5 / 12, 4 / 3 * 7 / 12))


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=8), max_size=12))
def test_the_prior_is_a_distribution_for_any_returns(groups: list[list[float]]) -> None:
    rates = TaskRates()
    add(rates, *(group(number, *returns) for number, returns in enumerate(groups)))
    a, b = rates.prior()
    assert a > 0
    assert b > 0
    assert 0.1 - 1e-9 <= a + b <= 2 + 1e-9


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (2.5, 7.0), (9.0, 1.2)])
def test_the_predicted_share_without_a_gradient(size: int, a: float, b: float) -> None:
    """Compare with the integral over the rate, of which each sequence of rewards has a part."""
    cells = 100_000
    rates = [(cell + 0.5) / cells for cell in range(cells)]
    densities = [p ** (a - 1) * (1 - p) ** (b - 1) for p in rates]
    equal = [
        sum(
            math.prod(p if reward else 1 - p for reward in rewards)
            for rewards in itertools.product((0, 1), repeat=size)
            if len(set(rewards)) == 1
        )
        if size < 4
        else p**size + (1 - p) ** size
        for p in rates
    ]
    share = math.fsum(d * e for d, e in zip(densities, equal, strict=True)) / math.fsum(densities)
    assert chance_of_equal(a, b, size) == pytest.approx(share, abs=2e-4)


def test_a_new_task_is_flat_in_two_of_nine_groups() -> None:
    """Check the prior: with eight rollouts, each of 0 to 8 successes is equally likely."""
    assert chance_of_equal(1, 1, 8) == pytest.approx(2 / 9)


def test_returns_that_are_not_0_or_1_count_by_the_range_of_the_run() -> None:
    scale, rates = ReturnRange(), TaskRates()
    scale.add([-2.0, 6.0])
    rates.add([group("a", -2.0, 0.0, 2.0, 6.0)], scale)
    assert evidence(rates, "a") == (0 + 0.25 + 0.5 + 1, 1 + 0.75 + 0.5 + 0)
    scale.add([1.0])
    assert scale.ends == [-2.0, 6.0]


@pytest.mark.parametrize(("value", "successes"), [(0.0, 0), (0.4, 0), (0.5, 3), (0.9, 3), (1.0, 3)])
def test_a_group_without_a_gradient_is_no_task_of_one_half(value: float, successes: int) -> None:
    """Check that equal returns of one half do not look like the best task."""
    rates = TaskRates()
    add(rates, group("a", value, value, value))
    assert evidence(rates, "a") == (successes, 3 - successes)


def test_the_first_equal_returns_count_by_their_sign() -> None:
    scale = ReturnRange()
    assert scale.scale(1.0) == 0
    for value, share in ((0.0, 0), (-1.0, 0), (1.0, 1)):
        scale = ReturnRange()
        scale.add([value, value])
        assert scale.scale(value) == share


# --- the order ----------------------------------------------------------------------------------
@given(
    st.integers(1, 9),
    st.lists(st.integers(1, 7), min_size=1, max_size=60),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_every_task_is_drawn_at_the_floor_rate(
    count: int, steps: Sequence[int], seed: int, rng: random.Random
) -> None:
    """Check each window of `FLOOR_EVERY` · N draws, for any rewards and any delay of groups."""
    rates, drawn, waiting = TaskRates(), list[str](), list[str]()
    order = AdaptiveOrder(ids(count), lambda: rates, seed)
    for step in steps:
        taken = [task["id"] for task in order.take(len(drawn), step)]
        drawn += taken
        waiting += taken
        ended = [waiting.pop(rng.randrange(len(waiting))) for _ in range(rng.randint(0, step))]
        add(rates, *(group(name, *rng.choices((0, 1), k=4)) for name in ended))
    window = FLOOR_EVERY * count
    for start in range(len(drawn) - window + 1):
        assert len(set(drawn[start : start + window])) == count


def test_hopeless_tasks_are_drawn_at_the_floor_rate() -> None:
    """Check windows in which the order of the rates alone would leave tasks out."""
    rates, drawn = TaskRates(), list[str]()
    order = AdaptiveOrder(ids(40), lambda: rates, 0)
    for _ in range(120):
        taken = [task["id"] for task in order.take(len(drawn), 4)]
        drawn += taken
        add(rates, *(group(name, *[float(int(name) < 20), 0.0] * 8) for name in taken))
    window = FLOOR_EVERY * 40
    for start in range(len(drawn) - window + 1):
        assert len(set(drawn[start : start + window])) == 40


def test_tasks_that_vary_are_drawn_most() -> None:
    """Draw 50 steps of 8 of 60 tasks, of which 12 succeed at times, 24 always and 24 never.

    Shuffled, 4 of 5 groups would have no gradient.
    """
    rates, rng = TaskRates(), random.Random(1)
    order, drawn = AdaptiveOrder(ids(60), lambda: rates, 0), list[int]()
    for _ in range(50):
        taken = [int(task["id"]) for task in order.take(len(drawn), 8)]
        drawn += taken
        chances = {n: 0.5 if n < 12 else float(n < 36) for n in taken}
        add(
            rates, *(group(n, *(float(rng.random() < chances[n]) for _ in range(8))) for n in taken)
        )
    late = Counter(number < 12 for number in drawn[200:])
    assert late[True] > 0.5 * late.total()
    assert rates.chance_of_zero([str(n) for n in range(12)], 8) < 0.1
    assert rates.chance_of_zero([str(n) for n in range(12, 60)], 8) > 0.4


def test_a_step_repeats_a_task_only_for_the_floor_or_if_all_are_drawn() -> None:
    rates = TaskRates()
    order = AdaptiveOrder(ids(3), lambda: rates, 0)
    counts = Counter(task["id"] for task in order.take(0, 12))
    assert sorted(counts.values()) == [4, 4, 4]
    assert AdaptiveOrder(ids(1), lambda: TaskRates(), 0).take(0, 3) == [{"id": "0"}] * 3
    many = AdaptiveOrder(ids(40), lambda: rates, 0).take(12, 16)
    assert len({task["id"] for task in many}) >= 16 - 16 // FLOOR_EVERY


def test_a_task_in_flight_waits() -> None:
    """Check that tasks whose groups have not ended are drawn after all others."""
    rates = TaskRates()
    order = AdaptiveOrder(ids(8), lambda: rates, 0)
    first, second = order.take(1, 3), order.take(5, 3)
    assert not {task["id"] for task in first} & {task["id"] for task in second}


def test_equal_tasks_are_one_task_and_different_ones_of_one_id_take_turns() -> None:
    twins = [{"id": "a", "text": "first"}, {"id": "b"}, {"id": "a", "text": "second"}]
    rates = TaskRates()
    order = AdaptiveOrder(twins, lambda: rates, 0)
    assert sorted(order.names) == ["a", "b"]
    texts = [task["text"] for task in order.take(0, 16) if task["id"] == "a"]
    assert texts == ["first", "second"] * (len(texts) // 2)
    assert len(texts) == 8


def test_the_order_depends_on_seed_rates_and_number_alone() -> None:
    """Check that a checkpoint's rates give the same tasks, and another seed others."""
    rates = TaskRates()
    order = AdaptiveOrder(ids(50), lambda: rates, 7)
    for start in (0, 8):
        taken = order.take(start, 8)
        add(rates, *(group(task["id"], 0, 1, 1) for task in taken))
    saved = msgspec.json.encode(rates)
    expected = order.take(16, 8)
    again = msgspec.json.decode(saved, type=TaskRates)
    assert AdaptiveOrder(ids(50), lambda: again, 7).take(16, 8) == expected
    assert again == rates
    other = msgspec.json.decode(saved, type=TaskRates)
    assert AdaptiveOrder(ids(50), lambda: other, 8).take(16, 8) != expected


# --- LightningRL --------------------------------------------------------------------------------
class World(Scripted):
    """A world whose tasks come from the algorithm's order."""

    def __init__(self, algorithm: LightningRL, groups: Sequence[Sequence[float | None]]) -> None:
        super().__init__(groups)
        self.order = algorithm.task_order([{"id": f"g{n}", "n": n} for n in range(len(groups))])
        self.taken: list[int] = []

    def next_tasks(self, count: int) -> list[int]:
        tasks: Any = self.order.take(len(self.taken), count)
        self.taken += [task["n"] for task in tasks]
        return self.taken[-count:]


FLAT, VARIES = (1.0, 1.0), (0.0, 1.0)


async def test_the_metrics_of_a_step() -> None:
    """Check observed and predicted shares: at first two equal rollouts have the probability 2/3.

    The first groups (2 of 2 three times, 1 of 2 once) and the uniform prior have m = 4/5 and
    q = 2/3, so c = (4/5 - 2/3) / (2/3 - 16/25) = 5, which is cut to 2: the prior is Beta(1.6, 0.4).
    With another group, it is Beta(3.6, 0.4) for a flat task and Beta(2.6, 1.4) for the other; their
    E[p² + (1-p)²] = 1 - 2ab / ((a+b)(a+b+1)) are 0.856 and 0.636.
    """
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=4, tasks="adaptive")
    world: Any = World(algorithm, [FLAT, VARIES, FLAT, FLAT])
    first = await algorithm.run_step(world)
    second = await algorithm.run_step(world)
    assert sorted(world.taken[:4]) == [0, 1, 2, 3]
    names = ("", "_predicted", "_shuffled")
    assert [first[f"tasks/zero_gradient{name}"] for name in names] == pytest.approx(
        [0.75, 2 / 3, 2 / 3]
    )
    assert second["tasks/zero_gradient_shuffled"] == pytest.approx((3 * 0.856 + 0.636) / 4)
    drawn = Counter(world.taken[4:])
    assert second["tasks/zero_gradient"] == 1 - drawn[1] / 4
    assert second["tasks/zero_gradient_predicted"] == pytest.approx(0.856 - 0.22 * drawn[1] / 4)


async def test_shuffled_order_reports_the_observed_share() -> None:
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=4, learning_rate=1e-3)
    world: Any = World(algorithm, [FLAT, VARIES, FLAT, FLAT])
    metrics = await algorithm.run_step(world)
    assert {key: value for key, value in metrics.items() if key.startswith("tasks/")} == {
        "tasks/zero_gradient": 0.75
    }
    assert isinstance(world.order, Epochs)
    assert algorithm.state() == {}
    assert algorithm.describe_choices() == []


class WithCritic(World):
    """A world whose learner has a critic that predicts 0.5 for each call."""

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        return [[0.5] * len(row.call_ids) for row in rows]


async def test_a_critic_learns_from_flat_groups_so_their_share_is_left_out() -> None:
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=4, learning_rate=1e-3, critic=True)
    world: Any = WithCritic(algorithm, [FLAT, VARIES, FLAT, FLAT])
    metrics = await algorithm.run_step(world)
    assert "batch/groups" in metrics
    assert not [key for key in metrics if key.startswith("tasks/")]


async def test_the_share_counts_groups_that_resample_replaces() -> None:
    algorithm = LightningRL(MODEL, group_size=2, tasks_per_step=2, tasks="adaptive", resample=3)
    world: Any = World(algorithm, [FLAT, FLAT, VARIES, VARIES])
    metrics = await algorithm.run_step(world)
    groups = len(world.taken)
    assert metrics["tasks/zero_gradient"] == metrics["resample/groups"] / groups
    assert len(set(world.taken)) == groups


async def test_a_checkpoint_continues_the_order() -> None:
    settings: dict[str, Any] = {"group_size": 2, "tasks_per_step": 3, "tasks": "adaptive"}
    groups = [FLAT, VARIES] * 6
    whole = LightningRL(MODEL, **settings)
    world: Any = World(whole, groups)
    for _ in range(2):
        await whole.run_step(world)
    state = msgspec.json.decode(msgspec.json.encode(whole.state()))
    await whole.run_step(world)
    resumed = LightningRL(MODEL, **settings)
    again: Any = World(resumed, groups)  # the order is made before the state is loaded
    resumed.load_state(state)
    again.taken = world.taken[:6]
    await resumed.run_step(again)
    assert again.taken == world.taken
    assert resumed.state() == whole.state()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "random"}, "tasks='random': use one of 'shuffled', 'adaptive'"),
        (
            {"tasks": "adaptive", "estimator": "reinforce++"},
            r"""tasks="adaptive": groups .* estimator='reinforce\+\+' learns from those""",
        ),
        ({"tasks": "adaptive", "estimator": "ppo"}, 'tasks="adaptive": groups .* estimator='),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LightningRL(MODEL, **options)


def test_the_output_names_the_choice() -> None:
    lines = LightningRL(MODEL, tasks="adaptive", learning_rate=1e-5).describe_choices()
    assert lines == ["tasks='adaptive': each of N tasks occurs in any 4 N draws"]

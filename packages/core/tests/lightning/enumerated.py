"""A process small enough to be enumerated: what a credit rule expects is exact, not sampled.

Two agents, `plan` and `work`, choose between 0 and 1 in six places, of which Y runs beside X1 and
X2, and `fix` happens only if `join` asks for it (intervals are the gateway's sequence):

    plan [1, 2]   X1 [3, 5]   Y [4, 8]   X2 [6, 7]   join [9, 10]   fix [11, 12]
    turn 0        turn 1      turn 1     turn 2      turn 3         turn 4

48 trajectories. Each (place, what is seen there) is a *state* with one parameter, the logit of
choosing 1, so that the score of a call is (choice - probability) at its state. A rule is judged by
the gradient that it expects, against the exact one, E[R · Σ scores].

    >>> process = Process("early")
    >>> len(process.trajectories), round(process.success, 3)
    (48, 0.273)
    >>> reinforce = process.expected(lambda group: [[t.reward] * len(t.calls) for t in group], 1)
    >>> bias(reinforce, process.gradient) < 1e-12
    True

`early` is the process at the beginning of a training, `late` near its end.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, product
from typing import Final, Literal, NamedTuple

from lightspan.lightning import Episode, build_episode
from lightspan_testing.strategies import make_attempt, make_record, make_rollout

State = tuple[int, tuple[int, ...]]
"""A state: its place, and the observations there."""
Gradient = dict[State, float]
Rule = Callable[[Sequence["Trajectory"]], Sequence[Sequence[float]]]
"""A credit rule: function from a group to an advantage for each call of each trajectory."""

PLAN, X1, Y, X2, JOIN, FIX = range(6)
AGENTS: Final = ("plan", "work", "work", "work", "plan", "work")
TURNS: Final = (0, 1, 1, 2, 3, 4)
INTERVALS: Final = ((1, 2), (3, 5), (4, 8), (6, 7), (9, 10), (11, 12))


class Choice(NamedTuple):
    """A call of a trajectory."""

    state: State
    taken: int
    score: float
    """Derivative of the choice's log-probability with respect to its state's logit."""

    @property
    def place(self) -> int:
        return self.state[0]

    @property
    def agent(self) -> str:
        return AGENTS[self.place]

    @property
    def turn(self) -> int:
        return TURNS[self.place]

    @property
    def call_id(self) -> str:
        return f"c{self.place}"


@dataclass(frozen=True)
class Trajectory:
    """A path through the process; `calls` are in causal order."""

    calls: tuple[Choice, ...]
    reward: float
    probability: float

    def as_episode(self, name: str, group_id: str = "g") -> Episode:
        """Return the trajectory as an episode of rollout `ro-<name>`.

        A call's prompt encodes the state, and its response encodes the choice.
        """
        records = [
            make_record(
                choice.call_id,
                [10 + choice.place, *choice.state[1]],
                [2 + choice.taken],
                INTERVALS[choice.place],
                name,
                agent_path=choice.agent,
            )
            for choice in self.calls
        ]
        attempt = make_attempt(name, self.reward)
        return build_episode(attempt, make_rollout(name, group_id), [], records)


class Process:
    """The process of the module's docstring.

    Args:
        phase: `early` or `late` in a training.
        join_sees: observations at `join`. `results` is the plan and whether each branch succeeded.
            Then X1's choice is hidden although it still matters to `fix`. `all` contains it too.
    """

    def __init__(
        self, phase: Literal["early", "late"], join_sees: Literal["results", "all"] = "results"
    ) -> None:
        self._probability = {"early": _early, "late": _late}[phase]
        self._join_sees = join_sees
        self.trajectories = [self._trajectory(*way) for way in self._ways()]

    @cached_property
    def success(self) -> float:
        """E[R], the expected reward."""
        return math.fsum(t.probability * t.reward for t in self.trajectories)

    @cached_property
    def values(self) -> dict[State, float]:
        """State → expected reward in that state."""
        reached: dict[State, list[tuple[float, float]]] = defaultdict(list)
        for trajectory in self.trajectories:
            for choice in trajectory.calls:
                reached[choice.state].append((trajectory.probability, trajectory.reward))
        return {
            state: math.fsum(p * r for p, r in found) / math.fsum(p for p, _ in found)
            for state, found in reached.items()
        }

    @cached_property
    def gradient(self) -> Gradient:
        """The exact gradient of E[R]."""
        return self.expected(lambda group: [[t.reward] * len(t.calls) for t in group], size=1)

    def groups(self, size: int) -> Iterator[tuple[tuple[Trajectory, ...], float]]:
        """Yield every multiset of `size` trajectories, with the probability of drawing it.

        There are 48 of size 1, 1,176 of size 2, 19,600 of size 3 and 249,900 of size 4.
        """
        for members in combinations_with_replacement(range(len(self.trajectories)), size):
            orders = math.factorial(size)
            for count in Counter(members).values():
                orders //= math.factorial(count)
            group = tuple(self.trajectories[member] for member in members)
            yield group, orders * math.prod(t.probability for t in group)

    def expected(self, rule: Rule, size: int = 4) -> Gradient:
        """Return the exact expectation of the mean of Σ advantage · score over a group.

        Args:
            rule: function to call once for each of `groups(size)`.
            size: number of trajectories in a group; enumerating groups of four takes five seconds.
        """
        total: Gradient = defaultdict(float)
        for group, probability in self.groups(size):
            share = probability / size
            for trajectory, advantages in zip(group, rule(group), strict=True):
                for choice, advantage in zip(trajectory.calls, advantages, strict=True):
                    total[choice.state] += share * advantage * choice.score
        return dict(total)

    def _ways(self) -> list[tuple[int, ...]]:
        """Return the choices of each trajectory, by place; those without `fix` are one shorter."""
        tails = ((0,), (1, 0), (1, 1))
        return [(*head, *tail) for head in product((0, 1), repeat=4) for tail in tails]

    def _trajectory(self, plan: int, x1: int, y: int, x2: int, join: int, *fix: int) -> Trajectory:
        x_good = int(x2 and (plan or x1))
        seen: tuple[int, ...] = (plan, x_good, y)
        at_join: State = (JOIN, seen if self._join_sees == "results" else (*seen, x1))
        taken: list[tuple[State, int]] = [((PLAN, ()), plan), ((X1, (plan,)), x1)]
        taken += [((Y, (plan,)), y), ((X2, (plan, x1)), x2), (at_join, join)]
        taken += [((FIX, at_join[1]), done) for done in fix]
        if join:
            reward = float(bool(fix[0] and (x_good or y or plan) and (x_good or y or x1)))
        else:
            reward = float(x_good and y)
        calls, probability = [], 1.0
        for state, choice in taken:
            one = self._probability(state[0], state[1][:3])
            probability *= one if choice else 1 - one
            calls.append(Choice(state, choice, choice - one))
        return Trajectory(tuple(calls), reward, probability)


def _early(place: int, seen: Sequence[int]) -> float:
    """Return the probability of choosing 1."""
    base = (0.45, 0.5, 0.55, 0.5, 0.4, 0.5)[place]
    return base + 0.06 * (sum(seen) - 1 if seen else 0)


def _late(place: int, seen: Sequence[int]) -> float:
    if place == JOIN and sum(seen) >= len(seen):
        return 0.08
    base = (0.8, 0.85, 0.85, 0.8, 0.3, 0.75)[place]
    return base + 0.03 * (sum(seen) - 1 if seen else 0)


def scaled(found: Mapping[State, float], exact: Mapping[State, float]) -> float:
    """Return the factor by which `found`, projected onto the exact gradient, differs from it.

    A learning rate could make up for the factor.
    """
    dot = math.fsum(found.get(state, 0.0) * value for state, value in exact.items())
    return dot / math.fsum(value**2 for value in exact.values())


def bias(found: Mapping[State, float], exact: Mapping[State, float]) -> float:
    """Return |found / scaled - exact| / |exact|, the relative error of the gradient's direction."""
    factor = scaled(found, exact)
    wrong = [found.get(state, 0.0) / factor - value for state, value in exact.items()]
    return math.hypot(*wrong) / math.hypot(*exact.values())

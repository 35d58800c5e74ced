"""Credit: from the rewards of an episode to one number per call.

A rule says two things: what each selected call of an episode is *paid* (its credit), and what
that is *compared* with (its `baseline`: `lightspan.lightning.baselines`). All speak of every
selected call, trained or rejected: statistics must not depend on which calls could be trained.

| rule | credit | compared with |
|---|---|---|
| `terminal` | the final reward | the rollouts of the group (or batch) |
| `discounted` | reward-to-go | calls of the agent in the same turn of other rollouts |
| `anchor` | reward-to-go | calls of the agent in the same *state* in other rollouts |
| `critic` | reward-to-go | what a critic expected at the call (`lightspan.lightning.gae`) |
| `at_grpo` | reward-to-go | as published (arXiv 2510.11062) |
| `gigpo` | reward-to-go | as published (arXiv 2505.10978) |

`terminal` is the identical assignment of LightningRL (arXiv 2508.03680 §3.3). Rewards on single
calls are not used.

*Reward-to-go*, per turn: with r the reward on a call, R the final reward, and D the last turn
(turns as `lightspan.lightning.transitions` defines them),

    credit(c) = r_c + sum over later turns k of gamma^(k - turn(c)) · (rewards of turn k)
                + gamma^(D - turn(c)) · R

so a call is paid for itself and for what came after, not for what was done beside it. A reward on
a call of a frozen agent belongs to the last selected turn that ended before it. Example, gamma 0.5,
R = 1, a reward of 0.2 on the first search:

    write   turn 0    0.5 · 0.2 + 0.25 · 1 = 0.35
    search  turn 1    0.2       + 0.5  · 1 = 0.7
    search  turn 1                0.5  · 1 = 0.5
    refine  turn 2                       1 = 1.0

`gamma` is 1 unless asked: below it a slow success is worth less than a fast one, and a call of it
may be pushed down beside those. An emitted reward enters once, however many choices its call had,
and only the last one emitted on a call enters at all. If that is NaN, nobody knows what the rollout
was paid, and it is unscored (`Episode.scored`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar, Final, NamedTuple, Protocol, cast

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.baselines import BASELINES, Baseline
from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.lightning.selection import Coverage
from lightspan.lightning.states import StateKey, check_key, key_name, observation
from lightspan.lightning.transitions import Transition, turn_depths
from lightspan.schema.validation import is_number

DEFAULT_GAMMA: Final = 1.0
"""Per turn."""
DEFAULT_PRIOR: Final = 1.0
"""Calls that the turn's baseline counts for beside those of a state."""


class Credit(Protocol):
    """A credit rule. One of your own needs the first three; `baseline` is then "turn"."""

    @property
    def name(self) -> str: ...

    @property
    def step_rewards(self) -> bool:
        """Whether rewards on calls count. If so they suffice to score an episode."""
        ...

    def __call__(self, episode: Episode, coverage: Coverage) -> dict[CallKey, float]:
        """The credit of each selected call of a scored episode."""
        ...


def baseline_of(credit: Credit) -> Baseline:
    """What a rule's credits are compared with.

    Raises:
        ConfigError: a rule of one's own names what there is not.
    """
    baseline = getattr(credit, "baseline", "turn")
    if baseline not in BASELINES:
        raise ConfigError(
            f"the credit rule {credit.name} has baseline={baseline!r}: use one of "
            f"{', '.join(BASELINES)}"
        )
    return cast("Baseline", baseline)


class Terminal(msgspec.Struct, frozen=True):
    """Every call gets the final reward."""

    baseline: ClassVar[Baseline] = "rollout"

    @property
    def name(self) -> str:
        return "terminal"

    @property
    def step_rewards(self) -> bool:
        return False

    def __call__(self, episode: Episode, coverage: Coverage) -> dict[CallKey, float]:
        reward = final_reward(episode)
        return {entry.call.key: reward for entry in coverage.selected}


class RewardToGo(msgspec.Struct, frozen=True):
    """What the rules that pay for what came after have in common (see the module).

    Raises:
        ConfigError: gamma is not in (0, 1].
    """

    gamma: float = DEFAULT_GAMMA
    baseline: ClassVar[Baseline]

    def __post_init__(self) -> None:
        if not is_number(self.gamma) or not 0 < self.gamma <= 1:
            raise ConfigError(f"credit: gamma must be above 0 and at most 1, not {self.gamma!r}")

    @property
    def name(self) -> str:
        return f"{type(self).__name__.lower()}({self.gamma:g})"

    @property
    def step_rewards(self) -> bool:
        return True

    def __call__(self, episode: Episode, coverage: Coverage) -> dict[CallKey, float]:
        calls = [entry.call for entry in coverage.selected]
        if not calls:
            return {}
        turns = turn_depths(calls)
        placed = _placed(calls, turns, episode)
        own, shared = ([math.fsum(turn) for turn in part] for part in (placed.own, placed.shared))
        shared[-1] += final_reward(episode)
        after = rewards_after(own, shared, self.gamma)
        return {
            call.key: _own_reward(call) + after[turn]
            for call, turn in zip(calls, turns, strict=True)
        }


class Discounted(RewardToGo, frozen=True):
    """Against the agent's calls in the same turn."""

    baseline: ClassVar[Baseline] = "turn"


class Anchor(RewardToGo, frozen=True):
    """Against the agent's calls in the same state (GiGPO's grouping, arXiv 2505.10978, without its
    bias).

    Args:
        key: what a state is told by (`lightspan.lightning.states`); where it returns None the
            call is compared with its turn.
        prior: how many calls the turn's baseline counts for beside those of the state; without
            any, a state that two rollouts share has the other's return for a baseline.
    """

    key: StateKey = observation
    prior: float = DEFAULT_PRIOR
    baseline: ClassVar[Baseline] = "anchor"

    def __post_init__(self) -> None:
        RewardToGo.__post_init__(self)
        check_key(self.key)
        if not is_number(self.prior) or self.prior < 0:
            raise ConfigError(f"credit: prior={self.prior!r} must be 0 or more")

    @property
    def name(self) -> str:
        prior = "" if self.prior == DEFAULT_PRIOR else f", prior={self.prior:g}"
        return f"anchor({self.gamma:g}, key={key_name(self.key)}{prior})"


class ATGRPO(RewardToGo, frozen=True):
    """Mean and spread per (group, agent, turn), as published (AT-GRPO, arXiv 2510.11062).

    Each turn is divided by a spread of its own and compared with itself too: that biases the
    gradient (`docs/credit.md`).
    """

    baseline: ClassVar[Baseline] = "at_grpo"

    @property
    def name(self) -> str:
        return f"at_grpo({self.gamma:g})"


class GiGPO(RewardToGo, frozen=True):
    """The episode's advantage plus the state's, as published (GiGPO, arXiv 2505.10978).

    Args:
        key: see `Anchor`.
        omega: weight of the state's advantage.
    """

    key: StateKey = observation
    omega: float = 1.0
    baseline: ClassVar[Baseline] = "gigpo"

    def __post_init__(self) -> None:
        RewardToGo.__post_init__(self)
        check_key(self.key)
        if not is_number(self.omega) or self.omega < 0:
            raise ConfigError(f"credit: omega={self.omega!r} must be 0 or more")

    @property
    def name(self) -> str:
        omega = "" if self.omega == 1 else f", omega={self.omega:g}"
        return f"gigpo({self.gamma:g}, key={key_name(self.key)}{omega})"


class GAE(RewardToGo, frozen=True):
    """Against what a critic expected at each call: generalised advantage estimation over the calls'
    causal graph (`lightspan.lightning.gae`). With `estimator="ppo"`, whose critic has lambda."""

    baseline: ClassVar[Baseline] = "critic"

    @property
    def name(self) -> str:
        return f"critic({self.gamma:g})"


def rewards_after(own: Sequence[float], shared: Sequence[float], gamma: float) -> list[float]:
    """[turns] What a call of each turn is paid for beside its own rewards: those that its whole
    turn shares, and the discounted rewards of later turns.

    Args:
        own: [turns] sum of the rewards on each turn's calls.
        shared: [turns] rewards that every call of a turn gets.
        gamma: discount per turn.
    """
    later = 0.0
    after = [0.0] * len(shared)
    for turn in range(len(shared) - 1, -1, -1):
        after[turn] = shared[turn] + gamma * later
        later = own[turn] + after[turn]
    return after


terminal: Final = Terminal()
"""The rule of identical assignment."""


def discounted(gamma: float = DEFAULT_GAMMA) -> Discounted:
    """Reward-to-go with this discount per turn, against the same turn.

    Raises:
        ConfigError: gamma is not in (0, 1].
    """
    return Discounted(gamma)


def anchor(
    key: StateKey = observation, *, gamma: float = DEFAULT_GAMMA, prior: float = DEFAULT_PRIOR
) -> Anchor:
    """Reward-to-go against the same state; see `Anchor`.

    Example:
        >>> anchor(lambda state: state.observation.splitlines()[0], gamma=0.99).baseline
        'anchor'
    """
    return Anchor(gamma, key, prior)


_NAMED: Final[Mapping[str, Callable[[], Credit]]] = {
    "terminal": Terminal,
    "discounted": Discounted,
    "anchor": Anchor,
    "critic": GAE,
    "at_grpo": ATGRPO,
    "gigpo": GiGPO,
}
CREDITS: Final = tuple(_NAMED)
"""The rules by name."""


def parse_credit(credit: str | Credit) -> Credit:
    """The rule that `credit=` asks for: one of `CREDITS`, with its defaults, or a rule.

    Raises:
        ConfigError: an unknown name, or what is no rule.
    """
    if isinstance(credit, type) or not (isinstance(credit, str) or callable(credit)):
        raise ConfigError(f"credit={credit!r}: use {', '.join(map(repr, CREDITS))} or a rule")
    if not isinstance(credit, str):
        return credit
    if credit not in _NAMED:
        raise ConfigError(f"credit={credit!r}: use {', '.join(map(repr, CREDITS))} or a rule")
    return _NAMED[credit]()


def assign(transitions: Sequence[Transition], credits: Mapping[CallKey, float]) -> list[Transition]:
    """The transitions, each with its credit as `reward`."""
    return [msgspec.structs.replace(t, reward=credits[t.call_key]) for t in transitions]


def unused_step_rewards(episode: Episode, coverage: Coverage, credit: Credit) -> int:
    """How many calls carry a reward that the rule does not use (or cannot place)."""
    if credit.step_rewards:
        return placed_rewards(episode, coverage).unplaced
    return len({call.call_id for call in episode.calls if call.reward is not None})


def final_reward(episode: Episode) -> float:
    """The final reward; nothing where rewards on calls alone scored the episode."""
    return 0.0 if episode.reward is None else episode.reward


def _own_reward(call: Call) -> float:
    """What a selected call was paid for itself."""
    return 0.0 if call.sequence_start is None else call.reward or 0.0


class PlacedRewards(NamedTuple):
    """The rewards on the calls of an episode, by the turn that is paid for them.

    A call that did not go through the gateway has no place among the turns but by a clock, and what
    a frozen call was paid before any selected call had ended is no selected call's doing: neither
    is paid to anyone.
    """

    own: list[list[float]]
    """[turns] On its selected calls."""
    shared: list[list[float]]
    """[turns] On frozen calls that came after it."""
    unplaced: int
    """Calls with a reward that has no place."""

    def all(self) -> list[float]:
        """Every reward that has a place."""
        return [reward for turn in [*self.own, *self.shared] for reward in turn]


def placed_rewards(episode: Episode, coverage: Coverage) -> PlacedRewards:
    """Where the rewards on an episode's calls belong."""
    rewarded = {call.call_id for call in episode.calls if call.reward is not None}
    calls = [entry.call for entry in coverage.selected] if rewarded else []
    if not calls:
        return PlacedRewards([], [], len(rewarded))
    return _placed(calls, turn_depths(calls), episode)


def _placed(calls: Sequence[Call], turns: Sequence[int], episode: Episode) -> PlacedRewards:
    """By call id: the choices of a call share its rewards, which count once."""
    size = max(turns) + 1
    own: list[list[float]] = [[] for _ in range(size)]
    shared: list[list[float]] = [[] for _ in range(size)]
    selected = {call.call_id: turn for call, turn in zip(calls, turns, strict=True)}
    ended = TurnsEnded(calls, turns)
    unplaced = 0
    rewarded = {call.call_id: call for call in episode.calls if call.reward is not None}
    for call in rewarded.values():
        turn = selected.get(call.call_id)
        place = own
        if call.sequence_start is None:
            turn = None
        elif turn is None:
            turn, place = ended.before(call.sequence_start), shared
        if turn is None or call.reward is None:
            unplaced += 1
        else:
            place[turn].append(call.reward)
    return PlacedRewards(own, shared, unplaced)


class TurnsEnded:
    """Looks up which turn had ended when.

    Args:
        calls: the selected ones.
        turns: [calls] the turn of each.
    """

    def __init__(self, calls: Sequence[Call], turns: Sequence[int]) -> None:
        ended = sorted(
            (call.sequence_end, turn)
            for call, turn in zip(calls, turns, strict=True)
            if call.sequence_end is not None
        )
        self._ends = [end for end, _ in ended]
        self._deepest = list(accumulate((turn for _, turn in ended), max))

    def before(self, position: int) -> int | None:
        """The last turn with a call that had ended before a sequence number; None: no turn had."""
        count = bisect_left(self._ends, position)
        return self._deepest[count - 1] if count else None

"""Credit: from the rewards of an episode to one number per call.

Two rules. Both speak of every selected call, trained or rejected: statistics must not depend on
which calls could be trained.

`terminal`: every call gets the final reward (the identical assignment of LightningRL, arXiv
2508.03680 §3.3). Rewards on single calls are not used.

`discounted(gamma)`: reward-to-go per turn. With r the reward on a call, R the final reward, and D
the last turn (turns as `lightspan.lightning.transitions` defines them),

    credit(c) = r_c + sum over later turns k of gamma^(k - turn(c)) · (rewards of turn k)
                + gamma^(D - turn(c)) · R

so a call is paid for itself and for what came after, not for what was done beside it. A reward on
a call of a frozen agent belongs to the last selected turn that ended before it. Example, gamma 0.5,
R = 1, a reward of 0.2 on the first search:

    write   turn 0    0.5 · 0.2 + 0.25 · 1 = 0.35
    search  turn 1    0.2       + 0.5  · 1 = 0.7
    search  turn 1                0.5  · 1 = 0.5
    refine  turn 2                       1 = 1.0

With gamma 1 and no rewards on calls it is `terminal`. An emitted reward enters once, however many
choices its call had, and only the last one emitted on a call enters at all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, Protocol

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.lightning.selection import Coverage
from lightspan.lightning.transitions import Transition, turn_depths

DEFAULT_GAMMA: Final = 0.95
"""Per turn, as in GiGPO (arXiv 2505.10978)."""


class Credit(Protocol):
    """A credit rule."""

    @property
    def name(self) -> str: ...

    @property
    def step_rewards(self) -> bool:
        """Whether rewards on calls count. If so they suffice to score an episode."""
        ...

    def __call__(self, episode: Episode, coverage: Coverage) -> dict[CallKey, float]:
        """The credit of each selected call of a scored episode."""
        ...


class Terminal(msgspec.Struct, frozen=True):
    """Every call gets the final reward."""

    @property
    def name(self) -> str:
        return "terminal"

    @property
    def step_rewards(self) -> bool:
        return False

    def __call__(self, episode: Episode, coverage: Coverage) -> dict[CallKey, float]:
        reward = _final(episode)
        return {entry.call.key: reward for entry in coverage.selected}


class Discounted(msgspec.Struct, frozen=True):
    """Reward-to-go per turn (see the module)."""

    gamma: float

    @property
    def name(self) -> str:
        return f"discounted({self.gamma:g})"

    @property
    def step_rewards(self) -> bool:
        return True

    def __call__(self, episode: Episode, coverage: Coverage) -> dict[CallKey, float]:
        calls = [entry.call for entry in coverage.selected]
        if not calls:
            return {}
        turns = turn_depths(calls)
        own, shared = _rewards_by_turn(calls, turns, episode)
        shared[-1] += _final(episode)
        after = rewards_after(own, shared, self.gamma)
        return {
            call.key: (call.reward or 0.0) + after[turn]
            for call, turn in zip(calls, turns, strict=True)
        }


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


def discounted(gamma: float) -> Discounted:
    """Reward-to-go with this discount per turn.

    Raises:
        ConfigError: gamma is not in (0, 1].
    """
    if not 0 < gamma <= 1:
        raise ConfigError(f"credit: gamma must be above 0 and at most 1, not {gamma!r}")
    return Discounted(float(gamma))


def parse_credit(credit: str | Credit) -> Credit:
    """The rule that `credit=` asks for: `"terminal"`, `"discounted"` (gamma 0.95) or a rule.

    Raises:
        ConfigError: an unknown name.
    """
    if not isinstance(credit, str):
        return credit
    rules: dict[str, Credit] = {"terminal": terminal, "discounted": discounted(DEFAULT_GAMMA)}
    if credit not in rules:
        raise ConfigError(f"credit={credit!r}: use {', '.join(map(repr, rules))} or a rule")
    return rules[credit]


def assign(transitions: Sequence[Transition], credits: Mapping[CallKey, float]) -> list[Transition]:
    """The transitions, each with its credit as `reward`."""
    return [msgspec.structs.replace(t, reward=credits[t.call_key]) for t in transitions]


def unused_step_rewards(episode: Episode, credit: Credit) -> int:
    """How many calls carry a reward that the rule does not use (or cannot place)."""
    rewarded = {call.call_id: call for call in episode.calls if call.reward is not None}
    if not credit.step_rewards:
        return len(rewarded)
    return sum(call.sequence_start is None for call in rewarded.values())


def _final(episode: Episode) -> float:
    """The final reward; nothing where rewards on calls alone scored the episode."""
    return 0.0 if episode.reward is None else episode.reward


def _rewards_by_turn(
    calls: Sequence[Call], turns: Sequence[int], episode: Episode
) -> tuple[list[float], list[float]]:
    """(own, shared) per turn: the sum of the rewards on its selected calls, and of those on frozen
    calls that came after it."""
    size = max(turns) + 1
    own: list[list[float]] = [[] for _ in range(size)]
    shared: list[list[float]] = [[] for _ in range(size)]
    counted: set[str] = set()
    for call, turn in zip(calls, turns, strict=True):
        if call.reward is not None and call.call_id not in counted:
            own[turn].append(call.reward)
        counted.add(call.call_id)
    rewarded = [c for c in episode.calls if c.reward is not None and c.call_id not in counted]
    ended = TurnsEnded(calls, turns)
    for call in {call.call_id: call for call in rewarded}.values():
        if call.sequence_start is None or call.reward is None:
            continue
        placed = ended.before(call.sequence_start)
        if placed is not None:
            shared[placed].append(call.reward)
    return [math.fsum(values) for values in own], [math.fsum(values) for values in shared]


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

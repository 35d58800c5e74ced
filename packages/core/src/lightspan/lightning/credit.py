"""Credit: from the rewards of an episode to one number per call.

A rule defines the credit of each selected call and its `baseline`, the number that the credit is
compared with (`lightspan.lightning.baselines`). Both cover every selected call, trained or
rejected, because statistics must not depend on which calls could be trained.

| rule | credit | compared with |
|---|---|---|
| `terminal` | the final reward | the rollouts of the group (or batch) |
| `discounted` | reward-to-go | calls of the agent in the same turn of other rollouts |
| `anchor` | reward-to-go | calls of the agent in the same *state* in other rollouts |
| `critic` | reward-to-go | the critic's value of the call (`lightspan.lightning.gae`) |
| `at_grpo` | reward-to-go | as in arXiv 2510.11062, but calls are not siblings (`ATGRPO`) |
| `gigpo` | reward-to-go | as published (arXiv 2505.10978) |
| `family` | the final reward | other families or leaves (`lightspan.lightning.families`) |

`terminal` is the identical assignment of LightningRL (arXiv 2508.03680 §3.3). It ignores rewards on
single calls.

*Reward-to-go*, per turn: with r_c the reward on a call, r(k) the sum of the rewards on the calls of
turn k, f(k) the sum of the rewards on calls of frozen agents for which k is the last selected turn
that ended before they began, R the final reward, and D the last turn (`lightspan.lightning.turns`),

    credit(c) = r_c + f(turn(c)) + sum over later turns k of gamma^(k - turn(c)) · (r(k) + f(k))
                + gamma^(D - turn(c)) · R

so a call is credited with its own reward and with the rewards of later turns, not with those of
parallel calls. Example, gamma 0.5, R = 1, a reward of 0.2 on the first search:

    write   turn 0    0.5 · 0.2 + 0.25 · 1 = 0.35
    search  turn 1    0.2       + 0.5  · 1 = 0.7
    search  turn 1                0.5  · 1 = 0.5
    refine  turn 2                       1 = 1.0

`gamma` is 1 by default, and .95 with `gigpo`, as published. Below 1, a slow success is worth less
than a fast success, and its calls may be discouraged in comparison. An emitted reward counts once,
however many choices its call had, and only the last reward emitted on a call counts. If this reward
is NaN, the rollout is unscored (`Episode.scored`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple, Protocol, cast

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.baselines import BASELINES, DEFAULT_PRIOR, Baseline
from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.lightning.selection import Coverage
from lightspan.lightning.states import StateKey, check_key, key_name, observation
from lightspan.lightning.turns import Turns
from lightspan.schema.validation import check_number

DEFAULT_GAMMA: Final = 1.0
"""Discount per turn."""
GIGPO_GAMMA: Final = 0.95
"""Discount per turn of `gigpo`, as in its paper's experiments and in langfengQ/verl-agent."""


class Credit(Protocol):
    """A credit rule: it assigns an episode's rewards to its calls.

    A user's rule needs the members below. It may have an attribute `baseline`, the name of the
    number that credits are compared with; the default is "turn".
    """

    @property
    def name(self) -> str: ...

    @property
    def step_rewards(self) -> bool:
        """Whether rewards on calls count. If so, an episode with such rewards only is scored."""

    def __call__(self, episode: Episode, coverage: Coverage) -> dict[CallKey, float]:
        """Return the credit of each call of an agent to train.

        Args:
            episode: an episode with a usable reward.
            coverage: which calls are trained, frozen or rejected. Frozen calls get no credit.
        """


def baseline_of(credit: Credit) -> Baseline:
    """Return the name of the baseline of a credit rule; "turn" if it has no `baseline`.

    Raises:
        ConfigError: the baseline is unknown.
    """
    baseline = getattr(credit, "baseline", "turn")
    if baseline not in BASELINES:
        raise ConfigError(
            f"the credit rule {credit.name} has baseline={baseline!r}: use one of "
            f"{', '.join(BASELINES)}"
        )
    return cast("Baseline", baseline)


def equal_returns_teach(credit: Credit) -> bool:
    """Return whether groups of equal returns have a gradient under a credit rule.

    `gigpo` and `at_grpo` compare calls by their credits. With gamma below 1, credits depend on the
    number of later turns, so they differ although the returns are equal. With `family`, the forks
    of rollouts with equal returns may differ.
    """
    is_discounted, baseline = getattr(credit, "gamma", 1.0) < 1, baseline_of(credit)
    return baseline == "family" or (is_discounted and baseline in ("gigpo", "at_grpo"))


class Terminal(msgspec.Struct, frozen=True):
    """Credit rule that gives the final reward to every call."""

    name: ClassVar[str] = "terminal"
    baseline: ClassVar[Baseline] = "rollout"
    step_rewards: ClassVar[bool] = False

    def __call__(self, episode: Episode, coverage: Coverage) -> dict[CallKey, float]:
        return dict.fromkeys(coverage.turns.by_key, final_reward(episode))


class Family(Terminal, frozen=True):
    """Credit rule that gives the final reward to every call, for rollouts and their forks.

    A call that forks repeat gets the mean of the final rewards of its family instead
    (`lightspan.lightning.families`). Without forks, the rule equals `terminal` with `rloo`.
    """

    name: ClassVar[str] = "family"
    baseline: ClassVar[Baseline] = "family"


class RewardToGo(msgspec.Struct, frozen=True):
    """Base of the credit rules that give a call its own reward and the discounted later rewards.

    Raises:
        ConfigError: gamma is not in (0, 1].
    """

    gamma: float = DEFAULT_GAMMA
    baseline: ClassVar[Baseline]
    step_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("credit: gamma", self.gamma, above=0, high=1)

    @property
    def name(self) -> str:
        return f"{self.baseline}({self.gamma:g})"

    def __call__(self, episode: Episode, coverage: Coverage) -> dict[CallKey, float]:
        turns = coverage.turns
        if not turns.count:
            return {}
        placed = placed_rewards(episode, turns)
        own, shared = ([math.fsum(turn) for turn in part] for part in (placed.own, placed.shared))
        shared[-1] += final_reward(episode)
        after = rewards_after(own, shared, self.gamma)
        return {call.key: _own_reward(call) + after[turn] for call, turn in turns}


class Discounted(RewardToGo, frozen=True):
    """Credit rule: reward-to-go, compared with the agent's calls in the same turn."""

    baseline: ClassVar[Baseline] = "turn"

    @property
    def name(self) -> str:
        return f"discounted({self.gamma:g})"


class Anchor(RewardToGo, frozen=True):
    """Credit rule: reward-to-go, compared with the agent's calls in the same state.

    States are grouped as in GiGPO (arXiv 2505.10978), without its bias.

    Args:
        key: function that identifies a state (`lightspan.lightning.states`). If it returns None,
            the call is compared with the calls of its turn.
        prior: weight of the turn's mean in the baseline, as a number of calls. 0 ignores the turn
            if another rollout has a call in the state.
    """

    key: StateKey = observation
    prior: float = DEFAULT_PRIOR
    baseline: ClassVar[Baseline] = "anchor"

    def __post_init__(self) -> None:
        RewardToGo.__post_init__(self)
        check_key(self.key)
        check_number("credit: prior", self.prior, low=0)

    @property
    def name(self) -> str:
        prior = "" if self.prior == DEFAULT_PRIOR else f", prior={self.prior:g}"
        return f"anchor({self.gamma:g}, key={key_name(self.key)}{prior})"


class ATGRPO(RewardToGo, frozen=True):
    """Credit rule with AT-GRPO's groups (arXiv 2510.11062): reward-to-go by agent and turn.

    The mean and standard deviation are those of the calls of the same group, agent and turn. They
    include the call itself, which biases the gradient (`docs/reference/credit.md`).

    This is the published rule only if the calls that are compared are siblings: AT-GRPO samples
    several answers to one prompt in each turn and continues from the best one (its tree-structured
    sampling), so that all calls of a group answer the same prompt. lightspan runs the rollouts of a
    task independently. Their calls have the same prompt in the first turn only; in later turns this
    rule compares calls in different states. The paper's sum of a team's and an agent's own reward
    is what the app emits.
    """

    baseline: ClassVar[Baseline] = "at_grpo"


class GiGPO(RewardToGo, frozen=True):
    """Credit rule of GiGPO (arXiv 2505.10978): the sum of two advantages.

    The first is the advantage of the rollout in its group. The second is the advantage of the call
    among the agent's calls in the same state, by the discounted reward-to-go. As published, a call
    is compared with itself too, which biases the gradient (`docs/reference/credit.md`). The public
    code adds 1e-6 to standard deviations; here nothing is added, and a spread of 0 gives 0.

    Args:
        gamma: discount per turn; by default that of the paper's experiments.
        key: function that identifies a state. If it returns None, the second advantage is 0.
        omega: weight of the second advantage.
    """

    gamma: float = GIGPO_GAMMA
    key: StateKey = observation
    omega: float = 1.0
    baseline: ClassVar[Baseline] = "gigpo"

    def __post_init__(self) -> None:
        RewardToGo.__post_init__(self)
        check_key(self.key)
        check_number("credit: omega", self.omega, low=0)

    @property
    def name(self) -> str:
        omega = "" if self.omega == 1 else f", omega={self.omega:g}"
        return f"gigpo({self.gamma:g}, key={key_name(self.key)}{omega})"


class GAE(RewardToGo, frozen=True):
    """Credit rule: reward-to-go, compared with a critic's values.

    Advantages are estimated by generalised advantage estimation over the causal graph of the calls
    (`lightspan.lightning.gae`). The rule is for `estimator="ppo"`; lambda is a setting of `Critic`.
    With groups, a critic is used with other rules (`lightspan.lightning.mixture`).
    """

    baseline: ClassVar[Baseline] = "critic"


def rewards_after(own: Sequence[float], shared: Sequence[float], gamma: float) -> list[float]:
    """Return what each call of a turn is credited with in addition to its own reward.

    It is the turn's `shared` reward plus the discounted rewards of later turns.

    Args:
        own: for each turn, the sum of the rewards on its calls.
        shared: for each turn, the rewards that every call of the turn gets.
        gamma: discount per turn.
    """
    later = 0.0
    after = [0.0] * len(shared)
    for turn in range(len(shared) - 1, -1, -1):
        after[turn] = shared[turn] + gamma * later
        later = own[turn] + after[turn]
    return after


terminal: Final = Terminal()
"""Credit rule that gives the final reward to every call."""


def discounted(gamma: float = DEFAULT_GAMMA) -> Discounted:
    """Return the rule that compares the reward-to-go of calls in the same turn (`Discounted`).

    Raises:
        ConfigError: `gamma` is not in (0, 1].
    """
    return Discounted(gamma)


def anchor(
    key: StateKey = observation, *, gamma: float = DEFAULT_GAMMA, prior: float = DEFAULT_PRIOR
) -> Anchor:
    """Return the rule that compares the reward-to-go of calls in the same state (`Anchor`).

    Args:
        key: function that identifies a state.
        gamma: discount per turn.
        prior: weight of the turn's mean in the baseline, as a number of calls.

    Raises:
        ConfigError: `key` is not a plain function, `gamma` is not in (0, 1], or `prior` is below 0.

    Example:
        >>> anchor(lambda state: state.observation.splitlines()[0], gamma=0.99).baseline
        'anchor'
    """
    return Anchor(gamma, key, prior)


_RULES: Final[Mapping[str, Callable[[], Credit]]] = {
    "terminal": Terminal,
    "discounted": Discounted,
    "anchor": Anchor,
    "critic": GAE,
    "at_grpo": ATGRPO,
    "gigpo": GiGPO,
    "family": Family,
}
CREDITS: Final = tuple(_RULES)
"""Names of the credit rules."""


def parse_credit(credit: str | Credit) -> Credit:
    """Return the credit rule for a value of `credit=`.

    Args:
        credit: name in `CREDITS`, for the rule with its defaults; or a rule, returned unchanged.

    Raises:
        ConfigError: the name is unknown, or `credit` is not a rule.
    """
    if isinstance(credit, str) and credit in _RULES:
        return _RULES[credit]()
    if isinstance(credit, str | type) or not callable(credit):
        raise ConfigError(f"credit={credit!r}: use {', '.join(map(repr, CREDITS))} or a rule")
    return credit


def unused_step_rewards(episode: Episode, coverage: Coverage, credit: Credit) -> int:
    """Return how many calls have a reward that cannot be used.

    A reward is not used if the credit rule ignores rewards on calls, or if no call can be credited
    with it (`PlacedRewards.unplaced`).

    Args:
        episode: the episode.
        coverage: status of its calls.
        credit: the credit rule.
    """
    if credit.step_rewards:
        return placed_rewards(episode, coverage.turns).unplaced
    return len({call.call_id for call in episode.calls if call.reward is not None})


def final_reward(episode: Episode) -> float:
    """Return the final reward of a scored episode; 0 if it has rewards on calls only."""
    return 0.0 if episode.reward is None else episode.reward


def _own_reward(call: Call) -> float:
    """Return the reward on a call; 0 if it has none, or if the call bypassed the gateway."""
    return 0.0 if call.sequence_start is None else call.reward or 0.0


class PlacedRewards(NamedTuple):
    """Rewards on the calls of an episode, by turn.

    A reward is `unplaced`, and credited to no call, in two cases. Either its call bypassed the
    gateway, so that the turn is unknown. Or its call belongs to a frozen agent and began before any
    call of an agent to train had ended.
    """

    own: list[list[float]]
    """[turns] Rewards on the selected calls of each turn."""
    shared: list[list[float]]
    """[turns] Rewards on calls of frozen agents that began after the turn ended."""
    unplaced: int
    """Number of calls whose reward is unplaced."""


def placed_rewards(episode: Episode, turns: Turns) -> PlacedRewards:
    """Assign the rewards on an episode's calls to turns.

    Each call id counts once, because the choices of a call share its rewards.

    Args:
        episode: the episode.
        turns: the turns of the calls of agents to train.
    """
    own: list[list[float]] = [[] for _ in range(turns.count)]
    shared: list[list[float]] = [[] for _ in range(turns.count)]
    selected = {call.call_id: turn for call, turn in turns}
    unplaced = 0
    for call in {call.call_id: call for call in episode.calls if call.reward is not None}.values():
        start, reward = call.sequence_start, call.reward
        is_selected = call.call_id in selected
        turn = selected[call.call_id] if is_selected else turns.ended_before(start or 0)
        if start is None or turn is None or reward is None:
            unplaced += 1
        else:
            (own if is_selected else shared)[turn].append(reward)
    return PlacedRewards(own, shared, unplaced)

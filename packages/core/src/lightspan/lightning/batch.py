"""Batch: the rows of one optimiser step, and why each call in it has its advantage and weight.

Three settings, none of which implies another:

- *unit*: whose observations the statistics are made of (`lightspan.lightning.advantages`);
- *credit*: how an episode's rewards come to its calls (`lightspan.lightning.credit`), what AIR adds
  (`lightspan.lightning.air`) and what that is compared with (`lightspan.lightning.baselines`);
- *weight*: how much each token counts in the loss.

With R the scored rollouts of the step, a token of a call with T tokens weighs

| weight | token | a rollout's weights sum to |
|---|---|---|
| `rollout` | 1 / (R · tokens of its rollout) | 1 / R (arXiv 2608.17528, rollout-mean) |
| `transition` | 1 / (R · T) | its calls / R |
| `token` | 1 / (R · C) | its tokens / (R · C) |

where C is `token_constant` (Dr. GRPO, arXiv 2503.20783, divides by the longest response), by
default the mean number of trained tokens per scored rollout of the step, which makes `token` the
token-mean of DAPO (arXiv 2503.14476). Tokens of a rollout, and C, are those of the policy in
question: policies are trained apart, and how much one says is nothing to another.

The order is: who counts in the statistics (every rollout for training that ended, is undamaged,
scored, and sampled by weights fresh enough) → statistics → filters. R and the statistics never
shrink because of a filter, and every loss is divided by R, never by rows. Rollouts whose advantages
are all zero get no rows (unless `keep_zero_advantages`, for a loss with KL or entropy), yet stay in
R.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

import msgspec

from lightspan.errors import ConfigError, DataError
from lightspan.lightning.advantages import (
    ESTIMATORS,
    OF_THE_BATCH,
    BaselineScale,
    Estimator,
    Explanation,
    Observation,
    Unit,
    check_estimator,
    count_zeros,
    groups_without_variance,
    normalise,
)
from lightspan.lightning.air import AIR, Shaping, check_air, shape, shaping_metrics
from lightspan.lightning.baselines import (
    Baseline,
    CallCredit,
    Comparison,
    at_grpo,
    by_rollout,
    by_state,
    by_turn,
    gigpo,
)
from lightspan.lightning.credit import (
    DEFAULT_PRIOR,
    Credit,
    assign,
    baseline_of,
    terminal,
    unused_step_rewards,
)
from lightspan.lightning.episode import Call, CallKey, Episode
from lightspan.lightning.gae import gae
from lightspan.lightning.length_penalty import Overlong, overlong_metrics, overlong_penalties
from lightspan.lightning.returns import return_of
from lightspan.lightning.rows import Row, build_rows, usable_transitions
from lightspan.lightning.selection import Coverage, Rejection
from lightspan.lightning.states import key_of, state_of
from lightspan.lightning.transitions import (
    Transition,
    TransitionKey,
    trained_transitions,
    turn_depths,
)
from lightspan.schema.records import Mode

Weight = Literal["rollout", "transition", "token"]
WEIGHTS: Final[tuple[Weight, ...]] = ("rollout", "transition", "token")
UNITS: Final[tuple[Unit, ...]] = ("rollout", "agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """How episodes become rows (see the module)."""

    estimator: Estimator = "grpo"
    unit: Unit = "rollout"
    credit: Credit = terminal
    air: AIR | None = None
    overlong: Overlong | None = None
    weight: Weight = "rollout"
    token_constant: float | Mapping[str, float] | None = None
    """The C of weight `token`, and of no other; by policy, where they differ. None, or a policy
    that is not named: the step's mean."""
    max_length: int | None = None
    """The longest sequence that the learner takes; longer calls are rejected, never cut."""
    max_staleness: int | None = None
    """How many versions the weights that sampled may lag behind; None for any number."""
    keep_zero_advantages: bool = False

    def __post_init__(self) -> None:
        check_estimator(self.estimator)
        if self.unit not in UNITS:
            raise ConfigError(f"unit={self.unit!r}: use one of {', '.join(UNITS)}")
        if self.weight not in WEIGHTS:
            raise ConfigError(f"weight={self.weight!r}: use one of {', '.join(WEIGHTS)}")
        if self.token_constant is not None and self.weight != "token":
            raise ConfigError(f"token_constant applies only to weight='token', not {self.weight!r}")
        constants = self.token_constant if self.token_constant is not None else {}
        values = constants.values() if isinstance(constants, Mapping) else [constants]
        if not all(0 < value < math.inf for value in values):
            raise ConfigError(f"token_constant={self.token_constant!r} must be above 0")
        check_air(self.air, self.credit)
        _check_comparison(self.estimator, self.credit)

    def constant_of(self, policy: str) -> float | None:
        """The C of a policy; None: the step's mean."""
        constant = self.token_constant
        return constant.get(policy) if isinstance(constant, Mapping) else constant


_ESTIMATORS_OF: Final[Mapping[Baseline, tuple[Estimator, ...]]] = {
    "critic": ("ppo",),
    "at_grpo": ("grpo",),
    "gigpo": ("grpo", "dr_grpo"),
}
"""Baselines that not every estimator has."""


def _check_comparison(estimator: Estimator, credit: Credit) -> None:
    """Raise `ConfigError` for an estimator and a credit rule that exclude each other."""
    baseline = baseline_of(credit)
    fitting = _ESTIMATORS_OF.get(baseline, tuple(e for e in ESTIMATORS if e != "ppo"))
    if estimator == "ppo" and baseline != "critic":
        raise ConfigError(
            f'estimator="ppo" compares calls with a critic: use credit="critic", not {credit.name}'
        )
    if estimator not in fitting:
        raise ConfigError(
            f"credit {credit.name} applies only to estimator="
            f"{' or '.join(map(repr, fitting))}, not {estimator!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one optimiser step (per policy), with everything that led to them."""

    rows: list[Row]
    """All rows; those of one rollout stand together."""
    rollouts: tuple[str, ...]
    """The scored rollouts, whose number R every weight is divided by; some may have no rows."""
    explanations: dict[TransitionKey, Explanation]
    """For every usable transition, also those left out because their advantage is zero."""
    coverages: tuple[Coverage, ...] = ()
    """The coverages that were given, plus what the batch itself rejected."""
    counters: dict[str, int] = field(default_factory=dict)
    """See `BatchBuilder.finish`."""
    air: dict[str, float] = field(default_factory=dict)
    """See `lightspan.lightning.air.shaping_metrics`; empty without AIR."""
    overlong: dict[str, float] = field(default_factory=dict)
    """See `lightspan.lightning.length_penalty.overlong_metrics`; empty without it."""
    usable_tokens: dict[str, int] = field(default_factory=dict)
    """Policy → tokens of its usable transitions, those left out because their advantage is zero
    too. Empty in a minibatch."""

    @property
    def size(self) -> int:
        """R."""
        return len(self.rollouts)

    def weight_mass(self, policy: str | None = None) -> float:
        """Sum of all weights (of a policy)."""
        chosen = (row for row in self.rows if policy in (None, row.policy))
        return math.fsum(weight for row in chosen for weight in row.weights)


def build_batch(
    episodes: Sequence[Episode],
    coverages: Sequence[Coverage],
    config: BatchConfig | None = None,
    *,
    versions: Mapping[str, int] | None = None,
) -> Batch:
    """The batch of these episodes: one optimiser step; see `draft_batch`.

    Raises:
        DataError: episodes and coverages do not match, or a rollout occurs twice.
        ConfigError: `max_staleness` without the version of a policy, a coverage made for another
            credit rule, a critic's rule (a draft takes its values), or a function of AIR's or a
            state's key that fails.
    """
    return draft_batch(episodes, coverages, config, versions=versions).finish()


def draft_batch(
    episodes: Sequence[Episode],
    coverages: Sequence[Coverage],
    config: BatchConfig | None = None,
    *,
    versions: Mapping[str, int] | None = None,
) -> BatchBuilder:
    """A batch but for what a critic says of its calls.

    Args:
        episodes: one per rollout, of whole groups.
        coverages: one per episode, made by `cover`.
        versions: the current version of each policy; needed for `max_staleness`.

    Raises:
        DataError, ConfigError: as `build_batch`.
    """
    config = config or BatchConfig()
    _check(episodes, coverages, config)
    counters: Counter[str] = Counter(rollouts=len(episodes))
    members, judged = [], list(coverages)
    for place, (episode, coverage) in enumerate(zip(episodes, coverages, strict=True)):
        refusal = _refusal(episode, coverage, config, versions)
        counters[refusal or "scored"] += 1
        if refusal == "stale":
            judged[place] = coverage.reject({c.key: Rejection.STALE for c in coverage.trained})
        elif refusal is None:
            members.append(_member(place, episode, coverage, config))
    for member in members:
        judged[member.place] = judged[member.place].reject(member.rejected)
    return BatchBuilder(config, episodes, judged, members, counters)


class BatchBuilder:
    """The scored rollouts of a step, each call with its credit.

    With a critic: `rows` go to it, and what it says of them to `finish`.
    """

    def __init__(
        self,
        config: BatchConfig,
        episodes: Sequence[Episode],
        coverages: Sequence[Coverage],
        members: Sequence[_Member],
        counters: Counter[str],
    ) -> None:
        self._config = config
        self._episodes = episodes
        self._coverages = coverages
        self._members = members
        self._counters = counters

    def rows(self) -> list[Row]:
        """Every usable transition, whatever its advantage will be."""
        return [row for member in self._members for row in build_rows(member.transitions).rows]

    def finish(
        self,
        values: Mapping[str, Mapping[CallKey, float]] | None = None,
        *,
        lam: float = 1.0,
    ) -> Batch:
        """The batch.

        Args:
            values: rollout → call → what the critic expects; of a critic's rule only.
            lam: of its generalised advantages.

        Counters: `rollouts` given, `scored` (R), `unscored`, `damaged`, `unfinished`, `not_train`,
        `stale` (each rollout left out is in exactly one of these); `groups`, `groups:<why all
        zero>`; `zero:<reason>` observations; `zero_advantage_rollouts`; `transitions`,
        `rejected:<reason>` calls, `trained_tokens`, `rows`; `unused_step_rewards`.

        Raises:
            ConfigError: values without a critic's rule, or such a rule without values.
            DataError: values that are not of these calls.
        """
        config, members, counters = self._config, self._members, Counter(self._counters)
        if (values is None) == (baseline_of(config.credit) == "critic"):
            raise ConfigError(
                f"credit {config.credit.name} {'needs' if values is None else 'takes no'} values "
                "of a critic"
            )
        norms = _norms(members, config, counters)
        comparisons = (
            _comparisons(members, norms, config)
            if values is None
            else _expectations(members, norms, config, values, lam)
        )
        explanations = _explain(members, norms, comparisons, config)
        rows = _rows(members, explanations, config, counters)
        _count(counters, self._episodes, members, config, self._coverages)
        counters.update(transitions=len(explanations), rows=len(rows))
        counters["trained_tokens"] = sum(sum(row.mask) for row in rows)
        shapings = [member.shaping for member in members]
        penalties = [member.penalties for member in members]
        return Batch(
            rows=rows,
            rollouts=tuple(member.episode.rollout_id for member in members),
            explanations=explanations,
            coverages=tuple(self._coverages),
            counters=dict(counters),
            air={} if config.air is None else shaping_metrics(shapings),
            overlong=(
                {} if config.overlong is None else overlong_metrics(config.overlong, penalties)
            ),
            usable_tokens=dict(_tokens_by_policy(members)),
        )


def split_minibatches(batch: Batch, k: int, seed: int = 0) -> list[Batch]:
    """The batch in k optimiser steps of whole rollouts, each weighted by its own R.

    Every scored rollout is in exactly one part, those without rows too, dealt so that parts differ
    by at most one rollout, and by at most one with rows. Fewer than k rollouts make fewer parts.

    Raises:
        ConfigError: k is not positive.
    """
    if k < 1:
        raise ConfigError(f"a batch cannot be split into {k} minibatches: use 1 or more")
    with_rows = {row.rollout_id for row in batch.rows}
    active = [rollout for rollout in batch.rollouts if rollout in with_rows]
    idle = [rollout for rollout in batch.rollouts if rollout not in with_rows]
    rng = random.Random(seed)
    rng.shuffle(active)
    rng.shuffle(idle)
    k = min(k, batch.size)
    return [_part(batch, set((active + idle)[start::k])) for start in range(k)]


def _part(batch: Batch, chosen: set[str]) -> Batch:
    rollouts = tuple(rollout for rollout in batch.rollouts if rollout in chosen)
    # weights hold the 1/R of the batch; a part is a step by itself, with an R of its own
    factor = batch.size / len(rollouts)
    rows = [
        replace(row, weights=[weight * factor for weight in row.weights])
        for row in batch.rows
        if row.rollout_id in chosen
    ]
    explanations = {
        key: msgspec.structs.replace(why, token_weight=why.token_weight * factor)
        for key, why in batch.explanations.items()
        if why.rollout_id in chosen
    }
    return Batch(rows=rows, rollouts=rollouts, explanations=explanations)


# --- who counts -------------------------------------------------------------------------------


def _check(episodes: Sequence[Episode], coverages: Sequence[Coverage], config: BatchConfig) -> None:
    if [e.attempt_id for e in episodes] != [c.attempt_id for c in coverages]:
        raise DataError("episodes and coverages do not belong together: give one per episode")
    twice = [r for r, n in Counter(e.rollout_id for e in episodes).items() if n > 1]
    if twice:
        raise DataError(f"rollout {twice[0]} occurs twice: a rollout is trained by one attempt")
    wanted = config.credit.step_rewards
    if any(coverage.step_rewards != wanted for coverage in coverages):
        raise ConfigError(
            f"credit {config.credit.name} needs coverages of cover(…, step_rewards={wanted})"
        )


def _refusal(
    episode: Episode,
    coverage: Coverage,
    config: BatchConfig,
    versions: Mapping[str, int] | None,
) -> str | None:
    """Why a rollout takes no part in the statistics, as a counter's name."""
    if episode.mode is not Mode.TRAIN:
        return "not_train"
    if not episode.finished:
        return "unfinished"
    if episode.capture_errors:
        return "damaged"
    if not episode.scored(config.credit.step_rewards):
        return "unscored"
    return "stale" if _stale(coverage, config.max_staleness, versions) else None


def _stale(
    coverage: Coverage, max_staleness: int | None, versions: Mapping[str, int] | None
) -> bool:
    """Whether any trained token was sampled by weights older than allowed."""
    if max_staleness is None:
        return False
    for call in coverage.trained:
        if versions is None or call.policy not in versions:
            raise ConfigError(f"max_staleness needs the current version of {call.policy!r}")
        sampled = [version for version, _ in call.record.versions] if call.record else []
        if min(sampled, default=0) < versions[call.policy] - max_staleness:
            return True
    return False


class _Member(NamedTuple):
    """A rollout that counts."""

    place: int
    episode: Episode
    transitions: list[Transition]
    """The usable ones, with their credit."""
    rejected: dict[CallKey, Rejection]
    credited: dict[CallKey, _Selected]
    """Every selected call, the trained ones and others."""
    units: tuple[str, ...]
    """Whose observations it makes: agent paths, or the empty one for the rollout."""
    value: float
    """Its return."""
    shaping: Shaping
    """What AIR adds to the credit of selected calls."""
    penalties: Mapping[CallKey, float]
    """What selected calls are paid less because they are too long."""


class _Selected(NamedTuple):
    """A selected call."""

    call: Call
    turn: int
    credit: float
    key: Hashable


def _member(place: int, episode: Episode, coverage: Coverage, config: BatchConfig) -> _Member:
    rule, air = config.credit, config.air
    plain = rule(episode, coverage)
    shaping = Shaping() if air is None else shape(air, rule, episode, coverage)
    penalties = {} if config.overlong is None else overlong_penalties(config.overlong, coverage)
    shaped = {
        key: credit + shaping.credits.get(key, 0.0) + penalties.get(key, 0.0)
        for key, credit in plain.items()
    }
    usable, rejected = usable_transitions(trained_transitions(episode, coverage), config.max_length)
    calls = [entry.call for entry in coverage.selected]
    key_of_state = getattr(rule, "key", None)
    credited = {
        call.key: _Selected(
            call,
            turn,
            shaped[call.key],
            key_of(key_of_state, state_of(call, episode.task_id, turn)) if key_of_state else None,
        )
        for call, turn in zip(calls, turn_depths(calls), strict=True)
        if call.key in shaped
    }
    agents = tuple(dict.fromkeys(call.agent_path for call in calls))
    return _Member(
        place,
        episode,
        assign(usable, shaped),
        {(call_id, choice): reason for (_, call_id, choice), reason in rejected.items()},
        credited,
        agents if config.unit == "agent" else ("",),
        return_of(episode, coverage, shaping.total),
        shaping,
        penalties,
    )


# --- statistics, weights, rows ----------------------------------------------------------------


def _norms(
    members: Sequence[_Member], config: BatchConfig, counters: Counter[str]
) -> dict[tuple[str, str], BaselineScale]:
    """(rollout id, unit) → what its observation is measured against."""
    observations = [
        Observation(member.episode.rollout_id, member.episode.group_id, member.value, unit)
        for member in members
        for unit in member.units
    ]
    norms = normalise(config.estimator, observations)
    counters.update(count_zeros(norms))
    return {(o.rollout_id, o.agent): norm for o, norm in zip(observations, norms, strict=True)}


def _comparisons(
    members: Sequence[_Member], norms: Mapping[tuple[str, str], BaselineScale], config: BatchConfig
) -> dict[TransitionKey, Comparison]:
    """What each selected call is measured against."""
    has_potential = config.air is not None and config.air.mode == "potential"
    keys, calls = [], []
    for member in members:
        episode = member.episode
        group = "" if config.estimator in OF_THE_BATCH else episode.group_id
        for key, selected in member.credited.items():
            unit = _unit(selected.call, config)
            keys.append((episode.attempt_id, *key))
            calls.append(
                CallCredit(
                    rollout_id=episode.rollout_id,
                    population=(group, unit),
                    agent_path=selected.call.agent_path,
                    turn=selected.turn,
                    credit=selected.credit,
                    shaping=member.shaping.credits.get(key, 0.0) if has_potential else 0.0,
                    penalty=member.penalties.get(key, 0.0),
                    value=member.value,
                    norm=norms[episode.rollout_id, unit],
                    key=selected.key,
                )
            )
    return dict(zip(keys, _compared(calls, config), strict=True))


def _unit(call: Call, config: BatchConfig) -> str:
    return call.agent_path if config.unit == "agent" else ""


def _expectations(
    members: Sequence[_Member],
    norms: Mapping[tuple[str, str], BaselineScale],
    config: BatchConfig,
    values: Mapping[str, Mapping[CallKey, float]],
    lam: float,
) -> dict[TransitionKey, Comparison]:
    """What each call with a value is measured against: what is left of its credit beside its
    generalised advantage."""
    gamma = getattr(config.credit, "gamma", 1.0)
    found = {}
    for member in members:
        episode = member.episode
        to_go = {key: selected.credit for key, selected in member.credited.items()}
        calls = [selected.call for selected in member.credited.values()]
        expected = values.get(episode.rollout_id, {})
        for key, advantage in gae(calls, to_go, expected, gamma=gamma, lam=lam).items():
            norm = norms[episode.rollout_id, _unit(member.credited[key].call, config)]
            found[episode.attempt_id, *key] = Comparison(
                baseline=to_go[key] - advantage,
                scale=norm.scale,
                others=0,
                against="rollouts",
                expected=expected[key],
            )
    missing = [t.key for member in members for t in member.transitions if t.key not in found]
    if missing:
        raise DataError(f"the critic says nothing of call {missing[0]}: give a value of each")
    return found


def _compared(calls: Sequence[CallCredit], config: BatchConfig) -> list[Comparison]:
    rule, estimator = config.credit, config.estimator
    match baseline_of(rule):
        case "rollout":
            return by_rollout(calls, estimator)
        case "anchor":
            return by_state(calls, estimator, getattr(rule, "prior", DEFAULT_PRIOR))
        case "at_grpo":
            return at_grpo(calls)
        case "gigpo":
            return gigpo(calls, estimator, getattr(rule, "omega", 1.0))
        case _:
            return by_turn(calls, estimator)


def _explain(
    members: Sequence[_Member],
    norms: Mapping[tuple[str, str], BaselineScale],
    comparisons: Mapping[TransitionKey, Comparison],
    config: BatchConfig,
) -> dict[TransitionKey, Explanation]:
    weights = _token_weights(members, config)
    explanations = {}
    for member in members:
        masses: dict[str, list[float]] = defaultdict(list)
        for transition in member.transitions:
            masses[transition.policy].append(weights[transition.key] * transition.tokens)
        totals = {policy: math.fsum(parts) for policy, parts in masses.items()}
        for t in member.transitions:
            unit = t.agent_path if config.unit == "agent" else ""
            compared = comparisons[t.key]
            explanations[t.key] = Explanation(
                rollout_id=t.rollout_id,
                group_id=t.group_id,
                agent_path=t.agent_path,
                estimator=config.estimator,
                unit=config.unit,
                credit_rule=config.credit.name,
                weighting=config.weight,
                credit=t.reward or 0.0,
                shaping=None if config.air is None else member.shaping.credits[t.call_key],
                penalty=None if config.overlong is None else member.penalties[t.call_key],
                expected=compared.expected,
                value=member.value,
                baseline=compared.baseline,
                scale=compared.scale,
                size=norms[member.episode.rollout_id, unit].size,
                zero=compared.zero,
                turn=t.turn,
                others=compared.others,
                against=compared.against,
                compared=compared.compared,
                terms=compared.terms,
                tokens=t.tokens,
                token_weight=weights[t.key],
                share=weights[t.key] * t.tokens / totals[t.policy],
            )
    return explanations


def _token_weights(members: Sequence[_Member], config: BatchConfig) -> dict[TransitionKey, float]:
    """The weight of each token of each transition (table of the module)."""
    rollouts = len(members)
    of_policy = _tokens_by_policy(members)
    of_rollout: Counter[tuple[str, str]] = Counter()
    for member in members:
        for t in member.transitions:
            of_rollout[t.rollout_id, t.policy] += t.tokens

    def divisor(t: Transition) -> float:
        if config.weight == "rollout":
            return rollouts * of_rollout[t.rollout_id, t.policy]
        if config.weight == "transition":
            return rollouts * t.tokens
        constant = config.constant_of(t.policy)
        return of_policy[t.policy] if constant is None else rollouts * constant

    return {t.key: 1.0 / divisor(t) for member in members for t in member.transitions}


def _tokens_by_policy(members: Sequence[_Member]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for member in members:
        for t in member.transitions:
            tokens[t.policy] += t.tokens
    return tokens


def _rows(
    members: Sequence[_Member],
    explanations: Mapping[TransitionKey, Explanation],
    config: BatchConfig,
    counters: Counter[str],
) -> list[Row]:
    rows = []
    is_critics = baseline_of(config.credit) == "critic"
    for member in members:
        whys = [explanations[t.key] for t in member.transitions]
        advantages = [why.advantage for why in whys]
        # all rows of a rollout or none: the weights of a part would not sum to the rollout's own
        if whys and not any(advantages):
            counters["zero_advantage_rollouts"] += 1
            if not (config.keep_zero_advantages or is_critics):  # a critic learns of all
                continue
        weights = [why.token_weight for why in whys]
        credits = [why.credit for why in whys]
        built = build_rows(
            member.transitions,
            advantages=advantages,
            token_weights=weights,
            value_targets=credits if is_critics else None,
        )
        rows += built.rows
    return rows


def _count(
    counters: Counter[str],
    episodes: Sequence[Episode],
    members: Sequence[_Member],
    config: BatchConfig,
    coverages: Sequence[Coverage],
) -> None:
    of_group: dict[str, list[float | None]] = {episode.group_id: [] for episode in episodes}
    for member in members:
        of_group[member.episode.group_id].append(member.value)
    counters["groups"] = len(of_group)
    counters.update(f"groups:{why}" for why in groups_without_variance(of_group).values())
    for coverage in coverages:
        counters.update(f"rejected:{entry.rejection}" for entry in coverage.rejected)
    unused = sum(
        unused_step_rewards(episode, coverage, config.credit)
        for episode, coverage in zip(episodes, coverages, strict=True)
    )
    if unused:
        counters["unused_step_rewards"] = unused

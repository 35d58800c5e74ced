"""Batch: the rows of one optimiser step, with the advantage and weight of each call.

Three independent settings:

- *unit*: the observations of the statistics (`lightspan.lightning.advantages`);
- *credit*: how an episode's rewards become credits of its calls (`lightspan.lightning.credit`), the
  part that AIR adds (`lightspan.lightning.air`), and the baseline
  (`lightspan.lightning.baselines`);
- *weight*: the weight of each token in the loss.

With R the scored rollouts of the step, a token of a call with T tokens weighs

| weight | token | a rollout's weights sum to |
|---|---|---|
| `rollout` | 1 / (R · tokens of its rollout) | 1 / R (arXiv 2608.17528, rollout-mean) |
| `transition` | 1 / (R · T) | its calls / R |
| `token` | 1 / (R · C) | its tokens / (R · C) |

where C is `token_constant` (Dr. GRPO, arXiv 2503.20783, divides by the longest response), by
default the mean number of trained tokens per scored rollout of the step, which makes `token` the
token-mean of DAPO (arXiv 2503.14476). Tokens of a rollout, and C, are counted per policy, because
policies are trained separately.

With the credit rule `family`, a family (`lightspan.lightning.families`) takes the place of a
rollout: R is the number of families, and a token behind a fork counts and weighs 1 / leaves.

The order is: select the rollouts that count, compute statistics, filter. A rollout counts if it is
for training, has ended, is undamaged, has a score, and was sampled by weights that are fresh
enough. No filter changes R or the statistics, and every loss is divided by R, never by the number
of rows.
Rollouts whose advantages are all zero get no rows (unless `keep_zero_advantages`, for a loss with
KL or entropy), but stay in R.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from lightspan.errors import ConfigError, DataError
from lightspan.lightning import baselines
from lightspan.lightning.advantages import (
    BATCH_ESTIMATORS,
    ESTIMATORS,
    BaselineScale,
    Estimator,
    Explanation,
    Observation,
    Unit,
    ZeroReason,
    groups_without_variance,
    mixture_statistics,
    normalise,
    rloo,
)
from lightspan.lightning.air import AIR, Shaping, check_air, shape, shaping_metrics
from lightspan.lightning.credit import (
    Credit,
    baseline_of,
    equal_returns_teach,
    terminal,
    unused_step_rewards,
)
from lightspan.lightning.episode import CallKey, Episode
from lightspan.lightning.gae import gae
from lightspan.lightning.length_penalty import Overlong, overlong_metrics, overlong_penalties
from lightspan.lightning.mixture import Mixture, check_mixed
from lightspan.lightning.returns import failed_tries, return_of
from lightspan.lightning.rows import Row, build_rows, usable_transitions
from lightspan.lightning.selection import Coverage, Rejection
from lightspan.lightning.states import key_of, observation, state_of
from lightspan.lightning.transitions import Transition, TransitionKey, trained_transitions
from lightspan.schema.records import Mode
from lightspan.schema.validation import check_choice, check_number

Weight = Literal["rollout", "transition", "token"]
WEIGHTS: Final[tuple[Weight, ...]] = get_args(Weight)
UNITS: Final[tuple[Unit, ...]] = get_args(Unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Settings by which a batch is built from episodes."""

    estimator: Estimator = "grpo"
    unit: Unit = "rollout"
    credit: Credit = terminal
    mixture: Mixture | None = None
    """How a critic is used with groups; None unless one is."""
    air: AIR | None = None
    overlong: Overlong | None = None
    weight: Weight = "rollout"
    token_constant: float | Mapping[str, float] | None = None
    """With weight `token`, number C by which tokens' weights are divided, or policy → C. None, or a
    policy without an entry, stands for the mean number of trained tokens per scored rollout in the
    step.
    """
    max_length: int | None = None
    """Maximum tokens of a call; longer calls are rejected, never cut. None for no limit."""
    max_staleness: int | None = None
    """Maximum number of versions that the weights of a rollout may be behind; None for no limit."""
    keep_zero_advantages: bool = False
    """Whether rollouts whose advantages are all zero get rows, for a loss with KL or entropy."""

    def __post_init__(self) -> None:
        for name, names in (("estimator", ESTIMATORS), ("unit", UNITS), ("weight", WEIGHTS)):
            check_choice(name, getattr(self, name), names)
        if self.token_constant is not None and self.weight != "token":
            raise ConfigError(f"token_constant applies only to weight='token', not {self.weight!r}")
        constants = self.token_constant
        for value in constants.values() if isinstance(constants, Mapping) else (constants,):
            check_number("token_constant", value, above=0, optional=True)
        check_air(self.air, self.credit)
        _check_baseline(self.estimator, self.credit)
        others = self.unit == "agent" or self.air or self.overlong or self.credit.step_rewards
        if baseline_of(self.credit) == "family" and others:
            needs = 'unit="rollout", and neither air=, overlong= nor rewards on calls'
            raise ConfigError(f"credit {self.credit.name} needs {needs}")
        if self.mixture is not None:
            check_mixed(self.estimator, self.credit)

    @property
    def needs_critic(self) -> bool:
        """Whether a critic's value is needed for each call that can be trained."""
        return self.mixture is not None or baseline_of(self.credit) == "critic"


_ESTIMATORS_OF: Final[Mapping[baselines.Baseline, tuple[Estimator, ...]]] = {
    "critic": ("ppo",),
    "at_grpo": ("grpo",),
    "gigpo": ("grpo", "dr_grpo"),
    "family": ("rloo",),
}
"""Baseline → estimators that support it; a missing baseline works with all but `ppo`."""


def _check_baseline(estimator: Estimator, credit: Credit) -> None:
    """Raise `ConfigError` if `estimator` does not support the baseline of the rule `credit`."""
    baseline = baseline_of(credit)
    allowed = _ESTIMATORS_OF.get(baseline, tuple(e for e in ESTIMATORS if e != "ppo"))
    if estimator == "ppo" and baseline != "critic":
        raise ConfigError(
            f'estimator="ppo" compares calls with a critic: use credit="critic", not {credit.name}'
        )
    if estimator not in allowed:
        raise ConfigError(
            f"credit {credit.name} applies only to estimator="
            f"{' or '.join(map(repr, allowed))}, not {estimator!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows that the learner trains on in one step, with explanations and counters."""

    rows: list[Row]
    """Rows of all policies; the rows of a rollout are contiguous."""
    rollouts: tuple[str, ...]
    """Ids of the scored rollouts, whose number R divides every weight; some may have no rows. With
    the credit rule `family`, they are trunks, and rows of forks have the rollout id of their trunk.
    """
    explanations: dict[TransitionKey, Explanation]
    """(attempt id, call id, choice) → advantage and weight of each call that could be trained, also
    of calls without rows because their rollout's advantages are all zero.
    """
    coverages: tuple[Coverage, ...] = ()
    """Status of the calls per input episode, with the rejections of the batch added."""
    counters: dict[str, int] = field(default_factory=dict)
    """Numbers of rollouts, groups, calls, tokens and rows by outcome, as `BatchBuilder.finish`
    lists them.
    """
    air: dict[str, float] = field(default_factory=dict)
    """AIR's metrics (`lightspan.lightning.air.shaping_metrics`); empty without AIR."""
    overlong: dict[str, float] = field(default_factory=dict)
    """Metrics of the length penalty (`lightspan.lightning.length_penalty.overlong_metrics`); empty
    without `Overlong`.
    """
    usable_tokens: dict[str, int] = field(default_factory=dict)
    """Policy → sampled tokens of its calls that could be trained, also of calls without rows
    because of zero advantages. Empty in a minibatch.
    """

    @property
    def size(self) -> int:
        """Number of scored rollouts, by which every loss is divided (R)."""
        return len(self.rollouts)


def prepare_batch(
    episodes: Sequence[Episode],
    coverages: Sequence[Coverage],
    config: BatchConfig | None = None,
    *,
    versions: Mapping[str, int] | None = None,
) -> BatchBuilder:
    """Return a builder, whose `finish` returns the batch and can take a critic's values.

    Args:
        episodes: one episode per rollout; all rollouts of a group must be included.
        coverages: status of the calls of each episode, from `classify_calls`.
        config: settings of the batch; None for the defaults.
        versions: policy → current version of its weights; needed if `config.max_staleness` is set.

    Raises:
        DataError: `episodes` and `coverages` do not match, or a rollout occurs twice; or, with the
            credit rule `family`, a rollout forks a fork.
        ConfigError: `max_staleness` is set and the version of a policy is missing; a coverage was
            made for another credit rule; a signal's function or the function for state keys failed.
    """
    config = config or BatchConfig()
    _check(episodes, coverages, config)
    counters: Counter[str] = Counter(rollouts=len(episodes))
    members, checked = [], list(coverages)
    for place, (episode, coverage) in enumerate(zip(episodes, coverages, strict=True)):
        refusal = _refusal(episode, coverage, config, versions)
        counters[refusal or "scored"] += 1
        if refusal == "stale":
            checked[place] = coverage.reject({c.key: Rejection.STALE for c in coverage.trained})
        elif refusal is None:
            member, rejected = _member(episode, coverage, config)
            members.append(member)
            checked[place] = coverage.reject(rejected)
    if baseline_of(config.credit) == "family":
        members = _families(members)
        counters["families"] = len(members)
    return BatchBuilder(config, episodes, checked, members, counters)


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """The scored rollouts of a step, with the credit of each call; `finish` makes the batch.

    If `config` needs a critic, let it compute a value for each call in `rows()`. Pass these
    values to `finish`.
    """

    config: BatchConfig
    episodes: Sequence[Episode]
    coverages: Sequence[Coverage]
    members: Sequence[_Member]
    counters: Mapping[str, int]

    def rows(self) -> list[Row]:
        """Return the rows of all calls that can be trained, as input for a critic.

        They include calls whose advantage will be zero.
        """
        return [row for member in self.members for row in build_rows(member.transitions).rows]

    def finish(
        self, values: Mapping[str, Mapping[CallKey, float]] | None = None, *, lam: float = 1.0
    ) -> Batch:
        """Compute advantages and rows, and return the batch.

        Its counters are

        - `rollouts`, the number of rollouts in the input. Each is counted in one of `scored` (R),
          `unscored`, `damaged`, `unfinished`, `not_train` and `stale`;
        - `families`, with the credit rule `family` (R): those of the `scored` rollouts and forks;
        - `groups`, and `groups:<reason>` for groups whose advantages are all zero;
        - `zero:<reason>`, the number of observations with zero advantage;
        - `zero_advantage_rollouts`, the number of rollouts whose advantages are all zero;
        - `retried`, the number of calls in failed tries, whose credit is at most the failure's;
        - `transitions` (trained calls) and `rejected:<reason>` (rejected calls);
        - `trained_tokens` and `rows`;
        - `unused_step_rewards`, the number of calls whose reward cannot be used;
        - `stray_rewards`, the number of rewards on an id of no call.

        Args:
            values: rollout id → call → the critic's value; None unless `config` needs a critic.
            lam: lambda of generalised advantage estimation.

        Raises:
            ConfigError: `config` needs a critic and `values` is None, or it needs none and `values`
                is given.
            DataError: a call that can be trained has no value; a value is not finite; or a value
                belongs to a call that is not of an agent to train.
        """
        config, members, counters = self.config, self.members, Counter(self.counters)
        if (values is None) == config.needs_critic:
            raise ConfigError(
                f"credit {config.credit.name} {'needs' if values is None else 'takes no'} values "
                "of a critic"
            )
        statistics = _statistics(members, config, counters)
        comparisons = _comparisons(members, statistics, config, values or {})
        if values is not None:
            comparisons = _generalised(members, comparisons, config, values, lam)
        explanations = _explain(members, statistics, comparisons, config)
        rows = _rows(members, explanations, config, counters)
        _count(counters, self.episodes, members, config, self.coverages)
        counters.update(transitions=len(explanations), rows=len(rows))
        counters["trained_tokens"] = sum(sum(row.mask) for row in rows)
        tokens: Counter[str] = Counter()
        for t in (t for member in members for t in member.transitions):
            tokens[t.policy] += t.tokens
        air, overlong = config.air, config.overlong
        penalties = [member.penalties for member in members]
        return Batch(
            rows=rows,
            rollouts=tuple(member.episode.rollout_id for member in members),
            explanations=explanations,
            coverages=tuple(self.coverages),
            counters=dict(counters),
            air={} if air is None else shaping_metrics([member.shaping for member in members]),
            overlong={} if overlong is None else overlong_metrics(overlong, penalties),
            usable_tokens=dict(tokens),
        )


def split_minibatches(batch: Batch, k: int, seed: int = 0) -> list[Batch]:
    """Split a batch at random into `k` minibatches of whole rollouts.

    The weights of a minibatch are divided by its own number of scored rollouts. Every scored
    rollout, with or without rows, is in exactly one minibatch. The minibatches have equal numbers
    of rollouts, or differ by one. The same holds for rollouts with rows. A batch of fewer than `k`
    rollouts has one minibatch per rollout.

    Raises:
        ConfigError: `k` is not positive.
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


def _part(batch: Batch, rollout_ids: set[str]) -> Batch:
    rollouts = tuple(rollout for rollout in batch.rollouts if rollout in rollout_ids)
    # weights contain the batch's 1/R, but a part is an optimiser step with its own R
    factor = batch.size / len(rollouts)
    rows = [
        replace(row, weights=[weight * factor for weight in row.weights])
        for row in batch.rows
        if row.rollout_id in rollout_ids
    ]
    explanations = {
        key: msgspec.structs.replace(why, token_weight=why.token_weight * factor)
        for key, why in batch.explanations.items()
        if why.rollout_id in rollout_ids
    }
    return Batch(rows=rows, rollouts=rollouts, explanations=explanations)


# --- rollouts that count ----------------------------------------------------------------------


def _check(episodes: Sequence[Episode], coverages: Sequence[Coverage], config: BatchConfig) -> None:
    if [e.attempt_id for e in episodes] != [c.attempt_id for c in coverages]:
        raise DataError("episodes and coverages do not belong together: give one per episode")
    twice = [r for r, n in Counter(e.rollout_id for e in episodes).items() if n > 1]
    if twice:
        raise DataError(f"rollout {twice[0]} occurs twice: a rollout is trained by one attempt")
    step_rewards = config.credit.step_rewards
    if any(coverage.step_rewards != step_rewards for coverage in coverages):
        raise ConfigError(
            f"credit {config.credit.name} needs coverages of "
            f"classify_calls(…, step_rewards={step_rewards})"
        )


def _refusal(
    episode: Episode, coverage: Coverage, config: BatchConfig, versions: Mapping[str, int] | None
) -> str | None:
    """Return why a rollout is left out of the statistics; None if it counts.

    The reason is the name of a counter, such as `unfinished`.

    Raises:
        ConfigError: `max_staleness` is set and the version of a policy is missing.
    """
    if episode.mode is not Mode.TRAIN:
        return "not_train"
    if not episode.finished:
        return "unfinished"
    if episode.capture_errors:
        return "damaged"
    if not episode.scored(config.credit.step_rewards):
        return "unscored"
    return "stale" if _is_stale(coverage, config.max_staleness, versions) else None


def _is_stale(
    coverage: Coverage, max_staleness: int | None, versions: Mapping[str, int] | None
) -> bool:
    """Return whether any trained token was sampled by weights that are too old.

    Args:
        coverage: status of the rollout's calls.
        max_staleness: maximum number of versions behind the current one; None for no limit.
        versions: policy → current version; None if unknown.

    Raises:
        ConfigError: `max_staleness` is set and the version of a policy is missing.
    """
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
    """A rollout that counts in the statistics, with the credits of its calls."""

    episode: Episode
    coverage: Coverage
    transitions: list[Transition]
    """The calls that can be trained, with their credit."""
    credits: dict[CallKey, float]
    """Credit of every call of an agent to train, whether or not the call can be trained."""
    units: tuple[str, ...]
    """Agent path per number that the rollout adds to the statistics; one empty text with unit
    `rollout`.
    """
    value: float
    """Return (total reward) of the rollout."""
    shaping: Shaping
    penalties: Mapping[CallKey, float]
    """Length penalties of selected calls, at most 0."""
    failed: Mapping[CallKey, float]
    """Call in a failed try (`Episode.retried`) → number that stands for the rollout's return."""
    behind: Mapping[TransitionKey, baselines.Comparison] = {}
    """Calls behind a fork → what they are compared with; empty unless it is a family of leaves."""
    leaves: int = 1


def _member(
    episode: Episode, coverage: Coverage, config: BatchConfig
) -> tuple[_Member, dict[CallKey, Rejection]]:
    """Compute the credits of a rollout's calls.

    Returns:
        The rollout with its credits; and for each call that cannot be trained, the reason.
    """
    rule, air = config.credit, config.air
    shaping = Shaping() if air is None else shape(air, rule, episode, coverage)
    penalties = {} if config.overlong is None else overlong_penalties(config.overlong, coverage)
    credits = {
        key: credit + shaping.credits.get(key, 0.0) + penalties.get(key, 0.0)
        for key, credit in rule(episode, coverage).items()
    }
    value = return_of(episode, coverage, shaping.total)
    failed = failed_tries(episode, coverage, value)
    credits |= {key: min(credits[key], episode.failure_reward or 0.0) for key in failed}
    usable, rejected = usable_transitions(trained_transitions(episode, coverage), config.max_length)
    agents = tuple(dict.fromkeys(call.agent_path for call in coverage.turns.calls))
    member = _Member(
        episode,
        coverage,
        usable,
        credits,
        agents if config.unit == "agent" else ("",),
        value,
        shaping,
        penalties,
        failed,
    )
    return member, {(call_id, choice): why for (_, call_id, choice), why in rejected.items()}


def _families(rollouts: Sequence[_Member]) -> list[_Member]:
    """Return one member for each family of rollouts (`lightspan.lightning.families`).

    Raises:
        DataError: a rollout forks a fork.
    """
    families: dict[str, list[_Member]] = defaultdict(list)
    for rollout in sorted(rollouts, key=lambda each: each.episode.fork is not None):
        fork = rollout.episode.fork
        families[fork.rollout_id if fork else rollout.episode.rollout_id].append(rollout)
    if nested := families.keys() & {r.episode.rollout_id for r in rollouts if r.episode.fork}:
        raise DataError(f"rollout {min(nested)} is a fork: fork the rollout that it repeats")
    return [_family(leaves) if len(leaves) > 1 else leaves[0] for leaves in families.values()]


def _family(leaves: Sequence[_Member]) -> _Member:
    """Return a family with the calls of all leaves, and the mean of their returns.

    The calls have the rollout id of the trunk, or of the first fork if the trunk is unscored.
    """
    trunk, mean = leaves[0], fmean(leaf.value for leaf in leaves)
    rejected = [each for leaf in leaves for each in leaf.coverage.rejected]
    before = {each.call.call_id for each in rejected if each.rejection is Rejection.REPLAYED}
    failed = {key: value for leaf in leaves for key, value in leaf.failed.items()}
    credits = {key: credit for leaf in leaves for key, credit in leaf.credits.items()}
    credits |= {key: mean for key in credits if key[0] in before and key not in failed}
    behind, transitions = dict[TransitionKey, baselines.Comparison](), list[Transition]()
    statistics = rloo([leaf.value for leaf in leaves], [*failed.values()])
    for leaf, s in zip(leaves, statistics, strict=True):
        one = baselines.Comparison(s.baseline, s.scale, s.size - 1, "in its family", s.zero_reason)
        for t in leaf.transitions:
            transitions.append(msgspec.structs.replace(t, rollout_id=trunk.episode.rollout_id))
            behind |= {} if t.record.call_id in before else {t.key: one}
    changed = trunk._replace(transitions=transitions, credits=credits, value=mean, failed=failed)
    return changed._replace(behind=behind, leaves=len(leaves))


# --- statistics, weights, rows ----------------------------------------------------------------


_Statistics = Mapping[tuple[str, str], BaselineScale]
"""(rollout id, unit) → baseline and scale of that number of the statistics."""


def _statistics(
    members: Sequence[_Member], config: BatchConfig, counters: Counter[str]
) -> _Statistics:
    observations = []
    for member in members:
        own, calls = member.coverage.turns.calls, member.failed
        paths = {call.agent_path: calls[call.key] for call in own if call.key in calls}
        failed = {_unit(path, config): value for path, value in paths.items()}
        key = member.episode.rollout_id, member.episode.group_id, member.value
        observations += [Observation(*key, unit, failed.get(unit)) for unit in member.units]
    rule = mixture_statistics if config.mixture else normalise
    statistics = rule(config.estimator, observations)
    counters.update(f"zero:{each.zero_reason}" for each in statistics if each.zero_reason)
    keys = [(observation.rollout_id, observation.agent) for observation in observations]
    return dict(zip(keys, statistics, strict=True))


def _comparisons(
    members: Sequence[_Member],
    statistics: _Statistics,
    config: BatchConfig,
    values: Mapping[str, Mapping[CallKey, float]],
) -> dict[TransitionKey, baselines.Comparison]:
    """Return the baseline and scale of each call, by the credit rule or the mixture.

    The keys are (attempt id, call id, choice).

    Args:
        members: the rollouts that count.
        statistics: baselines and scales of their returns.
        config: settings of the batch.
        values: rollout id → call → the critic's value; empty without a critic.
    """
    has_potential = config.air is not None and config.air.mode == "potential"
    state_key = getattr(config.credit, "key", observation if config.mixture else None)
    keys, calls = [], []
    for member in members:
        episode = member.episode
        group = "" if config.estimator in BATCH_ESTIMATORS else episode.group_id
        for call, turn in member.coverage.turns:
            if call.key not in member.credits:
                continue
            unit = _unit(call.agent_path, config)
            state = state_of(call, episode.task_id, turn) if state_key else None
            keys.append((episode.attempt_id, *call.key))
            calls.append(
                baselines.CallCredit(
                    rollout_id=episode.rollout_id,
                    population=(group, unit),
                    agent_path=call.agent_path,
                    turn=turn,
                    credit=member.credits[call.key],
                    shaping=member.shaping.credits.get(call.key, 0.0) if has_potential else 0.0,
                    penalty=member.penalties.get(call.key, 0.0),
                    value=member.failed.get(call.key, member.value),
                    statistics=statistics[episode.rollout_id, unit],
                    key=key_of(state_key, state) if state_key and state else None,
                    expected=values.get(episode.rollout_id, {}).get(call.key),
                )
            )
    comparisons = dict(zip(keys, _compare(calls, config), strict=True))
    return comparisons | {key: one for member in members for key, one in member.behind.items()}


def _unit(agent_path: str, config: BatchConfig) -> str:
    return agent_path if config.unit == "agent" else ""


def _generalised(
    members: Sequence[_Member],
    comparisons: Mapping[TransitionKey, baselines.Comparison],
    config: BatchConfig,
    values: Mapping[str, Mapping[CallKey, float]],
    lam: float,
) -> dict[TransitionKey, baselines.Comparison]:
    """Return the comparisons of calls with a value, each with a generalised advantage.

    A baseline becomes the call's credit minus its generalised advantage.

    Args:
        members: the rollouts that count.
        comparisons: (attempt id, call id, choice) → comparison, whose baseline is what was expected
            of the call.
        config: settings of the batch.
        values: rollout id → call → the critic's value.
        lam: lambda of generalised advantage estimation.

    Raises:
        DataError: a call that can be trained has no value; a value is not finite; or a value
            belongs to a call that is not of an agent to train.
    """
    gamma = getattr(config.credit, "gamma", 1.0)
    results = {}
    for member in members:
        attempt_id, to_go = member.episode.attempt_id, member.credits
        expected = {
            key: comparisons[attempt_id, *key].baseline if key in to_go else value
            for key, value in values.get(member.episode.rollout_id, {}).items()
        }
        advantages = gae(member.coverage.turns, to_go, expected, gamma=gamma, lam=lam)
        for key, advantage in advantages.items():
            baseline = expected[key] if lam == 1 else to_go[key] - advantage
            results[attempt_id, *key] = comparisons[attempt_id, *key]._replace(baseline=baseline)
    missing = [t.key for member in members for t in member.transitions if t.key not in results]
    if missing:
        raise DataError(f"values of a critic: call {missing[0]} has none, and each needs one")
    return results


def _compare(
    calls: Sequence[baselines.CallCredit], config: BatchConfig
) -> list[baselines.Comparison]:
    rule, estimator = config.credit, config.estimator
    if config.mixture is not None:
        return config.mixture.compare(calls, rule, estimator)
    match baseline_of(rule):
        case "rollout" | "family":
            return baselines.by_rollout(calls, estimator)
        case "anchor":
            prior = getattr(rule, "prior", baselines.DEFAULT_PRIOR)
            return baselines.by_state(calls, estimator, prior)
        case "critic":
            return baselines.by_critic(calls)
        case "at_grpo":
            return baselines.at_grpo(calls)
        case "gigpo":
            return baselines.gigpo(calls, estimator, getattr(rule, "omega", 1.0))
        case _:
            return baselines.by_turn(calls, estimator)


def _explain(
    members: Sequence[_Member],
    statistics: _Statistics,
    comparisons: Mapping[TransitionKey, baselines.Comparison],
    config: BatchConfig,
) -> dict[TransitionKey, Explanation]:
    weights = _token_weights(members, config)
    explanations = {}
    for member in members:
        masses: dict[str, list[float]] = defaultdict(list)
        for t in member.transitions:
            masses[t.policy].append(weights[t.key] * t.tokens)
        totals = {policy: math.fsum(parts) for policy, parts in masses.items()}
        for t in member.transitions:
            unit = _unit(t.agent_path, config)
            explanations[t.key] = Explanation(
                rollout_id=t.rollout_id,
                group_id=t.group_id,
                agent_path=t.agent_path,
                estimator=config.estimator,
                unit=config.unit,
                credit_rule=config.credit.name
                + (", retried" if t.call_key in member.failed else ""),
                weighting=config.weight,
                credit=member.credits[t.call_key],
                shaping=None if config.air is None else member.shaping.credits[t.call_key],
                penalty=None if config.overlong is None else member.penalties[t.call_key],
                value=member.value,
                size=statistics[t.rollout_id, unit].size,
                turn=t.turn,
                tokens=t.tokens,
                token_weight=weights[t.key],
                share=weights[t.key] * t.tokens / totals[t.policy],
                **comparisons[t.key]._asdict(),
            )
    return explanations


def _token_weights(members: Sequence[_Member], config: BatchConfig) -> dict[TransitionKey, float]:
    """Return for each call the weight in the loss that each of its tokens has.

    The keys are (attempt id, call id, choice).
    """
    rollouts = len(members)
    calls = [(t, 1 / m.leaves if t.key in m.behind else 1) for m in members for t in m.transitions]
    of_policy: dict[str, float] = defaultdict(float)
    of_rollout: dict[tuple[str, str], float] = defaultdict(float)
    for t, share in calls:
        of_policy[t.policy] += share * t.tokens
        of_rollout[t.rollout_id, t.policy] += share * t.tokens

    def divisor(t: Transition) -> float:
        if config.weight == "rollout":
            return rollouts * of_rollout[t.rollout_id, t.policy]
        if config.weight == "transition":
            return rollouts * t.tokens
        constant = config.token_constant
        if isinstance(constant, Mapping):
            constant = constant.get(t.policy)
        return of_policy[t.policy] if constant is None else rollouts * constant

    return {t.key: share / divisor(t) for t, share in calls}


def _rows(
    members: Sequence[_Member],
    explanations: Mapping[TransitionKey, Explanation],
    config: BatchConfig,
    counters: Counter[str],
) -> list[Row]:
    rows = []
    for member in members:
        whys = [explanations[t.key] for t in member.transitions]
        advantages = [why.advantage for why in whys]
        # all rows of a rollout or none, else its weights would not sum to its share
        if whys and not any(advantages):
            counters["zero_advantage_rollouts"] += 1
            if not (config.keep_zero_advantages or config.needs_critic):  # critics fit all
                continue
        rows += build_rows(
            member.transitions,
            advantages=advantages,
            token_weights=[why.token_weight for why in whys],
            value_targets=[why.credit for why in whys] if config.needs_critic else None,
        ).rows
    return rows


def _count(
    counters: Counter[str],
    episodes: Sequence[Episode],
    members: Sequence[_Member],
    config: BatchConfig,
    coverages: Sequence[Coverage],
) -> None:
    of_group: dict[str, list[float | None]] = {episode.group_id: [] for episode in episodes}
    failed: dict[str, list[float]] = defaultdict(list)
    for member in members:
        of_group[member.episode.group_id].append(member.value)
        failed[member.episode.group_id] += member.failed.values()
    counters.update("retried" for member in members for _ in member.failed)
    counters["groups"] = len(of_group)
    reasons = Counter(groups_without_variance(of_group, failed).values())
    if equal_returns_teach(config.credit):
        del reasons[ZeroReason.IDENTICAL]
    counters.update({f"groups:{why}": count for why, count in reasons.items()})
    for coverage in coverages:
        counters.update(f"rejected:{entry.rejection}" for entry in coverage.rejected)
    unused = sum(
        unused_step_rewards(episode, coverage, config.credit)
        for episode, coverage in zip(episodes, coverages, strict=True)
    )
    if unused:
        counters["unused_step_rewards"] = unused
    counters.update("stray_rewards" for e in episodes for _ in range(e.stray_rewards))

"""LightningRL (arXiv 2508.03680): any agent app, trained by per-call transitions.

`plan` says which tasks to run, `collect` reads what came back, `build` turns it into the batch of
one optimiser step. `run_step` strings them together for our trainer; a foreign trainer may call
them one by one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from lightspan.algorithms.async_rollouts import check_overlap, next_episodes
from lightspan.algorithms.critic_warmup import CriticWarmup
from lightspan.algorithms.grammar_check import without_mismatches
from lightspan.algorithms.learning_rate import Rate, choose_rate
from lightspan.algorithms.metrics import (
    alarms,
    approximate_kl,
    batch_metrics,
    merge_updates,
    rollout_metrics,
    saw_nothing,
    why_nothing,
)
from lightspan.algorithms.protocol import (
    Algorithm,
    Metrics,
    Policy,
    PolicySpec,
    TrainerContext,
    local_model,
)
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.lightning.advantages import (
    OF_THE_BATCH,
    Estimator,
    Unit,
    check_estimator,
    groups_without_variance,
)
from lightspan.lightning.air import AIR, bonuses
from lightspan.lightning.batch import (
    Batch,
    BatchBuilder,
    BatchConfig,
    Weight,
    draft_batch,
    split_minibatches,
)
from lightspan.lightning.credit import CREDITS, Credit, RewardToGo, parse_credit
from lightspan.lightning.episode import Episode
from lightspan.lightning.gae import values_by_call
from lightspan.lightning.length_penalty import Overlong
from lightspan.lightning.returns import group_rewards
from lightspan.lightning.rollout_checks import check_computed, check_scored
from lightspan.lightning.rows import Row
from lightspan.lightning.selection import Coverage, Frozen, Rejection, Selection, classify_calls
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import (
    Critic,
    LearnerCapabilities,
    LoRA,
    Optimizer,
    PolicyLoss,
    check_lora,
)
from lightspan.schema.records import Json, Mode
from lightspan.schema.routing import Routing, agent_name
from lightspan.schema.token_records import Sampling
from lightspan.schema.validation import MAX_SEED, check_kind, check_number, check_whole, is_number

DEFAULT_POLICY = "policy"
PROBE_ROWS: Final = 4
PROBE_SHARE: Final = 16
"""Rows that are scored before and after a step's updates: one of so many, and a few at least."""
_LEAST: Final = {
    "group_size": 1,
    "tasks_per_step": 1,
    "minibatches": 1,
    "resample": 0,
    "overlap": 0,
}
"""Whole numbers, and the least that each may be."""
_MIN_IF_GIVEN: Final = {"max_staleness": 0, "max_tokens": 1, "max_length": 2}
"""The same of those that may be None; a call has at least a token of prompt and one of answer."""

_LATER_OF_LOSS: Final = {"form": "clip", "importance_level": "token"}
"""Parts of a setting that runs of before did not have → their value then, which `config` leaves
out: such a run can go on."""

CreditName = Literal["terminal", "discounted", "anchor", "critic", "at_grpo", "gigpo"]
Optimize = str | Sequence[str] | Mapping[str, str | Policy]


@dataclass(kw_only=True, eq=False, frozen=True)
class LightningSettings:
    """The settings of `LightningRL`, which describes them: checked, and filled in if left out."""

    model: str | Path = field(kw_only=False)
    optimize: Optimize = "*"
    frozen: Frozen = None
    estimator: Estimator = "grpo"
    unit: Unit = "rollout"
    credit: CreditName | Credit | None = None
    gamma: float | None = None
    air: AIR | bool | None = None
    overlong: Overlong | None = None
    critic: Critic | None = None
    weight: Weight | None = None
    token_constant: float | None = None
    group_size: int = 8
    tasks_per_step: int = 16
    minibatches: int = 1
    resample: int = 0
    learning_rate: float | None = None
    temperature: float = 1.0
    max_tokens: int | None = None
    max_length: int | None = None
    failure_reward: float | None = None
    timeout_s: float | None = 600.0
    max_staleness: int | None = None
    overlap: int = 0
    lora: LoRA | None = None
    loss: PolicyLoss | None = None
    optimizer: Optimizer | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check()
        air = _air(self.air)
        is_ppo = self.estimator == "ppo"
        plain: CreditName = "critic" if is_ppo else "terminal" if air is None else "discounted"
        rate = self.learning_rate
        filled_in = {
            "model": local_model(self.model),
            "air": air,
            "credit": _credit(self.credit or plain, self.gamma),
            "critic": self.critic or (Critic() if is_ppo else None),
            "weight": self.weight or ("token" if self.estimator == "dr_grpo" else "rollout"),
            "loss": self.loss or PolicyLoss(),
            # with neither it is chosen later: the model is then asked for its size
            "optimizer": self.optimizer
            or (None if rate is None else Optimizer(learning_rate=rate)),
        }
        for name, value in filled_in.items():
            object.__setattr__(self, name, value)

    def _check(self) -> None:
        for name, low in _LEAST.items():
            check_whole(name, getattr(self, name), low)
        for name, low in _MIN_IF_GIVEN.items():
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low)
        for name in ("learning_rate", "timeout_s", "token_constant"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        check_whole("seed", self.seed, 0, MAX_SEED)
        check_estimator(self.estimator)
        if self.group_size == 1 and self.estimator not in OF_THE_BATCH:
            raise ConfigError(
                f"estimator={self.estimator!r} compares the rollouts of a task: group_size=1 "
                'teaches nothing; use 2 or more, or estimator="reinforce++" or "ppo"'
            )
        check_kind("critic", self.critic, Critic)
        if self.critic is not None and self.estimator != "ppo":
            raise ConfigError(f'critic= applies only to estimator="ppo", not {self.estimator!r}')
        check_kind("overlong", self.overlong, Overlong)
        free = math.inf if self.overlong is None else self.overlong.free
        if self.overlong is not None and self.max_tokens is not None and free >= self.max_tokens:
            raise ConfigError(
                f"overlong= takes nothing from answers of up to {free} tokens, and "
                f"max_tokens={self.max_tokens} allows no longer ones: lower Overlong.max_tokens"
            )
        if not is_number(self.temperature) or self.temperature <= 0:
            raise ConfigError(f"temperature={self.temperature!r}: training needs a positive one")
        if self.failure_reward is not None and not is_number(self.failure_reward):
            raise ConfigError(f"failure_reward={self.failure_reward!r} must be finite, or None")
        if self.resample and (self.group_size == 1 or self.estimator in OF_THE_BATCH):
            raise ConfigError(
                f"resample={self.resample} replaces groups whose returns are all the same, but "
                f"estimator={self.estimator!r} with group_size={self.group_size} learns from those "
                "too: use resample=0"
            )
        self._check_overlap()
        check_lora(self.lora)
        check_kind("loss", self.loss, PolicyLoss)
        check_kind("optimizer", self.optimizer, Optimizer)
        if self.optimizer is not None and self.learning_rate is not None:
            raise ConfigError("give learning_rate or optimizer, not both")

    def _check_overlap(self) -> None:
        if self.max_staleness is not None and self.max_staleness < self.overlap:
            raise ConfigError(
                f"overlap={self.overlap} trains groups that are up to as many versions old, and "
                f"max_staleness={self.max_staleness} rejects those: give at least "
                f"max_staleness={self.overlap}, or leave it out"
            )
        if self.overlap and self.resample:
            raise ConfigError(
                f"resample={self.resample} waits for all rollouts of a step to see which groups "
                f"vary, and overlap={self.overlap} does not: use one of them"
            )


# What a wrong or missing setting is told: the class that people call.
LightningSettings.__init__.__qualname__ = "LightningRL.__init__"


class LightningRL(LightningSettings, Algorithm):
    """Reinforcement learning for the agents of an app.

    Args:
        model: starting weights: a folder, or a name on the Hugging Face hub.
        optimize: names or globs on agent paths, or a mapping of them to policies.
        frozen: what the other agents' calls get: None (where the app points), `"base"` (the
            starting weights), `"shared"` (the moving weights), an `LLM`, or a mapping.
        estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce++`, `reinforce++_baseline`, or `ppo`, which
            means `credit="critic"`.
        unit: whose statistics normalise rewards: `rollout` or `agent`.
        credit: `"terminal"`, `"discounted"`, `"anchor"`, `"critic"`, `"at_grpo"`, `"gigpo"`, or a
            rule of `lightspan.lightning.credit`; None for terminal, with `air` for discounted.
        gamma: discount per turn, of every rule by name but terminal; None for 1.
        air: automatic intermediate rewards (`lightspan.AIR`): from the signals of tools and the
            like, by potentials, which do not change what the best policy is. True for `AIR()`.
        overlong: pays calls less whose answers are close to too long (`lightspan.Overlong`).
        critic: of `estimator="ppo"` (`lightspan.Critic`); None for its defaults.
        weight: of a rollout's tokens in the loss: `rollout`, `transition` or `token`; None for
            rollout, with `dr_grpo` for token.
        token_constant: what `weight="token"` divides by, beside the number of rollouts, whatever
            their length (Dr. GRPO: the longest answer); None for their mean trained tokens, with
            `dr_grpo` those of the run's first step, of each policy.
        group_size: rollouts per task.
        tasks_per_step: tasks per iteration.
        minibatches: optimiser steps per iteration.
        resample: rounds of further tasks at most, until as many groups vary as there are tasks in
            a step (dynamic sampling, DAPO, arXiv 2503.14476); 0 for none. A further task's group
            takes the place of one whose returns are all the same, which then is in no statistics,
            weights or update of the step. Rollouts of both are counted in `rollouts`.
        learning_rate: None chooses one from the model's size and LoRA, and says so
            (`lightspan.algorithms.learning_rate`).
        temperature: what training samples at, whatever the app asks.
        max_tokens: of one answer at most, whatever the app asks; None for the app's.
        max_length: longer calls are rejected; None for the model's context.
        failure_reward: of rollouts whose app failed; None leaves them unscored.
        timeout_s: of one rollout.
        max_staleness: versions that a rollout's weights may lag behind; None for any.
        overlap: rollouts go on while weights update: a group is trained when at most so many
            versions have been published since it began; 0 waits for all rollouts of a step.
            Advantages are of whole groups, and log-probabilities those that each token was sampled
            with; `PolicyLoss(importance_cap=)` corrects for their age. See docs/overlap.md.
        lora: adapters instead of full weights.
        loss: its form (PPO's clip, GSPO, CISPO), clipping, KL, entropy, importance weights.
        optimizer: None for AdamW at `learning_rate`.
        seed: of everything random in the algorithm.

    Raises:
        ConfigError: an option that does not exist, is outside its range or contradicts another.
    """

    name = "lightning_rl"
    # what these are once `LightningSettings` has filled them in
    model: str
    credit: Credit
    air: AIR | None
    weight: Weight
    loss: PolicyLoss
    if TYPE_CHECKING:
        optimizer: Optimizer
    else:

        @cached_property
        def optimizer(self) -> Optimizer:
            """AdamW at the rate that is chosen; an optimiser or a rate that is given stands in its
            place."""
            return Optimizer(learning_rate=self._chosen_rate.value)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._chooses_rate = vars(self)["optimizer"] is None
        if self._chooses_rate:
            del vars(self)["optimizer"]  # the property above stands in its place
        self._batch_config = BatchConfig(
            estimator=self.estimator,
            unit=self.unit,
            credit=self.credit,
            air=self.air,
            overlong=self.overlong,
            weight=self.weight,
            token_constant=self.token_constant,
            max_length=self.max_length,
            max_staleness=self.max_staleness,
            # KL and entropy teach where the reward does not
            keep_zero_advantages=bool(self.loss.kl or self.loss.entropy),
        )
        named = _pattern_names(self.optimize)
        selection = Selection.of(
            named,
            self.frozen,
            default_policy=_only_policy(named, self.frozen),
            sampling=Sampling(temperature=self.temperature, max_tokens=self.max_tokens),
        )
        self._routing = selection.routing
        self._specs = self._policy_specs(selection.policies)
        self._supported: frozenset[Rejection] = frozenset()
        self._air_was_idle = False
        self._overlap_metrics: Metrics = {}
        self._was_scored = False
        self._was_computed = False
        self._unscored_tasks: set[str] = set()
        self._expectations = CriticWarmup()
        self.last_batch: Batch | None = None
        """What the latest step learned from, for `inspect` and tests."""

    # --- what the trainer asks ------------------------------------------------------------
    @property
    def base_model(self) -> str:
        return self.model

    @property
    def batch_config(self) -> BatchConfig:
        """Estimator, unit, credit and weight."""
        return self._batch_config

    def check(self, engine: EngineCapabilities, learner: LearnerCapabilities) -> None:
        asked = {
            'a critic (estimator="ppo")': self.critic is not None and not learner.values,
            f"{len(self._specs)} policies": len(self._specs) > (learner.policies or math.inf),
        }
        adapters = [spec.lora for spec in self._specs.values()]
        refused = learner.refusals(self.loss)
        refused += learner.unsupported(self.optimizer, adapters)
        refused += [name for name, is_refused in asked.items() if is_refused]
        if refused:
            raise UnsupportedError(
                f"the learner does not support {', '.join(refused)}: leave it out, or use the "
                "embedded learner"
            )
        check_overlap(self.overlap, engine, adapters)
        if not engine.exact_tokens:
            raise UnsupportedError(
                "the engine does not give token ids and log-probabilities as it sampled them, "
                "which policy gradients need: use another engine"
            )
        if not engine.samples_at(self.temperature):
            least, highest = engine.temperatures
            raise UnsupportedError(
                f"LightningRL(temperature={self.temperature:g}): the engine samples at "
                f"temperatures from {least:g} to {highest:g}: take one of these, or another engine"
            )
        self._supported = _supported_by_both(engine, learner)

    def policies(self) -> dict[str, PolicySpec]:
        return dict(self._specs)

    def routing(self) -> Routing:
        return self._routing

    def describe_choices(self) -> list[str]:
        return [str(self._chosen_rate)] if self._chooses_rate else []

    def state(self) -> dict[str, Json]:
        state: dict[str, Json] = {}
        if self.critic is not None:
            state["critic"] = self._expectations.as_json()
        if self._keeps_constants():
            state["token_constants"] = dict(self._kept_constants())
        return state

    def load_state(self, state: dict[str, Json]) -> None:
        self._was_scored = True  # what it learned so far, it learned from rewards
        self._expectations = CriticWarmup.of(state.get("critic"))
        constants = state.get("token_constants")
        if self._keeps_constants() and isinstance(constants, Mapping):
            self._batch_config = replace(self._batch_config, token_constant=dict(constants))

    def config(self) -> dict[str, Json]:
        plain = {
            setting.name: msgspec.to_builtins(getattr(self, setting.name))
            for setting in fields(LightningSettings)
            if setting.name not in ("credit", "gamma", "air", "learning_rate")
        }
        rules = {
            "credit": self.credit.name,
            "step_rewards": self.credit.step_rewards,
            "air": None if self.air is None else self.air.config(),
        }
        plain["loss"] = _without(msgspec.to_builtins(self.loss), _LATER_OF_LOSS)
        return {"algorithm": self.name, **plain, **rules}

    # --- the three parts ------------------------------------------------------------------
    def plan(self, world: TrainerContext, missing: int | None = None) -> list[Json]:
        """The tasks of this iteration, or as many more as are missing."""
        return world.next_tasks(self.tasks_per_step if missing is None else missing)

    async def collect(self, world: TrainerContext) -> list[Episode]:
        """Run the planned tasks; with `resample`, further ones until enough groups vary. All
        episodes, those of replaced groups too, which `build` leaves out. With `overlap` those of
        groups that were begun before, while others begin."""
        if self.overlap:
            episodes, self._overlap_metrics = await next_episodes(
                world, self.overlap, self.tasks_per_step, self.group_size
            )
            return episodes
        episodes = await world.rollouts(self.plan(world), self.group_size)
        missing = self._missing_groups(episodes)
        for _ in range(self.resample):
            if not missing:
                return episodes
            tasks = self.plan(world, missing)
            episodes += await world.rollouts(tasks, self.group_size)
            missing = self._missing_groups(episodes)
        if missing and self.resample:
            world.note(
                f"after {self.resample} rounds of resampling {self.tasks_per_step - missing} of "
                f"{self.tasks_per_step} groups vary: the step learns from those"
            )
        return episodes

    def _missing_groups(self, episodes: Sequence[Episode]) -> int:
        """How many groups with variance a full step lacks."""
        rewards = self._returns(episodes)
        varying = len(rewards) - len(groups_without_variance(rewards))
        return max(0, self.tasks_per_step - varying)

    def _returns(self, episodes: Sequence[Episode]) -> dict[str, list[float | None]]:
        """By group, as the statistics will see them."""
        coverages = self.coverages(episodes)
        paid = bonuses(self.air, self.credit, episodes, coverages)
        return group_rewards(episodes, coverages, paid)

    def replaced(self, episodes: Sequence[Episode]) -> set[str]:
        """The groups without variance in whose place others were sampled, the earliest first: as
        many as are more than a step has. Those that could not be replaced stay."""
        if not self.resample:
            return set()
        rewards = self._returns(episodes)
        surplus = max(0, len(rewards) - self.tasks_per_step)
        return set(list(groups_without_variance(rewards))[:surplus])

    def build(
        self,
        episodes: Sequence[Episode],
        versions: Mapping[str, int] | None = None,
        coverages: Sequence[Coverage] | None = None,
    ) -> Batch:
        """The batch of one iteration, without the groups that were `replaced`: `draft`, finished.
        With a critic a draft has to ask it first.

        Args:
            versions: the current version of each policy; needed for `max_staleness`.
            coverages: those of `coverages`, less what the learner cannot take
                (`lightspan.algorithms.grammar_check`); None for all.
        """
        return self.draft(episodes, versions, coverages).finish()

    def draft(
        self,
        episodes: Sequence[Episode],
        versions: Mapping[str, int] | None = None,
        coverages: Sequence[Coverage] | None = None,
    ) -> BatchBuilder:
        """The batch but for what a critic says of its calls; see `build`."""
        if coverages is None:
            coverages = self.coverages(episodes)
        if replaced := self.replaced(episodes):
            kept = [episode for episode in episodes if episode.group_id not in replaced]
            attempts = {episode.attempt_id for episode in kept}
            coverages = [found for found in coverages if found.attempt_id in attempts]
            episodes = kept
        return draft_batch(episodes, coverages, self._batch_config, versions=versions)

    def coverages(
        self, episodes: Sequence[Episode], *, modes: Collection[Mode] = (Mode.TRAIN,)
    ) -> list[Coverage]:
        """What becomes of every call. Calls under top-p, top-k or a grammar are trained if the
        engine and the learner of the last `check` both declare it."""
        return [
            classify_calls(
                episode,
                self._routing,
                supported=self._supported,
                modes=modes,
                max_length=self.max_length,
                step_rewards=self.credit.step_rewards,
            )
            for episode in episodes
        ]

    # --- one iteration --------------------------------------------------------------------
    async def run_step(self, world: TrainerContext) -> Metrics:
        """Rollouts, batch, minibatch updates, publish."""
        episodes = await self.collect(world)
        if not self._was_scored:
            self._was_scored = check_scored(
                episodes, self._unscored_tasks, step_rewards=self.credit.step_rewards
            )
        coverages = await without_mismatches(world, self.coverages(episodes))
        self._was_computed = self._was_computed or check_computed(coverages)
        draft = self.draft(episodes, world.versions, coverages)
        batch = draft.finish() if self.critic is None else await self._expected(world, draft)
        self._keep_constants(batch)
        self.last_batch = batch
        self._look_at_air(world, batch)
        learned = await self._update(world, batch)
        if learned:
            await world.publish()
        counted = self._overlap_metrics if self.overlap else self._resample_metrics(episodes)
        return {**rollout_metrics(episodes), **counted, **batch_metrics(batch), **learned}

    async def _expected(self, world: TrainerContext, draft: BatchBuilder) -> Batch:
        """The batch, its calls compared with what the critic expected of them."""
        assert self.critic is not None
        rows = draft.rows()
        values = await world.learn(partial(world.learner.values, rows)) if rows else []
        return draft.finish(values_by_call(rows, values), lam=self._expectations.lam(self.critic))

    def _keeps_constants(self) -> bool:
        """Dr. GRPO divides by one constant in the whole run: where none was given, by the mean
        tokens of the step in which a policy was first trained."""
        return (
            self.estimator == "dr_grpo" and self.weight == "token" and self.token_constant is None
        )

    def _kept_constants(self) -> Mapping[str, float]:
        """By policy, so far."""
        constants = self._batch_config.token_constant
        return constants if isinstance(constants, Mapping) else {}

    def _keep_constants(self, batch: Batch) -> None:
        """Of policies without one. The batch itself was made with that mean as it is."""
        if not self._keeps_constants():
            return
        means = {policy: tokens / batch.size for policy, tokens in batch.usable_tokens.items()}
        constants = {**means, **self._kept_constants()}
        self._batch_config = replace(self._batch_config, token_constant=constants)

    def _resample_metrics(self, episodes: Sequence[Episode]) -> Metrics:
        """How many groups and rollouts were replaced; `rollouts` counts those too."""
        if not self.resample:
            return {}
        replaced = self.replaced(episodes)
        rollouts = sum(episode.group_id in replaced for episode in episodes)
        return {"resample/groups": len(replaced), "resample/rollouts": rollouts}

    def _look_at_air(self, world: TrainerContext, batch: Batch) -> None:
        """Say once that AIR does nothing."""
        if not self._air_was_idle and saw_nothing(batch):
            self._air_was_idle = True
            world.note(
                "air= saw nothing in this step: no signal found a tool call (`with "
                'lightspan.tool("name"):` or an adapter records them), so rewards are unshaped'
            )

    async def _update(self, world: TrainerContext, batch: Batch) -> Metrics:
        if not batch.rows:
            world.explain(batch.explanations)
            world.note(why_nothing(batch))
            return {}
        seed = random.Random(f"{self.seed}/{world.step}").randrange(2**31)
        parts = split_minibatches(batch, self.minibatches, seed)
        world.explain({key: why for part in parts for key, why in part.explanations.items()})
        parts = [part for part in parts if part.rows]
        # scored before the first update: what the learner itself held probable when all was sampled
        old = [await self._old_logprobs(world, part) for part in parts]
        probe = _probe([row for part in parts for row in part.rows], seed)
        before = await world.learn(partial(world.learner.score, probe))
        results = []
        for part, logprobs in zip(parts, old, strict=True):
            world.learner.capabilities.check_temperatures(part.rows)
            update = partial(world.learner.update, part.rows, self.loss, old_logprobs=logprobs)
            results.append(await world.learn(update))
        merged = merge_updates(results)
        after = await world.learn(partial(world.learner.score, probe))
        merged["approx_kl"] = approximate_kl(probe, before, after)
        for alarm in alarms(merged):
            world.note(alarm)
        if self.critic is not None:
            merged["lambda"] = self._expectations.lam(self.critic)
            merged |= self._expectations.learned(batch, merged)
        return {f"learner/{key}": value for key, value in merged.items()}

    async def _old_logprobs(self, world: TrainerContext, part: Batch) -> list[list[float]] | None:
        if self.loss.importance_cap is None:
            return None
        scores: list[list[float]] = await world.learn(partial(world.learner.score, part.rows))
        return scores

    # --- set-up ---------------------------------------------------------------------------
    @cached_property
    def _chosen_rate(self) -> Rate:
        return choose_rate(self._specs)

    def _policy_specs(self, names: Sequence[str]) -> dict[str, PolicySpec]:
        """What each policy starts from.

        Raises:
            ConfigError: two patterns describe one policy in different ways.
        """
        specs: dict[str, PolicySpec] = {}
        described = self.optimize if isinstance(self.optimize, Mapping) else {}
        for pattern, policy in described.items():
            if not isinstance(policy, Policy):
                continue
            name = _policy_name(pattern, policy)
            check_lora(policy.lora)
            spec = PolicySpec(
                model=local_model(policy.model or self.model), lora=policy.lora or self.lora
            )
            if specs.setdefault(name, spec) != spec:
                raise ConfigError(
                    f"optimize: the policy {name!r} is described twice, as {specs[name]} and {spec}"
                )
        default = PolicySpec(model=self.model, lora=self.lora)
        return {name: specs.get(name, default) for name in names}


def _probe(rows: Sequence[Row], seed: int) -> list[Row]:
    """Rows by which it is told how far an update moved the policy: two more forward passes, so
    only a few. Where rows are short calls, as many more: of some hundred tokens a single one that
    was improbable before would be most of what is told."""
    count = max(PROBE_ROWS, len(rows) // PROBE_SHARE)
    return random.Random(seed).sample(list(rows), min(count, len(rows)))


def _pattern_names(optimize: Optimize) -> str | Sequence[str] | Mapping[str, str]:
    """`optimize` with policies by name."""
    if not isinstance(optimize, Mapping):
        return optimize
    if unnamed := [pattern for pattern in optimize if not isinstance(pattern, str)]:
        raise ConfigError(f"optimize: {unnamed[0]!r} must be the name of an agent, or a pattern")
    return {pattern: _policy_name(pattern, policy) for pattern, policy in optimize.items()}


def _only_policy(optimize: str | Sequence[str] | Mapping[str, str], frozen: Frozen) -> str:
    """The policy that agents train whose policy is not named, and that `"shared"` means.

    Raises:
        ConfigError: `frozen="shared"` where there are several policies to share.
    """
    names = list(dict.fromkeys(optimize.values())) if isinstance(optimize, Mapping) else []
    shared = "shared" in (frozen.values() if isinstance(frozen, Mapping) else (frozen,))
    if shared and len(names) > 1:
        raise ConfigError(
            f'frozen="shared" does not say which of the policies {names} is shared; use "base", or '
            "train one policy"
        )
    return names[0] if names else DEFAULT_POLICY


def _policy_name(pattern: str, policy: str | Policy) -> str:
    return (policy.name or agent_name(pattern)) if isinstance(policy, Policy) else policy


def _without(config: dict[str, Json], later: Mapping[str, Json]) -> dict[str, Json]:
    """The settings, less those of `later` that have the value there."""
    return {
        name: value for name, value in config.items() if name not in later or value != later[name]
    }


def _credit(credit: str | Credit, gamma: float | None) -> Credit:
    rule = parse_credit(credit)
    if gamma is None:
        return rule
    if not isinstance(credit, str) or not isinstance(rule, RewardToGo):
        raise ConfigError(
            f"gamma={gamma!r} applies only to credit="
            f"{' or '.join(repr(name) for name in CREDITS if name != 'terminal')}"
        )
    rule_of_gamma: Credit = msgspec.structs.replace(rule, gamma=gamma)
    return rule_of_gamma


def _air(air: AIR | bool | None) -> AIR | None:
    if isinstance(air, bool):
        return AIR() if air else None
    if air is None or isinstance(air, AIR):
        return air
    raise ConfigError(f"air={air!r}: use True, or lightspan.AIR(signals=…, scale=…, mode=…)")


def _supported_by_both(
    engine: EngineCapabilities, learner: LearnerCapabilities
) -> frozenset[Rejection]:
    """What `classify_calls` need not reject: engine and learner both declare it (design law 11)."""
    declared = {
        Rejection.TRUNCATED_SAMPLING: engine.trainable_truncation and learner.trainable_truncation,
        Rejection.CONSTRAINED: engine.trainable_grammar and learner.trainable_grammar,
    }
    return frozenset(rejection for rejection, by_both in declared.items() if by_both)

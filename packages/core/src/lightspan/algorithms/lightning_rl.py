"""LightningRL (arXiv 2508.03680): train any agent app, with each model call as a training example.

`collect` runs tasks, `build` turns their episodes into the batch of one iteration. `run_step` runs
a whole iteration: rollouts, batch, update and publication.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from lightspan.algorithms import metrics
from lightspan.algorithms.adaptive_tasks import DESCRIPTION, AdaptiveOrder, GroupReturns
from lightspan.algorithms.async_rollouts import next_episodes
from lightspan.algorithms.critic_warmup import CriticWarmup, describe_critic
from lightspan.algorithms.grammar_check import reject_mismatches
from lightspan.algorithms.protocol import (
    Algorithm,
    FailureReward,
    Metrics,
    Policy,
    PolicySpec,
    TrainerContext,
    local_model,
)
from lightspan.algorithms.replay import GroupHistory, Replay
from lightspan.algorithms.task_sampler import Epochs, TaskOrder
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.lightning import advantages
from lightspan.lightning.air import AIR, bonuses
from lightspan.lightning.batch import (
    Batch,
    BatchBuilder,
    BatchConfig,
    Weight,
    prepare_batch,
    split_minibatches,
)
from lightspan.lightning.credit import (
    CREDITS,
    Credit,
    RewardToGo,
    baseline_of,
    equal_returns_teach,
    parse_credit,
)
from lightspan.lightning.episode import Episode
from lightspan.lightning.families import Forks, middle_call
from lightspan.lightning.gae import DEFAULT_LAMBDA, values_by_call
from lightspan.lightning.length_penalty import Overlong
from lightspan.lightning.mixture import MIN_TASKS, Mixture, gradient_left
from lightspan.lightning.returns import group_rewards
from lightspan.lightning.rollout_checks import check_computed, check_scored
from lightspan.lightning.rows import Row, keep_recorded, row_shares
from lightspan.lightning.selection import Coverage, Frozen, Rejection, Selection, classify_calls
from lightspan.lightning.states import qualified_name
from lightspan.lightning.transitions import TransitionKey, reject_calls
from lightspan.plugins import load_plugin
from lightspan.progress import plural
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import (
    Critic,
    LearnerCapabilities,
    LoRA,
    Optimizer,
    PolicyLoss,
    check_lora,
)
from lightspan.schema import validation
from lightspan.schema.records import Json, Mode
from lightspan.schema.routing import Routing, agent_name
from lightspan.schema.token_records import Sampling

DEFAULT_POLICY = "policy"
PROBE_ROWS: Final = 4
PROBE_SHARE: Final = 16
"""Rows of each policy that are scored before and after a step's updates: one in `PROBE_SHARE`, at
least `PROBE_ROWS`."""
_LOWEST = {"group_size": 1, "tasks_per_step": 1, "minibatches": 1, "resample": 0, "overlap": 0}
"""Integer setting → its minimum."""
_LOWEST_IF_SET: Final = {"max_staleness": 0, "max_tokens": 1, "max_length": 2}
"""Integer setting that may be None → its minimum. `max_length` is 2, because a call has at least
one token of prompt and one of answer."""

CreditName = Literal["terminal", "discounted", "anchor", "critic", "at_grpo", "gigpo", "family"]
TaskChoice = Literal["shuffled", "adaptive"]
Optimize = str | Sequence[str] | Mapping[str, str | Policy]


@dataclass(kw_only=True, eq=False, frozen=True)
class LightningSettings:
    """Settings of `LightningRL`, checked and with defaults filled in."""

    model: str | Path = field(kw_only=False)
    optimize: Optimize = "*"
    frozen: Frozen = None
    estimator: advantages.Estimator = "grpo"
    unit: advantages.Unit = "rollout"
    credit: CreditName | Credit | None = None
    gamma: float | None = None
    air: AIR | bool | None = None
    overlong: Overlong | None = None
    forks: Forks | None = None
    critic: Critic | bool | None = None
    weight: Weight | None = None
    token_constant: float | None = None
    group_size: int = 8
    tasks_per_step: int = 16
    tasks: TaskChoice = "shuffled"
    minibatches: int = 1
    target_kl: float | None = None
    resample: int = 0
    replay: Replay | None = None
    learning_rate: float | None = None
    temperature: float = 1.0
    max_tokens: int | None = None
    max_length: int | None = None
    failure_reward: FailureReward = "lowest"
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
        default: CreditName = "critic" if is_ppo else "terminal" if air is None else "discounted"
        credit = _credit(self.credit or default, self.gamma)
        rate = self.learning_rate
        defaults = {
            "model": local_model(self.model),
            "air": air,
            "credit": credit,
            "forks": self.forks or (Forks() if baseline_of(credit) == "family" else None),
            "critic": _critic(self.critic, is_ppo=is_ppo),
            "weight": self.weight or ("token" if self.estimator == "dr_grpo" else "rollout"),
            "loss": self.loss or PolicyLoss(),
            # None: chosen later, because it depends on the size of the model
            "optimizer": self.optimizer or (rate and Optimizer(learning_rate=rate)),
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        self._check_credit(credit)

    def _check_credit(self, credit: Credit) -> None:
        if self.forks is not None and (baseline_of(credit) != "family" or self.overlap):
            reason = "overlap=0, because the calls that forks repeat must be of the current weights"
            raise ConfigError(f'forks= needs credit="family", not {credit.name}, and {reason}')
        skips = {f"resample={self.resample}": self.resample, "replay=": self.replay}
        skips['tasks="adaptive"'] = self.tasks == "adaptive"
        names = [name for name, is_set in skips.items() if is_set]
        if names and (learns := self._learns_from_equal(credit)):
            is_credit = learns.startswith("credit")
            hint = "use gamma=1 (gigpo, at_grpo) or another credit, or " if is_credit else ""
            raise ConfigError(
                f"{' and '.join(names)}: groups whose returns are all the same are taken to teach "
                f"nothing, but {learns} learns from those too: {hint}leave the setting out"
            )

    def _learns_from_equal(self, credit: Credit) -> str:
        """Return the setting by which groups of equal returns have a gradient; empty if none is."""
        if self.estimator in advantages.BATCH_ESTIMATORS:
            return f"estimator={self.estimator!r}"
        if self.critic:
            return "critic="
        return f"credit={credit.name}" if equal_returns_teach(credit) else ""

    def _check(self) -> None:
        for name, low in (_LOWEST | _LOWEST_IF_SET).items():
            optional = name in _LOWEST_IF_SET
            validation.check_whole(name, getattr(self, name), low, optional=optional)
        for name in ("learning_rate", "target_kl", "timeout_s", "token_constant"):
            validation.check_number(name, getattr(self, name), above=0, optional=True)
        if self.target_kl is not None and (self.minibatches == 1 or self.replay):
            reason = "whose groups replay= would count as trained: use one of them"
            if self.minibatches == 1:
                reason = "after the first, and minibatches=1 has none: raise minibatches"
            raise ConfigError(f"target_kl={self.target_kl} skips minibatches {reason}")
        kinds = {"overlong": Overlong, "loss": PolicyLoss, "optimizer": Optimizer, "replay": Replay}
        kinds["forks"] = Forks
        for name, kind in kinds.items():
            validation.check_kind(name, getattr(self, name), kind)
        validation.check_whole("seed", self.seed, 0, validation.MAX_SEED)
        validation.check_choice("estimator", self.estimator, advantages.ESTIMATORS)
        if self.group_size == 1 and self.estimator not in advantages.BATCH_ESTIMATORS:
            raise ConfigError(
                f"estimator={self.estimator!r} compares the rollouts of a task: group_size=1 "
                'teaches nothing; use 2 or more, or estimator="reinforce++" or "ppo"'
            )
        if self.critic and self.estimator != "ppo":
            validation.check_whole("critic=: tasks_per_step", self.tasks_per_step, MIN_TASKS)
        if self.overlong and self.max_tokens and self.overlong.free >= self.max_tokens:
            raise ConfigError(
                f"overlong= penalises answers of more than {self.overlong.free} tokens, and "
                f"max_tokens={self.max_tokens} allows none: lower Overlong.max_tokens"
            )
        validation.check_number("temperature", self.temperature, above=0)
        if self.failure_reward not in (None, "lowest"):
            validation.check_number("failure_reward", self.failure_reward)
        validation.check_choice("tasks", self.tasks, get_args(TaskChoice))
        if self.replay and (self.critic or self.estimator not in ("grpo", "dr_grpo", "rloo")):
            raise ConfigError(
                f"{self.replay} trains groups with the statistics that they had, and estimator="
                f"{self.estimator!r} or critic= uses statistics of the whole batch: use "
                'estimator="grpo", "dr_grpo" or "rloo" without a critic, or leave replay= out'
            )
        check_lora(self.lora)
        if self.optimizer is not None and self.learning_rate is not None:
            raise ConfigError("give learning_rate or optimizer, not both")
        addition = "" if self.replay is None else f" with {self.replay}"
        age = self.overlap + (0 if self.replay is None else self.replay.max_age)
        if self.max_staleness is not None and self.max_staleness < age:
            raise ConfigError(
                f"overlap={self.overlap}{addition} trains groups that are up to {age} versions "
                f"old, and max_staleness={self.max_staleness} rejects those: give at least "
                f"max_staleness={age}, or leave it out"
            )
        if self.overlap and self.resample:
            raise ConfigError(
                f"resample={self.resample} waits for all rollouts of a step to see which groups "
                f"vary, and overlap={self.overlap} does not: use one of them"
            )


# errors of wrong or missing arguments name the public class
LightningSettings.__init__.__qualname__ = "LightningRL.__init__"


class LightningRL(LightningSettings, Algorithm):
    """Reinforcement learning for the agents of an app.

    Args:
        model: starting weights: a folder, or a name on the Hugging Face hub.
        optimize: names or globs on agent paths, or a mapping of them to policies.
        frozen: model for the calls of agents that are not trained. None leaves them at the endpoint
            that the app uses, `"base"` is the starting weights, and `"shared"` the trained weights.
            An `LLM`, or a mapping of agents to these values, is allowed too.
        estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce++`, `reinforce++_baseline`, or `ppo`, which
            implies `credit="critic"`.
        unit: rewards are normalised by statistics over rollouts (`rollout`) or agents (`agent`).
        credit: `"terminal"`, `"discounted"`, `"anchor"`, `"critic"`, `"at_grpo"`, `"gigpo"`,
            `"family"`, or a rule of `lightspan.lightning.credit`. None for terminal or, if `air` is
            set, discounted.
        gamma: discount per turn, for each rule that is given by its name, except terminal and
            family; None for 1 or, with `gigpo`, .95.
        air: automatic intermediate rewards (`lightspan.AIR`) from signals such as the success of
            tools. They are potentials, so they do not change which policy is best. True for
            `AIR()`.
        overlong: penalty on calls whose answers are close to too long (`lightspan.Overlong`).
        forks: how often and where `credit="family"` forks each rollout (`lightspan.Forks`). None
            for `Forks()` with this credit, and for no forks with all others.
        critic: True or `lightspan.Critic(…)` for a critic (`ppo` always has one). With `grpo`,
            `rloo` and `dr_grpo`, a call is compared with a mixture of its group and the critic,
            fitted to earlier steps (`lightspan.lightning.mixture`). It is unbiased, and has
            less noise in some apps; `grpo` then divides by the batch's standard deviation, not the
            group's. None for no critic.
        weight: weight of a rollout's tokens in the loss: `rollout`, `transition` or `token`; None
            for `rollout` or, with `dr_grpo`, `token`.
        token_constant: divisor of the loss with `weight="token"`, in addition to the number of
            rollouts (in Dr. GRPO: the longest answer). None for the mean of trained tokens per
            rollout in each step or, with `dr_grpo`, in each policy's first step.
        group_size: rollouts per task.
        tasks_per_step: tasks per iteration.
        tasks: order of tasks. `"shuffled"`: one shuffled epoch after another. `"adaptive"`: tasks
            are drawn whose groups are likely to change the weights, because they neither always
            succeed nor always fail; each task is still drawn at a minimum rate. See
            docs/guides/task-choice.md.
        minibatches: optimiser steps per iteration.
        target_kl: KL divergence per trained token, in nats, from the weights that an iteration
            begins with (`learner/approx_kl`). Above it the remaining minibatches of the iteration
            are skipped, and their rollouts are not trained. It is measured after each minibatch on
            a sample of the iteration's rows, by the estimator k3, and compared without a factor
            (Stable-Baselines3 and Spinning Up allow 1.5 times the setting of this name). Of several
            policies, the one that moved furthest counts. It needs several minibatches, because one
            is never skipped, and cannot be used with `replay`. None skips none.
        resample: maximum rounds of further tasks, until the returns of `tasks_per_step` groups vary
            (dynamic sampling, DAPO, arXiv 2503.14476); 0 for none. The group of a further task
            replaces a group whose returns are all the same. A replaced group has no part in the
            statistics, weights and update of the step; the metric `rollouts` still counts its
            rollouts. Like `replay` and adaptive `tasks`, it is refused with the credits `family`
            and, if their gamma is below 1, `gigpo` and `at_grpo`, because equal returns teach there
            too.
        replay: trains groups in which successes are rare again in later steps
            (`lightspan.Replay`), with the log-probabilities of the weights that sampled them. None
            trains each group once.
        learning_rate: None chooses one from the model's size and LoRA
            (`lightspan_torch.learning_rate`), and prints it.
        temperature: sampling temperature of training; the app's own value is ignored.
        max_tokens: maximum tokens of an answer, also in evaluations; a smaller value of the app's
            request counts. None for the app's value.
        max_length: maximum tokens of a call; longer calls are rejected. None for the model's
            context.
        failure_reward: reward of rollouts whose app failed (an exception, the time limit, the
            context). `"lowest"` is the lowest reward that a rollout of the run has had, and at most
            0. None leaves them unscored. Then an app may learn to fail, because an answer that
            makes it fail costs less than a wrong one.
        timeout_s: seconds per rollout.
        max_staleness: maximum number of versions that a rollout's weights may lag behind; None for
            no limit.
        overlap: maximum number of weight updates between the start of a group's rollouts and its
            training, while rollouts and updates run concurrently; 0 waits for all rollouts of a
            step. Advantages are computed over whole groups, with the log-probabilities of the
            weights that sampled each token; `PolicyLoss(importance_cap=)` corrects for the age of
            these weights. See docs/guides/overlap.md.
        lora: adapters to train instead of full weights; None for full weights.
        loss: form (PPO's clip, GSPO, CISPO), clipping, KL, entropy, importance weights.
        optimizer: None for AdamW at `learning_rate`.
        seed: seed of all randomness in the algorithm.

    Raises:
        ConfigError: an option is unknown, outside its range or contradicts another.
    """

    name = "lightning_rl"
    # narrower types than in `LightningSettings`, which fills in the defaults
    model: str
    credit: Credit
    air: AIR | None
    critic: Critic | None
    weight: Weight
    loss: PolicyLoss
    if TYPE_CHECKING:
        optimizer: Optimizer
    else:

        @cached_property
        def optimizer(self) -> Optimizer:
            """AdamW at the chosen rate, unless an optimiser or a rate is set."""
            return Optimizer(learning_rate=self._chosen_rate.value)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._chooses_rate = vars(self)["optimizer"] is None
        if self._chooses_rate:
            del vars(self)["optimizer"]  # uncovers the property above
        is_mixed = self.critic is not None and self.estimator != "ppo"
        settings: dict[str, Any] = {
            # KL and entropy have a gradient without an advantage
            "keep_zero_advantages": bool(self.loss.kl or self.loss.entropy),
            "mixture": Mixture.first(self.credit) if is_mixed else None,
        }
        names = {setting.name for setting in fields(BatchConfig)} - settings.keys()
        settings |= {name: getattr(self, name) for name in names}
        self._initial_config = BatchConfig(**settings)
        policies = _policy_names(self.optimize)
        selection = Selection.of(
            policies,
            self.frozen,
            default_policy=_only_policy(policies, self.frozen),
            sampling=Sampling(temperature=self.temperature, max_tokens=self.max_tokens),
        )
        self._routing = selection.routing
        self._specs = self._policy_specs(selection.policies)
        self._supported: frozenset[Rejection] = frozenset()
        self.reset()

    # --- interface of `Algorithm` ---------------------------------------------------------
    def reset(self) -> None:
        self._batch_config = self._initial_config
        self._collect_metrics: Metrics = {}
        self._middle_call: int | None = None
        self._was_scored = self._was_computed = False
        self._unscored_tasks: set[str] = set()
        self._critic_warmup, self._history = CriticWarmup(), GroupHistory()
        self._names: list[str] = []
        self.last_batch: Batch | None = None
        """Batch of the latest step; None before the first."""

    @property
    def base_model(self) -> str:
        return self.model

    @property
    def batch_config(self) -> BatchConfig:
        """Settings that decide how a batch is built from episodes."""
        return self._batch_config

    def check(self, engine: EngineCapabilities, learner: LearnerCapabilities) -> None:
        needs = {
            "a critic (critic=)": self.critic is not None and not learner.values,
            f"{len(self._specs)} policies": len(self._specs) > (learner.policies or math.inf),
        }
        refused = learner.refusals(self.loss)
        refused += learner.unsupported(self.optimizer, [one.lora for one in self._specs.values()])
        refused += [name for name, is_refused in needs.items() if is_refused]
        if refused:
            raise UnsupportedError(
                f"the learner does not support {', '.join(refused)}: leave it out, or use the "
                "embedded learner"
            )
        if self.overlap and not engine.in_place_update:
            raise UnsupportedError(
                f"overlap={self.overlap}: the engine cannot update weights while calls are "
                "running: use overlap=0 or another engine"
            )
        if not engine.exact_tokens:
            raise UnsupportedError(
                "the engine does not give token ids and log-probabilities as it sampled them, "
                "which policy gradients need: use another engine"
            )
        low, high = engine.temperatures
        if not low <= self.temperature <= high:
            raise UnsupportedError(
                f"LightningRL(temperature={self.temperature:g}): the engine samples at "
                f"temperatures from {low:g} to {high:g}: use one of these, or another engine"
            )
        # rejections that do not apply: engine and learner both declare support
        truncation = engine.trainable_truncation and learner.trainable_truncation
        grammar = engine.trainable_grammar and learner.trainable_grammar
        declared = {Rejection.TRUNCATED_SAMPLING: truncation, Rejection.CONSTRAINED: grammar}
        self._supported = frozenset(each for each, by_both in declared.items() if by_both)

    def policies(self) -> dict[str, PolicySpec]:
        return dict(self._specs)

    def routing(self) -> Routing:
        return self._routing

    def describe_choices(self) -> list[str]:
        lines = [str(self._chosen_rate)] if self._chooses_rate else []
        lines += [] if self.critic is None else [describe_critic(self.critic.lam)]
        return lines + [DESCRIPTION] * (self.tasks == "adaptive")

    def task_order(self, tasks: Sequence[Json]) -> TaskOrder:
        if self.tasks == "shuffled":
            return Epochs(tasks, self.seed)
        order = AdaptiveOrder(tasks, lambda: self._history, self.seed)
        self._names = order.names
        return order

    def state(self) -> dict[str, Json]:
        state: dict[str, Json] = {} if self.forks is None else {"middle_call": self._middle_call}
        if self.critic is not None:
            state["critic"] = msgspec.to_builtins(self._critic_warmup)
        if self._batch_config.mixture is not None:
            state["mixture"] = msgspec.to_builtins(self._batch_config.mixture)
        if self._fixes_constants:
            state["token_constants"] = dict(self._token_constants)
        if self.tasks != "shuffled" or self.replay is not None:
            state["history"] = msgspec.to_builtins(self._history)
        return state

    def load_state(self, state: dict[str, Json]) -> None:
        self._was_scored = True  # earlier steps had rewards
        self._critic_warmup = msgspec.convert(state.get("critic") or {}, CriticWarmup)
        self._history = msgspec.convert(state.get("history") or {}, GroupHistory)
        self._middle_call = msgspec.convert(state.get("middle_call"), int | None)
        if "mixture" in state:
            mixture = msgspec.convert(state["mixture"], Mixture)
            self._batch_config = replace(self._batch_config, mixture=mixture)
        if self._fixes_constants and isinstance(constants := state.get("token_constants"), Mapping):
            self._batch_config = replace(self._batch_config, token_constant=dict(constants))

    def config(self) -> dict[str, Json]:
        plain = {
            setting.name: msgspec.to_builtins(getattr(self, setting.name), enc_hook=qualified_name)
            for setting in fields(LightningSettings)
            if setting.name not in ("credit", "gamma", "learning_rate")
        }
        return {
            "algorithm": self.name,
            **plain,
            "credit": self.credit.name,
            "step_rewards": self.credit.step_rewards,
        }

    # --- the two parts ------------------------------------------------------------------
    async def collect(self, trainer: TrainerContext) -> list[Episode]:
        """Run the next tasks and return all their episodes.

        With `resample`, further tasks run until the returns (total rewards) of enough groups vary;
        the episodes include those of replaced groups, which `build` leaves out. With `overlap`, the
        episodes may belong to groups that an earlier step submitted.
        """
        if self.overlap:
            episodes, self._collect_metrics = await next_episodes(
                trainer, self.overlap, self.tasks_per_step, self.group_size
            )
            return episodes
        episodes = await trainer.rollouts(trainer.next_tasks(self.tasks_per_step), self.group_size)
        for _ in range(self.resample):
            count, flat = self._flat_groups(episodes)
            if (missing := self.tasks_per_step - count + len(flat)) <= 0:
                return episodes
            episodes += await trainer.rollouts(trainer.next_tasks(missing), self.group_size)
        return episodes if self.forks is None else await self._fork(trainer, episodes)

    async def _fork(self, trainer: TrainerContext, trunks: list[Episode]) -> list[Episode]:
        """Run the forks of a step's rollouts, and return rollouts and forks, in the same groups."""
        settings = self.forks or Forks()
        coverages, groups = self.coverages(trunks), {e.rollout_id: e.group_id for e in trunks}
        points = settings.points(trunks, coverages, self._middle_call)
        self._middle_call = middle_call(coverages)
        usable = [point for point in points if not point.refusal]
        if refusals := [point.refusal for point in points if point.refusal]:
            count = f"{len(refusals)} of {plural(len(points), 'rollout')}"
            trainer.note(f"{count} cannot be forked (for example: {refusals[0]})")
        forks = await trainer.forks(usable, settings.each) if usable else []
        wanted = settings.each * len(usable)
        counts = {"rollouts": wanted, "departed": wanted - len(forks), "refused": len(refusals)}
        self._collect_metrics = {f"forks/{name}": count for name, count in counts.items()}
        return trunks + [replace(f, group_id=groups[f.fork.rollout_id]) for f in forks if f.fork]

    def _group_returns(
        self, episodes: Sequence[Episode], coverages: Sequence[Coverage]
    ) -> list[GroupReturns]:
        """Return the groups with the returns (total rewards) of their rollouts.

        Automatic intermediate rewards (`air`) are included. A group has no gradient if its returns
        are all the same, as is the credit of any failed try. Groups of forks alone are left out.
        """
        added = bonuses(self.air, self.credit, episodes, coverages)
        rewards, failed = group_rewards(episodes, coverages, added)
        zero = advantages.groups_without_variance(rewards, failed)
        members: dict[str, list[Episode]] = {name: [] for name in rewards}
        for episode in episodes:
            if episode.group_id in members:
                members[episode.group_id].append(episode)
        scored = {name: [v for v in rewards[name] if v is not None] for name in rewards}
        return [
            GroupReturns(each[0].task_id, each, scored[name], name not in zero)
            for name, each in members.items()
        ]

    def _flat_groups(self, episodes: Sequence[Episode]) -> tuple[int, list[str]]:
        """Return the number of groups, and the ids of those that do not change the weights."""
        groups = self._group_returns(episodes, self.coverages(episodes))
        return len(groups), [g.episodes[0].group_id for g in groups if not g.has_gradient]

    def replaced(self, episodes: Sequence[Episode]) -> set[str]:
        """Return the ids of the groups that `resample` replaces; empty without `resample`.

        A group whose rollouts all have the same total reward, without a failed try, does not change
        the weights, so `resample` runs further groups. Each group beyond `tasks_per_step` replaces
        one such group, the earliest first.
        """
        count, flat = self._flat_groups(episodes) if self.resample else (0, [])
        return set(flat[: max(0, count - self.tasks_per_step)])

    def prepare(
        self,
        episodes: Sequence[Episode],
        versions: Mapping[str, int] | None = None,
        coverages: Sequence[Coverage] | None = None,
        replays: Sequence[Episode] = (),
    ) -> BatchBuilder:
        """Return a builder, whose `finish` returns the batch of one iteration.

        Args:
            episodes: episodes of the iteration, from `collect`.
            versions: policy → current version, for `max_staleness`; None without `max_staleness`.
            coverages: for each episode, which calls are trained, frozen or rejected. None for the
                result of the method `coverages`. Pass it if `lightspan.algorithms.grammar_check`
                has rejected further calls.
            replays: episodes of groups that earlier steps trained, which are trained again; their
                coverages follow those of `episodes`.
        """
        replaced = self.replaced(episodes)
        episodes = [*episodes, *replays]
        coverages = self.coverages(episodes) if coverages is None else coverages
        if replaced:
            episodes = [episode for episode in episodes if episode.group_id not in replaced]
            attempts = {episode.attempt_id for episode in episodes}
            coverages = [coverage for coverage in coverages if coverage.attempt_id in attempts]
        return prepare_batch(episodes, coverages, self._batch_config, versions=versions)

    def coverages(
        self, episodes: Sequence[Episode], *, modes: Collection[Mode] = (Mode.TRAIN,)
    ) -> list[Coverage]:
        """Return which calls of each episode are trained, frozen, or rejected with a reason.

        Calls that were sampled with top-p, top-k or a grammar are trained only if both the engine
        and the learner passed to `check` support it.

        Args:
            episodes: the episodes.
            modes: modes of rollouts whose calls may be trained.
        """
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
    async def run_step(self, trainer: TrainerContext) -> Metrics:
        """Run one iteration, and return its metrics.

        It runs rollouts, builds the batch, updates the weights by minibatches and publishes them.
        """
        episodes = await self.collect(trainer)
        self._was_scored = self._was_scored or check_scored(
            episodes, self._unscored_tasks, step_rewards=self.credit.step_rewards
        )
        replays, extra = list[Episode](), Metrics()
        if self.replay is not None:
            members = self.prepare(episodes, trainer.versions).members
            is_alone = not any(member.transitions for member in members)
            replays, extra = await self._history.take_replays(trainer, self.replay, is_alone)
        coverages = self.coverages([*episodes, *replays])
        coverages = await reject_mismatches(trainer, coverages)
        self._was_computed = self._was_computed or check_computed(coverages)
        builder = self.prepare(episodes, trainer.versions, coverages, replays)
        if self.critic is None:
            batch, lam = builder.finish(), 1.0
        else:
            rows = builder.rows()
            values = await trainer.learn(partial(trainer.learner.values, rows)) if rows else []
            lam = self._critic_warmup.lambda_(self.critic, {row.policy for row in rows})
            batch = builder.finish(values_by_call(rows, values), lam=lam)
        self._update_constants(batch)
        self.last_batch = batch
        update, skipped = await self._update(trainer, batch, lam)
        if update:
            await trainer.publish()
        shares = row_shares([t for member in builder.members for t in member.transitions])
        extra |= {f"agent/{path}/one_row": fmean(own) for path, own in shares.items()}
        extra |= self._collect_metrics | self._resample_metrics(episodes)
        if (mixture := self._batch_config.mixture) is not None:
            extra |= mixture.metrics()
            mixture = mixture.after(batch.explanations.values())
            self._batch_config = replace(self._batch_config, mixture=mixture)
        extra |= self._add_groups(trainer.step, episodes, coverages[: len(episodes)])
        if self.replay is not None:
            ids = {episode.rollout_id for episode in replays}
            again = sum(row.rollout_id in ids for row in batch.rows)
            extra["replay/row_share"] = again / max(1, len(batch.rows))
        covered = reject_calls(batch.coverages, skipped, Rejection.TARGET_KL)
        batch = replace(batch, coverages=tuple(covered[: -len(replays) or None]))
        counts = metrics.rollout_metrics(episodes, self.routing())
        return counts | extra | metrics.batch_metrics(batch) | update

    @property
    def _fixes_constants(self) -> bool:
        """Whether the loss divisor of each policy is measured in its first step and then kept.

        The divisor is the mean number of trained tokens per rollout. Dr. GRPO needs one constant
        for the whole run.
        """
        return (self.estimator, self.weight, self.token_constant) == ("dr_grpo", "token", None)

    @property
    def _token_constants(self) -> Mapping[str, float]:
        """The loss divisor of each policy that has been trained, by the policy's name."""
        constants = self._batch_config.token_constant
        return constants if isinstance(constants, Mapping) else {}

    def _update_constants(self, batch: Batch) -> None:
        """Store the loss divisor of each policy that `batch` trains for the first time.

        It is the mean number of the policy's trained tokens per rollout of `batch`.
        """
        if self._fixes_constants:
            means = {policy: tokens / batch.size for policy, tokens in batch.usable_tokens.items()}
            constants = {**means, **self._token_constants}
            self._batch_config = replace(self._batch_config, token_constant=constants)

    def _resample_metrics(self, episodes: Sequence[Episode]) -> Metrics:
        """Return the number of groups that `resample` replaced, and of their rollouts, as metrics.

        The result is empty without `resample`. The metric `rollouts` counts these rollouts too.
        """
        if not self.resample:
            return {}
        replaced = self.replaced(episodes)
        rollouts = sum(episode.group_id in replaced for episode in episodes)
        return {"resample/groups": len(replaced), "resample/rollouts": rollouts}

    def _add_groups(
        self, step: int, episodes: Sequence[Episode], coverages: Sequence[Coverage]
    ) -> Metrics:
        """Add the new groups of a step to the history, and return metrics of them.

        The metrics are the share of the groups without a gradient, and with adaptive tasks what was
        predicted for these groups, and for all tasks alike. The result is empty for estimators and
        credits that learn from such groups too, and with a critic.
        """
        if self._learns_from_equal(self.credit):
            return {}
        groups, history = self._group_returns(episodes, coverages), self._history
        history.returns.add(value for group in groups for value in group.returns)
        zero = sum(not group.has_gradient for group in groups)
        shares: Metrics = {"tasks/zero_gradient": zero / max(1, len(groups))}
        if self.tasks == "adaptive":
            kinds = {"predicted": [g.task_id for g in groups], "shuffled": self._names}
            for kind, ids in kinds.items():
                shares[f"tasks/zero_gradient_{kind}"] = history.chance_of_zero(ids, self.group_size)
            history.add(groups, history.returns)
        if self.replay is not None:
            history.add_replays(step, groups, self.replay)
        return shares

    async def _update(
        self, trainer: TrainerContext, batch: Batch, lam: float
    ) -> tuple[Metrics, Collection[TransitionKey]]:
        """Train the batch, and return the learner's metrics and the calls that were skipped."""
        if not batch.rows:
            trainer.explain(batch.explanations)
            return {}, ()
        seed = random.Random(f"{self.seed}/{trainer.step}").randrange(2**31)
        minibatches = split_minibatches(batch, self.minibatches, seed)
        explanations = {key: why for part in minibatches for key, why in part.explanations.items()}
        parts = [part for part in minibatches if part.rows]
        # before the first update, while the learner still has the weights of the rollouts
        old: list[Any] = [None] * len(parts)
        loss = self.loss.corrected(trainer.engine.capabilities, trainer.learner.capabilities)
        if loss.needs_old_logprobs:
            old = [await trainer.learn(partial(trainer.learner.score, p.rows)) for p in parts]
            if loss.importance_mask is not None or loss != self.loss:
                pairs = zip(parts, old, strict=True)
                old = [keep_recorded(p.rows, scores, trainer.versions) for p, scores in pairs]
        probe = _probe([row for part in parts for row in part.rows], seed)
        before = await trainer.learn(partial(trainer.learner.score, probe))
        limit = math.inf if self.target_kl is None else self.target_kl
        results: list[Metrics] = []
        moved = 0.0
        while len(results) < len(parts) and moved <= limit:
            part, logprobs = parts[len(results)], old[len(results)]
            trainer.learner.capabilities.check_temperatures(part.rows)
            update = partial(trainer.learner.update, part.rows, loss, old_logprobs=logprobs)
            results.append(await trainer.learn(update))
            if len(results) == len(parts) or self.target_kl is not None:
                after = await trainer.learn(partial(trainer.learner.score, probe))
                moved = metrics.approximate_kl(probe, before, after)
        skipped = {key for part in parts[len(results) :] for key in part.explanations}
        for key in skipped:
            explanations[key] = msgspec.structs.replace(explanations[key], token_weight=0.0)
        if missing := len(parts) - len(results):
            trainer.note(
                f"target_kl={self.target_kl:g}: the policy moved by {moved:.3g} nats per token, so "
                f"{missing} of {len(parts)} updates were skipped"
            )
        trainer.explain(explanations)
        merged = metrics.merge_updates(results) | {"approx_kl": moved}
        if self.target_kl is not None:
            merged["kl_skipped"] = missing
        if loss.needs_old_logprobs:
            probe, before = [row for part in parts for row in part.rows], [*chain(*old)]
        merged |= metrics.engine_ratio(probe, before, trainer.versions, loss)
        if self.critic is not None:
            merged |= {"lambda": lam, **gradient_left(batch.explanations.values(), lam)}
            fitted = {row.policy for part in parts[: len(results)] for row in part.rows}
            merged |= self._critic_warmup.update(batch, merged, fitted)
        return {f"learner/{key}": value for key, value in merged.items()}, skipped

    # --- set-up ---------------------------------------------------------------------------
    @cached_property
    def _chosen_rate(self) -> Any:
        """The default `Rate` of the policies, from `lightspan_torch.learning_rate`."""
        return load_plugin("api", "choose_rate")(self._specs)

    def _policy_specs(self, names: Sequence[str]) -> dict[str, PolicySpec]:
        """Return policy → its starting weights and LoRA settings.

        Raises:
            ConfigError: two patterns of `optimize` describe one policy in different ways, or
                adapters have dropout.
        """
        specs: dict[str, PolicySpec] = {}
        described = self.optimize if isinstance(self.optimize, Mapping) else {}
        for pattern, policy in described.items():
            if not isinstance(policy, Policy):
                continue
            name = _policy_name(pattern, policy)
            check_lora(policy.lora)
            model = local_model(policy.model or self.model)
            spec = PolicySpec(model=model, lora=policy.lora or self.lora)
            if specs.setdefault(name, spec) != spec:
                raise ConfigError(
                    f"optimize: the policy {name!r} is described twice, as {specs[name]} and {spec}"
                )
        default = PolicySpec(model=self.model, lora=self.lora)
        specs = {name: specs.get(name, default) for name in names}
        for lora in (spec.lora for spec in specs.values()):
            if lora is not None and lora.dropout:
                raise ConfigError(
                    f"LoRA(dropout={lora.dropout:g}): an update with dropout has other "
                    "log-probabilities than the sampled answers; use dropout=0 (SFT supports it)"
                )
        return specs


def _probe(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return a random sample of the rows of each policy, to measure how far an update moves it.

    The learner scores the sample before and after the update, so the sample is small. It grows with
    the number of rows, because in a few hundred tokens a single improbable token would dominate the
    result.
    """
    rng, by_policy = random.Random(seed), dict[str, list[Row]]()
    for row in rows:
        by_policy.setdefault(row.policy, []).append(row)
    counts = {name: max(PROBE_ROWS, len(own) // PROBE_SHARE) for name, own in by_policy.items()}
    samples = (rng.sample(own, min(counts[name], len(own))) for name, own in by_policy.items())
    return [*chain.from_iterable(samples)]


def _policy_names(optimize: Optimize) -> str | Sequence[str] | Mapping[str, str]:
    """Return `optimize` with each `Policy` object replaced by the name of its policy.

    Raises:
        ConfigError: a key of `optimize` is not text.
    """
    if not isinstance(optimize, Mapping):
        return optimize
    for pattern in optimize:
        if not isinstance(pattern, str):
            raise ConfigError(f"optimize: {pattern!r} must be the name of an agent, or a pattern")
    return {pattern: _policy_name(pattern, policy) for pattern, policy in optimize.items()}


def _only_policy(optimize: str | Sequence[str] | Mapping[str, str], frozen: Frozen) -> str:
    """Return the name of the policy that answers for agents with `frozen="shared"`.

    It is the first policy of `optimize`, or `DEFAULT_POLICY` if `optimize` names none.

    Raises:
        ConfigError: `frozen` has `"shared"`, but `optimize` names several policies.
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


def _credit(credit: str | Credit, gamma: float | None) -> Credit:
    rule = parse_credit(credit)
    if gamma is None:
        return rule
    if not isinstance(credit, str) or not isinstance(rule, RewardToGo):
        raise ConfigError(
            f"gamma={gamma!r} applies only to credit="
            f"{' or '.join(repr(name) for name in CREDITS if name not in ('terminal', 'family'))}"
        )
    return msgspec.structs.replace(rule, gamma=gamma)


def _critic(critic: Critic | bool | None, *, is_ppo: bool) -> Critic | None:
    if is_ppo and critic is False:
        raise ConfigError('critic=False: estimator="ppo" needs a critic: leave critic= out')
    if critic is None or isinstance(critic, bool):
        critic = Critic() if critic or is_ppo else None
    validation.check_kind("critic", critic, Critic)
    if critic is not None:
        lam = (DEFAULT_LAMBDA if is_ppo else 1.0) if critic.lam is None else critic.lam
        validation.check_effect(critic, "warmup", lam < 1, "with lambda 1: set lam= below 1 too")
        critic = msgspec.structs.replace(critic, lam=lam)
    return critic


def _air(air: AIR | bool | None) -> AIR | None:
    if isinstance(air, bool):
        return AIR() if air else None
    validation.check_kind("air", air, AIR)
    return air

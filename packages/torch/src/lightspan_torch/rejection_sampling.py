"""RejectionSampling: imitate the best of several rollouts (RAFT, arXiv 2304.06767).

docs/tutorials/own-algorithm.md explains this file, as an example of an algorithm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path

import msgspec

from lightspan.algorithms import Algorithm, Metrics, PolicySpec, TrainerContext, local_model
from lightspan.algorithms.grammar_check import reject_mismatches
from lightspan.algorithms.metrics import merge_updates, rollout_metrics
from lightspan.errors import ConfigError, UnsupportedError
from lightspan.lightning import Episode, Selection, build_rows, classify_calls, trained_transitions
from lightspan.lightning.rollout_checks import app_failed, check_scored
from lightspan.lightning.selection import Coverage, Frozen, Rejection
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LearnerCapabilities, LoRA, Optimizer, SFTLoss, check_lora
from lightspan.schema.records import Json, Mode
from lightspan.schema.routing import Routing
from lightspan.schema.token_records import Sampling
from lightspan.schema.validation import MAX_SEED, check_kind, check_number, check_whole
from lightspan_torch.imitation import explain_imitation
from lightspan_torch.learning_rate import choose_rate


@dataclass(kw_only=True, eq=False)
class RejectionSampling(Algorithm):
    """Best of n: run each task several times, fine-tune on the best rollouts, and repeat.

    The method is RAFT (reward-ranked fine-tuning, arXiv 2304.06767). Each step imitates the calls
    that the agents to train made in the best rollouts of each task, by one step of the optimiser.
    Rollouts are never imitated, but counted (`left_out/…` in the metrics), that are damaged,
    unfinished or unscored, or whose app failed, or that have no call that can be trained.

    Args:
        model: starting weights: a folder, or a name on the Hugging Face hub.
        optimize: agents to train: names, or globs on agent paths.
        frozen: model for the calls of other agents, as in `LightningRL`.
        group_size: rollouts per task.
        tasks_per_step: tasks per iteration.
        keep: maximum number of rollouts per task that are imitated, those with the highest rewards.
            None for all that share the task's highest reward.
        min_reward: minimum reward of an imitated rollout. None imitates rollouts that are better
            than the worst of their task, so a task whose rewards are all the same teaches nothing.
        temperature: sampling temperature of training; the app's own value is ignored.
        learning_rate: None chooses one from the model's size and LoRA, as in `LightningRL`.
        optimizer: settings of the optimiser, instead of `learning_rate`; None for AdamW.
        lora: settings of LoRA adapters to train; None for full weights.
        epochs: optimiser steps per iteration, each on all imitated calls.
        timeout_s: seconds per rollout; None for no limit.
        seed: seed of the order of tasks, and of sampling.

    Raises:
        ConfigError: an option is invalid, or contradicts another.
    """

    name = "rejection_sampling"
    loss = SFTLoss()
    model: str | Path = field(kw_only=False)
    optimize: str | Sequence[str] = "*"
    frozen: Frozen = None
    group_size: int = 8
    tasks_per_step: int = 16
    keep: int | None = None
    min_reward: float | None = None
    temperature: float = 1.0
    learning_rate: float | None = None
    optimizer: Optimizer | None = None  # type: ignore[assignment]
    lora: LoRA | None = None
    epochs: int = 1
    timeout_s: float | None = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("group_size", self.group_size, 2 if self.min_reward is None else 1)
        check_whole("tasks_per_step", self.tasks_per_step, 1)
        check_whole("keep", self.keep, 1, optional=True)
        check_whole("epochs", self.epochs, 1)
        check_number("min_reward", self.min_reward, optional=True)
        check_number("temperature", self.temperature, above=0)
        check_number("timeout_s", self.timeout_s, above=0, optional=True)
        check_whole("seed", self.seed, 0, MAX_SEED)
        check_kind("optimizer", self.optimizer, Optimizer)
        check_lora(self.lora)
        self.model = local_model(self.model)
        self._supported: list[Rejection] = []
        self._choices: list[str] = []
        if self.optimizer is not None and self.learning_rate is not None:
            raise ConfigError("give learning_rate or optimizer, not both")
        if self.optimizer is None and self.learning_rate is None:
            chosen = choose_rate(self.policies())
            self._choices, self.learning_rate = [str(chosen)], chosen.value
        if self.learning_rate is not None:
            self.optimizer = Optimizer(learning_rate=self.learning_rate)
        sampling = Sampling(temperature=self.temperature)
        self._routing = Selection.of(self.optimize, self.frozen, sampling=sampling).routing

    # --- the interface of `Algorithm` -----------------------------------------------------
    def policies(self) -> dict[str, PolicySpec]:
        return {"policy": PolicySpec(model=str(self.model), lora=self.lora)}

    def routing(self) -> Routing:
        return self._routing

    def config(self) -> dict[str, Json]:
        settings: dict[str, Json] = msgspec.to_builtins(self)
        return {"algorithm": self.name, "failure_reward": self.failure_reward, **settings}

    def describe_choices(self) -> list[str]:
        return self._choices

    def check(self, engine: EngineCapabilities, learner: LearnerCapabilities) -> None:
        if refused := learner.unsupported(self.optimizer or Optimizer(), [self.lora]):
            raise UnsupportedError(
                f"the learner does not support {', '.join(refused)}: leave it out"
            )
        self._supported = []
        if engine.trainable_grammar and learner.trainable_grammar:
            self._supported.append(Rejection.CONSTRAINED)
        if engine.trainable_truncation and learner.trainable_truncation:
            self._supported.append(Rejection.TRUNCATED_SAMPLING)

    def coverages(
        self, episodes: Sequence[Episode], *, modes: Collection[Mode] = (Mode.TRAIN,)
    ) -> list[Coverage]:
        """Return which calls may be imitated. Those in a failed try of an agent may not."""
        supported = self._supported
        return [
            classify_calls(
                replace(each, failure_reward=None), self._routing, supported=supported, modes=modes
            )
            for each in episodes
        ]

    # --- one iteration --------------------------------------------------------------------
    async def run_step(self, trainer: TrainerContext) -> Metrics:
        """Run the tasks, imitate the best rollouts by one update, and publish the weights."""
        tasks = trainer.next_tasks(self.tasks_per_step)
        episodes = await trainer.rollouts(tasks, self.group_size)
        if trainer.step == 1:
            check_scored(episodes, set())
        best, left_out = best_of_each_task(episodes, self.keep, self.min_reward)
        coverages = await reject_mismatches(trainer, self.coverages(best))
        pairs = zip(best, coverages, strict=True)
        transitions = [*chain.from_iterable(trained_transitions(*pair) for pair in pairs)]
        counts = {f"left_out/{reason}": number for reason, number in left_out.items()}
        for status, number in chain.from_iterable(c.counts().items() for c in coverages):
            counts[f"calls/{status}"] = counts.get(f"calls/{status}", 0) + number
        imitated = len({transition.attempt_id for transition in transitions})
        if imitated < len(best):
            counts["left_out/rejected"] = len(best) - imitated
        metrics = rollout_metrics(episodes, self._routing) | counts | {"imitated": imitated}
        # the learner minimises Σ weight · loss: here the mean over all imitated tokens
        weight = 1.0 / max(1, sum(transition.tokens for transition in transitions))
        rewards = {episode.attempt_id: episode.reward or 0.0 for episode in best}
        size = self.group_size
        trainer.explain(explain_imitation(transitions, rewards, weight, size=size))
        if not transitions:
            trainer.note(f"nothing to imitate in {len(episodes)} rollouts: {counts}")
            return metrics
        rows = build_rows(transitions, token_weights=[weight] * len(transitions)).rows
        update = partial(trainer.learner.update, rows, self.loss)
        learned = merge_updates([await trainer.learn(update) for _ in range(self.epochs)])
        await trainer.publish()
        return metrics | {f"learner/{key}": value for key, value in learned.items()}


def best_of_each_task(
    episodes: Sequence[Episode], keep: int | None = None, min_reward: float | None = None
) -> tuple[list[Episode], Counter[str]]:
    """Return the best episodes of each group, and reason → number of the others.

    A failed rollout is never among the best, but another may be better than it.

    Args:
        episodes: the episodes of whole groups.
        keep: maximum number per group; None for all that share the highest reward.
        min_reward: minimum reward; None for rewards above the lowest of the group.
    """
    groups: dict[str, list[tuple[float, Episode]]] = {}
    for episode in episodes:
        if episode.finished and not episode.capture_errors and episode.reward is not None:
            groups.setdefault(episode.group_id, []).append((episode.reward, episode))
    best: list[Episode] = []
    for group in groups.values():
        group.sort(key=itemgetter(0), reverse=True)
        lowest = group[-1][0]
        good = [
            (reward, episode)
            for reward, episode in group
            if (reward > lowest if min_reward is None else reward >= min_reward)
            and not app_failed(episode)
        ]
        ties = sum(reward == good[0][0] for reward, _ in good)
        best += [episode for _, episode in good[: keep or ties]]
    chosen = {episode.attempt_id for episode in best}
    return best, Counter(_reason(e) for e in episodes if e.attempt_id not in chosen)


def _reason(episode: Episode) -> str:
    """Return why an episode is not imitated."""
    if episode.capture_errors:
        return "damaged"
    if not episode.finished:
        return "unfinished"
    if app_failed(episode):
        return "failed"
    return "unscored" if episode.reward is None else "not_best"

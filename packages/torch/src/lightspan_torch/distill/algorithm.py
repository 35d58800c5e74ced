"""On-policy distillation: a teacher scores the tokens that the student samples in the app."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import msgspec

from lightspan.algorithms.lightning_rl import LightningRL
from lightspan.algorithms.protocol import Metrics, TrainerContext
from lightspan.errors import ConfigError, EngineError, ModelError, UnsupportedError
from lightspan.lightning.advantages import Estimator
from lightspan.lightning.batch import Batch, BatchBuilder, Weight
from lightspan.lightning.episode import CallKey, Episode
from lightspan.lightning.selection import Coverage, Rejection
from lightspan.lightning.transitions import TransitionKey
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import LearnerCapabilities
from lightspan.schema.records import Json, Mode
from lightspan.schema.validation import check_number
from lightspan_torch.distill.reverse_kl import distil, weighted, with_advantages, without_reward
from lightspan_torch.distill.scorer import Scorer
from lightspan_torch.distill.teachers import Teacher, TeacherServer, parse_teacher

_OF_REWARD: Final = ("estimator", "unit", "credit", "gamma", "air", "overlong")
"""Settings that only change the reward's part of the advantage."""
_REFUSED: Final = ("critic", "replay", "resample")
"""Settings of `LightningRL` that drop or compare rollouts by their rewards."""


@dataclass(kw_only=True, eq=False, frozen=True)
class DistillSettings(LightningRL):
    """Settings of `Distill`, checked and with defaults filled in."""

    teacher: str | Path | Teacher | None = None
    reward_weight: float = 0.0
    estimator: Estimator | None = None  # type: ignore[assignment]
    weight: Weight = "token"
    group_size: int = 1
    tasks_per_step: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "teacher", parse_teacher(self.teacher))
        check_number("reward_weight", self.reward_weight, low=0)
        if self.reward_weight == 0:
            self._check_unused(
                _OF_REWARD, "changes nothing without a reward: give reward_weight= too"
            )
            if self.tasks != "shuffled":
                raise ConfigError(
                    f"tasks={self.tasks!r} chooses tasks by their rewards: give reward_weight= too"
                )
        self._check_unused(_REFUSED, "compares rollouts by their rewards alone: leave it out")
        if self.estimator is None:
            estimator = "grpo" if self.group_size != 1 else "reinforce++"
            object.__setattr__(self, "estimator", estimator)
        if self.estimator == "ppo":
            raise ConfigError('estimator="ppo" needs a critic, which Distill has not: use another')
        super().__post_init__()
        if self.forks is not None:
            raise ConfigError(
                'Distill: credit="family" runs forks, whose tokens it cannot weigh: use another '
                "credit"
            )

    def _check_unused(self, names: Sequence[str], why: str) -> None:
        defaults = {each.name: each.default for each in fields(DistillSettings)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"Distill: {name}={getattr(self, name)!r} {why}")


DistillSettings.__init__.__qualname__ = "Distill.__init__"


class Distill(DistillSettings):
    """On-policy distillation: the student learns from a teacher in the app, without a reward.

    The student (`model`) acts in the app as with `LightningRL`, and the teacher scores the tokens
    that the student sampled for the chosen agents. Minimised is the reverse KL divergence per
    token, KL(student ‖ teacher), at the prefixes that the student visits (GKD, arXiv 2306.13649).
    With a teacher in this process it is computed over the whole vocabulary, with a server estimated
    from the sampled tokens (`lightspan_torch.distill.reverse_kl`). Both distributions are those at
    `temperature`, under the same grammar, so the best student has the teacher's logits and imitates
    it at every temperature. With `reward_weight`, the advantage of the reward is added.

    A rollout needs no reward. Every undamaged rollout that ended is trained, unless an answer never
    reached the app or a judge failed. The loss is divided by their number, with `reward_weight`
    too. Rollouts without a reward then learn from the teacher alone and have no part in statistics
    of rewards. `Trainer(keep="best")` compares rewards on the selection split, so it needs an app
    with a reward; without one the last weights are kept.

    Args:
        model: starting weights of the student: a folder, or a name on the Hugging Face hub.
        teacher: the teacher: a folder (a model, or the LoRA adapter of a run), a name on the hub,
            the URL of a vLLM server, `TeacherModel(…)` or `TeacherServer(…)`. It needs the
            student's tokenizer.
        reward_weight: weight of the reward's advantage, computed as `LightningRL` does; the
            teacher's part has the weight 1. 0 for no reward.
        estimator: as in `LightningRL`; None for `grpo` or, with `group_size=1`, `reinforce++`.
        weight: weight of a rollout's tokens in the loss, as in `LightningRL`; None for `rollout`.
        group_size: rollouts per task; more than one only if rewards are compared.
        tasks_per_step: tasks per iteration.

    The other arguments are those of `LightningRL`, except `critic`, `replay`, `resample` and
    `credit="family"`. With `overlap`, log p is the learner's, because older weights sampled the
    tokens.

    Raises:
        ConfigError: an option is unknown, outside its range or contradicts another.
    """

    name = "distill"
    teacher: Teacher

    # --- interface of `Algorithm` ---------------------------------------------------------
    def reset(self) -> None:
        super().reset()
        # a rollout whose reward teaches nothing still has a teacher
        self._batch_config = replace(self._batch_config, keep_zero_advantages=True)
        self._was_scored = self.reward_weight == 0

    @property
    def needs_rewards(self) -> bool:
        return self.reward_weight > 0

    def check(self, engine: EngineCapabilities, learner: LearnerCapabilities) -> None:
        super().check(engine, learner)
        if isinstance(self.teacher, TeacherServer):
            if self.temperature != 1:
                raise UnsupportedError(
                    f"Distill(temperature={self.temperature:g}): a vLLM server scores prompts at "
                    "temperature 1, so the student has to sample at 1 too: leave temperature= out, "
                    "or use a local teacher, TeacherModel(…)"
                )
            self._supported -= {Rejection.CONSTRAINED}
        self._supported -= {Rejection.TRUNCATED_SAMPLING}

    def describe_choices(self) -> list[str]:
        return [*super().describe_choices(), self._scorer.describe()]

    def inspect_episodes(self, episodes: Sequence[Episode]) -> list[str]:
        try:
            self._scorer.check()
        except (EngineError, ModelError) as error:
            raise ConfigError(str(error)) from error
        return super().inspect_episodes(episodes)

    async def check_run(self, trainer: TrainerContext) -> None:
        await trainer.learn(self._scorer.check)

    def config(self) -> dict[str, Json]:
        teacher: Any = msgspec.to_builtins(self.teacher)
        return {**super().config(), "teacher": teacher, "reward_weight": self.reward_weight}

    def coverages(
        self, episodes: Sequence[Episode], *, modes: Collection[Mode] = (Mode.TRAIN,)
    ) -> list[Coverage]:
        return super().coverages([_trainable(episode) for episode in episodes], modes=modes)

    # --- one iteration --------------------------------------------------------------------
    def prepare(
        self,
        episodes: Sequence[Episode],
        versions: Mapping[str, int] | None = None,
        coverages: Sequence[Coverage] | None = None,
        replays: Sequence[Episode] = (),
    ) -> BatchBuilder:
        coverages = self.coverages([*episodes, *replays]) if coverages is None else coverages
        rewards = None
        if self.reward_weight:
            rewards = super().prepare(episodes, versions, coverages, replays)
        builder = super().prepare([*map(_blank, episodes)], versions, coverages, replays)
        plain = {each.name: getattr(builder, each.name) for each in fields(BatchBuilder)}
        return _Builder(**plain, rewards=rewards, reward_weight=self.reward_weight)

    async def _update(
        self, trainer: TrainerContext, batch: Batch, lam: float
    ) -> tuple[Metrics, Collection[TransitionKey]]:
        if not batch.rows:
            return await super()._update(trainer, batch, lam)
        teacher, states = await self._scorer.score(trainer, batch.rows)
        taught = getattr(trainer.learner, "taught", None) if states is not None else None
        student = [row.logprobs for row in batch.rows]
        if self.overlap:  # older weights sampled some of them
            student = await trainer.learn(partial(trainer.learner.score, batch.rows))
        distilled = distil(
            batch.rows, teacher, student, batch.explanations, is_sampled=taught is None
        )
        batch = replace(batch, rows=distilled.rows, explanations=distilled.explanations)
        self.last_batch = batch
        with nullcontext() if taught is None else taught(states):
            update, skipped = await super()._update(trainer, batch, lam)
        metrics = {f"distill/{name}": value for name, value in distilled.metrics.items()}
        if "learner/reverse_kl" in update:
            metrics["distill/reverse_kl"] = update.pop("learner/reverse_kl")
        return update | metrics, skipped

    @cached_property
    def _scorer(self) -> Scorer[Any]:
        """The scorer of the teacher, which loads nothing before `check` or `score` is called."""
        from lightspan_torch.distill.local import LocalTeacher
        from lightspan_torch.distill.server import ServerTeacher

        students = sorted({spec.model for spec in self._specs.values()})
        if isinstance(self.teacher, TeacherServer):
            return ServerTeacher(self.teacher, students, self.max_length)
        return LocalTeacher(self.teacher, students, self.max_length)


def _trainable(episode: Episode) -> Episode:
    """Return the episode with a reward of 0 if it only lacks one, so that its calls are trained."""
    is_bare = episode.finished and episode.reward is None and not episode.unscored
    return replace(episode, reward=0.0) if is_bare else episode


def _blank(episode: Episode) -> Episode:
    """Return the episode with a reward of 0, unless it cannot be trained."""
    episode = _trainable(episode)
    if episode.reward is None:
        return episode
    return replace(episode, reward=0.0, failure_reward=None)


@dataclass(frozen=True, kw_only=True)
class _Builder(BatchBuilder):
    """The builder of a batch of all rollouts, whose advantages are those of the scored ones.

    Its rollouts have a reward of 0, so that all are in the batch.
    """

    rewards: BatchBuilder | None
    """Builder of the scored rollouts; None if rewards do not count."""
    reward_weight: float

    def finish(
        self, values: Mapping[str, Mapping[CallKey, float]] | None = None, *, lam: float = 1.0
    ) -> Batch:
        batch = super().finish(values, lam=lam)
        whys = {key: without_reward(why) for key, why in batch.explanations.items()}
        counters = dict(batch.counters)
        for name in [name for name in counters if name.startswith(("groups:", "zero"))]:
            del counters[name]  # of rewards that are all 0
        if self.rewards is not None:
            scored = self.rewards.finish()
            for key, why in scored.explanations.items():
                plain = whys[key]
                whys[key] = msgspec.structs.replace(
                    weighted(why, self.reward_weight),
                    token_weight=plain.token_weight,
                    share=plain.share,
                )
            for name in ("scored", "unscored"):
                counters[name] = scored.counters.get(name, 0)
        rows = [*with_advantages(batch.rows, whys)]
        return replace(batch, rows=rows, explanations=whys, counters=counters)

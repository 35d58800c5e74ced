"""Algorithm: the protocol of one training step.

The trainer runs store, gateway, engine, learner, runners and checkpoints; an algorithm runs one
step. A custom algorithm is a subclass of `Algorithm` with `policies`, `routing` and `run_step`;
`run_step` gets a `TrainerContext`. `lightspan_torch.rejection_sampling` is an example.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from lightspan.algorithms.task_sampler import Epochs, TaskOrder
from lightspan.errors import ConfigError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.batch import BatchConfig
from lightspan.lightning.episode import Episode
from lightspan.lightning.forks import ForkPoint
from lightspan.lightning.selection import Coverage, classify_calls
from lightspan.lightning.transitions import TransitionKey
from lightspan.protocols.engine import EngineCapabilities, TokenEngine
from lightspan.protocols.learner import (
    Critic,
    Learner,
    LearnerCapabilities,
    LoRA,
    Loss,
    Optimizer,
    PolicyLoss,
)
from lightspan.schema.images import Image
from lightspan.schema.prompts import LearnedPrompt
from lightspan.schema.records import Json, Mode
from lightspan.schema.resources import Resources
from lightspan.schema.routing import Routing

Metrics = dict[str, float]
FailureReward = float | Literal["lowest"] | None
"""Reward of a rollout whose app failed: a number, the lowest reward of the run's scored rollouts so
far (at most 0), or None for none."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a policy with its own model or LoRA: `optimize={"planner": Policy(…)}`."""

    name: str | None = None
    """Name of the policy; agents with the same policy name share weights. None for the agent's
    name."""
    model: str | None = None
    """Starting weights; None for the algorithm's `model`."""
    lora: LoRA | None = None
    """Adapter settings; None for the algorithm's `lora`."""

    def __post_init__(self) -> None:
        for name in ("name", "model"):
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, str | PathLike) or not str(value)):
                raise ConfigError(f"Policy: {name}={value!r} must be a non-empty text")


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Starting weights of a policy; if `lora` is None, all weights are trained."""

    model: str
    lora: LoRA | None = None


class TrainerContext(Protocol):
    """The running trainer, passed to `Algorithm.run_step`."""

    @property
    def engine(self) -> TokenEngine:
        """The engine. Raises `ConfigError` if the algorithm has no policies."""

    @property
    def learner(self) -> Learner:
        """The learner. Raises `ConfigError` if the algorithm has no policies."""

    @property
    def path(self) -> Path:
        """The run's folder.

        An algorithm may keep its own files in the subfolder `journal`. When the run is resumed,
        these files are not reset to the state of the checkpoint.
        """

    @property
    def tasks(self) -> Sequence[Json]:
        """All training tasks."""

    @property
    def step(self) -> int:
        """Number of the current iteration, starting at 1."""

    @property
    def last_step(self) -> int:
        """Number of the last planned iteration; a run may end earlier."""

    @property
    def rng(self) -> random.Random:
        """Seeded random generator; its state is part of the checkpoint."""

    @property
    def versions(self) -> dict[str, int]:
        """Policy → version of its weights in the engine."""

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Group id → number of weight publications since the group was submitted.

        It has the groups that `submit` started and `take` has not returned yet, in order of
        submission.
        """

    async def images(self, digests: Sequence[str]) -> dict[str, Image]:
        """Return the recorded images among `digests` (`Store.images`)."""
        ...

    def next_tasks(self, count: int) -> list[Json]:
        """Return the next `count` training tasks, in the order of `Algorithm.task_order`.

        When a run is resumed, the tasks of unfinished groups, which `take` had not returned, come
        first.
        """

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[Episode]:
        """Run the app on each task `group_size` times, and return the episodes when all have ended.

        The episodes of one task form a group: they share `group_id` and are contiguous.

        Args:
            tasks: tasks to run.
            group_size: rollouts per task.
            mode: mode of the rollouts; only those in train mode are trained.
            resources: resources that extend or override the algorithm's (`Algorithm.resources`):
                one mapping for all tasks, or one mapping per task, for example to compare
                candidates in parallel; None for the algorithm's alone.
        """

    async def forks(self, points: Sequence[ForkPoint], count: int) -> list[Episode]:
        """Repeat recorded attempts up to a call, sample from there, and return the episodes.

        The forks of one point form a group, apart from the group of the attempt that they repeat:
        they share `group_id` and are contiguous. They have the task, the resources and the mode of
        that attempt. The gateway answers the calls before the point as it did then, so the app runs
        again, with its tools, and only the calls from the point on are sampled. Attempts that
        departed from the recorded one are left out, with a message.

        Args:
            points: points of ended attempts of this store, from `lightspan.lightning.fork_points`.
            count: number of forks per point.

        Raises:
            ConfigError: an attempt cannot be forked at a point (`ForkPoint.refusal`), or the
                algorithm has `overlap`, whose attempts may be of older weights.
        """

    async def submit(
        self,
        tasks: Sequence[Json],
        group_size: int,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[str]:
        """Start the app on each task `group_size` times in train mode, without waiting.

        `take` returns the episodes. Running calls continue while weights are published; each token
        records the version of its weights. After a resume, `next_tasks` first returns the tasks of
        groups that `take` had not returned.

        Returns:
            One group id per task.

        Args:
            tasks: tasks to run.
            group_size: rollouts per task.
            resources: resources in addition to the algorithm's, as in `rollouts`.
        """

    async def take(self, count: int, first: Sequence[str] = ()) -> list[Episode]:
        """Wait until `count` submitted groups have ended, and return their episodes.

        Each group is returned whole and only once: first the groups named in `first`, then those
        that ended earliest.

        Args:
            count: number of groups.
            first: ids of groups to return in any case, at most `count`.

        Raises:
            ConfigError: fewer than `count` groups are left to return, `first` names a group that is
                not among them, or `first` has more than `count` groups.
        """

    async def stored_episodes(self, rollout_ids: Sequence[str]) -> list[Episode]:
        """Return the episodes of earlier rollouts, in the order in which they were enqueued.

        They have the app's own rewards: neither those of a judge, nor `failure_reward`.

        Raises:
            NotFoundError: a rollout is not in the store, for example because it was pruned.
        """

    async def interrupted(self, known: Container[str]) -> list[Episode]:
        """Return the episodes of this step's rollouts in train mode that a runner began.

        When a resumed run begins a step, they are rollouts of earlier processes. The rollouts of
        `Algorithm.check_run` belong to step 1.

        Args:
            known: ids of rollouts to leave out.
        """

    async def learn(self, function: Callable[[], Any]) -> Any:
        """Run `function`, which uses the learner, in the learner's thread; return its result.

        In another thread it could run concurrently with other uses of the learner, or block the
        event loop.
        """

    async def publish(self) -> None:
        """Publish the learner's weights to the engine as new versions."""

    def note(self, text: str) -> None:
        """Print a message in the run's output."""

    def record(self, kind: str, metrics: Metrics) -> None:
        """Append a line to `metrics.jsonl` within a step; sinks do not get it.

        Args:
            kind: kind of the line, other than `train`, `eval` and `selection`.
            metrics: metric → value.
        """

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """Record the advantage and weight of each trained call of this step.

        `lightspan inspect` shows them.

        Args:
            explanations: (attempt id, call id, number of the choice) → advantage and weight with
                their reasons.
        """

    def record_mismatches(self, mismatches: Mapping[TransitionKey, str]) -> None:
        """Record which calls of this step the learner cannot compute.

        `lightspan inspect` shows them.

        Args:
            mismatches: (attempt id, call id, number of the choice) → why the call cannot be
                computed under its grammar.
        """


@runtime_checkable
class Algorithm(Protocol):
    """A learning algorithm.

    Members with code in this class have a default; override them as needed. A subclass overrides a
    default property by a property or a class attribute, such as a dataclass field with a default
    (`seed: int = 0`). An attribute that is only set in `__init__` does not override a property.
    """

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def seed(self) -> int:
        """Seed of the order of tasks, random initial weights, and sampling."""
        return 0

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer()

    @property
    def critic(self) -> Critic | None:
        """Settings of the critic; None if the algorithm trains no critic."""
        return None

    @property
    def tasks_per_step(self) -> int:
        """Number of tasks per iteration; the trainer computes an epoch's iterations from it."""
        return 16

    @property
    def group_size(self) -> int:
        """Number of rollouts per task of an iteration.

        A dry run (`lightspan dev`) estimates a step from this number, and from `minibatches`,
        `loss`, `batch_config` and `coverages`.
        """
        return 1

    @property
    def minibatches(self) -> int:
        """Optimiser steps per iteration."""
        return 1

    @property
    def loss(self) -> Loss:
        """Loss of the learner's updates."""
        return PolicyLoss()

    @property
    def batch_config(self) -> BatchConfig:
        """Settings by which batches are built from episodes."""
        return BatchConfig()

    def coverages(
        self, episodes: Sequence[Episode], *, modes: Collection[Mode] = (Mode.TRAIN,)
    ) -> list[Coverage]:
        """Return which calls of each episode are trained, frozen, or rejected with a reason.

        Args:
            episodes: the episodes.
            modes: modes of rollouts whose calls may be trained.
        """
        routing = self.routing()
        return [classify_calls(episode, routing, modes=modes) for episode in episodes]

    @property
    def needs_rewards(self) -> bool:
        """Whether a rollout without a reward teaches nothing, and is reported."""
        return True

    @property
    def timeout_s(self) -> float | None:
        """Seconds per rollout; None for no limit."""
        return 600.0

    @property
    def failure_reward(self) -> FailureReward:
        """Reward of a rollout whose app failed; None leaves the rollout unscored."""
        return "lowest"

    @property
    def total_steps(self) -> int | None:
        """Number of iterations, if the algorithm sets it itself; None if the trainer sets it.

        If it is set, `Trainer` accepts neither `steps` nor `epochs`.
        """
        return None

    @property
    def searches(self) -> int:
        """Number of the run's iterations that search for prompts and update no weights."""
        return 0

    @property
    def search_rollouts(self) -> int:
        """Maximum number of rollouts in all search iterations (`searches`) together."""
        return 0

    def task_order(self, tasks: Sequence[Json]) -> TaskOrder:
        """Return the order of the training tasks: by default one shuffled epoch after another."""
        return Epochs(tasks, self.seed)

    async def check_run(self, trainer: TrainerContext) -> None:
        """Check a new run's tasks and app, by rollouts if needed, before its first evaluation.

        Raises:
            ConfigError: the run would fail later.
        """
        return

    def reset(self) -> None:
        """Discard what an earlier run with this object learned; a new run or evaluation begins.

        If it continues from a checkpoint, `load_state` follows.
        """
        return

    def starts_again(self, before: Mapping[str, Json]) -> bool:
        """Return whether a resumed run starts with step 1 again.

        A search for prompts does if its budget has grown.

        Args:
            before: the earlier settings of the run, as `config` returned them.
        """
        return False

    @property
    def base_model(self) -> str:
        """Model that answers the calls of agents with `frozen="base"`: the starting weights."""
        return next(iter(self.policies().values())).model

    def check(self, engine: EngineCapabilities, learner: LearnerCapabilities) -> None:
        """Check the capabilities of engine and learner against the algorithm's options.

        Raises:
            UnsupportedError: `engine` or `learner` does not support an option.
        """
        return

    def policies(self) -> dict[str, PolicySpec]:
        """Return policy → starting weights and LoRA settings, for all policies to train.

        If the mapping is empty, no weights are trained: the run has neither engine nor learner, and
        calls go to the endpoints of the app or of the routing.
        """

    def resources(self) -> Resources:
        """Return name → resource that the app can ask for, such as a prompt.

        The trainer adds the resource `routing`.
        """
        return {}

    def learned_prompts(self) -> Mapping[str, LearnedPrompt]:
        """Return name → learned prompt with its original text, for `FitResult.prompts`."""
        return {}

    def routing(self) -> Routing:
        """Return the rules that decide which policy or endpoint answers each agent's calls."""

    async def run_step(self, trainer: TrainerContext) -> Metrics:
        """Run one iteration (rollouts, update, publish), and return its metrics."""

    def state(self) -> dict[str, Json]:
        """Return the algorithm's state for a checkpoint, as JSON values.

        The state of the learner is saved separately.
        """
        return {}

    def load_state(self, state: dict[str, Json]) -> None:
        """Restore the state that the method `state` returned."""
        return

    def describe_choices(self) -> list[str]:
        """Return one line of text for each setting that the algorithm chose itself, with the
        reason.
        """
        return []

    def inspect_episodes(self, episodes: Sequence[Episode]) -> list[str]:
        """Return findings about the rollouts of a dry run, one line of text each.

        Raises:
            ConfigError: the episodes show that `fit` would fail.
        """
        return []

    def config(self) -> dict[str, Json]:
        """Return the algorithm's settings for the run's file `config.json`.

        A run can be resumed only with equal settings.
        """
        return {"algorithm": self.name, "seed": self.seed}


def local_model(model: str | Path) -> str:
    """Return `model` as an absolute path if it is a folder, else unchanged as text.

    With an absolute path, a run can be resumed from another working folder.
    """
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else str(model)

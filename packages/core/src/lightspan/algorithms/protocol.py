"""Algorithm: the protocol of one training step.

The trainer owns store, gateway, engine, learner, runners and checkpoints; an algorithm owns one
step. A custom algorithm is a subclass of `Algorithm` with `policies`, `routing` and `run_step`,
which uses a `TrainerContext`: `examples/own_algorithm` has one in fifty lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.advantages import Explanation
from lightspan.lightning.batch import BatchConfig
from lightspan.lightning.episode import Episode
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
from lightspan.schema.prompts import LearnedPrompt
from lightspan.schema.records import Json, Mode
from lightspan.schema.resources import Resources
from lightspan.schema.routing import Routing

Metrics = dict[str, float]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Policy of an agent with its own model or LoRA: `optimize={"planner": Policy(…)}`.

    Agents with equal `name` share weights; the default is the agent's name.
    """

    name: str | None = None
    model: str | None = None
    """Starting weights; None for the algorithm's."""
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        for name in ("name", "model"):
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, str | PathLike) or not str(value)):
                raise ConfigError(f"Policy: {name}={value!r} must be a non-empty text")


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Starting weights and parametrisation of a policy."""

    model: str
    lora: LoRA | None = None


class TrainerContext(Protocol):
    """Interface of a running trainer for its algorithm."""

    @property
    def engine(self) -> TokenEngine:
        """The engine. Raises `ConfigError` if the algorithm has no policies."""

    @property
    def learner(self) -> Learner:
        """The learner. Raises `ConfigError` if the algorithm has no policies."""

    @property
    def path(self) -> Path:
        """The run's folder. An algorithm's files in its `journal` survive a resume from any
        checkpoint."""

    @property
    def tasks(self) -> Sequence[Json]:
        """All training tasks."""

    @property
    def step(self) -> int:
        """The current optimiser iteration, 1 first."""

    @property
    def last_step(self) -> int:
        """The last planned iteration; a run may end earlier."""

    @property
    def rng(self) -> random.Random:
        """Seeded random generator; its state is part of the checkpoint."""

    @property
    def versions(self) -> dict[str, int]:
        """Policy → version that the engine serves."""

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Submitted groups that were not taken, in order → publications since submission."""

    def next_tasks(self, count: int) -> list[Json]:
        """Return the next training tasks, in shuffled epochs.

        After a resume, the tasks of groups that were interrupted before `take` come first.
        """

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[Episode]:
        """Run the app on each task `group_size` times, and wait.

        The episodes of a group share `group_id` and are contiguous.

        Args:
            resources: resources that extend or override the algorithm's (`Algorithm.resources`),
                for all tasks or one mapping per task, so that candidates run in parallel.
        """

    async def submit(
        self,
        tasks: Sequence[Json],
        group_size: int,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[str]:
        """Start the app on each task `group_size` times, in train mode, and return the ids of the
        groups without waiting for `take`.

        Running calls continue while weights are published; each token records its version. After a
        resume, groups that were not taken start again: `next_tasks` returns their tasks first.

        Args:
            resources: see `rollouts`.
        """

    async def take(self, count: int, first: Sequence[str] = ()) -> list[Episode]:
        """Wait for `count` submitted groups, including those of `first`, and return their episodes.

        Whole groups are returned, once each: those of `first`, then the ones that ended earliest.

        Raises:
            ConfigError: fewer groups are in flight, or one of `first` is not.
        """

    async def learn(self, function: Callable[[], Any]) -> Any:
        """Run a function of the learner in its thread, so that it does not block the event loop."""

    async def publish(self) -> None:
        """Publish the learner's weights to the engine as new versions."""

    def note(self, text: str) -> None:
        """Print a message in the run's output."""

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """Record the advantage and weight of each transition of this step for `inspect`."""

    def record_mismatches(self, mismatches: Mapping[TransitionKey, str]) -> None:
        """Record why calls of this step cannot be computed under their grammar, for `inspect`."""


@runtime_checkable
class Algorithm(Protocol):
    """A learning algorithm. Methods with a body are defaults.

    A subclass overrides a default by a property or a class attribute, such as a dataclass field
    with a default (`seed: int = 0`); an attribute set in `__init__` alone does not.
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
        """The critic's settings; None without a critic."""
        return None

    @property
    def tasks_per_step(self) -> int:
        """Tasks per iteration, which determine the iterations per epoch."""
        return 16

    @property
    def group_size(self) -> int:
        """Rollouts per task of an iteration. A dry run uses it and the next four for estimates."""
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
        """Settings of batches."""
        return BatchConfig()

    def coverages(
        self, episodes: Sequence[Episode], *, modes: Collection[Mode] = (Mode.TRAIN,)
    ) -> list[Coverage]:
        """Return the status of every call, one coverage per episode."""
        routing = self.routing()
        return [classify_calls(episode, routing, modes=modes) for episode in episodes]

    @property
    def timeout_s(self) -> float | None:
        """Seconds per rollout; None for no limit."""
        return 600.0

    @property
    def failure_reward(self) -> float | None:
        """Reward of a rollout whose app failed; None leaves it unscored."""
        return None

    @property
    def total_steps(self) -> int | None:
        """Number of iterations, if the algorithm itself determines it; then `Trainer` takes
        none."""
        return None

    @property
    def searches(self) -> int:
        """Iterations that search for prompts instead of updating weights."""
        return 0

    @property
    def search_rollouts(self) -> int:
        """Maximum rollouts of all these iterations together."""
        return 0

    @property
    def base_model(self) -> str:
        """Model for agents that are frozen as `"base"`."""
        return next(iter(self.policies().values())).model

    def check(self, engine: EngineCapabilities, learner: LearnerCapabilities) -> None:
        """Raise `UnsupportedError` for an option that this engine or learner does not support."""
        return

    def policies(self) -> dict[str, PolicySpec]:
        """Return the policies to train.

        Without any (something else than weights is learned), there is neither engine nor learner,
        and every call goes where the app points it.
        """

    def resources(self) -> Resources:
        """Return the current resources of apps by name; the trainer adds `routing`."""
        return {}

    def learned_prompts(self) -> Mapping[str, LearnedPrompt]:
        """Return the learned prompts with their originals, for `FitResult.prompts`."""
        return {}

    def routing(self) -> Routing:
        """Return the destinations of agents' calls."""

    async def run_step(self, trainer: TrainerContext) -> Metrics:
        """Run one iteration (rollouts, update, publish), and return its metrics."""

    def state(self) -> dict[str, Json]:
        """Return the state for a checkpoint, without the learner's, as JSON."""
        return {}

    def load_state(self, state: dict[str, Json]) -> None:
        """Restore the result of `state`."""
        return

    def describe_choices(self) -> list[str]:
        """Return automatic choices of settings, with reasons, as text."""
        return []

    def inspect_episodes(self, episodes: Sequence[Episode]) -> list[str]:
        """Return findings about the rollouts of a dry run, as text.

        Raises:
            ConfigError: `fit` would fail.
        """
        return []

    def config(self) -> dict[str, Json]:
        """Return the settings for `config.json`. Only equal settings can resume a run."""
        return {"algorithm": self.name, "seed": self.seed}


def local_model(model: str | Path) -> str:
    """Return the model's name, or its folder as an absolute path (a resume may run elsewhere)."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else str(model)

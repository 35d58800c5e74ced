"""Algorithm: decides what to run and what to learn from it.

The trainer owns the world (store, gateway, engine, learner, runners, checkpoints); an algorithm
owns one step. A user's own algorithm is a subclass of `Algorithm` with `policies`, `routing` and
`run_step`, and works through `TrainerContext`: `examples/own_algorithm` is one in fifty lines.
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
    """What an agent trains, where a name alone does not say it: `optimize={"planner": Policy(…)}`.

    Agents with equal `name` share weights; without a name, the agent's own is used.
    """

    name: str | None = None
    model: str | None = None
    """Starting weights; None for the algorithm's."""
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        for name in ("name", "model"):
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, str | PathLike) or not str(value)):
                raise ConfigError(f"Policy: {name}={value!r} must be a text that is not empty")


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One policy to train: its starting weights and how it is parametrised."""

    model: str
    lora: LoRA | None = None


class Reflections(msgspec.Struct, frozen=True, kw_only=True):
    """What a search would ask a reflection model."""

    model: str
    most: int
    """Questions, at most."""
    tokens_in: float
    """Of a question, about: a token is taken for four characters."""
    tokens_out: float
    """Of an answer, at least about: as long as the text that it changes."""
    most_cost: float | None = None
    """Of all, by `prices`; None: the model has none."""


class TrainerContext(Protocol):
    """What a trainer offers to an algorithm while it trains."""

    @property
    def engine(self) -> TokenEngine:
        """Raises `ConfigError`: the algorithm has no policies, so there is none."""
        ...

    @property
    def learner(self) -> Learner:
        """Raises `ConfigError`: likewise."""
        ...

    @property
    def path(self) -> Path:
        """Of the run's folder. What an algorithm keeps in its `journal` is there as long as the run
        is, whatever checkpoint it goes on from."""
        ...

    @property
    def tasks(self) -> Sequence[Json]:
        """Every training task."""
        ...

    @property
    def step(self) -> int:
        """The current optimiser iteration, 1 first."""
        ...

    @property
    def last_step(self) -> int:
        """The last iteration that is planned; a run may end before."""
        ...

    @property
    def rng(self) -> random.Random:
        """Seeded; its state is part of the checkpoint."""
        ...

    @property
    def versions(self) -> dict[str, int]:
        """Policy → the version that the engine serves."""
        ...

    @property
    def in_flight(self) -> Mapping[str, int]:
        """The groups that were submitted and not taken, in order → publications since."""
        ...

    def next_tasks(self, count: int) -> list[Json]:
        """The next training tasks: shuffled epochs, no task twice before all were used; first
        those of groups that an interruption cut off before they were taken."""
        ...

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[Episode]:
        """Run the app on each task `group_size` times and wait; a group's episodes share
        `group_id` and stand together.

        Args:
            resources: what the app is handed beside, and in place of, the algorithm's own
                (`Algorithm.resources`): for all, or one mapping per task, so that candidates run
                side by side. A group has one version of them.
        """
        ...

    async def submit(
        self,
        tasks: Sequence[Json],
        group_size: int,
        *,
        resources: Resources | Sequence[Resources] | None = None,
    ) -> list[str]:
        """Begin to run the app on each task `group_size` times, in train mode, and return at once:
        the ids of the groups, which `take` gives when they have ended. Calls under way go on while
        weights are published, each token with its version. A run that is resumed begins those
        anew that it had not taken: `next_tasks` gives their tasks first.

        Args:
            resources: see `rollouts`.
        """
        ...

    async def take(self, count: int, first: Sequence[str] = ()) -> list[Episode]:
        """Wait until so many submitted groups have ended, and those of `first` among them; their
        episodes, group by group, none torn: those of `first`, then whatever ended earliest. No
        group is given twice.

        Raises:
            ConfigError: fewer groups are in flight, or one of `first` is not.
        """
        ...

    async def learn(self, function: Callable[[], Any]) -> Any:
        """Run the learner's work in its own thread, so that the gateway goes on answering."""
        ...

    async def publish(self) -> None:
        """Hand the learner's weights to the engine as new versions."""
        ...

    def note(self, text: str) -> None:
        """Tell the person who watches."""
        ...

    def explain(self, explanations: Mapping[TransitionKey, Explanation]) -> None:
        """Keep why each transition of this step had its advantage and weight (`inspect`)."""
        ...

    def keep_mismatches(self, mismatches: Mapping[TransitionKey, str]) -> None:
        """Keep why calls of this step cannot be computed under their grammar (`inspect`)."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """One way to learn. What has a body here is a default.

    A subclass replaces a default by a property, or by an attribute of the class: a field of a
    dataclass with a default is one (`seed: int = 0`). An attribute set in `__init__` alone is not.
    """

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def seed(self) -> int:
        """Of the order of tasks, the weights that start at random, and sampling."""
        return 0

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer()

    @property
    def critic(self) -> Critic | None:
        """What learns beside the policies to expect their rewards; None: nothing."""
        return None

    @property
    def tasks_per_step(self) -> int:
        """What an iteration takes, to tell how many make an epoch."""
        return 16

    @property
    def group_size(self) -> int:
        """Rollouts per task of an iteration. A dry run reckons with it, as with the next four."""
        return 1

    @property
    def minibatches(self) -> int:
        """Optimiser steps of an iteration."""
        return 1

    @property
    def loss(self) -> Loss:
        """Of the learner's updates."""
        return PolicyLoss()

    @property
    def batch_config(self) -> BatchConfig:
        """How episodes become rows."""
        return BatchConfig()

    def coverages(
        self, episodes: Sequence[Episode], *, modes: Collection[Mode] = (Mode.TRAIN,)
    ) -> list[Coverage]:
        """What becomes of every call, one per episode."""
        routing = self.routing()
        return [classify_calls(episode, routing, modes=modes) for episode in episodes]

    @property
    def timeout_s(self) -> float | None:
        """Of one rollout."""
        return 600.0

    @property
    def failure_reward(self) -> float | None:
        """Of a rollout whose app failed; None leaves it unscored."""
        return None

    @property
    def total_steps(self) -> int | None:
        """Iterations in all, where the algorithm itself knows; then the trainer is told none."""
        return None

    @property
    def searches(self) -> int:
        """Iterations in which no weights are updated, but prompts searched for."""
        return 0

    @property
    def search_rollouts(self) -> int:
        """Rollouts of all those together, at most."""
        return 0

    @property
    def base_model(self) -> str:
        """Starting weights of agents that are frozen as `"base"`."""
        return next(iter(self.policies().values())).model

    def check(self, engine: EngineCapabilities, learner: LearnerCapabilities) -> None:
        """Raises `UnsupportedError`: an option that this engine or learner does not honour."""
        return

    def policies(self) -> dict[str, PolicySpec]:
        """The policies to train; none where something else than weights is learned. Then there is
        neither engine nor learner, and every call goes where the app points it."""
        ...

    def resources(self) -> Resources:
        """What apps are handed now, by name; `routing` among them is the trainer's."""
        return {}

    def learned_prompts(self) -> Mapping[str, LearnedPrompt]:
        """The prompts that were learned, and what they were before: `FitResult.prompts`."""
        return {}

    def routing(self) -> Routing:
        """Which agent's calls go where."""
        ...

    async def run_step(self, world: TrainerContext) -> Metrics:
        """One iteration: rollouts, update, publish. Returns its metrics."""
        ...

    def state(self) -> dict[str, Json]:
        """What has to survive a restart beside the learner, as JSON."""
        return {}

    def load_state(self, state: dict[str, Json]) -> None:
        """Go on from what `state` gave."""
        return

    def describe_choices(self) -> list[str]:
        """What it chose itself where nothing was given, and why, for people."""
        return []

    def inspect_episodes(self, episodes: Sequence[Episode]) -> list[str]:
        """What the rollouts of a dry run show of what it would learn, for people.

        Raises:
            ConfigError: why `fit` would end.
        """
        return []

    def reflections(self, tasks: Sequence[Json], episodes: Sequence[Episode]) -> list[Reflections]:
        """What it would ask reflection models, by the rollouts of a dry run.

        Args:
            tasks: all training tasks.
            episodes: those rollouts.

        Raises:
            ConfigError, DataError: why `fit` would end.
        """
        return []

    def config(self) -> dict[str, Json]:
        """The settings, for `config.json`. A run is resumed with equal ones only."""
        return {"algorithm": self.name, "seed": self.seed}


def local_model(model: str | Path) -> str:
    """The model's name, or its folder as an absolute path (a resume may run elsewhere)."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else str(model)

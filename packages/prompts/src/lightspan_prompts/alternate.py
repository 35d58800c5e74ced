"""Alternate: prompts and weights learn in one run, in turns, within one budget."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from lightspan.algorithms.lightning_rl import LightningRL
from lightspan.algorithms.protocol import (
    Algorithm,
    Metrics,
    PolicySpec,
    Reflections,
    TrainerContext,
)
from lightspan.algorithms.task_sampler import Epochs
from lightspan.errors import ConfigError
from lightspan.lightning.batch import BatchConfig
from lightspan.lightning.episode import Episode
from lightspan.lightning.selection import Coverage
from lightspan.protocols.engine import EngineCapabilities
from lightspan.protocols.learner import Critic, LearnerCapabilities, Loss, Optimizer
from lightspan.schema.prompts import LearnedPrompt
from lightspan.schema.records import Json, Mode, new_id, task_id
from lightspan.schema.resources import Resources
from lightspan.schema.routing import Routing
from lightspan.schema.validation import check_kind, check_whole
from lightspan_prompts.apo import APO
from lightspan_prompts.gepa import GEPA
from lightspan_prompts.search.candidates import JOURNAL, TooFewRolloutsError
from lightspan_prompts.search.prompt_discovery import Surveyed
from lightspan_prompts.search.selected_prompts import SelectedPrompts

FIRST: Final = "start"
"""What the weights are called that a run begins with."""


class _State(msgspec.Struct, kw_only=True):
    """What has to survive a restart."""

    templates: dict[str, str] | None = None
    """Prompt → template, as it was last chosen; None before the first search."""
    surveyed: Surveyed | None = None
    """The texts that the first search found in the app; None: none were to be, or it did not
    look yet."""
    rollouts: int = 0
    """Of all searches so far; likewise the next three."""
    reflections: int = 0
    tokens: int = 0
    cost: float = 0.0
    asked: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Task → who was asked in its first rollout in a search."""
    cursor: int = 0
    """Training tasks that weights have used so far."""
    weights: str = FIRST
    """A name of the weights as they are: another one after each step of theirs."""


class Alternate(Algorithm):
    """Learns prompts and weights in turns: a search for better prompts, run by the model as it is
    then; some steps of the weights, with the prompts as they are then; and again.

    Every rollout group has one version of the resources and of the policies: nothing of the one
    half moves while the other works. Prompts are chosen by the selection split of `prompts` alone,
    a seeded part of the training tasks that weights are not trained on; the held-out tasks choose
    nothing.

    Args:
        prompts: `GEPA` or `APO`, whose prompts are of agents that `weights` trains, of others, or
            both: in a request of either kind the text is that which was chosen. With `optimize=`
            the first search finds the texts in the app, and the others begin with what the one
            before them has chosen. Its budgets are of all its searches together, each of which may
            use an equal share of what is left.
        weights: `LightningRL`. Its model answers while prompts are searched too, and is sampled as
            in training; what the seed, a timeout of a rollout and the reward of a failed one are
            for the run, it says.
        max_rollouts: of both together, at most, beside those of the held-out tasks. What `prompts`
            may not use is for weights, in whole steps.
        cycles: how many turns each half has.

    Raises:
        ConfigError: the budget is too small for a step of weights in each cycle, or an option that
            cannot be honoured.
    """

    def __init__(
        self, prompts: GEPA | APO, weights: LightningRL, *, max_rollouts: int, cycles: int = 2
    ) -> None:
        if not isinstance(prompts, GEPA | APO):
            raise ConfigError(
                f"Alternate({prompts!r:.80}, …): the first learns prompts, GEPA or APO"
            )
        check_kind("weights", weights, LightningRL)
        if weights.overlap:
            raise ConfigError(
                f"Alternate(…, LightningRL(overlap={weights.overlap})): nothing of one half moves "
                "while the other works, so no rollout may go on from one to the other: leave it out"
            )
        check_whole("max_rollouts", max_rollouts, 1)
        check_whole("cycles", cycles, 1)
        self.prompts = prompts
        self.weights = weights
        self.max_rollouts = max_rollouts
        self.cycles = cycles
        self._step_rollouts = weights.tasks_per_step * weights.group_size * (1 + weights.resample)
        steps = (max_rollouts - prompts.max_rollouts) // self._step_rollouts
        if steps < cycles:
            raise ConfigError(
                f"Alternate(max_rollouts={max_rollouts}, cycles={cycles}): {type(prompts).__name__}"
                f" may use {prompts.max_rollouts} of them, and a step of weights takes "
                f"{self._step_rollouts}: give at least "
                f"{prompts.max_rollouts + cycles * self._step_rollouts}, or fewer cycles"
            )
        asked = prompts.max_reflections
        least = cycles * max(2, prompts.proposals if isinstance(prompts, GEPA) else 0)
        if asked is not None and asked < least:
            raise ConfigError(
                f"Alternate(cycles={cycles}): max_reflections={asked} is too few for a new "
                f"candidate in each; give at least {least}"
            )
        self._searches: dict[int, int] = {}
        """Step → the number of the cycle whose search it is; the others are of weights."""
        step = 1
        for cycle in range(cycles):
            self._searches[step] = cycle
            step += 1 + steps // cycles + (cycle < steps % cycles)
        self._total = step - 1
        self._state = _State()

    # --- what a trainer asks: of weights ------------------------------------------------------
    @property
    def seed(self) -> int:
        return self.weights.seed

    @property
    def optimizer(self) -> Optimizer:
        return self.weights.optimizer

    @property
    def critic(self) -> Critic | None:
        return self.weights.critic

    @property
    def tasks_per_step(self) -> int:
        return self.weights.tasks_per_step

    @property
    def group_size(self) -> int:
        return self.weights.group_size

    @property
    def minibatches(self) -> int:
        return self.weights.minibatches

    @property
    def loss(self) -> Loss:
        return self.weights.loss

    @property
    def batch_config(self) -> BatchConfig:
        return self.weights.batch_config

    @property
    def timeout_s(self) -> float | None:
        return self.weights.timeout_s

    @property
    def failure_reward(self) -> float | None:
        return self.weights.failure_reward

    @property
    def base_model(self) -> str:
        return self.weights.base_model

    def coverages(
        self, episodes: Sequence[Episode], *, modes: Collection[Mode] = (Mode.TRAIN,)
    ) -> list[Coverage]:
        return self.weights.coverages(episodes, modes=modes)

    def check(self, engine: EngineCapabilities, learner: LearnerCapabilities) -> None:
        self.weights.check(engine, learner)

    def policies(self) -> dict[str, PolicySpec]:
        return self.weights.policies()

    def routing(self) -> Routing:
        return self.weights.routing()

    def describe_choices(self) -> list[str]:
        return self.weights.describe_choices()

    # --- of both ------------------------------------------------------------------------------
    @property
    def total_steps(self) -> int:
        return self._total

    @property
    def searches(self) -> int:
        return self.cycles

    @property
    def search_rollouts(self) -> int:
        return self.prompts.max_rollouts

    @property
    def chosen(self) -> SelectedPrompts:
        """The texts as they were last chosen."""
        half, state = self.prompts, self._state
        return SelectedPrompts(
            half.prompts, half.patterns, state.surveyed, state.templates, state.asked
        )

    def resources(self) -> Resources:
        return self.chosen.resources()

    def learned_prompts(self) -> dict[str, LearnedPrompt]:
        return self.chosen.learned()

    def inspect_episodes(self, episodes: Sequence[Episode]) -> list[str]:
        return self.prompts.inspect_episodes(episodes)

    def reflections(self, tasks: Sequence[Json], episodes: Sequence[Episode]) -> list[Reflections]:
        return self.prompts.reflections(tasks, episodes)

    def state(self) -> dict[str, Json]:
        return {**msgspec.to_builtins(self._state), "half": self.weights.state()}

    def load_state(self, state: dict[str, Json]) -> None:
        self._state = msgspec.convert(state, _State)
        half: Any = state["half"]
        self.weights.load_state(half)

    def config(self) -> dict[str, Json]:
        search = self.prompts.config()
        reflection = search.pop("reflection")  # may change between two lives of a run
        del search["timeout_s"]  # that of weights holds
        given: Any = search["budget"]
        # may change too; the others of the budget may not, since a search's share hangs on them
        money = {name: given.pop(name) for name in ("max_cost", "prices")}
        return {
            **self.weights.config(),
            "algorithm": self.name,
            "search": search,
            "reflection": reflection,
            "budget": money,
            "max_rollouts": self.max_rollouts,
            "cycles": self.cycles,
            # what the run takes is not told by the tasks of a step
            "tasks_per_step": None,
            "step_tasks": self.weights.tasks_per_step,
        }

    # --- its steps ----------------------------------------------------------------------------
    async def run_step(self, world: TrainerContext) -> Metrics:
        """A search, or a step of weights."""
        cycle = self._searches.get(world.step)
        if cycle is None:
            return await self._learn(world)
        return await self._search(world, cycle)

    async def _search(self, world: TrainerContext, cycle: int) -> Metrics:
        """Look for better prompts, from its beginning or from what its journal has of it."""
        half, state = self.prompts, self._state
        turns = self.cycles - cycle
        tokens = None if half.max_tokens is None else half.max_tokens - state.tokens
        if tokens is not None and tokens <= 0:
            world.note(f"max_tokens={half.max_tokens} is used up: the prompts stay as they are")
            return {"rollouts": 0, "scored": 0, "failed": 0}
        cost = None if half.max_cost is None else half.max_cost - state.cost
        if cost is not None and cost <= 0:
            world.note(f"max_cost={half.max_cost:g} is used up: the prompts stay as they are")
            return {"rollouts": 0, "scored": 0, "failed": 0}
        asked = half.max_reflections
        search = replace(
            half,
            max_rollouts=(half.max_rollouts - state.rollouts) // turns,
            max_reflections=None if asked is None else (asked - state.reflections) // turns,
            max_tokens=None if tokens is None else max(1, tokens // turns),
            max_cost=None if cost is None else cost / turns,
        )
        search.begun = None if state.templates is None else self.chosen
        try:
            metrics = await search.run_step(_part(world, path=self._folder(world)))
        except TooFewRolloutsError as error:
            raise ConfigError(
                f"Alternate(cycles={self.cycles}): of max_rollouts={half.max_rollouts} this search "
                f"may use {search.max_rollouts}: {error}; each cycle has an equal share"
            ) from error
        world.explain({})  # its calls went to the model that is trained, and taught it nothing
        found = search.found
        assert found is not None
        state.templates = found.candidates[found.chosen].templates
        state.surveyed = found.surveyed
        state.asked = found.asked
        state.rollouts += found.rollouts
        state.reflections += found.reflections
        state.tokens += found.tokens
        state.cost += found.cost or 0.0
        return metrics

    def _folder(self, world: TrainerContext) -> Path:
        """Where the search of this step keeps its journal: of these weights alone. A run that was
        set back by more than a step has others, with which nothing of it would be true."""
        name = f"step-{world.step:06d}"
        mine = world.path / JOURNAL / f"{name}-{self._state.weights}"
        for other in (world.path / JOURNAL).glob("step-*"):
            if other.name >= name and other != mine:
                shutil.rmtree(other, ignore_errors=True)
        mine.mkdir(parents=True, exist_ok=True, mode=0o700)
        return mine

    async def _learn(self, world: TrainerContext) -> Metrics:
        """A step of the weights, with the prompts as they are, on tasks that choose no prompt."""
        apart = {task_id(task) for task in self.prompts.split(world.tasks).selection}
        tasks = [task for task in world.tasks if task_id(task) not in apart]

        def next_tasks(count: int) -> list[Json]:
            chosen = Epochs(tasks, self.seed).take(self._state.cursor, count)
            self._state.cursor += count
            return chosen

        part = _part(world, tasks=tasks, next_tasks=next_tasks)
        metrics = await self.weights.run_step(part)
        self._state.weights = new_id("")[-12:]
        return metrics


class _Part:
    """A world, but for what one half sees otherwise."""

    def __init__(self, world: TrainerContext, others: Mapping[str, Any]) -> None:
        self._world = world
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


def _part(world: TrainerContext, **others: Any) -> TrainerContext:
    return cast("TrainerContext", _Part(world, others))

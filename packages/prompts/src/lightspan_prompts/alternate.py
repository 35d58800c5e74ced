"""Alternate: learn prompts and weights in turns, within one budget."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from lightspan.algorithms.lightning_rl import LightningRL
from lightspan.algorithms.protocol import (
    Algorithm,
    Metrics,
    TrainerContext,
)
from lightspan.errors import ConfigError
from lightspan.lightning.episode import Episode
from lightspan.schema.prompts import LearnedPrompt
from lightspan.schema.records import Json, new_id, task_id
from lightspan.schema.resources import Resources
from lightspan.schema.validation import check_kind, check_whole
from lightspan_prompts.apo import APO
from lightspan_prompts.gepa import GEPA
from lightspan_prompts.search.candidates import JOURNAL, TooFewRolloutsError, equal_tasks
from lightspan_prompts.search.prompt_discovery import Surveyed
from lightspan_prompts.search.selected_prompts import SelectedPrompts

INITIAL_WEIGHTS: Final = "start"
"""Name of the initial weights."""


class _State(msgspec.Struct, kw_only=True):
    """State that is checkpointed."""

    templates: dict[str, str] | None = None
    """Prompt → selected template; None before the first search."""
    surveyed: Surveyed | None = None
    """Texts that the first search discovered in the app; None before it, or without `optimize=`."""
    rollouts: int = 0
    """Rollouts of all searches so far; `reflections`, `tokens` and `cost` are totals too."""
    reflections: int = 0
    tokens: int = 0
    cost: float = 0.0
    asked: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Id of a task → agents that were called in the task's first rollout of a search."""
    cursor: int = 0
    """Number of training tasks that steps of weights have used so far."""
    weights: str = INITIAL_WEIGHTS
    """Name of the current weights; each step of weights sets a new name."""


def _of_weights(name: str) -> Any:
    return property(lambda self: getattr(self.weights, name))


class Alternate(Algorithm):
    """Learn prompts and weights in turns, within one budget.

    First the prompts are searched with the current model. Then the weights are trained for some
    steps with the current prompts. This is done `cycles` times.

    Prompts do not change while weights are trained, nor weights while prompts are searched. Part of
    the training tasks, the selection split, is used to compare prompts; weights are not trained on
    it. The split is chosen by a seed. Held-out tasks do not affect any choice.

    Args:
        prompts: `GEPA` or `APO`. Its prompts may belong to agents that `weights` trains, to other
            agents, or to both. With `optimize=` the first search discovers the texts in the app.
            Later searches start from the best prompts so far. Its budgets cover all searches
            together; each search may use an equal share of what is left.
        weights: `LightningRL`. Its model also answers the app's calls during searches, with the
            sampling parameters of training. Its seed, rollout timeout and failure reward are used
            for the whole run; only if its failure reward is None, searches use that of `prompts`.
        max_rollouts: maximum rollouts of the run, not counting those of held-out tasks. Searches
            use up to `prompts.max_rollouts` of them; the others are for training steps.
        cycles: number of searches; training steps follow each search.

    Raises:
        ConfigError: `max_rollouts` is too small for a training step in each cycle, or an option is
            invalid.
    """

    def __init__(
        self, prompts: GEPA | APO, weights: LightningRL, *, max_rollouts: int, cycles: int = 2
    ) -> None:
        if not isinstance(prompts, GEPA | APO):
            raise ConfigError(
                f"Alternate({prompts!r:.80}, …): the first argument is a GEPA or an APO"
            )
        check_kind("weights", weights, LightningRL)
        if weights.overlap:
            raise ConfigError(
                f"Alternate(…, LightningRL(overlap={weights.overlap})): rollouts cannot overlap "
                "with a search: leave overlap= out"
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
        reflections = prompts.max_reflections
        least = cycles * max(2, prompts.proposals if isinstance(prompts, GEPA) else 0)
        if reflections is not None and reflections < least:
            raise ConfigError(
                f"Alternate(cycles={cycles}): max_reflections={reflections} is too few for a new "
                f"candidate in each; give at least {least}"
            )
        self._searches: dict[int, int] = {}
        """Number of a step that runs a search → number of its cycle; other steps train weights."""
        step = 1
        for cycle in range(cycles):
            self._searches[step] = cycle
            step += 1 + steps // cycles + (cycle < steps % cycles)
        self._total = step - 1
        self._state = _State()

    # --- options of weights -------------------------------------------------------------------
    seed = _of_weights("seed")
    optimizer = _of_weights("optimizer")
    critic = _of_weights("critic")
    tasks_per_step = _of_weights("tasks_per_step")
    group_size = _of_weights("group_size")
    minibatches = _of_weights("minibatches")
    loss = _of_weights("loss")
    batch_config = _of_weights("batch_config")
    timeout_s = _of_weights("timeout_s")
    failure_reward = _of_weights("failure_reward")
    base_model = _of_weights("base_model")

    coverages = _of_weights("coverages")
    check = _of_weights("check")
    policies = _of_weights("policies")
    routing = _of_weights("routing")
    describe_choices = _of_weights("describe_choices")

    # --- options of both ----------------------------------------------------------------------
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
        """Return the selected texts."""
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

    def reset(self) -> None:
        self._state = _State()
        self.weights.reset()

    def state(self) -> dict[str, Json]:
        return {**msgspec.to_builtins(self._state), "half": self.weights.state()}

    def load_state(self, state: dict[str, Json]) -> None:
        self._state = msgspec.convert(state, _State)
        half: Any = state["half"]
        self.weights.load_state(half)

    def config(self) -> dict[str, Json]:
        search = self.prompts.config()
        reflection = search.pop("reflection")  # may change on resume
        del search["timeout_s"]  # that of weights applies
        limits: Any = search["budget"]
        # These may change on resume; the other budgets may not, since a search's share depends on
        # them.
        money = {name: limits.pop(name) for name in ("max_cost", "prices")}
        return {
            **self.weights.config(),
            "algorithm": self.name,
            "search": search,
            "reflection": reflection,
            "budget": money,
            "max_rollouts": self.max_rollouts,
            "cycles": self.cycles,
            # the rollouts of a run do not follow from the tasks of a step
            "tasks_per_step": None,
            "step_tasks": self.weights.tasks_per_step,
        }

    # --- steps --------------------------------------------------------------------------------
    async def run_step(self, context: TrainerContext) -> Metrics:
        """Run a search for better prompts, or a training step, whichever is next."""
        cycle = self._searches.get(context.step)
        if cycle is None:
            return await self._learn(context)
        return await self._search(context, cycle)

    async def _search(self, context: TrainerContext, cycle: int) -> Metrics:
        """Search for better prompts, or resume the search from its log."""
        half, state = self.prompts, self._state
        turns = self.cycles - cycle
        limits: dict[str, Any] = {}
        for name, spent in (("max_tokens", state.tokens), ("max_cost", state.cost)):
            limit = getattr(half, name)
            limits[name] = None if limit is None else limit - spent
            if limit is not None and spent >= limit:
                context.note(f"{name}={limit} is used up: the prompts stay unchanged")
                return {"rollouts": 0, "scored": 0, "failed": 0}
        tokens, cost = limits["max_tokens"], limits["max_cost"]
        reflections, own = half.max_reflections, self.weights.failure_reward
        search = replace(
            half,
            max_rollouts=(half.max_rollouts - state.rollouts) // turns,
            max_reflections=None
            if reflections is None
            else (reflections - state.reflections) // turns,
            max_tokens=None if tokens is None else max(1, tokens // turns),
            max_cost=None if cost is None else cost / turns,
            failure_reward=half.failure_reward if own is None else own,
        )
        search.begun = None if state.templates is None else self.chosen
        try:
            metrics = await search.run_step(_overridden(context, path=self._folder(context)))
        except TooFewRolloutsError as error:
            raise self._too_few(search.max_rollouts, error) from error
        context.explain({})  # its calls were answered by the trained model but train nothing
        result = search.found
        assert result is not None
        state.templates = result.candidates[result.chosen].templates
        state.surveyed = result.surveyed
        state.asked = result.asked
        state.rollouts += result.rollouts
        state.reflections += result.reflections
        state.tokens += result.tokens
        state.cost += result.cost or 0.0
        return metrics

    async def check_run(self, trainer: TrainerContext) -> None:
        """Check the tasks, and the share of rollouts of the first search, before any rollout.

        Raises:
            ConfigError: the share is too small for one new candidate.
            DataError: there are too few tasks.
        """
        half = self.prompts
        first = replace(half, max_rollouts=half.max_rollouts // self.cycles)
        if text := equal_tasks(trainer.tasks):
            trainer.note(text)
        try:
            first.check_budget(half.split(trainer.tasks))
        except TooFewRolloutsError as error:
            raise self._too_few(first.max_rollouts, error) from error

    def _too_few(self, rollouts: int, error: TooFewRolloutsError) -> ConfigError:
        return ConfigError(
            f"Alternate(cycles={self.cycles}): of max_rollouts={self.prompts.max_rollouts} this "
            f"search may use {rollouts}: {error}; each cycle has an equal share"
        )

    def _folder(self, context: TrainerContext) -> Path:
        """Return the folder for the log of this step's search with the current weights.

        If the run was reset to an earlier step, there may be logs of later steps, or of this step
        with other weights. They are invalid, because the weights differ now, and are deleted.
        """
        name = f"step-{context.step:06d}"
        folder = context.path / JOURNAL / f"{name}-{self._state.weights}"
        for other in (context.path / JOURNAL).glob("step-*"):
            if other.name >= name and other != folder:
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    async def _learn(self, context: TrainerContext) -> Metrics:
        """Train the weights for one step, with the current prompts.

        The tasks of the selection split, on which prompts are compared, are not trained on.
        """
        selection = {task_id(task) for task in self.prompts.split(context.tasks).selection}
        tasks = [task for task in context.tasks if task_id(task) not in selection]
        order = self.weights.task_order(tasks)

        def next_tasks(count: int) -> list[Json]:
            chosen = order.take(self._state.cursor, count)
            self._state.cursor += count
            return chosen

        weights_context = _overridden(context, tasks=tasks, next_tasks=next_tasks)
        metrics = await self.weights.run_step(weights_context)
        self._state.weights = new_id("")[-12:]
        return metrics


class _Overridden:
    """A wrapper of the trainer's context in which some attributes have other values."""

    def __init__(self, context: TrainerContext, attributes: Mapping[str, Any]) -> None:
        self._context = context
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _overridden(context: TrainerContext, **attributes: Any) -> TrainerContext:
    return cast("TrainerContext", _Overridden(context, attributes))

"""`PromptSearch`: base of algorithms that learn prompts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from lightspan.algorithms.protocol import (
    Algorithm,
    Metrics,
    PolicySpec,
    TrainerContext,
)
from lightspan.lightning.episode import Episode
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import LearnedPrompt, PromptPlace, PromptTemplate
from lightspan.schema.records import Json
from lightspan.schema.resources import Resources
from lightspan.schema.routing import Routing
from lightspan.schema.validation import check_number, check_whole
from lightspan_prompts.endpoint_client import EndpointClient
from lightspan_prompts.pricing import Price
from lightspan_prompts.search.candidates import (
    KIND,
    NO_CALLS,
    SearchResult,
    Split,
    equal_tasks,
    split_tasks,
    write_found,
)
from lightspan_prompts.search.dates import date_literals, days_around
from lightspan_prompts.search.evaluator import Evaluator, FailureReward
from lightspan_prompts.search.feedback import evidence_of
from lightspan_prompts.search.prompt_discovery import date_warnings, survey
from lightspan_prompts.search.search_log import SearchLog
from lightspan_prompts.search.selected_prompts import SelectedPrompts
from lightspan_prompts.search.validation import (
    check_installed,
    check_optimize,
    check_prices,
    check_prompts,
    check_reflection,
)
from lightspan_prompts.search.verdict import judged


@dataclass(kw_only=True, eq=False)
class PromptSearch(Algorithm):
    """An algorithm that searches for better prompts.

    No weights are trained: calls go where the app sends them, with the app's own key. A subclass
    adds its own settings and implements `search`.
    """

    prompts: Mapping[str, PromptTemplate] = field(kw_only=False, default_factory=dict)
    reflection: LLM = field(kw_only=False, default=None)  # type: ignore[assignment]
    optimize: str | Sequence[str] = ()
    max_rollouts: int = 300
    max_reflections: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)
    selection: float = 0.5
    significance: float | None = 0.05
    perfect_reward: float | None = 1.0
    failure_reward: FailureReward = "lowest"
    timeout_s: float | None = 600.0
    reflection_images: int = 0
    reflection_timeout_s: float = 300.0
    patience_s: float = 1800.0
    seed: int = 0
    found: SearchResult | None = field(init=False, default=None, repr=False)
    """Result of the search; None before its end."""
    begun: SelectedPrompts | None = field(init=False, default=None, repr=False)
    """Prompts selected by an earlier search of the run; this search starts from them, without a new
    discovery. None for the first search."""
    _has_discovered: bool = field(init=False, default=False, repr=False)
    """Whether this process discovered the app's texts, so that they are not from an older log."""

    @abstractmethod
    async def search(self, context: TrainerContext, split: Split) -> SearchResult:
        """Run the search, or resume it from its log."""

    # --- for subclasses ---------------------------------------------------------------------
    def _check_options(self, modules: Sequence[str], models: Mapping[str, LLM]) -> None:
        """Validate the options that all searches have.

        Args:
            modules: modules that have to be installed.
            models: name of an option → the reflection model that it names.

        Raises:
            ConfigError: an option is invalid.
            ModuleNotFoundError: a module is missing.
        """
        check_installed(self.name, modules)
        self.prompts = dict(self.prompts)  # the caller may modify the mapping
        self.optimize = self.patterns
        check_prompts(self.prompts)
        check_optimize(self.name, self.optimize, self.prompts)
        for name, llm in models.items():
            check_reflection(name, llm)
        check_prices(self.max_cost, self.prices, list(models.values()))
        self.prices = dict(self.prices)
        check_number("selection", self.selection, above=0, below=1)
        if self.failure_reward != "lowest":
            check_number("failure_reward", self.failure_reward)
        check_number("patience_s", self.patience_s, low=0)
        check_whole("reflection_images", self.reflection_images, 0)
        check_number("reflection_timeout_s", self.reflection_timeout_s, above=0)
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, above=0)
        if self.perfect_reward is not None:
            check_number("perfect_reward", self.perfect_reward)
        if self.significance is not None:
            check_number("significance", self.significance, above=0, below=1)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)

    def _common_config(
        self, reflection: object, budget: Sequence[str], options: Sequence[str]
    ) -> dict[str, Json]:
        """Return the algorithm's configuration, which is stored with the run.

        Args:
            reflection: the reflection model, or a list of reflection models.
            budget: names of options that may change on resume.
            options: names of further options to include.
        """
        limits = {name: getattr(self, name) for name in budget}
        return {
            "algorithm": self.name,
            "seed": self.seed,
            "timeout_s": self.timeout_s,
            "prompts": msgspec.to_builtins(self.prompts),
            "optimize": list(self.optimize),
            "reflection": msgspec.to_builtins(reflection),
            "budget": {**limits, "prices": msgspec.to_builtins(dict(self.prices))},
            "significance": self.significance,
            # left out at its default, so that runs of earlier versions resume
            **({"reflection_images": self.reflection_images} if self.reflection_images else {}),
            "selection_share": self.selection,  # `selection` is the key of the data
            **{name: getattr(self, name) for name in options},
        }

    def _open_client(self, llm: LLM, context: TrainerContext) -> EndpointClient:
        return EndpointClient(
            llm,
            timeout_s=self.reflection_timeout_s,
            patience_s=self.patience_s,
            note=context.note,
            images=context.images,
            max_images=self.reflection_images,
        )

    def make_evaluator(self, context: TrainerContext, journal: SearchLog) -> Evaluator:
        """Return an evaluator that runs this search and writes to the log `journal`."""
        return Evaluator(
            context,
            self.prompts,
            journal,
            self.failure_reward,
            max_rollouts=self.max_rollouts,
            max_tokens=self.max_tokens,
            max_cost=self.max_cost,
            prices=self.prices,
            begun=self.begun,
            perfect_reward=self.perfect_reward,
            interrupted=context.interrupted,
            has_discovered=self._has_discovered,
            note=context.note,
            record=partial(context.record, KIND),
        )

    @abstractmethod
    def open_log(self, context: TrainerContext) -> SearchLog:
        """Open the search's log in the run's folder."""

    @abstractmethod
    def check_budget(self, split: Split) -> None:
        """Raise `TooFewRolloutsError` if the budget is too small for one new candidate."""

    def reset(self) -> None:
        self.found, self._has_discovered = None, False

    async def check_run(self, trainer: TrainerContext) -> None:
        """Check the search before the run's first evaluation of held-out tasks.

        Check the budget and the number of tasks. If `optimize` is set, also run the app to find its
        texts. These rollouts are logged, and the search reuses them as its first evaluation.

        Raises:
            ConfigError: a text cannot be learned, or the budget is too small.
            DataError: there are too few tasks.
            UnknownAgentError: a pattern matches no agent and no prompt.
            RewardError: no rollout has a reward.
        """
        split = self.split(trainer.tasks)
        self.check_budget(split)
        if text := equal_tasks(trainer.tasks):
            trainer.note(text)
        if self.patterns:
            log = self.open_log(trainer)
            evaluator, is_resumed = self.make_evaluator(trainer, log), log.is_replaying
            await evaluator.begin(split.selection, self.patterns, trainer.note)
            self._has_discovered = not is_resumed

    def starts_again(self, before: Mapping[str, Json]) -> bool:
        """Return whether the user has raised a budget since `before`, or lowered one of counts.

        If so, a search that was complete continues from its log, or ends earlier in it. A lower
        `max_tokens` or `max_cost` changes nothing, because all that the log has is paid for.

        Args:
            before: the algorithm's configuration that the run stored earlier.
        """
        earlier: Any = before.get("budget", {})
        budget: Any = self.config()["budget"]
        limits = {
            name: [math.inf if limit is None else limit for limit in (earlier[name], budget[name])]
            for name in budget
            if name in earlier and name != "prices"
        }
        counts = ("max_rollouts", "max_reflections")
        return any(
            now > then or (name in counts and now < then) for name, (then, now) in limits.items()
        )

    # --- for a dry run's plan ---------------------------------------------------------------
    @property
    def searches(self) -> int:
        return 1

    @property
    def search_rollouts(self) -> int:
        return self.max_rollouts

    # --- for the trainer --------------------------------------------------------------------
    @property
    def tasks_per_step(self) -> int:
        return self.max_rollouts

    @property
    def total_steps(self) -> int:
        return 1

    def policies(self) -> dict[str, PolicySpec]:
        return {}

    def routing(self) -> Routing:
        return Routing()

    def resources(self) -> Resources:
        """Return what the app gets: selected prompts, and replacements for agents' instructions.

        Before a selection, the app gets the initial prompts, and the instructions of its agents
        stay unchanged and are recorded.
        """
        return self.chosen.resources()

    def learned_prompts(self) -> dict[str, LearnedPrompt]:
        return self.chosen.learned()

    @property
    def chosen(self) -> SelectedPrompts:
        """Return the texts that the search selected, or the initial texts before a selection."""
        if self.found is None:
            return self.begun or SelectedPrompts(self.prompts, self.patterns)
        best = self.found.candidates[self.found.chosen].templates
        return SelectedPrompts(self.prompts, self.patterns, self.found.surveyed, best)

    @property
    def patterns(self) -> list[str]:
        """Return `optimize` as a list."""
        return [self.optimize] if isinstance(self.optimize, str) else list(self.optimize)

    def state(self) -> dict[str, Json]:
        return {"found": msgspec.to_builtins(self.found)}

    def load_state(self, state: dict[str, Json]) -> None:
        self.found = msgspec.convert(state["found"], SearchResult | None)

    # --- for a dry run ----------------------------------------------------------------------
    def inspect_episodes(self, episodes: Sequence[Episode]) -> list[str]:
        found = survey(episodes, self.patterns).lines() if self.patterns else []
        is_silent = episodes and not any(episode.calls for episode in episodes)
        silent = [NO_CALLS] if is_silent else []
        return [*self._dated_arguments(), *found, *silent, self._expected_spending(episodes)]

    def _expected_spending(self, episodes: Sequence[Episode]) -> str:
        """Describe how often reflection models are asked at most, and what the app's calls cost."""
        limits = [self._most_reflections, self.max_reflections or math.inf]
        text = f"at most {min(limits):g} questions to the reflection model come on top of the calls"
        if not (self.prices and episodes):
            return text
        used = [
            (model, tokens)
            for episode in episodes
            for model, tokens in (evidence_of(episode, None).usage or {}).items()
        ]
        costs = [self.prices[model].of(*tokens) for model, tokens in used if model in self.prices]
        cost = math.fsum(costs) / len(episodes) * self.max_rollouts
        missing = ", ".join(map(repr, sorted({model for model, _ in used} - self.prices.keys())))
        others = f" (prices= has none for {missing})" if missing else ""
        return (
            f"{text}; by prices= the app's calls in max_rollouts={self.max_rollouts} would cost "
            f"about {cost:.4g}{others}"
        )

    @property
    @abstractmethod
    def _most_reflections(self) -> int:
        """Maximum requests to reflection models without `max_reflections`."""

    def _dated_arguments(self) -> list[str]:
        """Return warnings about initial prompts that contain today's date."""
        days = days_around({datetime.now(UTC).date()})
        return [
            line
            for name, prompt in self.prompts.items()
            for line in date_warnings(name, date_literals(prompt, days), PromptPlace.ARGUMENT)
        ]

    # --- the step ---------------------------------------------------------------------------
    async def run_step(self, context: TrainerContext) -> Metrics:
        """Run the whole search."""
        for text in self._dated_arguments() if self.begun is None else ():
            context.note(text)
        found = await self.search(context, self.split(context.tasks))
        self.found = found = judged(found, self.significance)
        write_found(found, context.path)
        for text in [*found.notes(), *self._dated_results()]:
            context.note(text)
        return found.metrics()

    def _dated_results(self) -> list[str]:
        """Return warnings about learned texts in which today's date is new."""
        days = days_around({datetime.now(UTC).date()})
        return [
            f"the learned text of {name!r} contains {literal!r}, which looks like today, and its "
            "first text does not: take it out before the text is used on another day"
            for name, learned in self.learned_prompts().items()
            for literal in date_literals(learned.after, days)
            if literal not in learned.before.text
        ]

    def split(self, tasks: Sequence[Json]) -> Split:
        """Divide the training tasks into two parts; duplicates count once.

        One part is for reflections. On the other, candidates are compared.

        Raises:
            DataError: there are too few tasks.
        """
        return split_tasks(tasks, self.selection, self.seed)

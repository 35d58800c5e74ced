"""PromptSearch: an algorithm that learns prompts in one step, whatever decides what is tried."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

import msgspec

from lightspan.algorithms.protocol import (
    Algorithm,
    Metrics,
    PolicySpec,
    Reflections,
    TrainerContext,
)
from lightspan.lightning.episode import Episode
from lightspan.schema.llm import LLM
from lightspan.schema.pricing import Price
from lightspan.schema.prompts import LearnedPrompt, PromptTemplate
from lightspan.schema.records import Json, task_id
from lightspan.schema.resources import Resources
from lightspan.schema.routing import Routing
from lightspan_prompts.search.candidates import Found, Split, keep_found, split_tasks
from lightspan_prompts.search.feedback import evidence_of
from lightspan_prompts.search.prompt_discovery import survey
from lightspan_prompts.search.selected_prompts import SelectedPrompts

LETTERS_A_TOKEN: Final = 4
"""Characters, for estimates alone: the tokenizers of reflection models are not ours."""


class PromptSearch(Algorithm):
    """Searches for prompts that do better than those given. No weights are trained: calls go where
    the app points them, with the app's own key.

    A subclass has these as settings, and `search`.
    """

    prompts: Mapping[str, PromptTemplate]
    optimize: str | Sequence[str]
    selection: float
    max_rollouts: int
    prices: Mapping[str, Price]
    found: Found | None = None
    """What the search found; None before its end."""
    begun: SelectedPrompts | None = None
    """What an earlier search of the same run has chosen, which this one begins with: the app is not
    looked at again."""

    @abstractmethod
    async def search(self, world: TrainerContext, split: Split) -> Found:
        """The search, from its beginning or from what its journal has of it."""

    # --- what a trainer asks ----------------------------------------------------------------
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
        """The prompts: as they were given, and when the search is over as they were chosen; and
        what agents are told, which until then is what the app says, and written down."""
        return self.chosen.resources()

    def learned_prompts(self) -> dict[str, LearnedPrompt]:
        return self.chosen.learned()

    @property
    def chosen(self) -> SelectedPrompts:
        """The texts: as they are, and when the search is over as they were chosen."""
        if self.found is None:
            return self.begun or SelectedPrompts(self.prompts, self.patterns)
        best = self.found.candidates[self.found.chosen].templates
        return SelectedPrompts(self.prompts, self.patterns, self.found.surveyed, best)

    @property
    def patterns(self) -> list[str]:
        """`optimize`, as a list."""
        return [self.optimize] if isinstance(self.optimize, str) else list(self.optimize)

    def state(self) -> dict[str, Json]:
        return {"found": msgspec.to_builtins(self.found)}

    def load_state(self, state: dict[str, Json]) -> None:
        self.found = msgspec.convert(state["found"], Found | None)

    # --- what a dry run tells ---------------------------------------------------------------
    def inspect_episodes(self, episodes: Sequence[Episode]) -> list[str]:
        return survey(episodes, self.patterns).lines() if self.patterns else []

    def _texts(self, episodes: Sequence[Episode]) -> dict[str, PromptTemplate]:
        """What would be learned: the prompts, and what the rollouts show of the app."""
        found = survey(episodes, self.patterns).components if self.patterns else {}
        texts = {name: PromptTemplate(each.template) for name, each in found.items()}
        return {**self.prompts, **texts}

    def _asked(self, llm: LLM, most: int, letters: tuple[float, float]) -> Reflections:
        """So many questions and answers of so many characters each, at most."""
        sent, answered = (count / LETTERS_A_TOKEN for count in letters)
        price = self.prices.get(llm.model)
        cost = None if price is None else most * price.of(sent, answered)
        return Reflections(
            model=llm.model, most=most, tokens_in=sent, tokens_out=answered, most_cost=cost
        )

    # --- its one step -----------------------------------------------------------------------
    async def run_step(self, world: TrainerContext) -> Metrics:
        """The whole search."""
        self.found = found = await self.search(world, self.split(world.tasks))
        keep_found(found, world.path)
        for text in found.notes():
            world.note(text)
        return found.metrics()

    def split(self, tasks: Sequence[Json]) -> Split:
        """The training tasks in two parts; equal ones are one.

        Raises:
            DataError: there are too few.
        """
        return split_tasks(tasks, self.selection, self.seed)


def run_letters(tasks: Sequence[Json], episodes: Sequence[Episode]) -> float:
    """Characters that a reflection is shown of a rollout, in the mean."""
    named = {task_id(task): task for task in tasks}
    return fmean(len(evidence_of(each, named.get(each.task_id)).text) for each in episodes)

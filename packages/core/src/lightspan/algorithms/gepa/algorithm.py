"""GEPA: its settings, and its one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import msgspec

from lightspan.algorithms.gepa.search import Search
from lightspan.algorithms.prompts.candidates import JOURNAL, Found, Split, keep_found, split_tasks
from lightspan.algorithms.prompts.journal import Journal
from lightspan.algorithms.prompts.options import (
    check_installed,
    check_prompts,
    check_reflection,
)
from lightspan.algorithms.prompts.reflection import Reflector
from lightspan.algorithms.protocol import Algorithm, Metrics, PolicySpec, World
from lightspan.errors import short_constructor
from lightspan.schema.checks import check_number, check_whole
from lightspan.schema.llm import LLM
from lightspan.schema.prompts import LearnedPrompt, PromptTemplate
from lightspan.schema.records import Json
from lightspan.schema.routing import Routing


@short_constructor
@dataclass(kw_only=True, eq=False)
class GEPA(Algorithm):
    """Learns the texts of prompts: a language model reads what rollouts showed and proposes others,
    and a Pareto front of candidates keeps what is best at some task (arXiv 2507.19457).

    No weights are trained: calls go where the app points them, with the app's own key.

    Args:
        prompts: name → template. The app gets each as an argument called like it, or all of them
            as `resources`. They are optimised together, as parts of one candidate.
        reflection: the model that proposes other texts. Its `sampling` goes into each question.
        max_rollouts: of the app, at most, beside those of the held-out tasks.
        max_reflections: questions to the reflection model, at most.
        max_tokens: of the reflection model and the app's calls together, as their endpoints count
            them. It is looked at before each iteration, so that the last one may exceed it.
        selection: the share of the training tasks that candidates are compared by; reflections see
            the others. The seed splits them. The held-out tasks have no part in any choice.
        minibatch: tasks that a candidate is proposed from, and first tried on.
        proposals: candidates that are proposed and run side by side in an iteration.
        merge: also make candidates of two others, where there are several prompts.
        perfect_reward: with it on every task of the selection split the search ends, and a
            minibatch that has it everywhere is not reflected on. None: no reward is the highest.
        failure_reward: of a rollout whose app failed; and what one without a reward counts for
            where candidates are compared.
        timeout_s: of one rollout.
        reflection_timeout_s: of one question.
        patience_s: how long a question is put off in all by an endpoint that is busy (429).
        seed: of the split and of every choice.

    Raises:
        ConfigError: an option that cannot be honoured.
        ModuleNotFoundError: the library `gepa`, or the OpenAI SDK, is missing.
    """

    prompts: Mapping[str, PromptTemplate] = field(kw_only=False)
    reflection: LLM = field(kw_only=False)
    max_rollouts: int = 300
    max_reflections: int | None = None
    max_tokens: int | None = None
    selection: float = 0.5
    minibatch: int = 3
    proposals: int = 1
    merge: bool = True
    perfect_reward: float | None = 1.0
    failure_reward: float = 0.0
    timeout_s: float | None = 600.0
    reflection_timeout_s: float = 300.0
    patience_s: float = 1800.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_installed("GEPA", ["gepa", "openai"])
        self.prompts = dict(self.prompts)  # the user's own may change later
        check_prompts(self.prompts)
        check_reflection("reflection", self.reflection)
        for name in ("max_rollouts", "minibatch", "proposals"):
            check_whole(name, getattr(self, name), 1)
        for name in ("max_reflections", "max_tokens"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_number("selection", self.selection, above=0, below=1)
        check_number("failure_reward", self.failure_reward)
        check_number("reflection_timeout_s", self.reflection_timeout_s, above=0)
        check_number("patience_s", self.patience_s, low=0)
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, above=0)
        if self.perfect_reward is not None:
            check_number("perfect_reward", self.perfect_reward)
        self.found: Found | None = None
        """What the search found; None before its end."""

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

    def resources(self) -> dict[str, PromptTemplate]:
        """The prompts: as they were given, and when the search is over as they were chosen."""
        if self.found is None:
            return dict(self.prompts)
        chosen = self.found.candidates[self.found.chosen].templates
        return {
            name: PromptTemplate(chosen[name], engine=given.engine)
            for name, given in self.prompts.items()
        }

    def learned_prompts(self) -> dict[str, LearnedPrompt]:
        after = self.resources()
        return {
            name: LearnedPrompt(before=given, after=after[name])
            for name, given in self.prompts.items()
        }

    def state(self) -> dict[str, Json]:
        return {"found": msgspec.to_builtins(self.found)}

    def load_state(self, state: dict[str, Json]) -> None:
        self.found = msgspec.convert(state["found"], Found | None)

    def config(self) -> dict[str, Json]:
        budget = ("max_rollouts", "max_reflections", "max_tokens")
        same = ("minibatch", "proposals", "merge", "perfect_reward", "failure_reward")
        return {
            "algorithm": self.name,
            "seed": self.seed,
            "timeout_s": self.timeout_s,
            "prompts": msgspec.to_builtins(self.prompts),
            "reflection": msgspec.to_builtins(self.reflection),
            "budget": {name: getattr(self, name) for name in budget},
            "selection_share": self.selection,  # `selection` is of the data
            **{name: getattr(self, name) for name in same},
        }

    # --- its one step -----------------------------------------------------------------------
    async def run_step(self, world: World) -> Metrics:
        """The whole search."""
        split = self.split(world.tasks)
        reflector = Reflector(
            self.reflection,
            timeout_s=self.reflection_timeout_s,
            patience_s=self.patience_s,
            note=world.note,
        )
        try:
            library = f"gepa {version('gepa')}"
            journal = Journal(world.path / JOURNAL / "gepa.jsonl", library)
            try:
                found = await Search(self, world, split, journal, reflector).run()
            finally:
                journal.close()
        finally:
            await reflector.close()
        self.found = found
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

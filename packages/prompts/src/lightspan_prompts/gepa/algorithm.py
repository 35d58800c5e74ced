"""GEPA: its settings, and its one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from statistics import fmean

import msgspec

from lightspan.algorithms.protocol import Reflections, TrainerContext
from lightspan.errors import ConfigError
from lightspan.lightning.episode import Episode
from lightspan.schema.llm import LLM
from lightspan.schema.pricing import Price
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json
from lightspan.schema.validation import check_whole
from lightspan_prompts.endpoint_client import EndpointClient
from lightspan_prompts.gepa.reflection_prompts import question
from lightspan_prompts.gepa.search import Search
from lightspan_prompts.search.candidates import JOURNAL, Found, Split
from lightspan_prompts.search.search import PromptSearch, run_letters
from lightspan_prompts.search.search_log import SearchLog
from lightspan_prompts.search.validation import (
    check_installed,
    check_numbers,
    check_optimize,
    check_prices,
    check_prompts,
    check_reflection,
)


@dataclass(kw_only=True, eq=False)
class GEPA(PromptSearch):
    """Learns the texts of prompts: a language model reads what rollouts showed and proposes others,
    and a Pareto front of candidates keeps what is best at some task (arXiv 2507.19457).

    No weights are trained: calls go where the app points them, with the app's own key.

    Args:
        prompts: name → template. The app gets each as an argument called like it, or all of them
            as `resources`. They are optimised together, as parts of one candidate.
        optimize: agents whose instructions are learned in an app that nobody edits: names, or globs
            on agent paths as for `LightningRL(optimize=)`. Their texts are found in the calls of
            the first evaluation, and others sent in their place. Also names of prompts that the app
            asks for by `lightspan.prompt(name, text)`. They are parts of the candidate too.
        reflection: the model that proposes other texts. Its `sampling` goes into each question.
        max_rollouts: of the app, at most, beside those of the held-out tasks.
        max_reflections: questions to the reflection model, at most. An iteration asks up to
            `proposals` of them, and none begins for which fewer are left.
        max_tokens: of the reflection model and the app's calls together, as their endpoints count
            them. It is looked at before each question and each evaluation: the one that is under
            way when it is used up may exceed it, with `proposals` several side by side, and
            nothing else does. The best candidate of those that were compared by then is chosen.
        max_cost: of these, in the currency of `prices`; kept as `max_tokens` is. Calls of
            policies cost nothing, nor do those whose endpoint counts no tokens.
        prices: model, by the name that is asked for (or that answers, where a span has only that)
            → its `Price`; for `max_cost`, of every model that is asked.
        selection: the share of the training tasks that candidates are compared by; reflections see
            the others. The seed splits them. The held-out tasks have no part in any choice.
        minibatch: tasks that a candidate is proposed from, and first tried on.
        proposals: candidates that are proposed and run side by side in an iteration.
        finalists: of the candidates with the highest means so many are run once more on the
            selection split at the end, as far as the budgets allow, and one of them is chosen by
            both means, or the prompts as they are. 0 chooses by the first alone.
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

    prompts: Mapping[str, PromptTemplate] = field(kw_only=False, default_factory=dict)
    reflection: LLM = field(kw_only=False, default=None)  # type: ignore[assignment]
    optimize: str | Sequence[str] = ()
    max_rollouts: int = 300
    max_reflections: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)
    selection: float = 0.5
    minibatch: int = 3
    proposals: int = 1
    finalists: int = 2
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
        self.optimize = self.patterns
        check_prompts(self.prompts)
        check_optimize("GEPA", self.optimize, self.prompts)
        check_reflection("reflection", self.reflection)
        for name in ("max_rollouts", "minibatch", "proposals"):
            check_whole(name, getattr(self, name), 1)
        check_whole("finalists", self.finalists, 0)
        for name in ("max_reflections", "max_tokens"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        if self.max_reflections is not None and self.max_reflections < self.proposals:
            raise ConfigError(
                f"max_reflections={self.max_reflections} is too few for proposals="
                f"{self.proposals}, which are asked for together: give at least as many, or fewer "
                "proposals"
            )
        check_prices(self.max_cost, self.prices, [self.reflection])
        self.prices = dict(self.prices)
        check_numbers(self)

    # --- what a trainer asks ----------------------------------------------------------------
    def reflections(self, tasks: Sequence[Json], episodes: Sequence[Episode]) -> list[Reflections]:
        """As many as there are minibatches: each candidate is worse on its own, and dropped."""
        left = max(0, self.max_rollouts - len(self.split(tasks).selection))
        most = left // (2 * self.minibatch)
        if self.max_reflections is not None:
            most = min(most, self.max_reflections)
        texts = self._texts(episodes)
        asked = [question(name, text, []) for name, text in texts.items()]
        shown = self.minibatch * run_letters(tasks, episodes)
        told = fmean(len(text.text) for text in texts.values())
        return [self._asked(self.reflection, most, (fmean(map(len, asked)) + shown, told))]

    def config(self) -> dict[str, Json]:
        budget = ("max_rollouts", "max_reflections", "max_tokens", "max_cost")
        same = ("minibatch", "proposals", "finalists", "merge", "perfect_reward", "failure_reward")
        return {
            "algorithm": self.name,
            "seed": self.seed,
            "timeout_s": self.timeout_s,
            "prompts": msgspec.to_builtins(self.prompts),
            "optimize": list(self.optimize),
            "reflection": msgspec.to_builtins(self.reflection),
            "budget": {
                **{name: getattr(self, name) for name in budget},
                "prices": msgspec.to_builtins(dict(self.prices)),
            },
            "selection_share": self.selection,  # `selection` is of the data
            **{name: getattr(self, name) for name in same},
        }

    async def search(self, world: TrainerContext, split: Split) -> Found:
        reflector = EndpointClient(
            self.reflection,
            timeout_s=self.reflection_timeout_s,
            patience_s=self.patience_s,
            note=world.note,
        )
        library = f"gepa {version('gepa')}"
        try:
            with closing(SearchLog(world.path / JOURNAL / "gepa.jsonl", library)) as journal:
                return await Search(self, world, split, journal, reflector).run()
        finally:
            await reflector.close()

"""APO: its settings, and how its search is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from statistics import fmean

import msgspec

from lightspan.algorithms.protocol import Reflections, TrainerContext
from lightspan.lightning.episode import Episode
from lightspan.schema.llm import LLM
from lightspan.schema.pricing import Price
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json
from lightspan.schema.validation import check_whole
from lightspan_prompts.apo.reflection_prompts import ANGLES, WAYS, critique, edit
from lightspan_prompts.apo.search import LIBRARY, BeamPlan, Models, Search
from lightspan_prompts.endpoint_client import EndpointClient
from lightspan_prompts.search.candidates import JOURNAL, Found, Split
from lightspan_prompts.search.evaluator import Evaluator
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

_WHOLE = (
    *("beam_width", "branch_factor", "beam_rounds", "gradient_batch_size", "val_batch_size"),
    *("max_rollouts", "reflections_at_once"),
)


@dataclass(kw_only=True, eq=False)
class APO(PromptSearch):
    """Learns the texts of prompts by textual gradients and beam search (ProTeGi, arXiv 2305.03495):
    a language model says what rollouts show to be wrong with a prompt, and rewrites it by that; the
    best of a round's candidates are what the next round begins with.

    No weights are trained: calls go where the app points them, with the app's own key.

    Args:
        prompts: name → template. The app gets each as an argument called like it, or all of them
            as `resources`. A candidate is all of them together; of several each expansion changes
            the next one.
        optimize: agents whose instructions are learned in an app that nobody edits: names, or globs
            on agent paths as for `LightningRL(optimize=)`. Their texts are found in the calls of
            the first evaluation, and others sent in their place. Also names of prompts that the app
            asks for by `lightspan.prompt(name, text)`. They are parts of the candidate too.
        reflection: the model that says what is wrong with a prompt. Its `sampling` goes into each
            question.
        edits: the model that rewrites prompts by that; None for `reflection`.
        beam_width: candidates that go on to the next round.
        branch_factor: new ones from each of these per round; while there are fewer than
            `beam_width`, they have more.
        beam_rounds: rounds, at most.
        gradient_batch_size: tasks whose rollouts a model is shown, for each new candidate others.
        val_batch_size: tasks of the selection split that the candidates of a round are compared by.
            The best one is then run on the whole split, and chosen by that.
        max_rollouts: of the app, at most, beside those of the held-out tasks. The last round has as
            many candidates as are left for.
        max_reflections: questions to both models, at most: two for each new candidate.
        max_tokens: of both models and the app's calls together, as their endpoints count them. It
            is looked at before each question, and before rollouts are asked for, which are about 64
            together: what is under way then may exceed it, and nothing else does. A round that it
            ends adds nothing that was not compared yet.
        max_cost: of these, in the currency of `prices`; kept as `max_tokens` is. Calls of
            policies cost nothing, nor do those whose endpoint counts no tokens.
        prices: model, by the name that is asked for (or that answers, where a span has only that)
            → its `Price`; for `max_cost`, of every model that is asked.
        selection: the share of the training tasks that candidates are compared by; reflections see
            the others. The seed splits them. The held-out tasks have no part in any choice.
        perfect_reward: with it on every task of the selection split the search ends, and rollouts
            that all have it are not asked about. None: no reward is the highest.
        failure_reward: of a rollout whose app failed, a timeout included; and what one without a
            reward counts for where candidates are compared. None is left out of a mean.
        timeout_s: of one rollout.
        reflection_timeout_s: of one question.
        reflections_at_once: questions that are under way together.
        patience_s: how long a question is put off in all by an endpoint that is busy (429).
        seed: of the split and of every choice.

    Raises:
        ConfigError: an option that cannot be honoured.
        ModuleNotFoundError: the OpenAI SDK is missing.
    """

    prompts: Mapping[str, PromptTemplate] = field(kw_only=False, default_factory=dict)
    reflection: LLM = field(kw_only=False, default=None)  # type: ignore[assignment]
    optimize: str | Sequence[str] = ()
    edits: LLM | None = None
    beam_width: int = 4
    branch_factor: int = 4
    beam_rounds: int = 3
    gradient_batch_size: int = 4
    val_batch_size: int = 16
    max_rollouts: int = 1500
    max_reflections: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)
    selection: float = 0.5
    perfect_reward: float | None = 1.0
    failure_reward: float = 0.0
    timeout_s: float | None = 600.0
    reflection_timeout_s: float = 300.0
    reflections_at_once: int = 4
    patience_s: float = 1800.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_installed("APO", ["openai"])
        self.prompts = dict(self.prompts)  # the user's own may change later
        self.optimize = self.patterns
        check_prompts(self.prompts)
        check_optimize("APO", self.optimize, self.prompts)
        check_reflection("reflection", self.reflection)
        if self.edits is not None:
            check_reflection("edits", self.edits)
        for name in _WHOLE:
            check_whole(name, getattr(self, name), 1)
        if self.max_reflections is not None:
            check_whole("max_reflections", self.max_reflections, 2)  # those of one candidate
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)
        asked = [self.reflection] if self.edits is None else [self.reflection, self.edits]
        check_prices(self.max_cost, self.prices, asked)
        self.prices = dict(self.prices)
        check_numbers(self)

    def reflections(self, tasks: Sequence[Json], episodes: Sequence[Episode]) -> list[Reflections]:
        """Two for each new candidate: what is wrong, and another text by that."""
        split = self.split(tasks)
        least = min(self.gradient_batch_size, len(split.feedback)) + min(
            self.val_batch_size, len(split.selection)
        )
        most = min(
            self.beam_width * self.branch_factor * self.beam_rounds,
            max(0, self.max_rollouts - len(split.selection)) // least,
        )
        if self.max_reflections is not None:
            most = min(most, self.max_reflections // 2)
        texts = self._texts(episodes).items()
        shown = self.gradient_batch_size * run_letters(tasks, episodes)
        told = fmean(len(text.text) for _, text in texts)
        critiques = fmean(len(critique(name, text, [], ANGLES[0])) for name, text in texts)
        edited = fmean(len(edit(name, text, "", WAYS[0])) for name, text in texts)
        return [
            self._asked(self.reflection, most, (critiques + shown, told)),
            self._asked(self.edits or self.reflection, most, (edited + told, told)),
        ]

    def config(self) -> dict[str, Json]:
        same = (
            *("beam_width", "branch_factor", "beam_rounds", "gradient_batch_size"),
            *("val_batch_size", "perfect_reward", "failure_reward"),
            # how many candidates a round has hangs on these
            *("max_rollouts", "max_reflections"),
        )
        return {
            "algorithm": self.name,
            "seed": self.seed,
            "timeout_s": self.timeout_s,
            "prompts": msgspec.to_builtins(self.prompts),
            "optimize": list(self.optimize),
            "reflection": msgspec.to_builtins([self.reflection, self.edits]),
            "budget": {
                "max_tokens": self.max_tokens,
                "max_cost": self.max_cost,
                "prices": msgspec.to_builtins(dict(self.prices)),
            },
            "selection_share": self.selection,  # `selection` is of the data
            **{name: getattr(self, name) for name in same},
        }

    async def search(self, world: TrainerContext, split: Split) -> Found:
        async with AsyncExitStack() as stack:

            def opened(llm: LLM) -> EndpointClient:
                reflector = EndpointClient(
                    llm,
                    timeout_s=self.reflection_timeout_s,
                    patience_s=self.patience_s,
                    note=world.note,
                )
                stack.push_async_callback(reflector.close)
                return reflector

            critic = opened(self.reflection)
            models = Models(critic, critic if self.edits is None else opened(self.edits))
            journal = SearchLog(world.path / JOURNAL / "apo.jsonl", LIBRARY)
            stack.enter_context(closing(journal))
            trials = Evaluator(
                world,
                self.prompts,
                journal,
                self.failure_reward,
                max_tokens=self.max_tokens,
                max_cost=self.max_cost,
                prices=self.prices,
                begun=self.begun,
            )
            return await Search(self._plan(), trials, split, models, world.note).run()

    def _plan(self) -> BeamPlan:
        return BeamPlan(
            prompts=self.prompts,
            optimize=self.patterns,
            beam_width=self.beam_width,
            branch_factor=self.branch_factor,
            beam_rounds=self.beam_rounds,
            gradient_batch_size=self.gradient_batch_size,
            val_batch_size=self.val_batch_size,
            max_rollouts=self.max_rollouts,
            max_reflections=self.max_reflections,
            perfect_reward=self.perfect_reward,
            reflections_at_once=self.reflections_at_once,
            seed=self.seed,
        )

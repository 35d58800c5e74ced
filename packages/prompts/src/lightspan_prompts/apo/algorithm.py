"""APO: its options and its search."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, fields

from lightspan.algorithms.protocol import TrainerContext
from lightspan.schema.llm import LLM
from lightspan.schema.records import Json
from lightspan.schema.validation import check_whole
from lightspan_prompts.apo.search import LIBRARY, BeamPlan, Models, Search, check_budget
from lightspan_prompts.search.candidates import JOURNAL, SearchResult, Split
from lightspan_prompts.search.search import PromptSearch
from lightspan_prompts.search.search_log import SearchLog

_WHOLE = (
    *("beam_width", "branch_factor", "beam_rounds", "gradient_batch_size", "val_batch_size"),
    *("max_rollouts", "reflections_at_once"),
)


@dataclass(kw_only=True, eq=False)
class APO(PromptSearch):
    """Learn prompts by textual gradients and beam search (ProTeGi, arXiv 2305.03495).

    A candidate is a set of prompts. In each round, a language model criticises prompts, given
    rollouts (runs of the app), and rewrites them; the best candidates continue in the next round.
    No weights are trained: the app's calls go where the app sends them, with the app's own key.

    Args:
        prompts: name → template. The app gets each prompt as an argument of that name, or all as
            the argument `resources`. Each new candidate changes one prompt.
        optimize: agents whose instructions are learned without changes to the app: names, or globs
            on agent paths as for `LightningRL(optimize=)`. Their texts are discovered in the calls
            of the first evaluation, and replaced in requests. A name may also be that of a prompt
            that the app requests by `lightspan.prompt(name, text)`. All these texts are parts of a
            candidate too.
        reflection: the model that criticises prompts. Its `sampling` is part of each request.
        edits: the model that rewrites prompts; None for `reflection`.
        beam_width: number of candidates that continue in the next round.
        branch_factor: number of new candidates per candidate and round; more while there are fewer
            candidates than `beam_width`.
        beam_rounds: maximum rounds.
        gradient_batch_size: number of tasks whose rollouts are shown to the model for a critique.
            The tasks differ for each new candidate.
        val_batch_size: number of tasks of the selection split on which a round compares candidates.
            The best candidate is then run on the whole split; the final choice depends on that.
        max_rollouts: maximum rollouts of the app, not counting held-out tasks. The last round has
            as many candidates as are possible within this limit.
        max_reflections: maximum requests to both models; each new candidate takes two.
        max_tokens: maximum tokens of both models and of the app's calls, as endpoints count them.
            Checked before each request and before each batch of about 64 rollouts; a request or a
            batch under way may exceed it. A round that is cut short adds no candidate that was not
            compared.
        max_cost: maximum cost of these tokens, in the currency of `prices`; checked like
            `max_tokens`. Calls of trained models (policies) cost nothing. Where an endpoint counts
            no tokens, they are estimated; so are calls without an answer in time.
        prices: model → its `Price`, for every model that is called; required with `max_cost`.
            Without `max_cost`, the cost is only reported. A model is named as in the request, or as
            in the response if the request's model is not recorded.
        selection: fraction of the training tasks on which candidates are compared (the selection
            split, chosen by `seed`); reflections show rollouts of all other training tasks. No
            choice depends on held-out tasks.
        significance: the best candidate is chosen only if its gain on the selection split is
            unlikely to be chance; otherwise the initial prompts are kept. This is the maximum
            probability of chance (a permutation test over the tasks, corrected for the number of
            candidates). None to choose the best candidate in any case.
        perfect_reward: reward at which a task counts as solved: the highest reward that there is,
            which is above 1 on a scale such as 1 to 5. None if there is no such reward.
            The search ends if a candidate solves every task of the selection split. If all tasks of
            a critique are solved, no critique is requested.
        failure_reward: reward of a rollout whose app failed, timed out or ended without a reward.
            `"lowest"` is the lowest reward that another rollout of the search has had, and at most
            0, so that no text gains by breaking the app. A candidate without any rollout that has a
            reward of its own is never chosen.
        timeout_s: seconds per rollout.
        reflection_images: maximum number of images of the shown rollouts per request to the
            reflection model, for a model that takes images. With 0 they are named by their digests.
        reflection_timeout_s: seconds per request to a reflection model.
        reflections_at_once: maximum concurrent requests.
        patience_s: total seconds of waiting on rate limits (429) per request to a reflection
            model.
        seed: seed of the split and of every random choice.

    Raises:
        ConfigError: an option is invalid.
        ModuleNotFoundError: the OpenAI SDK is missing.
    """

    edits: LLM | None = None
    beam_width: int = 4
    branch_factor: int = 4
    beam_rounds: int = 3
    gradient_batch_size: int = 4
    val_batch_size: int = 16
    max_rollouts: int = 1500
    reflections_at_once: int = 4

    def __post_init__(self) -> None:
        models = {"reflection": self.reflection}
        if self.edits is not None:
            models["edits"] = self.edits
        self._check_options(["openai"], models)
        for name in _WHOLE:
            check_whole(name, getattr(self, name), 1)
        if self.max_reflections is not None:
            check_whole("max_reflections", self.max_reflections, 2)  # those of one candidate

    def config(self) -> dict[str, Json]:
        options = (
            *("beam_width", "branch_factor", "beam_rounds", "gradient_batch_size"),
            *("val_batch_size", "perfect_reward", "failure_reward"),
            # these determine the number of candidates per round
            *("max_rollouts", "max_reflections"),
        )
        models = [self.reflection, self.edits]
        return self._common_config(models, ("max_tokens", "max_cost"), options)

    async def search(self, context: TrainerContext, split: Split) -> SearchResult:
        plan = self._plan
        async with (
            aclosing(self._open_client(self.reflection, context)) as critic,
            aclosing(self._open_client(self.edits or self.reflection, context)) as editor,
        ):
            trials = self.make_evaluator(context, self.open_log(context))
            return await Search(plan, trials, split, Models(critic, editor), context.note).run()

    def open_log(self, context: TrainerContext) -> SearchLog:
        return SearchLog(context.path / JOURNAL / "apo.jsonl", LIBRARY)

    @property
    def _most_reflections(self) -> int:
        return 2 * self.beam_width * self.branch_factor * self.beam_rounds

    def check_budget(self, split: Split) -> None:
        check_budget(self._plan, split)

    @property
    def _plan(self) -> BeamPlan:
        return BeamPlan(**{option.name: getattr(self, option.name) for option in fields(BeamPlan)})

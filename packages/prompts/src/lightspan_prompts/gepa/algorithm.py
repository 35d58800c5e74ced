"""GEPA: its options and its search."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version

from lightspan.algorithms.protocol import TrainerContext
from lightspan.errors import ConfigError
from lightspan.schema.records import Json
from lightspan.schema.validation import check_whole
from lightspan_prompts.gepa.search import Search, check_budget
from lightspan_prompts.search.candidates import JOURNAL, SearchResult, Split
from lightspan_prompts.search.search import PromptSearch
from lightspan_prompts.search.search_log import SearchLog


@dataclass(kw_only=True, eq=False)
class GEPA(PromptSearch):
    """Learn prompts by reflection (arXiv 2507.19457).

    A language model reads rollouts and proposes new texts. A Pareto front keeps the best candidates
    per task.

    No weights are trained: calls go where the app sends them, with the app's own key.

    Args:
        prompts: name → template. The app takes each as an argument of that name, or all as
            `resources`. They are optimised together, as parts of one candidate.
        optimize: agents whose instructions are learned without changes to the app. Give their
            names, or globs on agent paths as for `LightningRL(optimize=)`. The instructions are
            found in the calls of the first evaluation, and replaced in later requests. The name of
            a prompt that the app requests by `lightspan.prompt(name, text)` may be given too.
        reflection: the model that proposes new texts. Its `sampling` is part of each request.
        max_rollouts: maximum rollouts of the app, not counting held-out tasks. A rollout whose
            attempt is lost (an endpoint's 429 or 5xx, a dead worker) is run again and counts once.
        max_reflections: maximum requests to the reflection model. An iteration sends up to
            `proposals`, and none begins if fewer are left.
        max_tokens: maximum tokens of the reflection model and of the app's calls, as endpoints
            count them. Checked before each request and each evaluation; a request or an
            evaluation that is under way may exceed it. When the maximum is
            reached, the search ends with the best candidate so far.
        max_cost: maximum cost of these tokens, in the currency of `prices`; checked like
            `max_tokens`. Calls of trained models (policies) cost nothing. Where an
            endpoint counts no tokens, they are estimated; so are calls without an answer in time.
        prices: model → its `Price`, for every model that is called; needed for
            `max_cost`, without which the cost is only reported. A model is named as in the request,
            or as in the response if its span has no request model.
        selection: fraction of the training tasks on which candidates are compared (the selection
            split, chosen by `seed`); reflections show rollouts of all other training tasks. No
            choice depends on held-out tasks.
        minibatch: number of tasks whose rollouts are shown for a proposal; the new candidate is
            tried on the same tasks first. At most all tasks outside the selection split.
        proposals: number of candidates that are proposed and run concurrently per iteration.
        finalists: number of best candidates that are run on the selection split a second time at
            the end, with the initial prompts, as far as budgets allow. The best finalist by the
            mean of both runs is chosen, or the initial prompts if they are better. With 0 the first
            run decides.
        merge: also combine two candidates, if there are several prompts.
        significance: probability above which the best candidate's gain on the selection split is
            taken for chance (a permutation test over its tasks, corrected for the number of
            candidates). The initial prompts are kept then. None to choose the best candidate in any
            case.
        perfect_reward: reward at which a task counts as solved: the highest reward that there is,
            which is above 1 on a scale such as 1 to 5. None if there is no such reward.
            The search ends if a candidate solves every task of the selection split. No reflection
            is requested for a minibatch whose tasks are all solved.
        failure_reward: reward of a rollout whose app failed, or ended without a reward.
            `"lowest"` is the lowest reward that another rollout of the search has had, and at most
            0, so that no text gains by breaking the app. A candidate without any rollout that has a
            reward of its own is never chosen.
        timeout_s: seconds per rollout.
        reflection_images: maximum number of images of the shown rollouts per request to the
            reflection model, for a model that takes images. With 0 they are named by their digests.
        reflection_timeout_s: seconds per request to the reflection model.
        patience_s: total seconds of waiting on rate limits (429) per request to the reflection
            model.
        seed: seed of the split and of every random choice.

    Raises:
        ConfigError: an option is invalid.
        ModuleNotFoundError: the library `gepa` or the OpenAI SDK is missing.
    """

    minibatch: int = 3
    proposals: int = 1
    finalists: int = 2
    merge: bool = True

    def __post_init__(self) -> None:
        self._check_options(["gepa", "openai"], {"reflection": self.reflection})
        for name in ("max_rollouts", "minibatch", "proposals"):
            check_whole(name, getattr(self, name), 1)
        check_whole("finalists", self.finalists, 0)
        if self.max_reflections is not None:
            check_whole("max_reflections", self.max_reflections, 1)
            if self.max_reflections < self.proposals:
                raise ConfigError(
                    f"max_reflections={self.max_reflections} is less than proposals="
                    f"{self.proposals}, which an iteration sends together: raise it, or lower "
                    "proposals"
                )

    def config(self) -> dict[str, Json]:
        return self._common_config(
            self.reflection,
            ("max_rollouts", "max_reflections", "max_tokens", "max_cost"),
            (
                *("minibatch", "proposals", "finalists", "merge"),
                *("perfect_reward", "failure_reward"),
            ),
        )

    async def search(self, context: TrainerContext, split: Split) -> SearchResult:
        async with aclosing(self._open_client(self.reflection, context)) as reflector:
            return await Search(self, context, split, self.open_log(context), reflector).run()

    def open_log(self, context: TrainerContext) -> SearchLog:
        return SearchLog(context.path / JOURNAL / "gepa.jsonl", f"gepa {version('gepa')}")

    @property
    def _most_reflections(self) -> int:
        return self.max_rollouts // self.minibatch

    def check_budget(self, split: Split) -> None:
        check_budget(self, split)

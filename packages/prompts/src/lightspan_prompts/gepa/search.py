"""The search: the library decides in a thread of its own, and asks this one for what it needs.

It is called by its public `optimize` alone. Three things of it are kept away from:

- It swallows the errors of a reflection model and goes on without: ours end it, as something that
  is no `Exception` (`_Ended`).
- It goes through sets of component names, whose order differs from process to process: components
  are numbers here, whose order does not.
- It weighs ancestors by their scores and fails where these add up to nothing, as those of a seed
  that does nothing right do: scores are shifted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from lightspan.errors import RewardError
from lightspan.progress import plural
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json
from lightspan_prompts.gepa.reflection_prompts import question
from lightspan_prompts.search.candidates import Candidate, Found, Split, TooFewRolloutsError
from lightspan_prompts.search.evaluator import Evaluator, Question, SpentError, Trial
from lightspan_prompts.search.feedback import Evidence
from lightspan_prompts.search.reflection import Unusable, other_template
from lightspan_prompts.search.search_log import Evaluation, SearchLog

if TYPE_CHECKING:
    from lightspan.algorithms.protocol import TrainerContext
    from lightspan_prompts.endpoint_client import EndpointClient
    from lightspan_prompts.gepa.algorithm import GEPA

T = TypeVar("T")
Texts = Mapping[int, str]
"""Component → template: what the library calls a candidate."""

log = logging.getLogger(__name__)

SHIFT: Final = 2.0**20
"""What a reward is raised by where the library sees it, so that no score is 0 or below."""
STEPS: Final = 2.0**24
"""Rewards are compared in steps of 1 / this: then sums of scores have no rounding, which would make
one candidate better than its equal."""
MERGED_ON: Final = 5
"""Tasks that the library tries a merged candidate on."""


class _Ended(BaseException):
    """Ends the library's run: no `Exception`, since it goes on after those."""


class _Item(NamedTuple):
    """A task, as the library handles it."""

    split: str
    task: Json


class Search:
    """One search, from its beginning or from what the journal has of it.

    Args:
        settings: the algorithm's.
        world: runs the rollouts.
        split: of the tasks.
        journal: open.
        reflector: open.
    """

    def __init__(
        self,
        settings: GEPA,
        world: TrainerContext,
        split: Split,
        journal: SearchLog,
        reflector: EndpointClient,
    ) -> None:
        self._settings = settings
        self._world = world
        self._split = split
        self._reflector = reflector
        self._trials = Evaluator(
            world,
            settings.prompts,
            journal,
            settings.failure_reward,
            max_tokens=settings.max_tokens,
            max_cost=settings.max_cost,
            prices=settings.prices,
            begun=settings.begun,
        )
        self._prompts = dict(settings.prompts)
        """As they are: those that were given, and when the app was looked at those found there."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._asking: Any = None
        """What the thread waits for; None while it waits for nothing."""
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._candidates: list[Candidate] = []
        self._compared: dict[tuple[str, ...], Evaluation] = {}
        """Of each candidate, the last evaluation on the selection split."""
        self._ended = ""

    async def run(self) -> Found:
        """Search until a budget is used up.

        Raises:
            ConfigError: the budget of rollouts is too small for one candidate; a text of the app's
                cannot be learned.
            UnknownAgentError: a pattern matches nothing.
            RewardError: no rollout of the prompts as they are has a reward.
            EngineError: the reflection model fails.
            And the errors of rollouts, of the journal and of the library.
        """
        self._check_budget()
        selection, patterns = self._split.selection, self._settings.patterns
        self._prompts = await self._trials.begin(selection, patterns, self._world.note)
        over: asyncio.Future[None] = self._loop.create_future()

        def end() -> None:
            if not over.done():
                over.set_result(None)

        def work() -> None:
            try:
                self._optimize()
            except _Ended:
                pass
            except BaseException as error:
                self._error = self._error or error
            finally:
                self._loop.call_soon_threadsafe(end)

        thread = threading.Thread(target=work, name="lightspan-gepa", daemon=True)
        thread.start()
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError:
            self._cancel()
            await over  # the thread waits for nothing any more
            raise
        thread.join()
        if self._error is not None:
            raise self._error
        return self._trials.found(self._candidates, await self._confirmed(), self._ended)

    @property
    def _names(self) -> list[str]:
        return list(self._prompts)

    async def _confirmed(self) -> int:
        """Run the finalists once more, and choose: the best of many is high by luck too.

        Of the prompts as they are nothing was chosen, so that their rewards are compared as they
        were; and of the others those only that were run again.
        """
        candidates, selection = self._candidates, self._split.selection
        left = self._settings.max_rollouts - self._trials.rollouts
        count = max(0, min(self._settings.finalists, left // len(selection)))
        best = sorted(range(len(candidates)), key=lambda each: -candidates[each].mean)[:count]
        if best in ([], [0]) or self._trials.spent():
            return self._chosen
        trials = [Trial("selection", candidates[n].templates, selection, "again") for n in best]
        if not self._trials.may_ask(trials):  # a budget was lowered: the journal went on from here
            return self._chosen
        for number, evaluation in zip(best, await self._trials.evaluate(trials), strict=True):
            again = {seen.task_id: seen.reward for seen in evaluation.seen}
            means = (candidates[number].mean, self._trials.mean_of(evaluation.seen))
            candidates[number] = msgspec.structs.replace(
                candidates[number], again=again, mean=math.fsum(means) / 2
            )
        return max(sorted({0, *best}), key=lambda each: candidates[each].mean)

    # --- budgets ----------------------------------------------------------------------------
    @property
    def _iteration(self) -> int:
        """The rollouts that an iteration takes at most."""
        minibatch, selection = self._settings.minibatch, len(self._split.selection)
        mutated = self._settings.proposals * (2 * minibatch + selection)
        return max(mutated, MERGED_ON + selection) if self._settings.merge else mutated

    @property
    def _reserved(self) -> int:
        """The rollouts that are left for the finalists, as many as there may be after an iteration;
        none before there is a first candidate."""
        count = len(self._candidates)
        most = min(self._settings.finalists, count + self._settings.proposals)
        return 0 if count == 1 else most * len(self._split.selection)

    def _check_budget(self) -> None:
        least = len(self._split.selection) + self._iteration
        if self._settings.max_rollouts < least:
            raise TooFewRolloutsError(
                f"GEPA(max_rollouts={self._settings.max_rollouts}) is too few for one new "
                f"candidate: {plural(len(self._split.selection), 'task')} of the selection split "
                f"twice, and {plural(self._settings.minibatch, 'task')} twice to propose from; "
                f"give at least {least}, or a smaller selection= or minibatch="
            )

    def _stops(self, state: Any) -> bool:
        """Whether the library begins no further iteration."""
        settings, trials, best = self._settings, self._trials, self._candidates[self._chosen]
        left = settings.max_rollouts - trials.rollouts - self._reserved
        perfect = settings.perfect_reward
        rewards = best.rewards.values()
        if perfect is not None and all(r is not None and r >= perfect for r in rewards):
            self._ended = "the selection split has the perfect reward on every task"
        elif left < self._iteration:
            self._ended = (
                f"{trials.rollouts} of max_rollouts={settings.max_rollouts} rollouts are done, "
                f"and another candidate may take {self._iteration}"
                + (f"; {self._reserved} are for the finalists" if self._reserved else "")
            )
        elif _is_used_up(trials.reflections + settings.proposals - 1, settings.max_reflections):
            asked = f"{trials.reflections} of max_reflections={settings.max_reflections}"
            self._ended = (
                f"{asked} reflections are done, and an iteration asks {settings.proposals}"
            )
        else:
            self._ended = trials.spent()
        return bool(self._ended)

    # --- in the library's thread ------------------------------------------------------------
    def _optimize(self) -> None:
        from gepa.api import optimize
        from gepa.strategies.proposal_sampling import IndependentSampling

        settings = self._settings
        perfect = settings.perfect_reward
        ours: Any = self  # its protocols name their arguments, and say `str` where a number will do
        stops: Any = self._stops
        first: Any = {
            number: prompt.template for number, prompt in enumerate(self._prompts.values())
        }
        optimize(
            seed_candidate=first,
            trainset=[_Item("feedback", task) for task in self._split.feedback],
            valset=[_Item("selection", task) for task in self._split.selection],
            adapter=ours,
            reflection_minibatch_size=settings.minibatch,
            skip_perfect_score=perfect is not None,
            perfect_score=math.inf if perfect is None else _score(perfect),
            use_merge=settings.merge and len(self._names) > 1,
            merge_val_overlap_floor=min(MERGED_ON, len(self._split.selection)),
            stop_callbacks=[stops],
            sampling_strategy=IndependentSampling(settings.proposals),
            callbacks=[ours],
            logger=_Log(),
            seed=settings.seed,
            raise_on_exception=True,
        )

    def evaluate(
        self, batch: Sequence[_Item], candidate: Texts, capture_traces: bool = False
    ) -> Any:
        """The library asks for the scores of a candidate."""
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: Sequence[tuple[Texts, Sequence[_Item]]]) -> list[Any]:
        """The library asks for the scores of several candidates, which run side by side."""
        from gepa.core.adapter import EvaluationBatch

        trials = [
            Trial(batch[0].split, self._named(texts), [item.task for item in batch])
            for texts, batch in items
        ]
        batches = []
        for evaluation in self._asked(self._trials.evaluate(trials)):
            self._look_at(evaluation)
            scores = [_score(self._trials.reward(seen)) for seen in evaluation.seen]
            outputs = [None] * len(scores)
            batch = EvaluationBatch(outputs=outputs, scores=scores, trajectories=evaluation.seen)
            batches.append(batch)
        return batches

    def _look_at(self, evaluation: Evaluation) -> None:
        """Keep an evaluation on the selection split; rewards that are too large end the search."""
        rewards = [seen.reward for seen in evaluation.seen if seen.reward is not None]
        largest = max(map(abs, rewards), default=0.0)
        if largest >= SHIFT / 2:
            self._error = RewardError(
                f"a reward of {largest:g} is too large to compare exactly: scale rewards below "
                f"{SHIFT / 2:g}"
            )
            raise _Ended
        if evaluation.split == "selection":
            self._compared[_name(evaluation.candidate)] = evaluation

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: Any, components_to_update: Sequence[int]
    ) -> dict[int, list[dict[str, Evidence]]]:
        """The library asks what reflections are to see."""
        records = [{"seen": seen} for seen in eval_batch.trajectories]
        return dict.fromkeys(components_to_update, records)

    def propose_new_texts(
        self,
        candidate: Texts,
        reflective_dataset: Mapping[int, Sequence[Mapping[str, Evidence]]],
        components_to_update: Sequence[int],
    ) -> dict[int, str]:
        """The library asks for other texts; none where the model gave no usable one."""
        texts = {}
        for number in components_to_update:
            name, template = self._names[number], self._template(number, candidate)
            seen = [record["seen"] for record in reflective_dataset[number]]
            asked = Question(name, question(name, template, seen), self._reflector)
            was_known = self._trials.is_replaying
            [entry] = self._asked(self._trials.reflect([asked]))
            try:
                changed = other_template(template, entry.answer, entry.finish_reason)
                texts[number] = changed.template
            except Unusable as why:
                self._trials.unusable += 1
                if not was_known:
                    count = self._trials.reflections
                    self._say(f"reflection {count} on {name!r} is of no use: {why}")
        return texts

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """The library took a candidate into its pool."""
        number, trials = event["candidate_idx"], self._trials
        last = self._compared[_name(self._named(event["candidate"]))]
        rewards = {seen.task_id: seen.reward for seen in last.seen}
        mean = trials.mean_of(last.seen)
        parents = [parent for parent in event["parent_ids"] if parent is not None]
        self._candidates.append(
            Candidate(
                templates=self._named(event["candidate"]),
                parents=parents,
                rewards=rewards,
                mean=mean,
                rollouts=trials.rollouts,
            )
        )
        if trials.is_replaying:
            return
        made = "the prompts as they are" if not parents else f"candidate {number}, of {parents}"
        self._say(
            f"{made}: {mean:.3f} on {plural(len(rewards), 'task')} of the selection split; best "
            f"{self._candidates[self._chosen].mean:.3f}; {trials.rollouts} of "
            f"{self._settings.max_rollouts} rollouts, {plural(trials.reflections, 'reflection')}"
        )

    # --- what the library's thread asks -----------------------------------------------------
    def _asked(self, work: Coroutine[Any, Any, T]) -> T:
        """What the event loop answers to the library's thread. An error there ends the search, and
        so does a budget that is used up: what was compared by then is what was found."""
        with self._lock:
            if self._is_cancelled:
                work.close()
                raise _Ended
            self._asking = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            answer: T = self._asking.result()
        except SpentError as why:
            self._ended = str(why)
            raise _Ended from why
        except BaseException as error:
            self._error = error
            raise _Ended from error
        finally:
            self._asking = None
        return answer

    def _cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._asking is not None:
                self._asking.cancel()

    def _say(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._world.note, text)

    # --- what came of it --------------------------------------------------------------------
    @property
    def _chosen(self) -> int:
        means = [candidate.mean for candidate in self._candidates]
        return means.index(max(means))

    def _named(self, texts: Texts) -> dict[str, str]:
        return {name: texts[number] for number, name in enumerate(self._names)}

    def _template(self, number: int, texts: Texts) -> PromptTemplate:
        return self._trials.template(self._names[number], texts[number])


class _Log:
    """Where the library writes."""

    def log(self, message: str) -> None:
        log.debug("%s", message)


def _is_used_up(used: int, most: int | None) -> bool:
    return most is not None and used >= most


def _score(reward: float) -> float:
    """A reward as the library sees it."""
    return SHIFT + round(reward * STEPS) / STEPS


def _name(texts: Mapping[str, str]) -> tuple[str, ...]:
    """A candidate, as a key."""
    return tuple(texts.values())

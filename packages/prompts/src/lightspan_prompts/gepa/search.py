"""GEPA's search: the library runs in a thread and sends its requests to the event loop.

Only the library's public function `optimize` is called. Three of its properties are worked around:

- The library ignores errors of a reflection model and continues. To end it, this module raises
  `_Ended`, which does not derive from `Exception`.
- The library iterates over sets of component names, whose order differs between processes. Here,
  components are named by numbers.
- The library weighs ancestors by their scores and fails if the scores sum to zero, such as when the
  initial prompts fail on every task. Here, scores are shifted.
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
from lightspan.schema.records import Json, task_id
from lightspan_prompts.gepa.reflection_prompts import question
from lightspan_prompts.search.candidates import (
    Candidate,
    Proposal,
    SearchResult,
    Split,
    TooFewRolloutsError,
    rounded,
)
from lightspan_prompts.search.evaluator import Question, SpentError, Trial
from lightspan_prompts.search.feedback import Evidence
from lightspan_prompts.search.reflection import Refused, Repeated, Unusable, proposed_template
from lightspan_prompts.search.search_log import Evaluation, SearchLog

if TYPE_CHECKING:
    from lightspan.algorithms.protocol import TrainerContext
    from lightspan_prompts.endpoint_client import EndpointClient
    from lightspan_prompts.gepa.algorithm import GEPA

T = TypeVar("T")
Texts = Mapping[int, str]
"""Component → template: a candidate in the library's form."""

log = logging.getLogger(__name__)

SHIFT: Final = 2.0**20
"""Shift of rewards for the library, so that every score is positive."""
MERGE_TASKS: Final = 5
"""Number of tasks on which the library tries a merged candidate."""


class _Ended(BaseException):
    """An exception that ends the library's run.

    It does not derive from `Exception`, because the library ignores an `Exception` and continues.
    """


class _Item(NamedTuple):
    """A task in the library's form."""

    split: str
    task: Json


class Search:
    """A GEPA search, which begins anew or resumes from its log.

    Args:
        settings: the algorithm with its options.
        context: the trainer's context, which runs the rollouts.
        split: the training tasks in two parts: for reflections and for comparing candidates.
        journal: an open log.
        reflector: an open client of the reflection model.
    """

    def __init__(
        self,
        settings: GEPA,
        context: TrainerContext,
        split: Split,
        journal: SearchLog,
        reflector: EndpointClient,
    ) -> None:
        self._settings = settings
        self._context = context
        self._split = split
        self._reflector = reflector
        self._trials = settings.make_evaluator(context, journal)
        self._prompts = dict(settings.prompts)
        """Initial prompts, and prompts discovered in the app."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: Any = None
        """Request that the thread waits for; None if there is none."""
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._candidates: list[Candidate] = []
        self._runs: list[list[list[Evidence]]] = []
        """Per candidate, the rollouts of its runs on the selection split."""
        self._compared: dict[tuple[str, ...], Evaluation] = {}
        """Candidate → its last evaluation on the selection split."""
        self._proposed: dict[tuple[str, ...], str] = {}
        """Proposed texts → what they were proposed by."""
        self._open_proposals: dict[tuple[str, ...], Proposal] = {}
        """Candidate → its proposal, until it is dropped or on the selection split."""
        self._ended = ""

    async def run(self) -> SearchResult:
        """Search until a budget is used up.

        Raises:
            ConfigError: the budget of rollouts is too small for one candidate, or a text of the app
                cannot be learned.
            UnknownAgentError: a pattern in `optimize` matches no agent and no prompt.
            RewardError: no rollout of the initial prompts has a reward.
            EngineError: the reflection model fails.
            And the errors of rollouts, of the log and of the library.
        """
        check_budget(self._settings, self._split)
        if (count := minibatch_of(self._settings, self._split)) < self._settings.minibatch:
            self._context.note(
                f"minibatch={self._settings.minibatch}: reflections show "
                f"{plural(count, 'task')}, all that the selection split leaves"
            )
        selection, patterns = self._split.selection, self._settings.patterns
        self._prompts = await self._trials.begin(selection, patterns, self._context.note)
        first = tuple(prompt.template for prompt in self._prompts.values())
        self._proposed[first] = "the initial prompts"
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
            await over  # nothing blocks the thread any more
            raise
        thread.join()
        if self._error is not None:
            raise self._error from self._error.__cause__  # without the library's exceptions around
        for made in self._open_proposals.values():
            why = "the search ended before it was compared"
            self._trials.add_proposal(msgspec.structs.replace(made, why=why), self._candidates)
        return self._trials.result(self._candidates, await self._confirmed(), self._ended)

    @property
    def _names(self) -> list[str]:
        return list(self._prompts)

    async def _confirmed(self) -> int:
        """Run the best candidates (finalists) a second time, and return the number of the best one.

        The candidate with the highest mean of many was partly lucky, so the finalists are compared
        by the mean of both runs. The initial prompts are run a second time too: with one run they
        would have a larger variance than the finalists, which makes false gains more frequent. If a
        budget does not suffice for them and one finalist, the first runs are compared.
        """
        self._trials.skip_finals()
        self._restate()
        remaining = self._settings.max_rollouts - self._trials.rollouts
        finalists = [n for n in self._ranked[: self._settings.finalists] if n]
        best: list[int] = []
        trials: list[Trial] = []
        for n in [0, *finalists] if finalists else ():
            trial = self._second_run(n)
            if not self._trials.has_final(trial):
                remaining -= len(self._split.selection)
                if remaining < 0:
                    break
            best.append(n)
            trials.append(trial)
        if len(best) < 2:
            best.clear()
        if finalists and (count := len(best[1:])) < len(finalists):
            self._context.note(
                f"max_rollouts={self._settings.max_rollouts} suffices to run {count} of "
                f"{plural(len(finalists), 'finalist')} and the initial prompts a second time"
                + ("" if count else ", so first runs are compared")
            )
        if best and (spent := self._trials.spent()):
            self._context.note(f"{spent}, so no candidate is run a second time: first runs decide")
            best.clear()
        if not best:
            return self._chosen
        if not self._trials.may_evaluate(trials):  # a budget was lowered: the log continued here
            return self._chosen
        for number, evaluation in zip(best, await self._trials.evaluate(trials), strict=True):
            self._runs[number].append(evaluation.seen)
        self._restate()
        return max(best, key=self._rank)

    def _restate(self) -> None:
        """Give the candidates the means by the current failure reward, which may have fallen."""
        pairs = zip(self._candidates, self._runs, strict=True)
        self._candidates[:] = [self._trials.with_rewards(*pair) for pair in pairs]

    def _rank(self, number: int) -> tuple[bool, float]:
        return self._candidates[number].rank

    def _second_run(self, number: int) -> Trial:
        """Return the trial of a finalist, the candidate `number`."""
        templates = self._candidates[number].templates
        return Trial("selection", templates, self._split.selection, "again", is_final=True)

    # --- budgets ----------------------------------------------------------------------------
    @property
    def _reserved(self) -> int:
        """Return the number of rollouts to keep for running the finalists at the end.

        The candidates that the next iteration may add count as possible finalists, and the initial
        prompts are run with them. Candidates that a smaller budget has run a second time need no
        rollouts. The number is 0 while the initial prompts are the only candidate.
        """
        if len(self._candidates) == 1 or not self._settings.finalists:
            return 0
        new = min(self._settings.finalists, self._settings.proposals)
        others = {0, *self._ranked[: self._settings.finalists - new]}
        unpaid = sum(not self._trials.has_final(self._second_run(n)) for n in others)
        return (new + unpaid) * len(self._split.selection)

    def _stops(self, state: Any) -> bool:
        """Return whether the search must end before another iteration (called by the library)."""
        self._ended = ""
        if not self._is_over() and self._trials.skip_finals():  # they ended a smaller budget
            self._is_over()
        return bool(self._ended)

    def _is_over(self) -> bool:
        """Return whether a budget or the perfect reward ends the search, and set `_ended`."""
        settings, trials, best = self._settings, self._trials, self._runs[self._chosen][0]
        iteration = _iteration(settings, self._split)
        remaining = settings.max_rollouts - trials.rollouts - self._reserved
        if perfect := trials.why_perfect(best):
            self._ended = perfect
        elif remaining < iteration:
            self._ended = (
                f"{trials.rollouts} of max_rollouts={settings.max_rollouts} rollouts are done, "
                f"and another candidate may take {iteration}"
                + (f"; {self._reserved} are for the finalists" if self._reserved else "")
            )
        elif _is_used_up(trials.reflections + settings.proposals - 1, settings.max_reflections):
            done = f"{trials.reflections} of max_reflections={settings.max_reflections}"
            self._ended = (
                f"{done} reflections are done, and an iteration takes {settings.proposals}"
            )
        else:
            self._ended = trials.spent() or trials.why_stale()
        return bool(self._ended)

    # --- in the library's thread ------------------------------------------------------------
    def _optimize(self) -> None:
        from gepa.api import optimize
        from gepa.strategies.proposal_sampling import IndependentSampling

        settings = self._settings
        # its protocols declare `str` where a number works, and name their arguments
        adapter: Any = self
        stops: Any = self._stops
        first: Any = {
            number: prompt.template for number, prompt in enumerate(self._prompts.values())
        }
        optimize(
            seed_candidate=first,
            trainset=[_Item("feedback", task) for task in self._split.feedback],
            valset=[_Item("selection", task) for task in self._split.selection],
            adapter=adapter,
            reflection_minibatch_size=minibatch_of(settings, self._split),
            skip_perfect_score=False,  # `propose_new_texts` does
            use_merge=settings.merge and len(self._names) > 1,
            merge_val_overlap_floor=min(MERGE_TASKS, len(self._split.selection)),
            stop_callbacks=[stops],
            sampling_strategy=IndependentSampling(settings.proposals),
            callbacks=[adapter],
            logger=_Log(),
            seed=settings.seed,
            raise_on_exception=True,
        )

    def evaluate(
        self, batch: Sequence[_Item], candidate: Texts, capture_traces: bool = False
    ) -> Any:
        """Run a candidate and return its scores (called by the library)."""
        return self.batch_evaluate([(candidate, batch)])[0]

    def batch_evaluate(self, items: Sequence[tuple[Texts, Sequence[_Item]]]) -> list[Any]:
        """Run candidates concurrently and return their scores (called by the library)."""
        from gepa.core.adapter import EvaluationBatch

        trials = [
            Trial(batch[0].split, self._named(texts), self._distinct(batch))
            for texts, batch in items
        ]
        batches = []
        evaluations = self._run_in_loop(self._trials.evaluate(trials))
        for evaluation, (_, batch) in zip(evaluations, items, strict=True):
            self._store(evaluation)
            self._compare_proposal(evaluation)
            seen = evaluation.seen
            if len(seen) < len(batch):  # the library repeats tasks of a small selection split
                runs = {evidence.task_id: evidence for evidence in seen}
                seen = [runs[task_id(item.task)] for item in batch]
            scores = [_score(self._trials.reward(evidence)) for evidence in seen]
            outputs = [None] * len(scores)
            batches.append(EvaluationBatch(outputs=outputs, scores=scores, trajectories=seen))
        return batches

    def _distinct(self, batch: Sequence[_Item]) -> list[Json]:
        """Return the tasks of a batch, each once.

        The library fills up its last minibatch of an epoch with tasks that may be in it already.
        Other tasks for reflections take their place.
        """
        others = self._split.feedback if batch[0].split == "feedback" else []
        tasks = {task_id(task): task for task in [*(item.task for item in batch), *others]}
        return list(tasks.values())[: len(batch)]

    def _compare_proposal(self, evaluation: Evaluation) -> None:
        """Record the score of a proposed candidate on the tasks for which it was proposed.

        Also record that the proposal is dropped if it scores no better than its parent.
        """
        name = _name(evaluation.candidate)
        made = self._open_proposals.get(name)
        if made is None or made.before is None or evaluation.split != "feedback":
            return
        before, after = made.before, self._trials.mean_of(evaluation.seen)
        made = msgspec.structs.replace(made, after=after)
        if rounded(after) > rounded(before):
            self._open_proposals[name] = made  # the library compares it on the selection split
            return
        del self._open_proposals[name]
        why = "it is no better on its minibatch"
        self._add_proposal(msgspec.structs.replace(made, why=why))

    def _store(self, evaluation: Evaluation) -> None:
        """Keep an evaluation if it is on the tasks by which candidates are compared.

        Raises:
            _Ended: a reward is too large for exact sums. `run` then raises a `RewardError`.
        """
        rewards = [evidence.reward for evidence in evaluation.seen if evidence.reward is not None]
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
        """Return the rollouts that the reflection model is shown (called by the library)."""
        records = [{"seen": evidence} for evidence in eval_batch.trajectories]
        return dict.fromkeys(components_to_update, records)

    def propose_new_texts(
        self,
        candidate: Texts,
        reflective_dataset: Mapping[int, Sequence[Mapping[str, Evidence]]],
        components_to_update: Sequence[int],
    ) -> dict[int, str]:
        """Request new texts (called by the library).

        Return component → text. A component is left out if the model's answer has no usable text.
        """
        texts: dict[int, str] = {}
        for number in components_to_update:
            name = self._names[number]
            template = self._trials.template(name, candidate[number])
            evidence = [record["seen"] for record in reflective_dataset[number]]
            if all(map(self._trials.is_solved, evidence)):
                continue
            request = Question(name, question(name, template, evidence), self._reflector)
            [entry] = self._run_in_loop(self._trials.reflect([request]))
            try:
                changed = proposed_template(template, entry.answer, entry.finish_reason)
                whole = _name(self._named({**candidate, **texts, number: changed.template}))
                made = Proposal(
                    prompt=name,
                    parents=[self._number_of(candidate)],
                    text=changed.template,
                    before=self._trials.mean_of(evidence),
                    tasks=len(evidence),
                )
                if whole in self._proposed:
                    raise Repeated(f"it equals {self._proposed[whole]}")
                self._proposed[whole] = f"the proposal of reflection {self._trials.reflections}"
                self._open_proposals[whole] = made
                texts[number] = changed.template
                self._trials.check_usable(None)
            except Unusable as problem:
                why, parents = str(problem), [self._number_of(candidate)]
                if not isinstance(problem, Refused):
                    why = f"reflection {self._trials.reflections} is unusable: {why}"
                self._add_proposal(Proposal(prompt=name, parents=parents, why=why))
                if not isinstance(problem, Refused):
                    self._run_in_loop(self._count_unusable(problem))
        return texts

    async def _count_unusable(self, problem: Unusable) -> None:
        self._trials.check_usable(problem)

    def _number_of(self, texts: Texts) -> int:
        """Return the number of the candidate with these texts."""
        named = self._named(texts)
        return [candidate.templates for candidate in self._candidates].index(named)

    def _add_proposal(self, proposal: Proposal) -> None:
        self._loop.call_soon_threadsafe(self._trials.add_proposal, proposal, list(self._candidates))

    def on_merge_rejected(self, event: Mapping[str, Any]) -> None:
        """Record a merge that the library dropped (called by the library)."""
        parents = [parent for parent in event["parent_ids"] if parent is not None]
        why = "it is worse than both on some tasks"
        self._add_proposal(Proposal(prompt="", parents=parents, why=why))

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """Record a candidate that the library keeps (called by the library)."""
        number, trials = event["candidate_idx"], self._trials
        last = self._compared[_name(self._named(event["candidate"]))]
        parents = [parent for parent in event["parent_ids"] if parent is not None]
        new = Candidate(
            templates=self._named(event["candidate"]),
            parents=parents,
            rewards={},
            mean=-math.inf,
            rollouts=trials.rollouts,
        )
        self._candidates.append(trials.with_rewards(new, [last.seen]))
        self._runs.append([last.seen])
        if parents:
            made = self._open_proposals.pop(_name(self._named(event["candidate"])), None)
            made = made or Proposal(prompt="", parents=parents)
            self._add_proposal(msgspec.structs.replace(made, candidate=number))
        if trials.is_replaying:
            return
        what = f"candidate {number}, of {parents}" if parents else "the initial prompts"
        self._note(
            f"{what}: {self._candidates[-1].mean:.3f} on {plural(len(last.seen), 'task')} of the "
            f"selection split; best {self._candidates[self._chosen].mean:.3f}; "
            f"{trials.rollouts} of {self._settings.max_rollouts} rollouts, "
            f"{plural(trials.reflections, 'reflection')}"
        )

    # --- the library's thread ---------------------------------------------------------------
    def _run_in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop; called from the library's thread.

        If the coroutine raises an error, the search ends. If the error is that a budget is used up,
        the search ends with the candidates found so far.
        """
        with self._lock:
            if self._is_cancelled:
                work.close()
                raise _Ended
            self._pending = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            answer: T = self._pending.result()
        except SpentError as why:
            self._ended = str(why)
            raise _Ended from why
        except BaseException as error:
            self._error = error
            raise _Ended from error
        finally:
            self._pending = None
        return answer

    def _cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._pending is not None:
                self._pending.cancel()

    def _note(self, text: str) -> None:
        self._loop.call_soon_threadsafe(self._context.note, text)

    @property
    def _chosen(self) -> int:
        return max(range(len(self._candidates)), key=self._rank)

    @property
    def _ranked(self) -> list[int]:
        """The numbers of the candidates, the highest mean first."""
        return sorted(range(len(self._candidates)), key=self._rank, reverse=True)

    def _named(self, texts: Texts) -> dict[str, str]:
        return {name: texts[number] for number, name in enumerate(self._names)}


def check_budget(settings: GEPA, split: Split) -> None:
    """Raise `TooFewRolloutsError` if the budget is too small for one new candidate."""
    least = len(split.selection) + _iteration(settings, split)
    if settings.max_rollouts < least:
        raise TooFewRolloutsError(
            f"GEPA(max_rollouts={settings.max_rollouts}) is too few for one new candidate: "
            f"{plural(len(split.selection), 'task')} of the selection split twice, and "
            f"{plural(minibatch_of(settings, split), 'task')} twice to propose from; give at least "
            f"{least}, "
            "or a smaller selection= or minibatch="
        )


def minibatch_of(settings: GEPA, split: Split) -> int:
    """Return the number of tasks of a minibatch: at most all outside the selection split.

    The library would run some of them twice otherwise.
    """
    return min(settings.minibatch, len(split.feedback))


def _iteration(settings: GEPA, split: Split) -> int:
    """Return the largest number of rollouts that one iteration of the library can take."""
    selection = len(split.selection)
    mutated = settings.proposals * (2 * minibatch_of(settings, split) + selection)
    return max(mutated, MERGE_TASKS + selection) if settings.merge else mutated


class _Log:
    """Logger of the library."""

    def log(self, message: str) -> None:
        log.debug("%s", message)


def _is_used_up(used: int, most: int | None) -> bool:
    return most is not None and used >= most


def _score(reward: float) -> float:
    """Convert a reward to a positive score for the library.

    The score is rounded so that sums of scores are exact.
    """
    return SHIFT + rounded(reward)


def _name(texts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the texts of a candidate as a tuple, which can be a dictionary key."""
    return tuple(texts.values())

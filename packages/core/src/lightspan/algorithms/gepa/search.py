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
import hashlib
import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from lightspan.algorithms.gepa import reflection
from lightspan.algorithms.gepa.feedback import Seen, seen_of
from lightspan.algorithms.gepa.journal import Evaluation, Journal, Reflection, Survey
from lightspan.algorithms.gepa.survey import Surveyed, survey
from lightspan.errors import ConfigError, RewardError
from lightspan.progress import many
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json, task_id
from lightspan.schema.resources import INSTRUCTIONS, Resources
from lightspan.schema.routing import matches

if TYPE_CHECKING:
    from lightspan.algorithms.gepa.algorithm import GEPA
    from lightspan.algorithms.gepa.reflection import Reflector
    from lightspan.algorithms.protocol import World

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


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that went into the pool, and how they did on the selection split."""

    templates: dict[str, str]
    """Prompt → template."""
    parents: list[int]
    """Places of those that it was made of; none for the prompts as they were given."""
    rewards: dict[str, float | None]
    """Task of the selection split → reward; None: unscored."""
    mean: float
    """Of these, an unscored one taken for `failure_reward`."""
    rollouts: int
    """Done until it was known."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found."""

    candidates: list[Candidate]
    chosen: int
    """The first one with the highest mean."""
    ended: str
    """Why the search ended."""
    rollouts: int
    unscored: int
    failed: int
    mean: float | None
    """Of the rewards of all rollouts."""
    reflections: int
    unusable: int
    """Answers of the reflection model that were no other text."""
    tokens: int
    surveyed: Surveyed | None = None
    """The texts that were found in the app; None: none were to be."""
    applied: int = 0
    """Calls, and askings for a prompt, that got a candidate's text."""
    kept: dict[str, int] = msgspec.field(default_factory=dict)
    """Which of them got the app's own, and why → how many."""
    unasked: dict[str, int] = msgspec.field(default_factory=dict)
    """Agent → rollouts in which it made no call, on tasks in whose first rollout it made one."""

    def texts(self) -> str:
        """What became of the texts that were found, for people; empty where none were to be."""
        if self.surveyed is None:
            return ""
        kept = ", ".join(f"{why} ({count})" for why, count in sorted(self.kept.items()))
        own = f"; the app's own in {sum(self.kept.values())}: {kept}" if kept else ""
        parts = [f"texts of candidates were sent in {many(self.applied, 'call')}{own}"]
        parts += [
            f"{name!r} was not asked in {many(count, 'rollout')} of tasks on which it was asked "
            "before: if a cache of the app's answered for it, one candidate got the answer to "
            "another; switch it off while prompts are learned"
            for name, count in sorted(self.unasked.items())
        ]
        return ". ".join(parts)


class Split(NamedTuple):
    """The training tasks in two parts."""

    feedback: list[Json]
    """What reflections see."""
    selection: list[Json]
    """What candidates are compared by."""


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
        self, settings: GEPA, world: World, split: Split, journal: Journal, reflector: Reflector
    ) -> None:
        self._settings = settings
        self._world = world
        self._split = split
        self._journal = journal
        self._reflector = reflector
        self._prompts = dict(settings.prompts)
        """As they are: those that were given, and when the app was looked at those found there."""
        self._surveyed: Surveyed | None = None
        self._first: Survey | None = None
        """What the first evaluation gets, once."""
        self._asked_before: dict[str, list[str]] = {}
        """Task → who was asked in its first rollout."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._asking: Any = None
        """What the thread waits for; None while it waits for nothing."""
        self._is_cancelled = False
        self._error: BaseException | None = None
        self._candidates: list[Candidate] = []
        self._compared: dict[str, Evaluation] = {}
        """Of each candidate, the last evaluation on the selection split."""
        self._rewards: list[float] = []
        self._rollouts = self._unscored = self._failed = 0
        self._reflections = self._unusable = self._tokens = 0
        self._applied = 0
        self._kept: Counter[str] = Counter()
        self._unasked: Counter[str] = Counter()
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
        if self._settings.optimize:
            await self._survey()
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
        return self._found()

    @property
    def _names(self) -> list[str]:
        return list(self._prompts)

    async def _survey(self) -> None:
        """Find the texts that are to be learned in the calls of the app as it is: they are those of
        the first evaluation, and no others."""
        tasks, patterns = self._split.selection, self._settings.optimize
        key = _key({"survey": json.dumps(patterns)}, [task_id(task) for task in tasks])
        entry = self._journal.replayed(key, Survey)
        if entry is None:
            episodes = await self._world.rollouts(tasks, 1)
            found = await asyncio.to_thread(survey, episodes, patterns)
            self._surveyed = found
            seen = [
                seen_of(episode, task, self._concerns)
                for episode, task in zip(episodes, tasks, strict=True)
            ]
            entry = Survey(key=key, found=found, seen=seen)
            self._journal.add(entry)
            for line in found.lines():
                self._world.note(line)
        self._first, self._surveyed = entry, entry.found
        taken = sorted(self._prompts.keys() & entry.found.components.keys())
        if taken:
            raise ConfigError(
                f"optimize={patterns} finds {taken} in the app, and prompts= names {taken} too: "
                "give the prompt that the app takes as an argument another name"
            )
        for name, component in entry.found.components.items():
            self._prompts[name] = PromptTemplate(component.template)

    # --- budgets ----------------------------------------------------------------------------
    @property
    def _iteration(self) -> int:
        """The rollouts that an iteration takes at most."""
        minibatch, selection = self._settings.minibatch, len(self._split.selection)
        mutated = self._settings.proposals * (2 * minibatch + selection)
        return max(mutated, MERGED_ON + selection) if self._settings.merge else mutated

    def _check_budget(self) -> None:
        least = len(self._split.selection) + self._iteration
        if self._settings.max_rollouts < least:
            raise ConfigError(
                f"GEPA(max_rollouts={self._settings.max_rollouts}) is too few for one new "
                f"candidate: {many(len(self._split.selection), 'task')} of the selection split "
                f"twice, and {many(self._settings.minibatch, 'task')} twice to propose from; give "
                f"at least {least}, or a smaller selection= or minibatch="
            )

    def _stops(self, state: Any) -> bool:
        """Whether the library begins no further iteration."""
        settings, best = self._settings, self._candidates[self._chosen]
        perfect, left = settings.perfect_reward, settings.max_rollouts - self._rollouts
        rewards = best.rewards.values()
        if perfect is not None and all(r is not None and r >= perfect for r in rewards):
            self._ended = "the selection split has the perfect reward on every task"
        elif left < self._iteration:
            self._ended = (
                f"{self._rollouts} of max_rollouts={settings.max_rollouts} rollouts are done, and "
                f"another candidate may take {self._iteration}"
            )
        elif _is_used_up(self._reflections + settings.proposals - 1, settings.max_reflections):
            self._ended = f"max_reflections={settings.max_reflections} is used up"
        elif _is_used_up(self._tokens, settings.max_tokens):
            self._ended = f"max_tokens={settings.max_tokens} is used up: {self._tokens} tokens"
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

        evaluations = self._asked(self._evaluations(items))
        batches = []
        for evaluation in evaluations:
            self._count(evaluation)
            scores = [_score(self._reward(seen)) for seen in evaluation.seen]
            outputs = [None] * len(scores)
            batch = EvaluationBatch(outputs=outputs, scores=scores, trajectories=evaluation.seen)
            batches.append(batch)
        return batches

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: Any, components_to_update: Sequence[int]
    ) -> dict[int, list[dict[str, Seen]]]:
        """The library asks what reflections are to see."""
        records = [{"seen": seen} for seen in eval_batch.trajectories]
        return dict.fromkeys(components_to_update, records)

    def propose_new_texts(
        self,
        candidate: Texts,
        reflective_dataset: Mapping[int, Sequence[Mapping[str, Seen]]],
        components_to_update: Sequence[int],
    ) -> dict[int, str]:
        """The library asks for other texts; none where the model gave no usable one."""
        texts = {}
        for number in components_to_update:
            name, template = self._names[number], self._template(number, candidate)
            seen = [record["seen"] for record in reflective_dataset[number]]
            asked = reflection.question(name, template, seen)
            was_known = self._journal.is_replaying
            entry = self._asked(self._reflection(name, asked))
            self._reflections += 1
            self._tokens += entry.input_tokens + entry.output_tokens
            try:
                text = reflection.new_text(entry.answer, entry.finish_reason)
                changed = template.rewritten(text).template
                if changed == template.template:
                    raise reflection.Unusable("the prompt is what it was")
                texts[number] = changed
            except (reflection.Unusable, ConfigError) as why:
                self._unusable += 1
                if not was_known:
                    self._say(f"reflection {self._reflections} on {name!r} is of no use: {why}")
        return texts

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """The library took a candidate into its pool."""
        number = event["candidate_idx"]
        last = self._compared[_key(self._named(event["candidate"]), [])]
        rewards = {seen.task_id: seen.reward for seen in last.seen}
        mean = math.fsum(map(self._reward, last.seen)) / len(last.seen)
        parents = [parent for parent in event["parent_ids"] if parent is not None]
        self._candidates.append(
            Candidate(
                templates=self._named(event["candidate"]),
                parents=parents,
                rewards=rewards,
                mean=mean,
                rollouts=self._rollouts,
            )
        )
        if self._journal.is_replaying:
            return
        made = "the prompts as they are" if not parents else f"candidate {number}, of {parents}"
        self._say(
            f"{made}: {mean:.3f} on {many(len(rewards), 'task')} of the selection split; best "
            f"{self._candidates[self._chosen].mean:.3f}; {self._rollouts} of "
            f"{self._settings.max_rollouts} rollouts, {many(self._reflections, 'reflection')}"
        )

    # --- what the library's thread asks -----------------------------------------------------
    def _asked(self, work: Coroutine[Any, Any, T]) -> T:
        """What the event loop answers to the library's thread. An error there ends the search."""
        with self._lock:
            if self._is_cancelled:
                work.close()
                raise _Ended
            self._asking = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            answer: T = self._asking.result()
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

    # --- in the event loop ------------------------------------------------------------------
    async def _evaluations(
        self, items: Sequence[tuple[Texts, Sequence[_Item]]]
    ) -> list[Evaluation]:
        """Those that the journal has, then the others, all at once."""
        known: list[Evaluation] = []
        keys = [
            _key(self._named(texts), [task_id(i.task) for i in batch]) for texts, batch in items
        ]
        for key in keys:
            entry = self._journal.replayed(key, Evaluation)
            if entry is None:
                break
            known.append(entry)
        first, self._first = self._first, None
        begun = [] if first is None or known else [self._of_survey(first, keys[0], items[0])]
        done = len(known) + len(begun)
        fresh = [*begun, *await self._rolled_out(keys[done:], items[done:])]
        for evaluation in fresh:
            self._journal.add(evaluation)
        return [*known, *fresh]

    async def _rolled_out(
        self, keys: Sequence[str], items: Sequence[tuple[Texts, Sequence[_Item]]]
    ) -> list[Evaluation]:
        pairs = [(texts, item) for texts, batch in items for item in batch]
        if not pairs:
            return []
        resources = [self._resources(texts) for texts, _ in pairs]
        episodes = await self._world.rollouts(
            [item.task for _, item in pairs], 1, resources=resources
        )
        seen = [
            seen_of(episode, item.task, self._concerns)
            for episode, (_, item) in zip(episodes, pairs, strict=True)
        ]
        evaluations = []
        for key, (texts, batch) in zip(keys, items, strict=True):
            mine, seen = seen[: len(batch)], seen[len(batch) :]
            evaluations.append(
                Evaluation(key=key, split=batch[0].split, candidate=self._named(texts), seen=mine)
            )
        return evaluations

    def _of_survey(
        self, first: Survey, key: str, item: tuple[Texts, Sequence[_Item]]
    ) -> Evaluation:
        """The first evaluation, which the survey has done."""
        texts, batch = item
        assert [task_id(each.task) for each in batch] == [seen.task_id for seen in first.seen]
        return Evaluation(
            key=key, split=batch[0].split, candidate=self._named(texts), seen=first.seen
        )

    def _resources(self, texts: Texts) -> Resources:
        """What the app is handed of a candidate."""
        given: dict[str, Any] = {
            name: self._template(number, texts)
            for number, name in enumerate(self._names)
            if name in self._settings.prompts
        }
        if self._surveyed is not None:
            given[INSTRUCTIONS] = self._surveyed.told(self._named(texts))
        return given

    def _concerns(self, name: str) -> bool:
        found = self._surveyed
        return found is not None and any(matches(pattern, name) for pattern in found.patterns)

    async def _reflection(self, name: str, asked: str) -> Reflection:
        key = _key({"asked": asked}, [])
        entry = self._journal.replayed(key, Reflection)
        if entry is not None:
            return entry
        answer = await self._reflector.ask(asked)
        entry = Reflection(
            key=key,
            prompt=name,
            asked=asked,
            answer=answer.text,
            finish_reason=answer.finish_reason,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
        )
        self._journal.add(entry)
        return entry

    # --- what came of it --------------------------------------------------------------------
    def _count(self, evaluation: Evaluation) -> None:
        rewards = [seen.reward for seen in evaluation.seen]
        scored = [reward for reward in rewards if reward is not None]
        if not scored and not self._rollouts:
            self._error = RewardError(
                "no rollout of the prompts as they are has a reward, so there is nothing to "
                f"compare: the first one says {evaluation.seen[0].text[-300:]!r}"
            )
            raise _Ended
        largest = max(map(abs, scored), default=0.0)
        if largest >= SHIFT / 2:
            self._error = RewardError(
                f"a reward of {largest:g} is too large to compare exactly: scale rewards below "
                f"{SHIFT / 2:g}"
            )
            raise _Ended
        if evaluation.split == "selection":
            self._compared[_key(evaluation.candidate, [])] = evaluation
        self._rewards += scored
        self._rollouts += len(rewards)
        self._unscored += len(rewards) - len(scored)
        self._failed += sum(seen.failed for seen in evaluation.seen)
        self._tokens += sum(seen.tokens for seen in evaluation.seen)
        for seen in evaluation.seen:
            self._applied += seen.applied
            self._kept.update(seen.kept)
            before = self._asked_before.setdefault(seen.task_id, seen.asked)
            self._unasked.update(() if seen.failed else set(before) - set(seen.asked))

    def _reward(self, seen: Seen) -> float:
        """What a rollout counts for where candidates are compared, which takes a number."""
        return self._settings.failure_reward if seen.reward is None else seen.reward

    @property
    def _chosen(self) -> int:
        means = [candidate.mean for candidate in self._candidates]
        return means.index(max(means))

    def _found(self) -> Found:
        scored = len(self._rewards)
        return Found(
            candidates=self._candidates,
            chosen=self._chosen,
            ended=self._ended,
            rollouts=self._rollouts,
            unscored=self._unscored,
            failed=self._failed,
            mean=math.fsum(self._rewards) / scored if scored else None,
            reflections=self._reflections,
            unusable=self._unusable,
            tokens=self._tokens,
            surveyed=self._surveyed,
            applied=self._applied,
            kept=dict(self._kept),
            unasked=dict(self._unasked),
        )

    def _named(self, texts: Texts) -> dict[str, str]:
        return {name: texts[number] for number, name in enumerate(self._names)}

    def _template(self, number: int, texts: Texts) -> PromptTemplate:
        given = self._prompts[self._names[number]]
        return PromptTemplate(texts[number], engine=given.engine)


class _Log:
    """Where the library writes."""

    def log(self, message: str) -> None:
        log.debug("%s", message)


def _is_used_up(used: int, most: int | None) -> bool:
    return most is not None and used >= most


def _score(reward: float) -> float:
    """A reward as the library sees it."""
    return SHIFT + round(reward * STEPS) / STEPS


def _key(texts: Mapping[str, str], ids: Sequence[str]) -> str:
    """What is asked, as a name."""
    said = json.dumps([dict(texts), list(ids)], ensure_ascii=True)
    return hashlib.sha256(said.encode()).hexdigest()[:24]

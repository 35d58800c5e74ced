"""Trials: what a search asks for, done or read from its journal, and what it cost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from lightspan.algorithms.prompts.candidates import Candidate, Found
from lightspan.algorithms.prompts.feedback import Seen, seen_of
from lightspan.algorithms.prompts.journal import Evaluation, Journal, Reflection
from lightspan.algorithms.prompts.reflection import Reflector
from lightspan.errors import RewardError
from lightspan.lightning.episode import Episode
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json, Mode, task_id

Prompts = Mapping[str, PromptTemplate]


class Runs(Protocol):
    """Who runs the app: a `World`, as far as a search needs one."""

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Sequence[Prompts],
    ) -> list[Episode]:
        """See `World`."""
        ...


class Trial(NamedTuple):
    """Prompts to run on some tasks."""

    split: str
    """`feedback` or `selection`."""
    templates: Mapping[str, str]
    """Prompt → template."""
    tasks: Sequence[Json]
    place: str = ""
    """Tells it from an equal one that is asked for at the same time."""


class Question(NamedTuple):
    """A question to a reflection model."""

    prompt: str
    """Whose other text it is about."""
    asked: str
    reflector: Reflector
    place: str = ""
    """Tells it from an equal one that is asked at the same time."""


class Trials:
    """Evaluations and reflections of a search, from its beginning or from what its journal has.

    Args:
        runs: runs the app.
        prompts: as they were given.
        journal: open; None keeps nothing.
        failure_reward: what a rollout without a reward counts for where candidates are compared,
            because that takes a number.
        selection_mode: of rollouts of the selection split.
    """

    def __init__(
        self,
        runs: Runs,
        prompts: Prompts,
        journal: Journal | None,
        failure_reward: float,
        selection_mode: Mode = Mode.TRAIN,
    ) -> None:
        self._runs = runs
        self._prompts = prompts
        self._journal = journal
        self._failure_reward = failure_reward
        self._modes = {"feedback": Mode.TRAIN, "selection": selection_mode}
        self._rewards: list[float] = []
        self.rollouts = 0
        self.unscored = 0
        self.failed = 0
        self.reflections = 0
        self.unusable = 0
        """Answers that were of no use, as the search counts them."""
        self.tokens = 0
        """Of the app's calls and of reflections, as far as their endpoints count them."""

    @property
    def is_replaying(self) -> bool:
        """Whether what is asked next was answered in an earlier life."""
        return self._journal is not None and self._journal.is_replaying

    async def evaluate(self, asked: Sequence[Trial]) -> list[Evaluation]:
        """What came of these trials, of one split. What the journal does not have is run side by
        side.

        Raises:
            RewardError: the first trial of a search has not one reward.
            CheckpointError: the journal is of another search.
            And the errors of rollouts.
        """
        keys = [evaluation_key(trial) for trial in asked]
        found: list[Evaluation | None] = [None] * len(keys)
        if self._journal is not None:
            found = self._journal.replayed(keys, Evaluation)
        missing = [place for place, evaluation in enumerate(found) if evaluation is None]
        fresh = await self._rolled_out([asked[place] for place in missing])
        for place, seen in zip(missing, fresh, strict=True):
            trial = asked[place]
            evaluation = Evaluation(
                key=keys[place], split=trial.split, candidate=dict(trial.templates), seen=seen
            )
            if self._journal is not None:
                self._journal.add(evaluation)
            found[place] = evaluation
        evaluations = [evaluation for evaluation in found if evaluation is not None]
        for evaluation in evaluations:
            self._count(evaluation)
        return evaluations

    async def reflect(self, questions: Sequence[Question], at_once: int = 1) -> list[Reflection]:
        """What the reflection models answer. Each answer is kept as it arrives.

        Args:
            at_once: questions that are under way together, at most.

        Raises:
            EngineError: a model does not answer.
            CheckpointError: the journal is of another search.
        """
        keys = [_key({"asked": each.asked}, [], each.place) for each in questions]
        found: list[Reflection | None] = [None] * len(keys)
        if self._journal is not None:
            found = self._journal.replayed(keys, Reflection)
        slots = asyncio.Semaphore(at_once)

        async def ask(place: int) -> None:
            async with slots:
                found[place] = await self._ask(questions[place], keys[place])

        try:
            async with asyncio.TaskGroup() as group:
                for place, reflection in enumerate(found):
                    if reflection is None:
                        group.create_task(ask(place))
        except BaseExceptionGroup as failed:  # of which the first is as good as any
            raise failed.exceptions[0] from None
        reflections = [reflection for reflection in found if reflection is not None]
        self.reflections += len(reflections)
        self.tokens += sum(each.input_tokens + each.output_tokens for each in reflections)
        return reflections

    async def _ask(self, question: Question, key: str) -> Reflection:
        answer = await question.reflector.ask(question.asked)
        reflection = Reflection(
            key=key,
            prompt=question.prompt,
            asked=question.asked,
            answer=answer.text,
            finish_reason=answer.finish_reason,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
        )
        if self._journal is not None:
            self._journal.add(reflection)
        return reflection

    async def _rolled_out(self, trials: Sequence[Trial]) -> list[list[Seen]]:
        """What the rollouts of each trial showed."""
        tasks = [task for trial in trials for task in trial.tasks]
        if not tasks:
            return [[] for _ in trials]
        resources = [self.templates(trial.templates) for trial in trials for _ in trial.tasks]
        mode = self._modes[trials[0].split]
        episodes = await self._runs.rollouts(tasks, 1, mode, resources=resources)
        seen = iter([seen_of(e, task) for e, task in zip(episodes, tasks, strict=True)])
        return [[next(seen) for _ in trial.tasks] for trial in trials]

    def _count(self, evaluation: Evaluation) -> None:
        rewards = [seen.reward for seen in evaluation.seen]
        scored = [reward for reward in rewards if reward is not None]
        if not scored and not self.rollouts:
            raise RewardError(
                "no rollout of the prompts as they are has a reward, so there is nothing to "
                f"compare: the first one says {evaluation.seen[0].text[-300:]!r}"
            )
        self._rewards += scored
        self.rollouts += len(rewards)
        self.unscored += len(rewards) - len(scored)
        self.failed += sum(seen.failed for seen in evaluation.seen)
        self.tokens += sum(seen.tokens for seen in evaluation.seen)

    # --- what came of it --------------------------------------------------------------------
    def reward(self, seen: Seen) -> float:
        """What a rollout counts for where candidates are compared."""
        return self._failure_reward if seen.reward is None else seen.reward

    def mean_of(self, seen: Sequence[Seen]) -> float:
        """The mean by which a candidate is compared: of every rollout, none left out."""
        return math.fsum(map(self.reward, seen)) / len(seen)

    @property
    def mean(self) -> float | None:
        """Of the rewards of all rollouts; None while there is none."""
        return math.fsum(self._rewards) / len(self._rewards) if self._rewards else None

    def found(self, candidates: Sequence[Candidate], chosen: int, ended: str) -> Found:
        """What the search found with these trials."""
        return Found(
            candidates=list(candidates),
            chosen=chosen,
            ended=ended,
            rollouts=self.rollouts,
            unscored=self.unscored,
            failed=self.failed,
            mean=self.mean,
            reflections=self.reflections,
            unusable=self.unusable,
            tokens=self.tokens,
        )

    def templates(self, texts: Mapping[str, str]) -> dict[str, PromptTemplate]:
        """Texts, as the app gets them."""
        return {
            name: PromptTemplate(texts[name], engine=given.engine)
            for name, given in self._prompts.items()
        }


def evaluation_key(trial: Trial) -> str:
    """What a trial is called in the journal."""
    return _key(trial.templates, [task_id(task) for task in trial.tasks], trial.place)


def _key(texts: Mapping[str, str], ids: Sequence[str], place: str) -> str:
    said = json.dumps([dict(texts), list(ids), *([place] if place else [])], ensure_ascii=True)
    return hashlib.sha256(said.encode()).hexdigest()[:24]

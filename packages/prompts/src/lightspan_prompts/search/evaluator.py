"""Trials: what a search asks for, done or read from its journal, and what it cost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from lightspan.errors import ConfigError, RewardError
from lightspan.lightning.episode import Episode
from lightspan.schema.pricing import Price
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json, Mode, task_id
from lightspan.schema.resources import INSTRUCTIONS, Resources
from lightspan_prompts.endpoint_client import EndpointClient
from lightspan_prompts.search.candidates import ANY_CALL, Candidate, Found
from lightspan_prompts.search.feedback import Evidence, evidence_of
from lightspan_prompts.search.prompt_discovery import Surveyed, Text, survey
from lightspan_prompts.search.search_log import Evaluation, Reflection, SearchLog, Survey
from lightspan_prompts.search.selected_prompts import SelectedPrompts

Prompts = Mapping[str, PromptTemplate]


class Runs(Protocol):
    """Who runs the app: a `World`, as far as a search needs one."""

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Sequence[Resources] | None = None,
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
    reflector: EndpointClient
    place: str = ""
    """Tells it from an equal one that is asked at the same time."""


class SpentError(Exception):
    """A budget of tokens or money is used up, so that nothing more is asked; says which."""


class Evaluator:
    """Evaluations and reflections of a search, from its beginning or from what its journal has.

    Before rollouts are asked for, and before each question, the budgets are looked at: what exceeds
    them is what was under way when they were used up.

    Args:
        runs: runs the app.
        prompts: as they were given.
        journal: open; None keeps nothing.
        failure_reward: what a rollout without a reward counts for where candidates are compared,
            because that takes a number.
        selection_mode: of rollouts of the selection split.
        max_tokens: see `GEPA`.
        max_cost: see `GEPA`.
        prices: model → what its tokens cost; for `max_cost`.
        begun: what an earlier search of the same run has chosen, where there was one.
    """

    def __init__(
        self,
        runs: Runs,
        prompts: Prompts,
        journal: SearchLog | None,
        failure_reward: float,
        selection_mode: Mode = Mode.TRAIN,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        prices: Mapping[str, Price] | None = None,
        begun: SelectedPrompts | None = None,
    ) -> None:
        self._runs = runs
        self._prompts = prompts
        self._begun = begun
        self._surveyed = None if begun is None else begun.surveyed
        self._first: Survey | None = None
        """What the first trial gets, once."""
        self._asked_before = {} if begun is None else dict(begun.asked)
        """Task → who was asked in its first rollout of the run: a cache that is still there in a
        second search answers all of that one."""
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
        self._max_tokens = max_tokens
        self._max_cost = max_cost
        self._prices = None if max_cost is None else prices
        self._used: dict[str, tuple[int, int]] = {}
        """Model → its tokens, sent and answered."""
        self._applied = 0
        self._kept: Counter[str] = Counter()
        self._unasked: Counter[str] = Counter()

    @property
    def is_replaying(self) -> bool:
        """Whether what is asked next was answered in an earlier life."""
        return self._journal is not None and self._journal.is_replaying

    async def begin(
        self, tasks: Sequence[Json], patterns: Sequence[str], note: Callable[[str], None]
    ) -> dict[str, PromptTemplate]:
        """The texts to begin with: the prompts that were given, and what is found in the app, if it
        was not looked at before.

        Args:
            tasks: of the selection split.
            patterns: of agents, and of prompts that the app asks for.
            note: told what was found.

        Raises:
            ConfigError: what is found has the name of a prompt that was given.
            And what `survey` raises.
        """
        given = dict(self._prompts)
        if self._begun is not None and self._begun.templates is not None:
            now = self._begun.templates
            names = [*given, *([] if self._surveyed is None else self._surveyed.components)]
            return {name: self.template(name, now[name]) for name in names}
        if not patterns:
            return given
        found = await self.survey(tasks, patterns, note)
        taken = sorted(given.keys() & found.components.keys())
        if taken:
            raise ConfigError(
                f"optimize={list(patterns)} finds {taken} in the app, and prompts= names {taken} "
                "too: give the prompt that the app takes as an argument another name"
            )
        texts = {name: PromptTemplate(each.template) for name, each in found.components.items()}
        return {**given, **texts}

    async def survey(
        self, tasks: Sequence[Json], patterns: Sequence[str], note: Callable[[str], None]
    ) -> Surveyed:
        """Find the texts that are to be learned in the calls of the app as it is. Those are the
        rollouts of the first trial, which has to be of these tasks, and no others.

        Args:
            tasks: of the selection split.
            patterns: of agents and prompts.
            note: told what was found.

        Raises:
            ConfigError: a text cannot be learned.
            UnknownAgentError: a pattern matches nothing.
            CheckpointError: the journal is of another search.
            And the errors of rollouts.
        """
        key = _key({"survey": json.dumps(list(patterns))}, [task_id(task) for task in tasks], "")
        [entry] = [None] if self._journal is None else self._journal.replayed([key], Survey)
        if entry is None:
            episodes = await self._runs.rollouts(tasks, 1, self._modes["selection"])
            self._surveyed = await asyncio.to_thread(survey, episodes, patterns)
            seen = self._seen(episodes, tasks)
            _check_scored(seen)
            entry = Survey(key=key, found=self._surveyed, seen=seen)
            if self._journal is not None:
                self._journal.add(entry)
            for line in entry.found.lines():
                note(line)
        self._first, self._surveyed = entry, entry.found
        return entry.found

    def may_ask(self, asked: Sequence[Trial]) -> bool:
        """Whether the journal has one of these next, or nothing any more."""
        keys = [evaluation_key(trial) for trial in asked]
        return self._journal is None or self._journal.goes_on_with(keys)

    async def evaluate(self, asked: Sequence[Trial]) -> list[Evaluation]:
        """What came of these trials, of one split. What the journal does not have is run side by
        side.

        Raises:
            SpentError: a budget is used up, and some of them were not run.
            RewardError: the first trial of a search has not one reward.
            ConfigError: the app asked a model whose price is not given, and prices are.
            CheckpointError: the journal is of another search.
            And the errors of rollouts.
        """
        keys = [evaluation_key(trial) for trial in asked]
        found: list[Evaluation | None] = [None] * len(keys)
        if self._journal is not None:
            found = self._journal.replayed(keys, Evaluation)
        missing = [place for place, evaluation in enumerate(found) if evaluation is None]
        first, self._first = self._first, None
        begun = [] if first is None or 0 not in missing else [first.seen]
        assert not begun or [task_id(task) for task in asked[0].tasks] == [
            seen.task_id for seen in begun[0]
        ]
        rest = [asked[place] for place in missing[len(begun) :]]
        if rest:
            self._check_spent()
        fresh = [*begun, *await self._rolled_out(rest)]
        if fresh and not self.rollouts:
            _check_scored(fresh[0])
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
        """What the reflection models answer. Each answer is kept, and counted, as it arrives.

        Args:
            at_once: questions that are under way together, at most.

        Raises:
            SpentError: a budget is used up, and some questions were not asked.
            EngineError: a model does not answer.
            ConfigError: its price is not given, and prices are.
            CheckpointError: the journal is of another search.
        """
        keys = [_key({"asked": each.asked}, [], each.place) for each in questions]
        found: list[Reflection | None] = [None] * len(keys)
        if self._journal is not None:
            found = self._journal.replayed(keys, Reflection)
        for known, question in zip(found, questions, strict=True):
            if known is not None:
                self._count_answer(known, question)
        slots = asyncio.Semaphore(at_once)

        async def ask(place: int) -> None:
            async with slots:
                if not self.spent():  # what is under way is waited for: it is paid
                    found[place] = answer = await self._ask(questions[place], keys[place])
                    self._count_answer(answer, questions[place])

        try:
            async with asyncio.TaskGroup() as group:
                for place, reflection in enumerate(found):
                    if reflection is None:
                        group.create_task(ask(place))
        except BaseExceptionGroup as failed:  # of which the first is as good as any
            raise failed.exceptions[0] from None
        reflections = [reflection for reflection in found if reflection is not None]
        if len(reflections) < len(questions):
            self._check_spent()
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
            model=question.reflector.model,
        )
        if self._journal is not None:
            self._journal.add(reflection)
        return reflection

    async def _rolled_out(self, trials: Sequence[Trial]) -> list[list[Evidence]]:
        """What the rollouts of each trial showed."""
        tasks = [task for trial in trials for task in trial.tasks]
        if not tasks:
            return [[] for _ in trials]
        resources = [self._resources(trial.templates) for trial in trials for _ in trial.tasks]
        mode = self._modes[trials[0].split]
        episodes = await self._runs.rollouts(tasks, 1, mode, resources=resources)
        seen = iter(self._seen(episodes, tasks))
        return [[next(seen) for _ in trial.tasks] for trial in trials]

    def _seen(self, episodes: Sequence[Episode], tasks: Sequence[Json]) -> list[Evidence]:
        return [
            evidence_of(episode, task, self._concerns)
            for episode, task in zip(episodes, tasks, strict=True)
        ]

    def _concerns(self, text: Text) -> bool:
        return self._surveyed is not None and self._surveyed.concerns(text)

    def _count(self, evaluation: Evaluation) -> None:
        rewards = [seen.reward for seen in evaluation.seen]
        scored = [reward for reward in rewards if reward is not None]
        self._rewards += scored
        self.rollouts += len(rewards)
        self.unscored += len(rewards) - len(scored)
        self.failed += sum(seen.failed for seen in evaluation.seen)
        self.tokens += sum(seen.tokens for seen in evaluation.seen)
        for seen in evaluation.seen:
            if self._prices is not None and seen.usage is None and seen.tokens:
                raise ConfigError(
                    "max_cost= cannot be kept: this run was begun by a version whose journal does "
                    "not say which models the app asked; go on without it, or start anew"
                )
            self._use(seen.usage or {})
            self._applied += seen.applied
            self._kept.update(seen.kept)
            asked = seen.asked
            if self._surveyed is None:  # nobody knows which calls have a part of an argument
                asked = [ANY_CALL] if seen.calls else []
            before = self._asked_before.setdefault(seen.task_id, asked)
            self._unasked.update(() if seen.failed else set(before) - set(asked))

    def _count_answer(self, answer: Reflection, question: Question) -> None:
        self.reflections += 1
        self.tokens += answer.input_tokens + answer.output_tokens
        model = answer.model or question.reflector.model  # older journals do not say
        self._use({model: (answer.input_tokens, answer.output_tokens)})

    def _use(self, usage: Mapping[str, tuple[int, int]]) -> None:
        """Count tokens of models. A journal keeps what was asked before, so that nothing is asked
        again when a price was forgotten."""
        for model, (asked, answered) in usage.items():
            if self._prices is not None and model not in self._prices and asked + answered:
                if not model:
                    raise ConfigError(
                        "max_cost= cannot be kept: a call of the app's has tokens and names no "
                        "model; go on without it (resume=True)"
                    )
                raise ConfigError(
                    f"max_cost= needs the price of every model that is asked, and {model!r} was: "
                    f"give prices={{{model!r}: Price(input=…, output=…), …}}, of a million tokens, "
                    "and go on with resume=True"
                )
            before = self._used.get(model, (0, 0))
            self._used[model] = (before[0] + asked, before[1] + answered)

    @property
    def cost(self) -> float | None:
        """Of all tokens so far, by the prices; None without prices."""
        if self._prices is None:
            return None
        return math.fsum(self._prices[model].of(*used) for model, used in self._used.items())

    def spent(self) -> str:
        """Which budget of what is asked is used up, and how far; empty if none is, or while there
        are answers of an earlier life: those are paid."""
        if self.is_replaying:
            return ""
        if self._max_tokens is not None and self.tokens >= self._max_tokens:
            return f"max_tokens={self._max_tokens} is used up: {self.tokens} tokens"
        if self._max_cost is not None and self.cost is not None and self.cost >= self._max_cost:
            return f"max_cost={self._max_cost:g} is used up: {self.cost:.4g}"
        return ""

    def _check_spent(self) -> None:
        if why := self.spent():
            raise SpentError(why)

    # --- what came of it --------------------------------------------------------------------
    def reward(self, seen: Evidence) -> float:
        """What a rollout counts for where candidates are compared."""
        return self._failure_reward if seen.reward is None else seen.reward

    def mean_of(self, seen: Sequence[Evidence]) -> float:
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
            cost=self.cost,
            surveyed=self._surveyed,
            applied=self._applied,
            kept=dict(self._kept),
            unasked=dict(self._unasked),
            asked=self._asked_before,
        )

    def _resources(self, texts: Mapping[str, str]) -> Resources:
        """What the app is handed of a candidate."""
        if self._surveyed is None:
            return self.templates(texts)
        return {**self.templates(texts), INSTRUCTIONS: self._surveyed.told(texts)}

    def templates(self, texts: Mapping[str, str]) -> dict[str, PromptTemplate]:
        """Texts, as the app gets them that are its arguments."""
        return {name: self.template(name, texts[name]) for name in self._prompts}

    def template(self, name: str, text: str) -> PromptTemplate:
        """Another text of a prompt, as that has it."""
        given = self._prompts.get(name)
        return PromptTemplate(text) if given is None else PromptTemplate(text, engine=given.engine)


def _check_scored(seen: Sequence[Evidence]) -> None:
    """Raise `RewardError` if the app as it is got no reward: before that is kept, so that a run
    whose app is mended goes on."""
    if all(each.reward is None for each in seen):
        raise RewardError(
            "no rollout of the prompts as they are has a reward, so there is nothing to "
            f"compare: the first one says {seen[0].text[-300:]!r}"
        )


def evaluation_key(trial: Trial) -> str:
    """What a trial is called in the journal."""
    return _key(trial.templates, [task_id(task) for task in trial.tasks], trial.place)


def _key(texts: Mapping[str, str], ids: Sequence[str], place: str) -> str:
    said = json.dumps([dict(texts), list(ids), *([place] if place else [])], ensure_ascii=True)
    return hashlib.sha256(said.encode()).hexdigest()[:24]

"""Run the evaluations and reflections of a search, or read them from its log; add up their cost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from lightspan.algorithms.protocol import Metrics
from lightspan.errors import ConfigError, EngineError, RewardError
from lightspan.lightning.episode import Episode, score_failure
from lightspan.progress import plural
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json, Mode, task_id
from lightspan.schema.resources import Resources
from lightspan.schema.system_prompts import OTHER_TEXTS
from lightspan.training.jsonl_log import append, read_bytes
from lightspan_prompts.endpoint_client import Answer, EndpointClient, is_refusal
from lightspan_prompts.pricing import Price
from lightspan_prompts.search.candidates import (
    ANY_CALL,
    PROPOSALS,
    Candidate,
    Proposal,
    SearchResult,
    rounded,
)
from lightspan_prompts.search.feedback import (
    Evidence,
    estimated_tokens,
    evidence_of,
    interrupted_evidence,
)
from lightspan_prompts.search.prompt_discovery import Surveyed, Text, survey
from lightspan_prompts.search.reflection import Repeated, Unusable
from lightspan_prompts.search.search_log import (
    INTERRUPTED,
    REFUSED,
    E,
    Entry,
    Evaluation,
    Reflection,
    SearchLog,
    Survey,
)
from lightspan_prompts.search.selected_prompts import SelectedPrompts

Prompts = Mapping[str, PromptTemplate]
FailureReward = float | Literal["lowest"]
"""Reward of a rollout whose app failed or gave none: a number, or the lowest reward of the search's
other rollouts so far, and at most 0."""
MAX_UNANSWERED: Final = 3
"""Number of questions in a row without a text after which the search stops."""
MAX_UNUSABLE: Final = 8
"""Number of answers in a row without a usable text after which the search stops."""
MAX_KNOWN: Final = 20
"""Number of answers in a row without a new text after which the search ends. It is larger, because
the model sees other rollouts with each question and may still have an idea."""


class Runs(Protocol):
    """The part of `TrainerContext` that a search needs, which runs the app."""

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Sequence[Resources] | None = None,
    ) -> list[Episode]:
        """Run each task `group_size` times and return the episodes; see `TrainerContext`."""
        ...


class Trial(NamedTuple):
    """Prompts to run on some tasks, as one evaluation."""

    split: str
    """`feedback` or `selection`."""
    templates: Mapping[str, str]
    """Prompt → template."""
    tasks: Sequence[Json]
    place: str = ""
    """Text that distinguishes trials with equal prompts and tasks; empty if there are none."""
    is_final: bool = False
    """Whether only the end of the search follows."""


class Question(NamedTuple):
    """A request to a reflection model."""

    prompt: str
    """Name of the prompt to rewrite."""
    asked: str
    reflector: EndpointClient
    place: str = ""
    """Text that distinguishes equal questions; empty if there are none."""


class SpentError(Exception):
    """A budget of rollouts, tokens or money is used up, so no more requests are sent.

    The message names the budget.
    """


class Evaluator:
    """Run the evaluations and reflections of a search, or replay them from its log.

    Budgets are checked before each batch of rollouts and each request. What is already running when
    a budget is used up may exceed it.

    Args:
        runs: runs the app.
        prompts: the initial prompts.
        journal: an open log; None for no log.
        failure_reward: reward in comparisons of a rollout without a reward of its own.
        selection_mode: mode in which tasks are run to compare candidates.
        max_rollouts: maximum number of rollouts; None for no maximum.
        max_tokens: maximum tokens of calls and reflections (see `GEPA`); None for no maximum.
        max_cost: maximum cost of these tokens (see `GEPA`); None for no maximum.
        prices: model → price of its tokens, for `max_cost`.
        begun: prompts selected by an earlier search of the run; None for the first search.
        perfect_reward: reward at which a task counts as solved; None if there is no such reward.
        interrupted: returns the episodes of earlier processes (`TrainerContext.interrupted`); None
            if there are no such processes.
        has_discovered: whether this process discovered the texts that the log has.
        note: called with messages for the user.
        record: called with the numbers of each proposal.
    """

    def __init__(
        self,
        runs: Runs,
        prompts: Prompts,
        journal: SearchLog | None,
        failure_reward: FailureReward,
        selection_mode: Mode = Mode.TRAIN,
        max_rollouts: int | None = None,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        prices: Mapping[str, Price] | None = None,
        begun: SelectedPrompts | None = None,
        perfect_reward: float | None = None,
        interrupted: Callable[[Container[str]], Awaitable[list[Episode]]] | None = None,
        has_discovered: bool = False,
        note: Callable[[str], None] = lambda text: None,
        record: Callable[[Metrics], None] = lambda metrics: None,
    ) -> None:
        self._record = record
        self._find_interrupted = interrupted
        self._runs = runs
        self._prompts = prompts
        self._begun = begun
        self._surveyed = None if begun is None else begun.surveyed
        self._has_discovered = has_discovered
        self._first: Survey | None = None
        """Survey whose rollouts also count as the first trial's; None after that trial."""
        self._initial: Mapping[str, str] = {}
        """Prompt → template with which the search begins; empty before `begin`."""
        self._unchecked = set() if self._surveyed is None else set(self._surveyed.components)
        """Discovered texts that an earlier process or search read, and none that this process ran
        has sent."""
        self._asked_before = {} if begun is None else dict(begun.asked)
        """Task → agents called in its first rollout of the run that was neither lost nor failed. It
        may be in an earlier search, because a cache of the app may outlast a search."""
        self._journal = journal
        self._finals: dict[str, Evaluation] = {}
        """Key → final evaluation that `skip_finals` has read and counted."""
        self._failure_reward = failure_reward
        self._modes = {"feedback": Mode.TRAIN, "selection": selection_mode}
        self._perfect_reward = perfect_reward
        self._note = note
        self._unanswered = 0
        """Number of questions in a row that this process asked and that got no text."""
        self._unusable = 0
        """Number of answers in a row that this process asked for and that had no usable text."""
        self._known = 0
        """Number of answers in a row that had no new text, those of the log included."""
        self._rewards: list[float] = []
        self._lowest = 0.0
        """Lowest of `_rewards`, at most 0."""
        self._is_below = False
        """Whether a reward below a numeric failure reward was noted."""
        self._failures = 0
        """Number of rollouts whose app failed without giving a reward."""
        self.rollouts = 0
        self._interrupted = 0
        """Number of `rollouts` that an earlier process began, and whose results it did not get."""
        self._max_rollouts = max_rollouts
        self._overrun = ""
        """Why `max_rollouts` allowed no further evaluation; empty if it did."""
        self.unscored = 0
        self.failed = 0
        self.reflections = 0
        self.unusable = 0
        """Number of unusable answers (`check_usable`); refused questions have none."""
        self.tokens = 0
        """Tokens of the app's calls and of reflections, as far as endpoints count them."""
        self._max_tokens = max_tokens
        self.estimated = 0
        """Number of calls and reflections whose endpoints count no tokens."""
        self._unanswered_calls = 0
        self._repeated = 0
        self._max_cost = max_cost
        self._prices = prices or None
        self._used: dict[str, tuple[int, int]] = {}
        """Model → (tokens sent, tokens received)."""
        self._proposals: list[Proposal] = []
        self._earlier_proposals = 0
        """Number of proposals that an earlier process recorded."""
        self._calls = 0
        self._applied = 0
        self._is_checked = False
        """Whether the first evaluation was checked for model calls."""
        self._kept: Counter[str] = Counter()
        self._unasked: Counter[str] = Counter()

    @property
    def is_replaying(self) -> bool:
        """Return whether the log has more results, which answer the next requests."""
        return self._journal is not None and self._journal.is_replaying

    async def begin(
        self, tasks: Sequence[Json], patterns: Sequence[str], note: Callable[[str], None]
    ) -> dict[str, PromptTemplate]:
        """Return the texts from which the search starts: name → template.

        They are the texts that an earlier search of the run selected. Without an earlier search,
        they are the initial prompts, and the texts of the app that `survey` discovers.

        Args:
            tasks: tasks on which candidates are compared.
            patterns: patterns of agents, and of prompts that the app requests by name.
            note: called with a line per discovered text.

        Raises:
            ConfigError: a discovered text has the same name as one of the initial prompts.
            And the errors of `survey`.
        """
        await self._log_interrupted()
        prompts = await self._initial_prompts(tasks, patterns, note)
        self._initial = {name: prompt.template for name, prompt in prompts.items()}
        return prompts

    async def _log_interrupted(self) -> None:
        """Log and count rollouts of an earlier process that are in the store but not in the log.

        Their entry stays where the log was interrupted, so each resume counts them once, and at the
        same point of the search.
        """
        if self._journal is None or self._find_interrupted is None:
            return
        episodes = await self._find_interrupted(self._journal.rollout_ids)
        if episodes:
            self._journal.add_interrupted([interrupted_evidence(each) for each in episodes])
            count = plural(len(episodes), "interrupted rollout")
            self._note(f"{count}, their tokens and cost are counted")
        self._count_interrupted()

    def _count_interrupted(self) -> None:
        for entry in [] if self._journal is None else self._journal.take_interrupted():
            self._count(entry)

    async def _initial_prompts(
        self, tasks: Sequence[Json], patterns: Sequence[str], note: Callable[[str], None]
    ) -> dict[str, PromptTemplate]:
        prompts = dict(self._prompts)
        if self._begun is not None and self._begun.templates is not None:
            names = [*prompts, *([] if self._surveyed is None else self._surveyed.components)]
            return {name: self.template(name, self._begun.templates[name]) for name in names}
        if not patterns:
            return prompts
        components = (await self.survey(tasks, patterns, note)).components
        taken = sorted(prompts.keys() & components.keys())
        if taken:
            raise ConfigError(
                f"optimize={list(patterns)} finds {taken} in the app, and prompts= has {taken} "
                "too: rename the prompt that the app takes as an argument"
            )
        return {**prompts, **{name: PromptTemplate(c.template) for name, c in components.items()}}

    async def survey(
        self, tasks: Sequence[Json], patterns: Sequence[str], note: Callable[[str], None]
    ) -> Surveyed:
        """Run the unchanged app, and discover the texts to learn in its calls.

        The first trial reuses these rollouts, so it must have exactly these tasks.

        Args:
            tasks: tasks on which candidates are compared.
            patterns: patterns of agents and prompts.
            note: called with a line per discovered text.

        Raises:
            ConfigError: a text cannot be learned.
            UnknownAgentError: a pattern matches no agent and no prompt.
            CheckpointError: the log belongs to another search.
            And the errors of rollouts.
        """
        key = _key({"survey": json.dumps(list(patterns))}, [task_id(task) for task in tasks], "")
        [entry] = self._replayed([key], Survey)
        if entry is None:
            self._check_spent(len(tasks))
            episodes = await self._runs.rollouts(tasks, 1, self._modes["selection"])
            self._surveyed = await asyncio.to_thread(survey, episodes, patterns)
            evidence = self._seen(episodes, tasks)
            _check_scored(evidence)
            entry = Survey(key=key, found=self._surveyed, seen=evidence)
            self._log(entry)
            for line in entry.found.lines():
                note(line)
        elif not self._has_discovered:
            self._unchecked = set(entry.found.components)
        self._first, self._surveyed = entry, entry.found
        return entry.found

    def may_evaluate(self, trials: Sequence[Trial]) -> bool:
        """Return whether `evaluate` accepts `trials` now.

        While results are read from the log, only the trial that is logged next is accepted. After
        that, any trials are.
        """
        keys = [evaluation_key(trial) for trial in trials]
        keys = [key for key in keys if key not in self._finals]
        return self._journal is None or not keys or self._journal.may_continue_with(keys)

    def has_final(self, trial: Trial) -> bool:
        """Return whether `skip_finals` has read the results of `trial`, which needs no rollout."""
        return evaluation_key(trial) in self._finals

    def skip_finals(self) -> bool:
        """Count and keep the final evaluations that come next in the log.

        They were made when this budget or a smaller one ended the search. `evaluate` reuses those
        that are requested at the end. Return whether there were any.
        """
        finals = [] if self._journal is None else self._journal.take_finals()
        for final in finals:
            self._finals[final.key] = final
            self._count(final)
        self._count_interrupted()
        return bool(finals)

    async def evaluate(self, trials: Sequence[Trial]) -> list[Evaluation]:
        """Evaluate trials, which are prompts to run on some tasks.

        All of them use the same part of the training tasks. Trials that are not in the log are run
        concurrently.

        Raises:
            SpentError: a budget is used up, and some trials were not run.
            RewardError: no rollout of the first trial has a reward.
            ConfigError: a model that the app called is missing in `prices`, or a text of the app
                has changed since it was discovered.
            CheckpointError: the log belongs to another search.
            And the errors of rollouts.
        """
        keys = [evaluation_key(trial) for trial in trials]
        evaluated = [self._finals.get(key) for key in keys]
        places = [place for place, evaluation in enumerate(evaluated) if evaluation is None]
        logged = self._replayed([keys[place] for place in places], Evaluation)
        for place, evaluation in zip(places, logged, strict=True):
            evaluated[place] = evaluation
        missing = [place for place, evaluation in enumerate(evaluated) if evaluation is None]
        first, self._first = self._first, None
        surveyed = [] if first is None or 0 not in missing else [first.seen]
        assert not surveyed or [task_id(task) for task in trials[0].tasks] == [
            evidence.task_id for evidence in surveyed[0]
        ]
        rest = [trials[place] for place in missing[len(surveyed) :]]
        if rest:
            self._check_spent(sum(len(trial.tasks) for trial in rest))
        fresh = [*surveyed, *await self._rolled_out(rest)]
        if fresh and not self._has_begun:
            _check_scored(fresh[0])
        self._check_sent([one for evidence in fresh[len(surveyed) :] for one in evidence])
        for place, evidence in zip(missing, fresh, strict=True):
            trial = trials[place]
            evaluation = Evaluation(
                key=keys[place],
                split=trial.split,
                candidate=dict(trial.templates),
                seen=evidence,
                is_final=trial.is_final,
            )
            self._log(evaluation)
            evaluated[place] = evaluation
        evaluations = [evaluation for evaluation in evaluated if evaluation is not None]
        for evaluation in evaluations:
            if evaluation.key not in self._finals:
                self._count(evaluation)
        return evaluations

    async def reflect(self, questions: Sequence[Question], at_once: int = 1) -> list[Reflection]:
        """Send questions to the reflection models; log and count each answer on arrival.

        Args:
            questions: the requests; a request that is in the log is not sent.
            at_once: maximum concurrent requests.

        Raises:
            SpentError: a budget is used up, and some questions were not sent.
            EngineError: a model fails.
            ConfigError: the model is missing in `prices`.
            CheckpointError: the log belongs to another search.
        """
        keys = [_key({"asked": one.asked}, [], one.place) for one in questions]
        answers = self._replayed(keys, Reflection)
        for answer, question in zip(answers, questions, strict=True):
            if answer is not None:
                self._count_answer(answer, question.reflector.model)
        slots = asyncio.Semaphore(at_once)

        async def ask(place: int) -> None:
            async with slots:
                if not self.spent():  # requests in flight are paid for and awaited
                    answers[place] = answer = await self._ask(questions[place], keys[place])
                    self._count_answer(answer, questions[place].reflector.model)

        try:
            async with asyncio.TaskGroup() as group:
                for place, reflection in enumerate(answers):
                    if reflection is None:
                        group.create_task(ask(place))
        except BaseExceptionGroup as failed:  # raise the first of them
            raise failed.exceptions[0] from None
        reflections = [reflection for reflection in answers if reflection is not None]
        if len(reflections) < len(questions):
            self._check_spent()
        return reflections

    async def _ask(self, question: Question, key: str) -> Reflection:
        """Ask the reflection model a question and log its answer.

        If the model refuses the question because of its content, an empty answer is logged.

        Raises:
            EngineError: the model fails, or `MAX_UNANSWERED` questions in a row got no text. If the
                last of them was refused it is not logged, so a resumed run asks it again.
        """
        reflector = question.reflector
        try:
            answer = await reflector.ask(question.asked)
            problem = "" if answer.text.strip() else f"no text ({answer.finish_reason})"
        except EngineError as error:
            if not is_refusal(error):
                raise
            answer, problem = Answer("", REFUSED, 0, 0), str(error)
        self._unanswered = self._unanswered + 1 if problem else 0
        failure = EngineError(
            f"the model {reflector.model} answered {MAX_UNANSWERED} questions in a row without "
            f"a text, the last with: {problem}; give another model or other sampling, and "
            "continue with resume=True"
        )
        is_over = self._unanswered >= MAX_UNANSWERED
        if answer.finish_reason == REFUSED:
            if is_over:
                raise failure
            self._note(f"a question about {question.prompt!r} was refused: {problem}")
        tokens, is_counted = (answer.input_tokens, answer.output_tokens), True
        if not any(tokens) and answer.finish_reason != REFUSED:
            is_counted = False
            tokens = estimated_tokens(question.asked), estimated_tokens(answer.text)
        reflection = Reflection(
            key=key,
            prompt=question.prompt,
            asked=question.asked,
            answer=answer.text,
            finish_reason=answer.finish_reason,
            input_tokens=tokens[0],
            output_tokens=tokens[1],
            model=question.reflector.model,
            is_estimated=not is_counted,
        )
        self._log(reflection)
        if is_over:  # it is paid for, so a resumed run has to count it
            raise failure
        return reflection

    def check_usable(self, problem: Unusable | None) -> None:
        """Count an answer that is unusable because of `problem`; None for a usable one.

        Raises:
            EngineError: `MAX_UNUSABLE` answers in a row had no usable text. Texts that are known
                already do not count here (`why_stale`). Without a log, which could be resumed,
                never raised.
        """
        self.unusable += problem is not None
        if problem is None:
            self._unusable = self._known = 0
            return
        self._known += 1
        if self._journal is not None and not self.is_replaying:
            self._unusable = 0 if isinstance(problem, Repeated) else self._unusable + 1
            if self._unusable >= MAX_UNUSABLE:
                remedy = (
                    "give another model or other sampling, such as more tokens where answers are "
                    "cut off"
                )
                if "{" in str(problem):  # a placeholder of a part that is kept
                    remedy = (
                        "give a reflection model that keeps the braces, or name the text without "
                        "this part in the app, by lightspan.prompt(name, text)"
                    )
                raise EngineError(
                    f"{MAX_UNUSABLE} answers in a row of the reflection model had no usable text, "
                    f"the last: {problem}; {remedy}, and continue with resume=True"
                )

    def why_stale(self) -> str:
        """Say that `MAX_KNOWN` answers in a row had no new text; empty if one of them had.

        A search ends then with its candidates so far, instead of using up its budget. Without a
        log, always empty.
        """
        if self._known < MAX_KNOWN or self._journal is None or self.is_replaying:
            return ""
        return (
            f"{MAX_KNOWN} answers in a row of the reflection model had no new text; another model "
            "or a higher temperature may give one, in another folder"
        )

    def _replayed(self, keys: Sequence[str], kind: type[E]) -> list[E | None]:
        if self._journal is None:
            return [None] * len(keys)
        answers = self._journal.replayed(keys, kind)
        self._count_interrupted()
        return answers

    def _log(self, entry: Entry) -> None:
        if self._journal is not None:
            self._journal.add(entry)

    async def _rolled_out(self, trials: Sequence[Trial]) -> list[list[Evidence]]:
        """Run the trials; return the results of the rollouts of each trial."""
        tasks = [task for trial in trials for task in trial.tasks]
        if not tasks:
            return [[] for _ in trials]
        resources = [self._resources(trial.templates) for trial in trials for _ in trial.tasks]
        mode = self._modes[trials[0].split]
        episodes = await self._runs.rollouts(tasks, 1, mode, resources=resources)
        evidence = iter(self._seen(episodes, tasks))
        return [[next(evidence) for _ in trial.tasks] for trial in trials]

    def _seen(self, episodes: Sequence[Episode], tasks: Sequence[Json]) -> list[Evidence]:
        """Describe rollouts; those whose app failed get the failure reward of the search.

        The episodes may have another one, since the run's lowest reward may be of a held-out task.
        """
        own = [e.reward for e in episodes if e.reward is not None and e.reward_source != "failure"]
        setting = self._failure_reward
        value = min([self._lowest, *own]) if isinstance(setting, str) else setting
        return [
            evidence_of(_rescored(episode, value), task, self._concerns)
            for episode, task in zip(episodes, tasks, strict=True)
        ]

    def _sent_name(self, name: str) -> str:
        """Return the name of a prompt in `Evidence.sent`: its own, or its agent's path."""
        components = {} if self._surveyed is None else self._surveyed.components
        return components[name].agent or name if name in components else name

    def _check_sent(self, evidence: Sequence[Evidence]) -> None:
        """Raise `ConfigError` if the app requests a discovered text, and always with another one.

        Checked in the first rollouts of a process that continues a search, before they are logged.
        In the process that discovered the texts they cannot have changed.
        """
        sent = {name for one in evidence for name in one.sent or ()}
        kept = {reason for one in evidence for reason in one.kept}
        for name in sorted(self._unchecked):
            path = self._sent_name(name)
            why = [w for w in OTHER_TEXTS if f"{path}: {w}" in kept]
            if path in sent:
                self._unchecked.remove(name)
            elif why:
                assert self._surveyed is not None
                text = self._surveyed.components[name].template
                raise ConfigError(
                    f"the app's text of {name!r} has changed since this run read it, so no learned "
                    f"text can replace it ({why[0]}). It was {text!r:.500}: restore it and "
                    "continue with resume=True, or start anew in another folder"
                )

    def _concerns(self, text: Text) -> bool:
        return self._surveyed is not None and self._surveyed.concerns(text)

    @property
    def _has_begun(self) -> bool:
        """Whether the results of any rollout are counted."""
        return self.rollouts > self._interrupted

    def _count(self, evaluation: Evaluation) -> None:
        self._count_spending(evaluation)
        if evaluation.split == INTERRUPTED:
            self._interrupted += len(evaluation.seen)
            return
        scored = [one for one in evaluation.seen if _is_scored(one)]
        rewards = [one.reward for one in scored if one.reward is not None]
        self._rewards += rewards
        self._check_rewards(rewards)
        unscored = sum(one.reward is None for one in evaluation.seen)
        self._failures += len(evaluation.seen) - unscored - len(rewards)
        self.failed += sum(evidence.failed for evidence in evaluation.seen)
        for evidence in evaluation.seen:
            self._applied += evidence.applied
            self._kept.update(evidence.kept)
            if evidence.failed or _is_lost(evidence):
                continue  # it may have ended before a call
            agents = evidence.asked
            if self._surveyed is None:  # without a discovery, calls cannot be matched to arguments
                agents = [ANY_CALL] if evidence.calls else []
            before = self._asked_before.setdefault(evidence.task_id, agents)
            self._unasked.update(set(before) - set(agents))
        self._check_calls()

    def _count_spending(self, evaluation: Evaluation) -> None:
        """Add the rollouts of an evaluation and what they cost to the totals."""
        self.rollouts += len(evaluation.seen)
        self.unscored += sum(one.reward is None for one in evaluation.seen)
        self.tokens += sum(evidence.tokens for evidence in evaluation.seen)
        for evidence in evaluation.seen:
            if self._max_cost is not None and evidence.usage is None and evidence.tokens:
                raise ConfigError(
                    "max_cost= cannot be applied: this run's log is from a version that did not "
                    "record the app's models; continue without it, or start anew"
                )
            self._use(evidence.usage or {})
            self._calls += evidence.calls
            self.estimated += evidence.estimated
            self._unanswered_calls += evidence.unanswered
            self._repeated += evidence.repeated

    def _check_calls(self) -> None:
        """Print a note, after the first evaluation, if a budget does not count the app's calls."""
        limits = {"max_tokens": self._max_tokens, "max_cost": self._max_cost}
        names = [name for name, limit in limits.items() if limit is not None]
        if names and not (self._is_checked or self._calls or self.is_replaying):
            self._note(
                "no model call of the app was seen, so reflections alone count for "
                f"{' and '.join(names)}: lightspan sees the SDKs of OpenAI and Anthropic, and what "
                "has an adapter"
            )
        self._is_checked = True

    def _count_answer(self, answer: Reflection, asked_model: str = "") -> None:
        if answer.finish_reason == REFUSED:
            return
        self.reflections += 1
        self.tokens += answer.input_tokens + answer.output_tokens
        model = answer.model or asked_model  # older logs have no model
        self._use({model: (answer.input_tokens, answer.output_tokens)})
        self.estimated += answer.is_estimated

    def _use(self, usage: Mapping[str, tuple[int, int]]) -> None:
        """Add the tokens that each model used to the total.

        Raises:
            ConfigError: a model has no price, and `max_cost` is set. The tokens are already in the
                log, so the user can add the price and resume.
        """
        for model, (sent, received) in usage.items():
            is_priced = self._prices is not None and model in self._prices
            if self._max_cost is not None and not is_priced and sent + received:
                if not model:
                    raise ConfigError(
                        "max_cost= cannot be applied: a call of the app has tokens but no model "
                        "name; continue without it (resume=True)"
                    )
                raise ConfigError(
                    f"max_cost= needs the price of every model, and {model!r} was called: add "
                    f"prices={{{model!r}: Price(input=…, output=…), …}} per million tokens, and "
                    "continue with resume=True"
                )
            before = self._used.get(model, (0, 0))
            self._used[model] = (before[0] + sent, before[1] + received)

    @property
    def cost(self) -> float | None:
        """Return the cost of all tokens so far; None without prices."""
        if self._prices is None:
            return None
        priced = [
            (self._prices[name], used) for name, used in self._used.items() if name in self._prices
        ]
        return math.fsum(price.of(*used) for price, used in priced)

    def spent(self) -> str:
        """Return a text that says which budget is used up; empty if none is.

        Also empty while answers are read from the log, because they are already paid for.
        """
        if self.is_replaying:
            return ""
        if self._overrun:
            return self._overrun
        if self._max_tokens is not None and self.tokens >= self._max_tokens:
            return f"max_tokens={self._max_tokens} is used up: {self.tokens} tokens"
        if self._max_cost is not None and self.cost is not None and self.cost >= self._max_cost:
            return f"max_cost={self._max_cost:g} is used up: {self.cost:.4g}"
        return ""

    def _check_spent(self, rollouts: int = 0) -> None:
        """Check the budgets before some requests.

        A search plans within `max_rollouts`, but interrupted rollouts come on top.

        Args:
            rollouts: number of rollouts that are requested.

        Raises:
            SpentError: a budget is used up.
            ConfigError: it is used up by interrupted rollouts, before any result.
        """
        most = math.inf if self._max_rollouts is None else self._max_rollouts
        if rollouts and self.rollouts + rollouts > most:
            self._overrun = (
                f"{self.rollouts} of max_rollouts={self._max_rollouts} rollouts are done, and the "
                f"next evaluation takes {rollouts}"
            )
        why = self.spent()
        if why and not self._has_begun:
            raise ConfigError(
                f"{why}: {plural(self._interrupted, 'interrupted rollout')} came before any "
                "result; give a larger budget with resume=True, or start anew in another folder"
            )
        if why:
            raise SpentError(why)

    # --- proposals --------------------------------------------------------------------------
    def add_proposal(self, proposal: Proposal, candidates: Sequence[Candidate]) -> None:
        """Record whether a proposed text was accepted, with the budgets used so far.

        It becomes a line of `proposals.jsonl`, and its numbers a line of `metrics.jsonl`.
        Also send the user a note about it. A proposal that is already in the file from before a
        resume gets no note.
        """
        means = [candidate.mean for candidate in candidates if candidate.is_whole]
        proposal = msgspec.structs.replace(
            proposal,
            rollouts=self.rollouts,
            reflections=self.reflections,
            tokens=self.tokens,
            cost=self.cost,
            best=max(means, default=None),
        )
        self._proposals.append(proposal)
        path = None if self._journal is None else self._journal.path.parent.parent / PROPOSALS
        if path is not None and len(self._proposals) == 1:
            self._earlier_proposals = len((read_bytes(path) or b"").splitlines())
            path.unlink(missing_ok=True)
        if len(self._proposals) > self._earlier_proposals:
            self._note(proposal.line())
        if path is not None:
            append(path, [proposal])
        lowest = {} if self._lowest_failure is None else {"failure_reward": self._lowest_failure}
        self._record({**proposal.metrics(), **lowest})

    # --- results ----------------------------------------------------------------------------
    @property
    def _failure_value(self) -> float:
        return self._lowest if isinstance(self._failure_reward, str) else self._failure_reward

    @property
    def _lowest_failure(self) -> float | None:
        """The current failure reward if it may change, else None."""
        return self._lowest if isinstance(self._failure_reward, str) else None

    def reward(self, evidence: Evidence) -> float:
        """Return the reward of a rollout in comparisons.

        It is the current failure reward if the rollout has no reward of its own.
        """
        own = evidence.reward
        return self._failure_value if own is None or evidence.is_failure else own

    def with_rewards(self, candidate: Candidate, runs: Sequence[Sequence[Evidence]]) -> Candidate:
        """Return the candidate with its rewards by the current failure reward.

        Args:
            candidate: the candidate.
            runs: its rollouts on the selection split, and those of a second run if there is one.
        """
        rewards = [
            {one.task_id: self.reward(one) if one.is_failure else one.reward for one in run}
            for run in (*runs, ())[:2]
        ]
        return msgspec.structs.replace(
            candidate,
            rewards=rewards[0],
            again=rewards[1],
            mean=math.fsum(map(self.mean_of, runs)) / len(runs),
            is_scored=any(_is_scored(one) for run in runs for one in run)
            and self._is_sent(candidate, [one for run in runs for one in run]),
        )

    def _is_sent(self, candidate: Candidate, evidence: Sequence[Evidence]) -> bool:
        """Return whether any rollout got a text in which the candidate differs from the first."""
        changed = {
            name for name, text in candidate.templates.items() if text != self._initial.get(name)
        }
        if not changed or changed & self._prompts.keys():  # the app gets those as arguments
            return True
        paths = {self._sent_name(name) for name in changed}
        return any(one.applied if one.sent is None else paths & {*one.sent} for one in evidence)

    def is_solved(self, evidence: Evidence) -> bool:
        """Return whether the task of a rollout counts as solved.

        Always False without a perfect reward, and after any rollout has had a reward above it.
        """
        perfect, reward = self._perfect_reward, evidence.reward
        if perfect is None or reward is None or not _is_scored(evidence):
            return False
        return rounded(reward) >= rounded(perfect)

    def why_perfect(self, evidence: Sequence[Evidence]) -> str:
        """Say that all tasks of the selection split are solved; empty if they are not."""
        if not all(map(self.is_solved, evidence)):
            return ""
        text = f"every task of the selection split has perfect_reward={self._perfect_reward:g}"
        if self.reflections:
            return text
        return (
            f"{text} with the initial prompts, so there is nothing to learn; if a higher reward is "
            "possible, give it as perfect_reward=, or perfect_reward=None"
        )

    def _check_rewards(self, rewards: Sequence[float]) -> None:
        """Note the first reward above the perfect one, and the first below the failure reward."""
        self._lowest = min([self._lowest, *rewards])
        number, lowest = self._failure_reward, min(rewards, default=math.inf)
        if not (isinstance(number, str) or self._is_below) and rounded(lowest) < rounded(number):
            self._is_below = True
            self._note(
                f"a reward of {lowest:g} is below failure_reward={number:g}, so a text with which "
                'the app fails may count as a gain: give failure_reward="lowest", or a number '
                "below every reward"
            )
        highest = max(rewards, default=-math.inf)
        perfect = self._perfect_reward
        if perfect is not None and rounded(highest) > rounded(perfect):
            self._note(
                f"a reward of {highest:g} is above perfect_reward={perfect:g}, so no "
                "task counts as solved: give the highest reward there is, or perfect_reward=None"
            )
            self._perfect_reward = None

    def mean_of(self, evidence: Sequence[Evidence]) -> float:
        """Return the mean reward of the rollouts, by which candidates are compared.

        A rollout without a reward of its own counts with the failure reward.
        """
        return math.fsum(map(self.reward, evidence)) / len(evidence)

    @property
    def mean(self) -> float | None:
        """Return the mean reward of all scored rollouts so far; None if no rollout is scored."""
        scored = [*self._rewards, *[self._failure_value] * self._failures]
        return math.fsum(scored) / len(scored) if scored else None

    def result(self, candidates: Sequence[Candidate], chosen: int, ended: str) -> SearchResult:
        """Return the result of the search, with the totals of rollouts, tokens and cost.

        Args:
            candidates: all candidates.
            chosen: number of the best candidate.
            ended: reason why the search ended.
        """
        self._count_unused()
        return SearchResult(
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
            proposals=self._proposals,
            calls=self._calls,
            usage=dict(self._used),
            estimated=self.estimated,
            unanswered=self._unanswered_calls,
            repeated=self._repeated,
            interrupted=self._interrupted,
            failure_reward=self._lowest_failure,
            unpriced=[
                name for name in self._used if self._prices is not None and name not in self._prices
            ],
            surveyed=self._surveyed,
            applied=self._applied,
            kept=dict(self._kept),
            unasked=dict(self._unasked),
            asked=self._asked_before,
        )

    def _count_unused(self) -> None:
        """Count what was paid under a larger budget than this one, and note it."""
        unused = [] if self._journal is None else self._journal.unused()
        before = self.rollouts, self.reflections
        for entry in unused:
            if isinstance(entry, Evaluation):
                self._count(entry)
            elif isinstance(entry, Reflection):
                self._count_answer(entry)
        if unused:
            self._note(
                f"{plural(self.rollouts - before[0], 'rollout')} and "
                f"{plural(self.reflections - before[1], 'reflection')} of an earlier, larger "
                "budget are counted in rollouts, tokens and cost, and their candidates are left "
                "out; a larger budget uses them again"
            )

    def _resources(self, texts: Mapping[str, str]) -> Resources:
        """Return the resources that the app gets for a candidate's texts."""
        selected = SelectedPrompts(self._prompts, surveyed=self._surveyed, templates=texts)
        return selected.resources()

    def template(self, name: str, text: str) -> PromptTemplate:
        """Return the prompt `name` with `text` as its template."""
        prompt = self._prompts.get(name)
        return PromptTemplate(text, engine=prompt.engine) if prompt else PromptTemplate(text)


def _rescored(episode: Episode, failure_reward: float) -> Episode:
    if episode.reward_source != "failure":
        return score_failure(episode, failure_reward)
    return replace(episode, reward=failure_reward, failure_reward=failure_reward)


def _is_scored(evidence: Evidence) -> bool:
    """Return whether a rollout has a reward of its own."""
    return evidence.reward is not None and not evidence.is_failure


def _is_lost(evidence: Evidence) -> bool:
    """Return whether a rollout has no reward for a reason outside the app and its scorer."""
    return evidence.reward is None and not evidence.is_failure and not evidence.unscored


def _check_scored(evidence: Sequence[Evidence]) -> None:
    """Raise `RewardError` if no rollout has a reward.

    This is checked before the rollouts are logged. So the user can correct the app and resume.
    """
    if all(one.reward is None for one in evidence):
        one = evidence[0]
        first = (
            f"is unscored: {one.unscored}" if one.unscored else f"ended with {one.text[-300:]!r}"
        )
        if one.is_failure and not one.failed:
            first = (
                "returned none (None, NaN or infinity) and emitted none: return a number, or call "
                "lightspan.emit_reward"
            )
        raise RewardError(
            "no rollout of the initial prompts has a reward, so there is nothing to compare; the "
            f"first one {first}"
        )


def evaluation_key(trial: Trial) -> str:
    """Return the key of a trial in the log."""
    return _key(trial.templates, [task_id(task) for task in trial.tasks], trial.place)


def _key(texts: Mapping[str, str], ids: Sequence[str], place: str) -> str:
    data = json.dumps([dict(texts), list(ids), *([place] if place else [])], ensure_ascii=True)
    return hashlib.sha256(data.encode()).hexdigest()[:24]

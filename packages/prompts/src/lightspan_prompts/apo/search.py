"""Beam search: in each round, create new candidates from the best ones, and keep the best."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from lightspan.algorithms.task_sampler import Epochs
from lightspan.errors import ConfigError
from lightspan.progress import plural
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json
from lightspan_prompts.apo.reflection_prompts import ANGLES, WAYS, critique, edit
from lightspan_prompts.endpoint_client import EndpointClient
from lightspan_prompts.search.candidates import (
    Candidate,
    Proposal,
    SearchResult,
    Split,
    TooFewRolloutsError,
    rounded,
)
from lightspan_prompts.search.evaluator import Evaluator, Question, SpentError, Trial
from lightspan_prompts.search.feedback import Evidence
from lightspan_prompts.search.reflection import Refused, Repeated, Unusable, proposed_template
from lightspan_prompts.search.search_log import REFUSED, Evaluation, Reflection
from lightspan_prompts.thoughts import without_thoughts

LIBRARY: Final = "lightspan.APO 1"
"""Name and version in the log's header.

Increase the version if a change makes the same answers lead to other requests.
"""
MAX_CONCURRENT_ROLLOUTS: Final = 64
"""Maximum rollouts requested together: enough to keep runners busy, few enough that a killed run
loses little."""


@dataclass(frozen=True, kw_only=True)
class BeamPlan:
    """Options of a search (see `APO`, which validates them)."""

    prompts: Mapping[str, PromptTemplate]
    optimize: Sequence[str] = ()
    beam_width: int
    branch_factor: int
    beam_rounds: int
    gradient_batch_size: int
    val_batch_size: int
    max_rollouts: int | None
    max_reflections: int | None
    reflections_at_once: int
    seed: int


class Models(NamedTuple):
    """The reflection models."""

    critic: EndpointClient
    """Client of the model that criticises a prompt."""
    editor: EndpointClient
    """Client of the model that rewrites a prompt according to the critique."""


class _Slot(NamedTuple):
    """One planned change of a prompt, which makes a new candidate from the candidate `parent`."""

    parent: int
    prompt: str
    """Name of the prompt to change."""
    tasks: list[Json]
    angle: str
    way: str
    place: str
    """Round and position of the slot; unique in the search."""


class Search:
    """A beam search for prompts, which can be resumed from its log.

    Args:
        plan: the options.
        trials: runs evaluations and reflections.
        split: the tasks for critiques, and those for comparisons.
        models: open clients of the models that criticise and rewrite prompts.
        note: called with progress messages.
        rollouts_at_once: maximum rollouts requested together; a trial with more is requested alone.
    """

    def __init__(
        self,
        plan: BeamPlan,
        trials: Evaluator,
        split: Split,
        models: Models,
        note: Callable[[str], None],
        rollouts_at_once: int = MAX_CONCURRENT_ROLLOUTS,
    ) -> None:
        self._plan = plan
        self._rollouts_at_once = rollouts_at_once
        self._trials = trials
        self._split = split
        self._models = models
        self._note = note
        self._feedback = _Batches(split.feedback, f"{plan.seed}/feedback")
        self._selection = _Batches(split.selection, f"{plan.seed}/selection batches")
        self._prompts = dict(plan.prompts)
        """Initial prompts, and prompts discovered in the app."""
        self._candidates: list[Candidate] = []
        self._runs: dict[int, list[Evidence]] = {}
        """Number of a candidate → its last rollouts on the selection split."""
        self._turns: list[int] = []
        """Per candidate, the index of the prompt that its next expansion changes. A candidate that
        changed one prompt continues with the next."""
        self._beam: list[int] = []
        self._open_prompts: dict[int, str] = {}
        """New candidate that was not compared yet → name of its changed prompt."""

    async def run(self) -> SearchResult:
        """Search until the rounds are done or a budget is used up.

        Raises:
            ConfigError: the budget of rollouts is too small for one candidate, or a text of the app
                cannot be learned.
            UnknownAgentError: a pattern matches nothing.
            RewardError: no rollout of the initial prompts has a reward.
            EngineError: a reflection model fails.
            And the errors of rollouts and of the log.
        """
        check_budget(self._plan, self._split)
        selection, patterns = self._split.selection, self._plan.optimize
        self._prompts = await self._trials.begin(selection, patterns, self._note)
        self._beam = [self._add(self._initial)]
        await self._compare_whole(0)
        try:
            ended = await self._rounds()
        except SpentError as why:
            ended = str(why)
            self._drop_open()
        # if a budget ended a round, its last candidates were not compared
        compared = [candidate for candidate in self._candidates if candidate.rewards]
        return self._trials.result(compared, self.chosen, ended)

    async def _rounds(self) -> str:
        """Run the rounds; return the reason for the end."""
        for number in range(1, self._plan.beam_rounds + 1):
            if ended := self._why_it_ends():
                return ended
            await self._round(number)
        rounds = self._plan.beam_rounds
        are = "is" if rounds == 1 else "are"
        return self._perfect() or f"{plural(rounds, 'round')} of the beam {are} done"

    @property
    def chosen(self) -> int:
        """Return the number of the candidate with the highest mean on the whole selection split."""
        whole = [number for number, candidate in enumerate(self._candidates) if candidate.is_whole]
        return max(whole, key=lambda n: self._candidates[n].rank)

    @property
    def best(self) -> dict[str, str]:
        """Return the templates of the best candidate, or the initial ones before any comparison."""
        if any(candidate.is_whole for candidate in self._candidates):
            return self._candidates[self.chosen].templates
        return self._initial

    @property
    def _names(self) -> list[str]:
        return list(self._prompts)

    @property
    def _initial(self) -> dict[str, str]:
        return {name: prompt.template for name, prompt in self._prompts.items()}

    # --- budgets ----------------------------------------------------------------------------
    def _rollouts_of(self, expansions: int) -> int:
        """Return the maximum number of rollouts of a round.

        Rollouts are needed for the critiques, to compare the candidates, and to run the best one on
        the whole selection split.

        Args:
            expansions: number of new candidates in the round.
        """
        gradients = expansions * self._feedback.size(self._plan.gradient_batch_size)
        compared = len(self._beam) + expansions
        batch = self._selection.size(self._plan.val_batch_size)
        return gradients + compared * batch + len(self._split.selection)

    def _expansions(self) -> int:
        """Return how many new candidates the next round may have within the budgets."""
        plan, trials = self._plan, self._trials
        most = plan.beam_width * plan.branch_factor
        if plan.max_reflections is not None:
            most = min(most, (plan.max_reflections - trials.reflections) // 2)
        if plan.max_rollouts is not None:
            remaining = plan.max_rollouts - trials.rollouts
            while most > 0 and self._rollouts_of(most) > remaining:
                most -= 1
        return max(0, most)

    def _why_it_ends(self) -> str:
        """Return why the search ends before another round; empty if it does not end."""
        plan, trials = self._plan, self._trials
        if perfect := self._perfect():
            return perfect
        if ended := trials.spent() or trials.why_stale():
            return ended
        if self._expansions():
            return ""
        if plan.max_reflections is not None and plan.max_reflections - trials.reflections < 2:
            done = f"{trials.reflections} of max_reflections={plan.max_reflections}"
            return f"{done} reflections are done, and another candidate takes two"
        return (
            f"{trials.rollouts} of max_rollouts={plan.max_rollouts} rollouts are done, and "
            f"another candidate may take {self._rollouts_of(1)}"
        )

    def _perfect(self) -> str:
        return self._trials.why_perfect(self._runs[self.chosen])

    # --- a round ----------------------------------------------------------------------------
    async def _round(self, number: int) -> None:
        slots = self._slots(number)
        fresh = await self._expand(slots)
        if fresh:
            await self._select([*self._beam, *fresh], number)
        if self._trials.is_replaying:
            return
        plan, best = self._plan, self._candidates[self.chosen]
        self._note(
            f"round {number} of {plan.beam_rounds}: {plural(len(fresh), 'new candidate')} of "
            f"{plural(len(slots), 'expansion')}; best {best.mean:.3f} on the selection split; "
            f"{plural(self._trials.rollouts, 'rollout')}, "
            f"{plural(self._trials.reflections, 'reflection')}"
        )

    def _slots(self, number: int) -> list[_Slot]:
        """Choose the candidates and the prompts to change in the round `number`.

        Each candidate of the beam is expanded equally often, the best first, because a budget may
        allow only the first expansions.
        """
        plan, rng = self._plan, random.Random(f"{self._plan.seed}/round {number}")
        parents = [self._beam[place % len(self._beam)] for place in range(plan.beam_width)]
        slots = []
        for place, parent in enumerate((parents * plan.branch_factor)[: self._expansions()]):
            slots.append(
                _Slot(
                    parent=parent,
                    prompt=self._names[self._turns[parent] % len(self._names)],
                    tasks=self._feedback.draw(plan.gradient_batch_size),
                    angle=rng.choice(ANGLES),
                    way=rng.choice(WAYS),
                    place=f"{number}/{place}",
                )
            )
            self._turns[parent] += 1
        return slots

    async def _expand(self, slots: Sequence[_Slot]) -> list[int]:
        """Create new candidates as planned in `slots`, and return their numbers.

        Each slot makes one candidate, or none if this fails, for example if the critique led to no
        new text.
        """
        trials = [
            Trial("feedback", self._candidates[slot.parent].templates, slot.tasks, slot.place)
            for slot in slots
        ]
        runs = await self._evaluated(trials)
        # without a failure there is nothing to criticise
        open_slots = [
            (slot, run)
            for slot, run in zip(slots, runs, strict=True)
            if not all(map(self._trials.is_solved, run.seen))
        ]
        critiques = await self._reflected(
            [
                Question(
                    slot.prompt,
                    critique(slot.prompt, self._template(slot), run.seen, slot.angle),
                    self._models.critic,
                    slot.place,
                )
                for slot, run in open_slots
            ]
        )
        criticised = []
        for (slot, _), reflection in zip(open_slots, critiques, strict=True):
            if criticism := without_thoughts(reflection.answer):
                criticised.append((slot, criticism))
            elif reflection.finish_reason == REFUSED:
                self._reject(slot, Refused("the question for a critique was refused"))
            else:
                self._reject(slot, Unusable("the critique is empty"))
        edits = await self._reflected(
            [
                Question(
                    slot.prompt,
                    edit(slot.prompt, self._template(slot), criticism, slot.way),
                    self._models.editor,
                    slot.place,
                )
                for slot, criticism in criticised
            ]
        )
        fresh = []
        for (slot, _), reflection in zip(criticised, edits, strict=True):
            try:
                fresh.append(self._add(self._changed(slot, reflection), slot))
                self._trials.check_usable(None)
            except Unusable as problem:
                self._reject(slot, problem)
        return fresh

    def _changed(self, slot: _Slot, reflection: Reflection) -> dict[str, str]:
        """Return the templates of the new candidate that an edit makes.

        Args:
            slot: the planned change.
            reflection: answer of the model that rewrites the prompt.

        Raises:
            Unusable: the answer has no new text.
            Repeated: an earlier candidate has the same templates.
        """
        changed = _read(self._template(slot), reflection)
        templates = {**self._candidates[slot.parent].templates, slot.prompt: changed.template}
        for number, candidate in enumerate(self._candidates):
            if candidate.templates == templates:
                raise Repeated(f"it equals candidate {number}")
        return templates

    def _reject(self, slot: _Slot, problem: Unusable) -> None:
        why = str(problem)
        is_refused = isinstance(problem, Refused)
        if not is_refused:
            why = f"reflection {slot.place} is unusable: {why}"
        made = Proposal(prompt=slot.prompt, parents=[slot.parent], why=why)
        self._trials.add_proposal(made, self._candidates)
        if not is_refused:
            self._trials.check_usable(problem)

    async def _select(self, numbers: Sequence[int], number: int) -> None:
        """Compare candidates on the next tasks of the selection split; keep the best as the beam.

        The best one is then run on the whole split. Its mean on the few tasks cannot be used as a
        result: it is too high on average, because the candidate was selected by it.

        Args:
            numbers: numbers of the candidates.
            number: number of the round.
        """
        batch = self._selection.draw(self._plan.val_batch_size)
        trials = [
            Trial("selection", self._candidates[n].templates, batch, f"batch {number}")
            for n in numbers
        ]
        means: dict[int, float] = {}
        for n, run in zip(numbers, await self._evaluated(trials), strict=True):
            means[n] = self._trials.mean_of(run.seen)
            if not self._candidates[n].is_whole:
                self._keep(n, run, is_whole=False)
        # the earlier one of equals: a change that gains nothing is not worth making
        self._beam = sorted(numbers, key=lambda n: (-rounded(means[n]), n))[: self._plan.beam_width]
        if not self._candidates[self._beam[0]].is_whole:
            await self._compare_whole(self._beam[0])
        for n in numbers:
            if n in self._open_prompts:
                self._add_proposal(n, means, len(batch))

    def _drop_open(self) -> None:
        """Record the new candidates that were not compared before a budget was used up."""
        for number, prompt in self._open_prompts.items():
            candidate = self._candidates[number]
            made = Proposal(
                prompt=prompt,
                parents=candidate.parents,
                text=candidate.templates[prompt],
                why="the search ended before it was compared",
            )
            self._trials.add_proposal(made, self._candidates)

    def _add_proposal(self, number: int, means: Mapping[int, float], tasks: int) -> None:
        """Record whether a new candidate was kept in its first round, and with which means.

        Args:
            number: number of the candidate.
            means: number of each compared candidate → its mean reward.
            tasks: number of tasks on which they were compared.
        """
        prompt, candidate = self._open_prompts.pop(number), self._candidates[number]
        [parent] = candidate.parents
        is_kept = number in self._beam
        made = Proposal(
            prompt=prompt,
            parents=[parent],
            text=candidate.templates[prompt],
            before=means.get(parent),
            after=means[number],
            tasks=tasks,
            candidate=number if is_kept else None,
            why="" if is_kept else f"it is not among the best {self._plan.beam_width} of the round",
        )
        self._trials.add_proposal(made, self._candidates)

    async def _compare_whole(self, number: int) -> None:
        templates = self._candidates[number].templates
        [run] = await self._evaluated([Trial("selection", templates, self._split.selection)])
        self._keep(number, run, is_whole=True)

    def _keep(self, number: int, run: Evaluation, *, is_whole: bool) -> None:
        """Keep the rollouts of a candidate; compute all means by the current failure reward."""
        self._runs[number] = run.seen
        self._candidates[number] = msgspec.structs.replace(
            self._candidates[number], rollouts=self._trials.rollouts, is_whole=is_whole
        )
        for n, seen in self._runs.items():
            self._candidates[n] = self._trials.with_rewards(self._candidates[n], [seen])

    # --- evaluation and reflection ----------------------------------------------------------
    async def _evaluated(self, trials: Sequence[Trial]) -> list[Evaluation]:
        """Evaluate the trials, and limit how many rollouts run concurrently."""
        done: list[Evaluation] = []
        while len(done) < len(trials):
            some = trials[len(done) :]
            count = max(1, self._rollouts_at_once // max(1, len(some[0].tasks)))
            done += await self._trials.evaluate(some[:count])
        return done

    async def _reflected(self, questions: Sequence[Question]) -> list[Reflection]:
        return await self._trials.reflect(questions, self._plan.reflections_at_once)

    def _template(self, slot: _Slot) -> PromptTemplate:
        text = self._candidates[slot.parent].templates[slot.prompt]
        return self._trials.template(slot.prompt, text)

    def _add(self, templates: dict[str, str], slot: _Slot | None = None) -> int:
        """Add a candidate that has not been run; return its number.

        `slot` contains its parent candidate and the prompt that was rewritten. It is None for the
        initial prompts, which have no parent.
        """
        new = Candidate(
            templates=templates,
            parents=[] if slot is None else [slot.parent],
            rewards={},
            mean=float("-inf"),
            rollouts=self._trials.rollouts,
            is_whole=False,
        )
        self._candidates.append(new)
        if slot is not None:
            self._open_prompts[len(self._candidates) - 1] = slot.prompt
        self._turns.append(0 if slot is None else self._names.index(slot.prompt) + 1)
        return len(self._candidates) - 1


def check_budget(plan: BeamPlan, split: Split) -> None:
    """Raise `TooFewRolloutsError` if the budget is too small for one new candidate."""
    most, whole = plan.max_rollouts, len(split.selection)
    batch = min(plan.val_batch_size, whole)
    gradient = min(plan.gradient_batch_size, len(split.feedback))
    least = whole + gradient + 2 * batch + whole
    if most is not None and most < least:
        raise TooFewRolloutsError(
            f"APO(max_rollouts={most}) is too few for one new candidate: {plural(whole, 'task')} "
            f"of the selection split twice, {plural(gradient, 'task')} for reflection, and "
            f"{plural(batch, 'task')} for each of two prompts to compare; give at least {least}, "
            "or a smaller selection=, gradient_batch_size= or val_batch_size="
        )


def _read(template: PromptTemplate, edit: Reflection) -> PromptTemplate:
    """Return the template that an edit proposes in place of `template`.

    Some models answer with the new text alone. An answer without marks is taken as the new text if
    it has all placeholders of `template`, and if there are any.

    Raises:
        Unusable: the answer has no new text.
    """
    answer, reason = edit.answer, edit.finish_reason
    text = without_thoughts(answer).strip()
    if template.fields and not any(mark in text for mark in ("<prompt>", "</prompt>", "```")):
        with suppress(ConfigError):
            template.rewritten(text)
            answer = f"<prompt>\n{text}\n</prompt>"
    return proposed_template(template, answer, reason)


class _Batches:
    """Draw batches of tasks in shuffled order, each task once in a batch.

    When all tasks were drawn, they are shuffled again. Equal tasks are drawn as several tasks.
    """

    def __init__(self, tasks: Sequence[Json], seed: str) -> None:
        self._tasks = tasks
        self._epochs = Epochs(range(len(tasks)), seed)
        self._place = 0

    def size(self, count: int) -> int:
        """Return the number of tasks in a batch: `count`, but not more than there are tasks."""
        return min(count, len(self._tasks))

    def draw(self, count: int) -> list[Json]:
        batch: dict[int, Json] = {}
        while len(batch) < self.size(count):
            [index] = self._epochs.take(self._place, 1)
            self._place += 1
            batch[index] = self._tasks[index]
        return list(batch.values())

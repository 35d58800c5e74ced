"""The beam search: rounds of expanding a beam of candidates and keeping its best."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lightspan.algorithms.task_sampler import Epochs
from lightspan.progress import plural
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Json, task_id
from lightspan_prompts.apo.reflection_prompts import ANGLES, WAYS, critique, edit
from lightspan_prompts.endpoint_client import EndpointClient
from lightspan_prompts.search.candidates import Candidate, Found, Split, TooFewRolloutsError
from lightspan_prompts.search.evaluator import Evaluator, Question, SpentError, Trial
from lightspan_prompts.search.reflection import Unusable, other_template
from lightspan_prompts.search.search_log import Evaluation, Reflection

LIBRARY: Final = "lightspan.APO 1"
"""In the journal's header: another number where the same answers lead to other questions."""
ROLLOUTS_AT_ONCE: Final = 64
"""That are asked for together: enough to keep runners busy, and few enough that a run which is
killed loses little."""


@dataclass(frozen=True, kw_only=True)
class BeamPlan:
    """What a search does, see `APO`, which has checked it."""

    prompts: Mapping[str, PromptTemplate]
    optimize: Sequence[str] = ()
    beam_width: int
    branch_factor: int
    beam_rounds: int
    gradient_batch_size: int
    val_batch_size: int
    max_rollouts: int | None
    max_reflections: int | None
    perfect_reward: float | None
    reflections_at_once: int
    seed: int


class Models(NamedTuple):
    """The reflection models."""

    critic: EndpointClient
    """Says what is wrong with a prompt."""
    editor: EndpointClient
    """Writes another one by that."""


class _Slot(NamedTuple):
    """A candidate to be expanded once."""

    parent: int
    prompt: str
    """The one that is changed."""
    tasks: list[Json]
    angle: str
    way: str
    place: str
    """Tells it from the other slots of the search."""


class Search:
    """One search, from its beginning or from what the journal has of it.

    Args:
        plan: what to do.
        trials: does it.
        split: of the tasks.
        models: open.
        note: tells the person who watches.
    """

    def __init__(
        self,
        plan: BeamPlan,
        trials: Evaluator,
        split: Split,
        models: Models,
        note: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._trials = trials
        self._split = split
        self._models = models
        self._note = note
        self._feedback = _Batches(split.feedback, f"{plan.seed}/feedback")
        self._selection = _Batches(split.selection, f"{plan.seed}/selection batches")
        self._prompts = dict(plan.prompts)
        """As they are: those that were given, and when the app was looked at those found there."""
        self._candidates: list[Candidate] = []
        self._turns: list[int] = []
        """Of each candidate: which of several prompts its next expansion changes. What came of a
        change of one goes on with the next one."""
        self._beam: list[int] = []

    async def run(self) -> Found:
        """Search until the rounds are done or a budget is used up.

        Raises:
            ConfigError: the budget of rollouts is too small for one candidate; a text of the app's
                cannot be learned.
            UnknownAgentError: a pattern matches nothing.
            RewardError: no rollout of the prompts as they are has a reward.
            EngineError: a reflection model fails.
            And the errors of rollouts and of the journal.
        """
        self._check_budget()
        selection, patterns = self._split.selection, self._plan.optimize
        self._prompts = await self._trials.begin(selection, patterns, self._note)
        self._beam = [self._add(self._given)]
        await self._compare_whole(0)
        try:
            ended = await self._rounds()
        except SpentError as why:
            ended = str(why)
        # the last ones were not compared with any other, where a budget ended a round
        compared = [each for each in self._candidates if each.rewards]
        return self._trials.found(compared, self.chosen, ended)

    async def _rounds(self) -> str:
        """Go through the rounds; says why there are no more."""
        for number in range(1, self._plan.beam_rounds + 1):
            if ended := self._why_it_ends():
                return ended
            await self._round(number)
        return self._perfect() or f"{plural(self._plan.beam_rounds, 'round')} of the beam are done"

    @property
    def chosen(self) -> int:
        """The best candidate so far: the first one with the highest mean on the whole selection
        split."""
        whole = [number for number, each in enumerate(self._candidates) if each.is_whole]
        return max(whole, key=lambda number: self._candidates[number].mean)

    @property
    def best(self) -> dict[str, str]:
        """The templates of the best candidate so far; those that were given before there is one."""
        if any(each.is_whole for each in self._candidates):
            return self._candidates[self.chosen].templates
        return self._given

    @property
    def _names(self) -> list[str]:
        return list(self._prompts)

    @property
    def _given(self) -> dict[str, str]:
        return {name: prompt.template for name, prompt in self._prompts.items()}

    # --- budgets ----------------------------------------------------------------------------
    def _rollouts_of(self, expansions: int) -> int:
        """What a round takes at most: the parents' runs, the comparison, and its winner's."""
        gradients = expansions * self._feedback.size(self._plan.gradient_batch_size)
        compared = len(self._beam) + expansions
        batch = self._selection.size(self._plan.val_batch_size)
        return gradients + compared * batch + len(self._split.selection)

    def _check_budget(self) -> None:
        most, whole = self._plan.max_rollouts, len(self._split.selection)
        batch = self._selection.size(self._plan.val_batch_size)
        gradient = self._feedback.size(self._plan.gradient_batch_size)
        least = whole + gradient + 2 * batch + whole
        if most is not None and most < least:
            raise TooFewRolloutsError(
                f"APO(max_rollouts={most}) is too few for one new candidate: "
                f"{plural(whole, 'task')} of the selection split twice, "
                f"{plural(gradient, 'task')} to learn from, and {plural(batch, 'task')} for "
                f"each of two prompts to compare; give at least {least}, or a smaller selection=, "
                "gradient_batch_size= or val_batch_size="
            )

    def _expansions(self) -> int:
        """How many new candidates the next round may ask for."""
        plan, trials = self._plan, self._trials
        most = plan.beam_width * plan.branch_factor
        if plan.max_reflections is not None:
            most = min(most, (plan.max_reflections - trials.reflections) // 2)
        if plan.max_rollouts is not None:
            left = plan.max_rollouts - trials.rollouts
            while most > 0 and self._rollouts_of(most) > left:
                most -= 1
        return max(0, most)

    def _why_it_ends(self) -> str:
        """Why no further round begins; empty if one does."""
        plan, trials = self._plan, self._trials
        if perfect := self._perfect():
            return perfect
        if spent := trials.spent():
            return spent
        if self._expansions():
            return ""
        if plan.max_reflections is not None and plan.max_reflections - trials.reflections < 2:
            asked = f"{trials.reflections} of max_reflections={plan.max_reflections}"
            return f"{asked} reflections are done, and another candidate takes two"
        return (
            f"{trials.rollouts} of max_rollouts={plan.max_rollouts} rollouts are done, and "
            f"another candidate may take {self._rollouts_of(1)}"
        )

    def _perfect(self) -> str:
        rewards = self._candidates[self.chosen].rewards.values()
        if all(map(self._is_perfect, rewards)):
            return "the selection split has the perfect reward on every task"
        return ""

    def _is_perfect(self, reward: float | None) -> bool:
        perfect = self._plan.perfect_reward
        return perfect is not None and reward is not None and reward >= perfect

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
        """What is expanded: each of the beam as often as every other, the best first where a budget
        ends it."""
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
        """The new candidates that came of these slots."""
        trials = [
            Trial("feedback", self._candidates[slot.parent].templates, slot.tasks, slot.place)
            for slot in slots
        ]
        runs = await self._evaluated(trials)
        # where nothing went wrong there is nothing to say
        open_slots = [
            (slot, run)
            for slot, run in zip(slots, runs, strict=True)
            if not all(self._is_perfect(seen.reward) for seen in run.seen)
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
        for (slot, _), (said, is_fresh) in zip(open_slots, critiques, strict=True):
            if said.answer.strip():
                criticised.append((slot, said.answer))
            else:
                self._useless(slot, "the critique is empty", is_fresh)
        edits = await self._reflected(
            [
                Question(
                    slot.prompt,
                    edit(slot.prompt, self._template(slot), said, slot.way),
                    self._models.editor,
                    slot.place,
                )
                for slot, said in criticised
            ]
        )
        fresh = []
        for (slot, _), (said, is_fresh) in zip(criticised, edits, strict=True):
            try:
                fresh.append(self._add(self._changed(slot, said), slot))
            except Unusable as why:
                self._useless(slot, str(why), is_fresh)
        return fresh

    def _changed(self, slot: _Slot, said: Reflection) -> dict[str, str]:
        """The templates that an edit gives.

        Raises:
            Unusable: it gives none.
        """
        changed = other_template(self._template(slot), said.answer, said.finish_reason)
        templates = {**self._candidates[slot.parent].templates, slot.prompt: changed.template}
        for number, each in enumerate(self._candidates):
            if each.templates == templates:
                raise Unusable(f"it is what candidate {number} is already")
        return templates

    def _useless(self, slot: _Slot, why: str, is_fresh: bool) -> None:
        self._trials.unusable += 1
        if is_fresh:
            self._note(f"reflection {slot.place} on {slot.prompt!r} is of no use: {why}")

    async def _select(self, numbers: Sequence[int], number: int) -> None:
        """Keep the best of these candidates on the next batch of the selection split, and look at
        the very best on all of it: to be the best of many in a batch takes luck too."""
        batch = self._selection.draw(self._plan.val_batch_size)
        trials = [
            Trial("selection", self._candidates[n].templates, batch, f"batch {number}")
            for n in numbers
        ]
        means: dict[int, float] = {}
        for n, run in zip(numbers, await self._evaluated(trials), strict=True):
            means[n] = self._trials.mean_of(run.seen)
            if not self._candidates[n].is_whole:
                self._candidates[n] = self._seen_on(n, run, is_whole=False)
        # the earlier one of equals: a change that gains nothing is not worth making
        self._beam = sorted(numbers, key=lambda n: (-means[n], n))[: self._plan.beam_width]
        if not self._candidates[self._beam[0]].is_whole:
            await self._compare_whole(self._beam[0])

    async def _compare_whole(self, number: int) -> None:
        templates = self._candidates[number].templates
        [run] = await self._evaluated([Trial("selection", templates, self._split.selection)])
        self._candidates[number] = self._seen_on(number, run, is_whole=True)

    def _seen_on(self, number: int, run: Evaluation, *, is_whole: bool) -> Candidate:
        before = self._candidates[number]
        return Candidate(
            templates=before.templates,
            parents=before.parents,
            rewards={seen.task_id: seen.reward for seen in run.seen},
            mean=self._trials.mean_of(run.seen),
            rollouts=self._trials.rollouts,
            is_whole=is_whole,
        )

    # --- asking -----------------------------------------------------------------------------
    async def _evaluated(self, trials: Sequence[Trial]) -> list[Evaluation]:
        """What came of these trials, a few of which run side by side."""
        done: list[Evaluation] = []
        while len(done) < len(trials):
            some = trials[len(done) :]
            count = max(1, ROLLOUTS_AT_ONCE // max(1, len(some[0].tasks)))
            done += await self._trials.evaluate(some[:count])
        return done

    async def _reflected(self, questions: Sequence[Question]) -> list[tuple[Reflection, bool]]:
        """The answers, each with whether it is of this life."""
        was_known = self._trials.is_replaying
        answers = await self._trials.reflect(questions, self._plan.reflections_at_once)
        return [(answer, not was_known) for answer in answers]

    def _template(self, slot: _Slot) -> PromptTemplate:
        text = self._candidates[slot.parent].templates[slot.prompt]
        return self._trials.template(slot.prompt, text)

    def _add(self, templates: dict[str, str], made_in: _Slot | None = None) -> int:
        """Take in a candidate that was not run yet."""
        new = Candidate(
            templates=templates,
            parents=[] if made_in is None else [made_in.parent],
            rewards={},
            mean=float("-inf"),
            rollouts=self._trials.rollouts,
            is_whole=False,
        )
        self._candidates.append(new)
        self._turns.append(0 if made_in is None else self._names.index(made_in.prompt) + 1)
        return len(self._candidates) - 1


class _Batches:
    """Tasks in shuffled epochs, a batch at a time, no task twice in one."""

    def __init__(self, tasks: Sequence[Json], seed: str) -> None:
        self._tasks = list({task_id(task): task for task in tasks}.values())
        self._epochs = Epochs(self._tasks, seed)
        self._place = 0

    def size(self, count: int) -> int:
        """Of a batch for which so many are asked."""
        return min(count, len(self._tasks))

    def draw(self, count: int) -> list[Json]:
        batch: dict[str, Json] = {}
        while len(batch) < self.size(count):
            [task] = self._epochs.take(self._place, 1)
            self._place += 1
            batch.setdefault(task_id(task), task)
        return list(batch.values())

"""Candidates and results of a search, and how tasks are divided for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lightspan.algorithms.protocol import Metrics
from lightspan.errors import ConfigError, DataError
from lightspan.progress import plural
from lightspan.schema.records import Json, task_id
from lightspan.training.data import check_ids
from lightspan_prompts.search.prompt_discovery import Surveyed

JOURNAL: Final = "journal"
"""Folder of logs in the run's folder."""
PROPOSALS: Final = "proposals.jsonl"
"""File with one line per proposal, in the run's folder; written during the search."""
KIND: Final = "search"
"""`kind` of the lines of `metrics.jsonl` with the numbers of a proposal."""
CANDIDATES: Final = "candidates.json"
"""File in the folder `JOURNAL` with the result of the search."""
ANY_CALL: Final = ""
"""Key for any model call in place of an agent's path, if no texts of agents are learned."""
NO_CALLS: Final = (
    "no model call of the app was seen, so reflections show tasks, messages and rewards, and not "
    "what was asked and answered: they would with the SDK of OpenAI or Anthropic, or an adapter"
)


STEPS: Final = 2.0**24
"""Rewards are compared after rounding to 1 / STEPS. So 0.7 + 0.2 + 0.1, which floats add up to
0.9999999999999999, equals 1."""


def rounded(reward: float) -> float:
    """Return a reward as it is compared with others.

    Floats of at least `STEPS` are left as they are; some of them are too large to be multiplied.
    """
    return round(reward * STEPS) / STEPS if abs(reward) < STEPS else reward


class TooFewRolloutsError(ConfigError):
    """The search's budget of rollouts is too small for one new candidate."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts, with their rewards on the tasks by which candidates are compared."""

    templates: dict[str, str]
    """Prompt → template."""
    parents: list[int]
    """Indices of the candidates from which it was made; empty for the initial prompts."""
    rewards: dict[str, float | None]
    """Task of the selection split → reward: the failure reward if the app failed or gave none. None
    if it is unscored for another reason, such as a judge without an answer."""
    mean: float
    """Mean of `rewards` and `again`, where None counts as the failure reward."""
    rollouts: int
    """Rollouts of the search up to this result."""
    again: dict[str, float | None] = msgspec.field(default_factory=dict)
    """Task of the selection split → reward in the second run of a finalist."""
    is_scored: bool = True
    """Whether any of these rollouts has a reward of its own, and any got a text of the candidate;
    else it is never chosen."""
    is_whole: bool = True
    """Whether all tasks of the selection split were run; a partial result is never chosen."""

    @property
    def rank(self) -> tuple[bool, float]:
        """Return a value that is larger for a better candidate."""
        return self.is_scored, rounded(self.mean)


class Proposal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A proposed text and what became of it."""

    prompt: str
    """Name of the changed prompt; empty for a merge of two candidates."""
    parents: list[int]
    text: str = ""
    """The proposed text; empty if the answer had none."""
    before: float | None = None
    """Mean reward of the parent on the tasks of `tasks`; None if it was not compared."""
    after: float | None = None
    """Mean reward of the proposal on the same tasks; None if it was not compared."""
    tasks: int = 0
    candidate: int | None = None
    """Number of the candidate that it became; None if it was dropped."""
    why: str = ""
    """Reason why it was dropped."""
    rollouts: int = 0
    """Rollouts of the search so far; `reflections`, `tokens` and `cost` likewise."""
    reflections: int = 0
    tokens: int = 0
    cost: float | None = None
    best: float | None = None
    """Highest mean on the selection split so far."""

    def metrics(self) -> Metrics:
        """Return the numbers of the proposal; those that are unknown are left out."""
        numbers = ("before", "after", "tasks", "candidate", "best")
        names = (*numbers, "rollouts", "reflections", "tokens", "cost")
        return {name: n for name in names if (n := getattr(self, name)) is not None}

    def line(self) -> str:
        """Describe the proposal in one line."""
        what = f"a text for {self.prompt!r}" if self.prompt else "a merge"
        parents = " and ".join(map(str, self.parents))
        scores = ""
        if self.before is not None and self.after is not None:
            scores = f": {self.before:.3f} -> {self.after:.3f} on {plural(self.tasks, 'task')}"
        end = f"dropped, {self.why}" if self.candidate is None else f"candidate {self.candidate}"
        return f"{what} in place of candidate {parents}'s{scores}; {end}"


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search."""

    candidates: list[Candidate]
    chosen: int
    """Number of the candidate whose prompts are used: `best`, or 0 for the initial prompts, if the
    gain of `best` is no more than chance would give."""
    ended: str
    """Reason for the end of the search."""
    rollouts: int
    unscored: int
    failed: int
    mean: float | None
    """Mean reward of all scored rollouts; None if no rollout is scored."""
    reflections: int
    unusable: int
    """Answers of the reflection model without a usable new text."""
    tokens: int
    cost: float | None = None
    """Cost of calls outside of policies, in the currency of the prices; None without prices."""
    proposals: list[Proposal] = msgspec.field(default_factory=list)
    """Every proposed text, dropped ones too."""
    usage: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """Model outside of policies → (tokens sent, tokens received)."""
    calls: int | None = None
    """Number of the app's model calls that were seen; None in older results."""
    estimated: int = 0
    """Number of calls and reflections whose endpoints count no tokens, which are estimated."""
    unanswered: int = 0
    """Number of the app's calls that were cancelled or timed out, which are estimated."""
    repeated: int = 0
    """Number of attempts that were lost and repeated, whose tokens count too."""
    interrupted: int = 0
    """Number of `rollouts` that ended with an earlier process of the run, without a result."""
    failure_reward: float | None = None
    """The lowest reward of these rollouts, at most 0, if failures count with it; else None."""
    unpriced: list[str] = msgspec.field(default_factory=list)
    """Models without a price, which are not in `cost`."""
    surveyed: Surveyed | None = None
    """Texts discovered in the app; None if `optimize` was empty."""
    applied: int = 0
    """Number of calls and prompt requests that got a candidate's text."""
    kept: dict[str, int] = msgspec.field(default_factory=dict)
    """Reason why the app's own text was sent → count."""
    unasked: dict[str, int] = msgspec.field(default_factory=dict)
    """Agent → number of rollouts that did not call it although the task's first rollout did. Lost
    and failed rollouts are left out. The only key is `ANY_CALL` if all texts are arguments."""
    asked: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Task → agents called in its first rollout of the run that was neither lost nor failed."""
    best: int = 0
    """Number of the candidate with the highest mean on the whole selection split; with finalists,
    only they and the initial prompts (number 0) compete."""
    chance: float | None = None
    """Probability of a gain as large as that of `best` if all candidates were equally good; None if
    `best` is 0 or if it was not computed."""
    left_out: int = 0
    """Number of tasks that `chance` leaves out, because `best` or the first has no reward there."""
    significance: float | None = None
    """Highest probability at which `best` is chosen; None for no limit."""

    def verdict(self) -> str:
        """Say whether the best candidate is better by more than chance."""
        number = self.best or self.chosen  # not every result was judged
        best, first = self.candidates[number], self.candidates[0]
        scores = f"{first.mean:.3f} -> {best.mean:.3f} on {plural(len(best.rewards), 'task')}"
        others = plural(len(self.candidates) - 1, "new candidate")
        if self.left_out:
            scores += f" ({self.left_out} left out of the test, without a reward in one of both)"
        if not number:
            return (
                f"the prompts stay unchanged: none of {others} is better than they are, "
                f"{first.mean:.3f} on the selection split"
            )
        if self.chance is None:
            return f"candidate {number} is chosen: {scores} of the selection split"
        if self.chosen:
            return (
                f"candidate {number} is chosen, the best of {others}: {scores} of the selection "
                f"split, a gain that chance alone would give with probability {self.chance:.2g}; "
                "the maximum of several is biased upwards: judge by the held-out reward"
            )
        return (
            f"no gain that can be told from chance, so the prompts stay unchanged: candidate "
            f"{number}, the best of {others}, has {scores} of the selection split, a gain that "
            f"chance alone would give with probability {self.chance:.2g}. Its text is in "
            f"{JOURNAL}/{CANDIDATES}; more tasks tell smaller gains from chance, and "
            "significance=None takes it in any case"
        )

    def texts(self) -> str:
        """Describe in how many calls a candidate's texts were sent, and why not in the others.

        Also describe rollouts in which an agent made no call, perhaps because the app has a cache.
        Empty if there is nothing to report.
        """
        parts = []
        if self.surveyed is not None:
            reasons = ", ".join(f"{why} ({count})" for why, count in sorted(self.kept.items()))
            own = f"; the app's own in {sum(self.kept.values())}: {reasons}" if reasons else ""
            parts = [f"texts of candidates were sent in {plural(self.applied, 'call')}{own}"]
        for name, count in sorted(self.unasked.items()):
            agent = "any agent" if name == ANY_CALL else repr(name)
            parts.append(
                f"{plural(count, 'rollout')} had no call of {agent} though an earlier one of the "
                "same task did: if the app has a cache, one candidate got another's answers; "
                "switch it off while prompts are learned"
            )
        return ". ".join(parts)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the search: its rollouts, candidates, tokens and mean rewards."""
        metrics: dict[str, float] = {
            "rollouts": self.rollouts,
            "scored": self.rollouts - self.unscored,
            "failed": self.failed,
            "candidates": len(self.candidates),
            "reflections": self.reflections,
            "reflections/unusable": self.unusable,
            "tokens": self.tokens,
            "selection/before": self.candidates[0].mean,
            "selection/best": self.candidates[self.best or self.chosen].mean,
            "selection/chosen": self.candidates[self.chosen].mean,
        }
        if self.failure_reward is not None:
            metrics["failure_reward"] = self.failure_reward
        if self.chance is not None:
            metrics["selection/chance"] = self.chance
        if self.cost is not None:
            metrics["cost"] = self.cost
        if self.surveyed is not None:
            metrics["texts/sent"] = self.applied
            metrics["texts/original"] = sum(self.kept.values())
            metrics["texts/unasked"] = sum(self.unasked.values())
        return metrics if self.mean is None else {**metrics, "reward": self.mean}

    def spending(self) -> list[str]:
        """Return lines about the tokens and the cost of the search.

        Evaluations of held-out tasks are not included.
        """
        lines = []
        used = [
            f"{name} {sent:,} in, {received:,} out"
            for name, (sent, received) in self.usage.items()
            if sent + received
        ]
        if used:
            lines.append(f"tokens: {'; '.join(used)}")
        if self.cost is not None:
            of = ", for reflections alone: no call of the app was seen"
            if self.calls != 0:
                of = ", without the app's calls for embeddings, which are not counted"
            lines.append(f"this cost {self.cost:.4g}, by prices={of}")
        if self.unpriced:
            names = ", ".join(map(repr, self.unpriced))
            lines.append(f"prices= has no price for {names}, so the cost is without them")
        if self.estimated:
            lines.append(
                f"{plural(self.estimated, 'model call')} came without a count of tokens, as "
                'streams do unless the app asks for it (stream_options={"include_usage": True}) '
                "and reads them to the end: theirs are estimated from the text that arrived, about "
                "4 bytes each, without what the app did not read"
            )
        if self.unanswered:
            lines.append(
                f"{plural(self.unanswered, 'model call')} of the app had no answer in time, or the "
                "app cancelled it: such a call counts with the text that was sent and, as its "
                "answer, the max_tokens of its request (nothing without it)"
            )
        if self.repeated:
            lines.append(
                f"{plural(self.repeated, 'attempt')} came to nothing because of errors of an "
                "endpoint or lost workers, and the app was run again: their tokens are counted, "
                "and max_rollouts is not a limit for them"
            )
        if self.interrupted:
            lines.append(
                f"{plural(self.interrupted, 'rollout')} of this search ended with an interrupted "
                "process: they, their tokens and cost are counted, without calls that were cut off"
            )
        return lines

    def notes(self) -> list[str]:
        """Return messages for the user."""
        notes = [self.ended, self.verdict()]
        notes += self.spending()
        if texts := self.texts():
            notes.append(texts)
        if self.calls == 0:
            notes.append(NO_CALLS)
        if self.unusable:
            answers = plural(self.reflections, "answer")
            notes.append(f"{self.unusable} of {answers} of the reflection model were unusable")
        return notes


class Split(NamedTuple):
    """The training tasks in two parts: for reflections, and for comparing candidates."""

    feedback: list[Json]
    """Tasks that reflections show."""
    selection: list[Json]
    """Tasks by which candidates are compared."""


def equal_tasks(tasks: Sequence[Json]) -> str:
    """Describe how equal training tasks count; empty if there are none."""
    if len({task_id(task) for task in tasks}) == len(tasks):
        return ""
    return "equal training tasks count once while prompts are compared and shown"


def split_tasks(tasks: Sequence[Json], share: float, seed: int) -> Split:
    """Divide the training tasks into two parts; duplicates count once.

    Args:
        tasks: the training tasks.
        share: fraction of the tasks on which candidates are compared (the selection split).
        seed: seed of the random choice.

    Raises:
        DataError: there are too few tasks, or tasks that differ share an id.
    """
    check_ids(tasks, "train", may_repeat=True)
    distinct = {task_id(task): task for task in tasks}
    count = max(1, round(share * len(distinct)))
    if count >= len(distinct):
        raise DataError(
            f"selection={share:g} of {plural(len(distinct), 'distinct training task')} "
            "leaves none to reflect on: give more tasks, or a smaller share"
        )
    names = random.Random(f"{seed}/selection").sample(list(distinct), count)
    selected = set(names)
    return Split(
        feedback=[task for name, task in distinct.items() if name not in selected],
        selection=[distinct[name] for name in names],
    )


def write_found(found: SearchResult, run: Path) -> None:
    """Write the result of a search into a run's folder."""
    path = run / JOURNAL / CANDIDATES
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def read_searches(run: Path) -> dict[str, SearchResult]:
    """Read the results of a run's searches.

    The keys are names of steps, such as `step-000001`. A run with a single search has the key "".

    Raises:
        ConfigError: a file is damaged.
    """
    results = {name: read_found(place) for name, place in search_places(run).items()}
    return {name: result for name, result in results.items() if result is not None}


def search_places(run: Path) -> dict[str, Path]:
    """Return the folders of a run's searches, by the keys of `read_searches`.

    The folder of a single search is that of the run.
    """
    places = {"": run}
    for folder in sorted((run / JOURNAL).glob("step-*")):
        places["-".join(folder.name.split("-")[:2])] = folder
    return places


def read_found(run: Path) -> SearchResult | None:
    """Return the result of a run's search; None if there is none yet.

    Raises:
        ConfigError: the file is damaged.
    """
    path = run / JOURNAL / CANDIDATES
    try:
        return msgspec.json.decode(path.read_bytes(), type=SearchResult)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error

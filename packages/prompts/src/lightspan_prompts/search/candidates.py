"""What a search compares candidates by, and what it found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lightspan.errors import ConfigError, DataError
from lightspan.progress import plural
from lightspan.schema.records import Json, task_id
from lightspan_prompts.search.prompt_discovery import Surveyed

JOURNAL: Final = "journal"
"""The folder in the run's."""
CANDIDATES: Final = "candidates.json"
"""In it: what the search found."""
ANY_CALL: Final = ""
"""In place of an agent, where no texts of agents are learned: whoever asked a model."""


class TooFewRolloutsError(ConfigError):
    """A search may use too few rollouts for one new candidate."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that were compared, and how they did on the selection split."""

    templates: dict[str, str]
    """Prompt → template."""
    parents: list[int]
    """Places of those that it was made of; none for the prompts as they were given."""
    rewards: dict[str, float | None]
    """Task of the selection split → reward; None: unscored."""
    mean: float
    """Of these and of `again`, an unscored one taken for `failure_reward`."""
    rollouts: int
    """Done until it was known."""
    again: dict[str, float | None] = msgspec.field(default_factory=dict)
    """Task of the selection split → reward when it was run once more, as a finalist."""
    is_whole: bool = True
    """Whether these are all tasks of the selection split; a part of them leads to no choice."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found."""

    candidates: list[Candidate]
    chosen: int
    """The first one with the highest mean on the whole selection split, of the finalists if there
    were some, and the prompts as they were given."""
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
    cost: float | None = None
    """Of those that no policy sampled, in the currency of the prices; None without prices."""
    surveyed: Surveyed | None = None
    """The texts that were found in the app; None: none were to be."""
    applied: int = 0
    """Calls, and askings for a prompt, that got a candidate's text."""
    kept: dict[str, int] = msgspec.field(default_factory=dict)
    """Which of them got the app's own, and why → how many."""
    unasked: dict[str, int] = msgspec.field(default_factory=dict)
    """Agent → rollouts in which it made no call, on tasks in whose first rollout it made one; or
    `ANY_CALL`, where the texts are arguments alone."""
    asked: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Task → who was asked in its first rollout of the run."""

    def texts(self) -> str:
        """What became of the texts, for people; empty where nothing is to be said of them."""
        parts = []
        if self.surveyed is not None:
            kept = ", ".join(f"{why} ({count})" for why, count in sorted(self.kept.items()))
            own = f"; the app's own in {sum(self.kept.values())}: {kept}" if kept else ""
            parts = [f"texts of candidates were sent in {plural(self.applied, 'call')}{own}"]
        for name, count in sorted(self.unasked.items()):
            who = "no model was asked" if name == ANY_CALL else f"{name!r} was not asked"
            where = "one was" if name == ANY_CALL else "it was asked"
            parts.append(
                f"{who} in {plural(count, 'rollout')} of tasks on which {where} before: if a cache "
                "of the app's answered, one candidate got the answer to another; switch it off "
                "while prompts are learned"
            )
        return ". ".join(parts)

    def metrics(self) -> dict[str, float]:
        """For the line of a step."""
        metrics: dict[str, float] = {
            "rollouts": self.rollouts,
            "scored": self.rollouts - self.unscored,
            "failed": self.failed,
            "candidates": len(self.candidates),
            "reflections": self.reflections,
            "reflections/unusable": self.unusable,
            "tokens": self.tokens,
            "selection/before": self.candidates[0].mean,
            "selection/best": self.candidates[self.chosen].mean,
        }
        if self.cost is not None:
            metrics["cost"] = self.cost
        if self.surveyed is not None:
            metrics["texts/sent"] = self.applied
            metrics["texts/original"] = sum(self.kept.values())
            metrics["texts/unasked"] = sum(self.unasked.values())
        return metrics if self.mean is None else {**metrics, "reward": self.mean}

    def notes(self) -> list[str]:
        """What to tell the person who watches."""
        best = self.candidates[self.chosen]
        what = "the prompts stay as they are" if not self.chosen else f"candidate {self.chosen}"
        notes = [
            f"{self.ended}. Of {plural(len(self.candidates), 'candidate')} {what}: {best.mean:.3f} "
            f"on the selection split, {self.candidates[0].mean:.3f} before; the highest of "
            "several is high by luck too: what counts is the held-out reward"
        ]
        if self.cost is not None:
            notes.append(f"this cost {self.cost:.4g}, by prices=")
        if texts := self.texts():
            notes.append(texts)
        if self.unusable:
            asked = plural(self.reflections, "answer")
            notes.append(f"{self.unusable} of {asked} of the reflection model were of no use")
        return notes


class Split(NamedTuple):
    """The training tasks in two parts."""

    feedback: list[Json]
    """What reflections see."""
    selection: list[Json]
    """What candidates are compared by."""


def split_tasks(tasks: Sequence[Json], share: float, seed: int) -> Split:
    """The training tasks in two parts; equal ones are one.

    Args:
        share: of the selection split.
        seed: says which tasks are in it.

    Raises:
        DataError: there are too few.
    """
    distinct = {task_id(task): task for task in tasks}
    count = max(1, round(share * len(distinct)))
    if count >= len(distinct):
        raise DataError(
            f"selection={share:g} of {plural(len(distinct), 'distinct training task')} "
            "leaves none to reflect on: give more tasks, or a smaller share"
        )
    names = random.Random(f"{seed}/selection").sample(list(distinct), count)
    taken = set(names)
    return Split(
        feedback=[task for name, task in distinct.items() if name not in taken],
        selection=[distinct[name] for name in names],
    )


def keep_found(found: Found, run: Path) -> None:
    """Write what a search found into a run's folder, where people and programs read it."""
    path = run / JOURNAL / CANDIDATES
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def read_searches(run: Path) -> dict[str, Found]:
    """What each search of a run found, by the name of its step; without one where there is a single
    search.

    Raises:
        ConfigError: a file is damaged.
    """
    places = {"": run}
    for folder in sorted((run / JOURNAL).glob("step-*")):
        places["-".join(folder.name.split("-")[:2])] = folder
    found = {name: read_found(place) for name, place in places.items()}
    return {name: each for name, each in found.items() if each is not None}


def read_found(run: Path) -> Found | None:
    """What the search of a run found; None if it found nothing yet, or there was none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = run / JOURNAL / CANDIDATES
    try:
        return msgspec.json.decode(path.read_bytes(), type=Found)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error

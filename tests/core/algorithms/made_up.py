"""Rollouts that are made up from the prompts, for searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightspan.algorithms.prompts.candidates import Found
from lightspan.lightning.episode import Episode
from lightspan.schema.records import AttemptStatus, Mode, Outcome, task_id

TASKS: list[Any] = [{"n": n} for n in range(10)]
WORDS = ("ALPHA", "BETA")


def score(task: Any, texts: Mapping[str, str]) -> float | None:
    """Each task needs one word in one of the prompts."""
    name, word = ("first", "second")[task["n"] % 2], WORDS[task["n"] // 2 % 2]
    return float(word in texts[name])


class World:
    """Answers rollouts from a function of the task and the prompts."""

    def __init__(self, path: Path, reward: Callable[..., float | None] = score) -> None:
        self.path = path
        self.tasks = TASKS
        self.reward = reward
        self.rollouts_done = 0
        self.notes: list[str] = []
        self.batches: list[int] = []

    async def rollouts(
        self, tasks: Sequence[Any], group_size: int, mode: Mode = Mode.TRAIN, *, resources: Any
    ) -> list[Episode]:
        assert group_size == 1
        self.batches.append(len(tasks))
        episodes = []
        for task, offered in zip(tasks, resources, strict=True):
            self.rollouts_done += 1
            texts = {name: prompt.format(q="Q") for name, prompt in offered.items()}
            name = f"ro-{self.rollouts_done}"
            episodes.append(
                Episode(
                    rollout_id=name,
                    attempt_id=f"at-{name}",
                    task_id=task_id(task),
                    group_id=name,
                    mode=mode,
                    status=AttemptStatus.SUCCEEDED,
                    outcome=Outcome.OK,
                    reward=self.reward(task, texts),
                )
            )
        return episodes

    def note(self, text: str) -> None:
        self.notes.append(text)


def pool(found: Found) -> list[Any]:
    return [(each.templates, each.parents, each.rewards, each.mean) for each in found.candidates]

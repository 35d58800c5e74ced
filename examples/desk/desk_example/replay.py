"""Run GEPA's search with recorded answers in place of the model.

A prompt always routes the same messages right, so the search decides as it would with the model.
The algorithm, the script of proposals and the splits are those of `train.py`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from desk_example.comparison import Answers, Search
from desk_example.options import MAX_ROLLOUTS
from desk_example.reflection import scripted
from desk_example.training import NAME, train_tasks
from lightspan import GEPA, PromptTemplate
from lightspan.lightning.episode import Episode
from lightspan.schema.records import AttemptStatus, Json, Mode, Outcome, task_id


class Replay:
    """Stand-in for the `TrainerContext` that GEPA's search uses.

    Args:
        path: an empty folder.
        answers: prompt → its results.
    """

    def __init__(self, path: Path, answers: Mapping[str, Answers]) -> None:
        self.path = path
        self.tasks: list[Any] = [*train_tasks()]
        self._answers = answers
        self._places = {task_id(task): place for place, task in enumerate(self.tasks)}

    async def rollouts(
        self,
        tasks: Sequence[Json],
        group_size: int,
        mode: Mode = Mode.TRAIN,
        *,
        resources: Sequence[Mapping[str, Any]],
    ) -> list[Episode]:
        """Return one episode per task, with the recorded reward of the prompt in `resources`."""
        return [
            self._episode(task, offered[NAME].text)
            for task, offered in zip(tasks, resources, strict=True)
        ]

    def _episode(self, task: Json, text: str) -> Episode:
        name = task_id(task)
        return Episode(
            rollout_id=name,
            attempt_id=name,
            task_id=name,
            group_id=name,
            mode=Mode.TRAIN,
            status=AttemptStatus.SUCCEEDED,
            outcome=Outcome.OK,
            reward=float(self._answers[text].train[self._places[name]]),
            calls=(),
        )

    def note(self, text: str) -> None:
        """Ignore a message for the run's output."""

    def record(self, kind: str, metrics: Mapping[str, float]) -> None:
        """Ignore the numbers of a proposal."""


def replayed(order: int, begins: str, answers: Mapping[str, Answers]) -> Search:
    """Run the search with seed `order` from the prompt `begins`, and return its result."""
    with tempfile.TemporaryDirectory() as folder, scripted(order, Path(folder)) as llm:
        algorithm = GEPA({NAME: PromptTemplate(begins)}, llm, max_rollouts=MAX_ROLLOUTS, seed=order)
        world: Any = Replay(Path(folder), answers)
        asyncio.run(algorithm.run_step(world))
    found = algorithm.found
    assert found is not None
    chosen = algorithm.learned_prompts()[NAME].after.text
    return Search(
        order=order,
        begins=begins,
        chosen=chosen,
        rollouts=found.rollouts,
        reflections=found.reflections,
        candidates=len(found.candidates),
        held_out=answers[chosen].held_out,
        replayed=True,
    )

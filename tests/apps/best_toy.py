"""A training with known held-out rewards: `best_toy.py FOLDER MODEL TITLE N`.

A task contains its reward for each number of steps that the run has made.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from drilled import Drilled, row_of  # type: ignore[import-not-found]
from toy_apps import say  # type: ignore[import-not-found]

import lightspan
from lightspan.algorithms import Algorithm, Metrics, TrainerContext
from lightspan.progress import SilentReporter
from lightspan.protocols.learner import SFTLoss

REWARDS = [0.2, 0.5, 0.9, 0.9, 0.1, 0.1, 0.3]
"""Reward by number of steps: the best is that of step 2, and step 3 has the same."""


@lightspan.rollout
def scheduled(task: dict[str, Any]) -> float:
    """Return the task's reward for the number of steps that the run has made."""
    with lightspan.agent("writer"):
        say("go on", max_tokens=1)
    lines = (Path(task["folder"]) / "metrics.jsonl").read_text().splitlines()
    done = sum(json.loads(line)["kind"] == "train" for line in lines)
    return float(task["rewards"][done])


def tasks(folder: Path, count: int, split: str) -> list[dict[str, Any]]:
    """Return `count` tasks of a split."""
    return [{"id": f"{split} {n}", "folder": str(folder), "rewards": REWARDS} for n in range(count)]


class Hashing(Drilled):  # type: ignore[misc]
    """Train on random numbers, and store the hash of the weights after each step."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.hashes: dict[int, str] = {}

    async def run_step(self, world: TrainerContext) -> Metrics:
        await world.rollouts(world.next_tasks(1), 1)
        row = row_of([world.rng.randrange(300) for _ in range(8)])
        result = await world.learn(lambda: world.learner.update([row], SFTLoss()))
        await world.publish()
        self.hashes[world.step] = world.learner.weight_hash("drilled")
        return {"loss": result["loss"]}

    def state(self) -> dict[str, Any]:
        return {"hashes": list(self.hashes.items())}

    def load_state(self, state: dict[str, Any]) -> None:
        self.hashes = dict(state["hashes"])


class Killing(SilentReporter):
    """A reporter that kills the process when the n-th piece of work with a title begins.

    The trainer's pieces of work are training steps and evaluations.
    """

    def __init__(self, title: str, n: int) -> None:
        self._title, self._left = title, n

    def start(self, title: str, total: int) -> None:
        self._left -= title == self._title
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(
    folder: Path,
    algorithm: Algorithm,
    *,
    resume: bool = False,
    told: Path | None = None,
    selection: Any = None,
    **options: Any,
) -> lightspan.FitResult:
    """Train at most six steps, evaluate each, and keep the best.

    Args:
        folder: folder of the run.
        algorithm: the algorithm.
        resume: whether to resume the run.
        told: folder of the run whose steps determine the rewards; None for `folder`.
        selection: tasks that select the best step; None for two tasks of their own.
        options: further arguments of `Trainer`.
    """
    chosen: dict[str, Any] = {"steps": 6, "validate_every": 1, "keep": "best", **options}
    trainer = lightspan.Trainer(algorithm, runners=2, folder=folder, checkpoint_every=100, **chosen)
    train, held_out, others = (
        tasks(told or folder, 2, split) for split in ("train", "held out", "selection")
    )
    chosen_by = others if selection is None else selection
    return trainer.fit(scheduled, train, held_out, selection=chosen_by, resume=resume)


def main(folder: Path, model: str, title: str, n: str) -> None:
    """Train until the reporter kills the process."""
    import torch

    torch.set_num_threads(1)
    fit(folder, Hashing(Path(model)), patience=3, reporter=Killing(title, int(n)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

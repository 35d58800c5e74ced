"""A script that trains with adaptive tasks and replay until tests end it: `train_choice.py FOLDER
MODEL STEPS [OVERLAP]`. It resumes the run in the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from toy_apps import say  # type: ignore[import-not-found]

import lightspan
from lightspan import LightningRL, LocalRunners, Replay, Trainer

SUCCESSES = {"never": (), "seldom": (0,), "half": (0, 2), "always": (0, 1, 2, 3)}
"""Kind of task → which of four consecutive rollouts get the reward 1, the others 0."""


@lightspan.rollout
def counts(task: dict[str, Any]) -> float:
    """Call the writer; return a reward by the number of the task's rollout, not by the answer.

    The number is the size of a file that each rollout extends by a byte. So each group of four has
    the same rewards, in some order, also after a kill.
    """
    with lightspan.agent("writer"):
        say(task["id"])
    path = Path(task["folder"]) / f"count-{task['id']}"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, b".")
        number = os.lseek(file, 0, os.SEEK_CUR) - 1
    finally:
        os.close(file)
    return float(number % 4 in SUCCESSES[task["kind"]])


def main(folder: str, model: str, steps: str, overlap: str = "0") -> None:
    import torch

    torch.set_num_threads(1)
    algorithm = LightningRL(
        Path(model),
        optimize="writer",
        group_size=4,
        tasks_per_step=3,
        learning_rate=1e-3,
        tasks="adaptive",
        replay=Replay(groups=1, rare=0.5, max_age=3),
        overlap=int(overlap),
    )
    runners = LocalRunners(6, processes=1)
    trainer = Trainer(algorithm, runners=runners, steps=int(steps), folder=folder)
    train = [
        {"id": f"{kind}-{number}", "kind": kind, "folder": str(Path(folder).parent)}
        for kind in SUCCESSES
        for number in range(3)
    ]
    print(trainer.fit(counts, train, resume=True).summary())


if __name__ == "__main__":
    main(*sys.argv[1:])

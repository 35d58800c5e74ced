"""A script that distils until tests end it: `train_distill.py FOLDER MODEL TEACHER STEPS
[--resume]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from toy_apps import two  # type: ignore[import-not-found]

from lightspan import LocalRunners, Trainer
from lightspan_torch import Distill


def main(folder: str, model: str, teacher: str, steps: str, *, resume: bool) -> None:
    """Train, with a checkpoint after each step."""
    import torch

    torch.set_num_threads(1)
    algorithm = Distill(
        Path(model),
        teacher=Path(teacher),
        optimize="writer",
        frozen="base",
        tasks_per_step=4,
        learning_rate=1e-3,
    )
    runners = LocalRunners(4, processes=1)
    trainer = Trainer(algorithm, runners=runners, steps=int(steps), folder=folder)
    train = [{"q": f"question {number}"} for number in range(7)]
    print(trainer.fit(two, train, resume=resume).summary())


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--resume"]
    main(*given, resume="--resume" in sys.argv)

"""A script that trains an app of another environment, with runners that are started by hand.

`train_apart.py FOLDER MODEL STEPS [--resume]`; tests kill it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightspan import ExternalRunners, LightningRL, Trainer


def main(folder: str, model: str, steps: int, resume: bool) -> None:
    """Train the app `apart_app:answer`, which is given by its name."""
    import torch

    torch.set_num_threads(1)
    algorithm = LightningRL(
        Path(model), optimize="writer", group_size=4, tasks_per_step=2, learning_rate=1e-3
    )
    runners = ExternalRunners(4, timeout_s=60)
    trainer = Trainer(algorithm, runners=runners, steps=steps, folder=folder)
    train = [{"q": f"question {number}"} for number in range(6)]
    print(trainer.fit("apart_app:answer", train, resume=resume).summary())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), "--resume" in sys.argv)

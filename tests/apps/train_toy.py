"""A script that trains until tests end it: `train_toy.py FOLDER MODEL STEPS [OVERLAP]
[--resume]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from toy_apps import two  # type: ignore[import-not-found]

from lightspan import LightningRL, LocalRunners, Trainer


def main(folder: str, model: str, steps: str, overlap: str = "0", *, resume: bool) -> None:
    """Train; evaluate before the first step, after the last, and every fifth step."""
    import torch

    torch.set_num_threads(1)
    algorithm = LightningRL(
        Path(model),
        optimize="writer",
        frozen="base",
        group_size=4,
        tasks_per_step=3,
        learning_rate=1e-3,
        overlap=int(overlap),
    )
    runners = LocalRunners(6, processes=2)
    trainer = Trainer(algorithm, runners=runners, steps=int(steps), folder=folder, validate_every=5)
    train = [{"q": f"question {number}"} for number in range(7)]
    val = [{"q": f"held out {number}"} for number in range(4)]
    print(trainer.fit(two, train, val, resume=resume).summary())


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--resume"]
    main(*given, resume="--resume" in sys.argv)

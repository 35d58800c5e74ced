"""A script that trains on two ranks, and whose every step follows from its seed alone:
`train_ranks.py FOLDER MODEL STEPS [--resume]`."""

from __future__ import annotations

import sys
from pathlib import Path

from drilled import Numbers  # type: ignore[import-not-found]
from toy_apps import spell  # type: ignore[import-not-found]

from lightspan import Torch, Trainer


def main(folder: str, model: str, steps: str, *more: str) -> None:
    """Train."""
    import torch

    torch.set_num_threads(1)
    learner = Torch(ranks=2)
    trainer = Trainer(
        Numbers(Path(model)), steps=int(steps), runners=1, folder=folder, learner=learner
    )
    trainer.fit(spell, [{"q": f"question {n}"} for n in range(3)], resume="--resume" in more)


if __name__ == "__main__":
    main(*sys.argv[1:])

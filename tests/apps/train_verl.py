"""A script that trains with verl: `train_verl.py FOLDER MODEL PYTHON RANKS STEPS [--resume]`.

With `--lora` it trains LoRA of rank 8.
"""

from __future__ import annotations

import sys
from pathlib import Path

from toy_apps import spell  # type: ignore[import-not-found]

from lightspan import LightningRL, LocalRunners, LoRA, Trainer, Verl


def main(folder: str, model: str, python: str, ranks: int, steps: int, *more: str) -> None:
    """Train; evaluate before and after."""
    import torch

    torch.set_num_threads(1)
    with_lora = "--lora" in more
    algorithm = LightningRL(
        Path(model),
        optimize="writer",
        group_size=8,
        tasks_per_step=4,
        lora=LoRA(rank=8) if with_lora else None,
        learning_rate=1e-2 if with_lora else 1e-3,
    )
    trainer = Trainer(
        algorithm,
        runners=LocalRunners(8, processes=2),
        steps=steps,
        folder=folder,
        learner=Verl(python=python, ranks=ranks),
    )
    train = [{"q": f"question {number}"} for number in range(32)]
    val = [{"q": f"held out {number}"} for number in range(40)]
    print(trainer.fit(spell, train, val, resume="--resume" in more).summary())


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])

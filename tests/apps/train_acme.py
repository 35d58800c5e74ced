"""A script that trains with plugins of a third party: `train_acme.py FOLDER MODEL`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from toy_apps import spell  # type: ignore[import-not-found]

from lightspan import LightningRL, Trainer

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, model = map(Path, sys.argv[1:])
    algorithm = LightningRL(model, group_size=4, tasks_per_step=2, learning_rate=1e-3)
    trainer = Trainer(
        algorithm,
        engine="acme",
        learner="acme",
        runners="acme",
        store=f"acme://{folder}/acme.db",
        sinks=["acme"],
        steps=2,
        folder=folder,
    )
    tasks = [{"q": f"question {number}"} for number in range(4)]
    print(trainer.fit(spell, tasks, [{"q": "held out"}]).summary())

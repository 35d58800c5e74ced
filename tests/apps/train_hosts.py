"""A script that trains an app of other machines: `train_hosts.py FOLDER MODEL STEPS [ADDRESS]`.

It resumes the run in the folder, if there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightspan import LightningRL, Trainer
from lightspan_cluster import Hosts


def main(folder: str, model: str, steps: str, address: str | None = None) -> None:
    """Train the app `far_app:answer`, which is given by its name."""
    import torch

    torch.set_num_threads(1)
    algorithm = LightningRL(
        Path(model), optimize="writer", group_size=4, tasks_per_step=2, learning_rate=1e-3
    )
    hosts = Hosts(4, address=address, timeout_s=60)
    trainer = Trainer(algorithm, runners=hosts, steps=int(steps), folder=folder)
    train = [{"q": f"question {number}"} for number in range(6)]
    print(trainer.fit("far_app:answer", train, resume=Path(folder).exists()).summary())


if __name__ == "__main__":
    main(*sys.argv[1:])

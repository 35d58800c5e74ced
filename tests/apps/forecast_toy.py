"""`forecast_toy.py dev|fit MODEL FOLDER [RANK [STEPS RUNNERS]]`: what a run was forecast to take,
or took.

In a process of its own, so that its memory is that of the run alone.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from toy_apps import two  # type: ignore[import-not-found]

from lightspan import LightningRL, LoRA, Trainer, Transformers
from lightspan.progress import SilentReporter
from lightspan.reports.dry_run.measurements import peak_bytes


def main(
    what: str, model: str, folder: str, rank: str = "", steps: str = "4", runners: str = "4"
) -> None:
    """Say it."""
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    algorithm = LightningRL(
        Path(model),
        optimize="writer",
        frozen="base",
        group_size=4,
        tasks_per_step=4,
        learning_rate=1e-5,
        lora=LoRA(rank=int(rank)) if rank else None,
    )
    trainer = Trainer(
        algorithm,
        runners=int(runners),
        steps=int(steps),
        folder=folder,
        engine=Transformers(num_blocks=64),
        reporter=SilentReporter(),
    )
    train = [{"q": f"question {number} {'and more ' * 20}"} for number in range(16)]
    val = [{"q": f"held out {number}"} for number in range(4)]
    if what == "dev":
        print(json.dumps(trainer.dev(two, train, val).json()))
        return
    trainer.fit(two, train, val)
    peak = peak_bytes()
    print(json.dumps({"peak_bytes": peak, "seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main(*sys.argv[1:7])

"""Train the toy app by best of n, on a tiny random model: seconds on a CPU.

python examples/own_algorithm/train.py [--folder runs/own] [--steps 6] [--resume]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lightspan import FitResult, RejectionSampling, Trainer
from lightspan.progress import Reporter
from lightspan_testing.tiny import tiny_model
from shouting import shout


def train(
    folder: Path, steps: int = 6, *, resume: bool = False, reporter: Reporter | None = None
) -> FitResult:
    """Train the toy app, with an evaluation before and after training."""
    model = folder.with_name(f"{folder.name}-start")
    if not model.exists():
        tiny_model(model, seed=0)
    algorithm = RejectionSampling(model, tasks_per_step=8, epochs=2, learning_rate=1e-2)
    trainer = Trainer(algorithm, steps=steps, folder=folder, reporter=reporter)
    tasks = [{"question": f"question {number}"} for number in range(64)]
    held_out = [{"question": f"held out {number}"} for number in range(32)]
    return trainer.fit(shout, tasks, held_out, resume=resume)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/own"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    print(train(given.folder, given.steps, resume=given.resume).summary())

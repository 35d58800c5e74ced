"""How far a dry run's forecast of the time is from what the run then takes.

`Trainer.dev` and then `fit` of one small training, full weights and adapters, each in a process of
its own, turn by turn, so that both meet the same machine. The median of the runs' ratios counts;
exit status 1 if a forecast is more than twice too long or too short. What it says of the memory is
held by a test.

Run: python benchmarks/forecast.py [--runs 5] [--json PATH]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from _report import Figure, finish, options_of

from lightspan.testing.tiny import tiny_model

APPS: Final = Path(__file__).resolve().parent.parent / "tests" / "apps"
TIME_FACTOR: Final = 2.0
LEARNERS: Final = {"full weights": (), "adapters of rank 8": ("8",)}


def main() -> int:
    """Measure, print, judge."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--runs", type=int, default=5, help="dry runs and runs of each (5)")
    options = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = tiny_model(folder / "model", seed=0, hidden=384, layers=6, heads=6, scale=0.02)
        for learner, arguments in LEARNERS.items():
            ratios = []
            for number in range(options.runs):
                run = str(folder / f"{len(arguments)}-{number}")
                forecast_s = _said("dev", str(model), run, *arguments)["time"]["total_s"]
                ratios.append(forecast_s / _said("fit", str(model), run, *arguments)["seconds"])
            ratio = statistics.median(ratios)
            figures.append(
                Figure(
                    what=f"time forecast, {learner}",
                    unit="times off",
                    ours=max(ratio, 1 / ratio),
                    at_most=TIME_FACTOR,
                    note=f"forecast / taken: {', '.join(f'{one:.2f}' for one in ratios)}",
                )
            )
    return finish(figures, options.json)


def _said(*arguments: str) -> dict[str, Any]:
    script = [sys.executable, str(APPS / "forecast_toy.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


if __name__ == "__main__":
    sys.exit(main())

"""Record short runs of the SQL example whose metrics test the alerts of a training.

    python benchmarks/alert_histories.py             record all cases into tests/reports/histories
    python benchmarks/alert_histories.py collapse    one case; `--seed 1` with another seed

Needs `lightspan[train]`, the SQL example and its adapter. Each case is the recipe of the example
with a few changes. Of `metrics.jsonl` the figures that alerts read are written, without
evaluations. A case takes one to three minutes of CPU time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightspan import LightningRL, Trainer
from lightspan.progress import PlainReporter
from lightspan_testing.permuted_rewards import Permuted
from sql_example import training

ROOT: Final = Path(__file__).parents[1]
HISTORIES: Final = ROOT / "tests" / "reports" / "histories"
FIGURES: Final = (
    *("kind", "step", "reward", "reward_se", "batch/groups", "batch/scored"),
    *("batch/zero_advantage_rollouts", "batch/trained_tokens", "learner/approx_kl"),
    *("learner/entropy", "learner/learning_rate", "learner/ratio_max", "learner/clip_fraction"),
)
"""Figures of a line that are written, and those that start with `batch/groups:`."""
RATE: Final = 4e-4
"""Default learning rate of the example's model."""
CASES: Final[Mapping[str, tuple[type[LightningRL], float, int, dict[str, Any]]]] = {
    "good": (LightningRL, 1, 20, {}),
    "permuted": (Permuted, 1, 20, {}),
    "rate-x30": (LightningRL, 30, 8, {}),
    "collapse": (LightningRL, 6, 10, {"minibatches": 8}),
}
"""Case → its algorithm, the factor of its learning rate, its steps and its other settings.
`collapse` moves the policy so far in its first step that the reward is lost."""


def record(case: str, seed: int, cache: Path) -> Path:
    """Train a case, write its history, and return the history's path."""
    kind, factor, steps, changes = CASES[case]
    reporter = PlainReporter(sys.stderr)
    recipe = replace(training.RECIPE, steps=steps)
    model, _ = training.warm_start(cache, seed, reporter, recipe)
    options = {**training.rl_options(seed, recipe), **changes}
    if factor != 1:
        options["learning_rate"] = factor * RATE
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            kind(str(model), **options),
            runners=8,
            steps=steps,
            folder=Path(scratch) / "run",
            checkpoint_every=1000,
            reporter=reporter,
        )
        result = trainer.fit(training.answer, training.load_tasks(cache, "train", recipe))
        lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    path = HISTORIES / f"sql-seed{seed}{'' if case == 'good' else f'-{case}'}.jsonl"
    path.write_text("".join(f"{json.dumps(figures(json.loads(line)))}\n" for line in lines))
    return path


def figures(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a line of metrics that are written, rounded to six digits."""
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in line.items()
        if name in FIGURES or name.startswith("batch/groups:")
    }


def main() -> None:
    """Record the cases of the command line."""
    formatter = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("cases", nargs="*", default=[*CASES], metavar="CASE")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=ROOT / "examples" / "sql" / ".cache")
    options = parser.parse_args()
    for case in options.cases:
        print(record(case, options.seed, options.cache))


if __name__ == "__main__":
    main()

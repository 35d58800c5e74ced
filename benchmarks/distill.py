"""Does a trained policy teach a fresh model with fewer rollouts than its own training took?

    python benchmarks/distill.py [--seeds 0] [--json PATH]
    python benchmarks/distill.py --table         the table of the rows so far, without running

Needs `lightspan[train]`, the example of the router and its adapter. Each training appends a row to
the results file when it ends, and the same command goes on with those that are missing; a training
that was killed continues from its last checkpoint.

The design is in docs/evidence/distill.md. `teacher` trains SmolLM2-135M-Instruct by the recipe of
the router (`LightningRL`, 24 steps of 64 rollouts). `distill` begins with the published weights
again, and the policy of `teacher` of the same seed teaches it: one rollout for each of 384
messages, a quarter of the teacher's rollouts, in 24 steps of 16, without a reward. `half` is the
same training after 12 steps. `sampled` does the same as `distill` with the estimate from sampled
tokens, as a server would teach. `start` is the published model. Measured is the reward on the 320
messages of the test, sampled once at the temperature of training, as in docs/evidence/router.md.
The target: `distill` ends at most .05 below `teacher`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import _distill_table as report

ROOT: Final = Path(__file__).parents[1]
CACHE: Final = ROOT / ".cache/distill"
STEPS: Final = 24
TASKS_PER_STEP: Final = 16
MINIBATCHES: Final = 4
RATE: Final = 5e-4
HELD_OUT: Final = 320


def main() -> int:
    """Run the trainings that are missing, and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--arms", nargs="+", default=list(report.ARMS), choices=report.ARMS)
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="messages of the test")
    parser.add_argument("--json", type=Path, default=report.RESULTS, help="results file")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the runs")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    rows = report.rows_of(options.json)
    finished = {(row["arm"], row["seed"]) for row in rows if row["mean"] is not None}
    for seed in options.seeds:
        for arm in options.arms:
            if not options.table and (arm, seed) not in finished:
                print(f"{arm}, seed {seed}: begins", file=sys.stderr, flush=True)
                row = measured(arm, seed, options)
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(report.table(report.rows_of(options.json)))
    return 0


def measured(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate an arm; return its row."""
    for name in ("common", "router"):
        sys.path.append(str(ROOT / "examples" / name))
    import torch

    from lightspan import LightningRL, Trainer, Transformers
    from lightspan.progress import PlainReporter
    from lightspan.training.folder import RunFolder
    from lightspan_torch import Distill
    from router_example import training as app
    from router_example.pretrained import pretrained

    torch.set_num_threads(1)
    say = PlainReporter(sys.stderr)
    model = pretrained(ROOT / "examples/router/.cache", say)
    of_recipe = app.rl_options(seed)
    folder = options.cache / f"{'distill' if arm == 'half' else arm}-{seed}"
    is_student = arm in ("half", "distill", "sampled")
    if is_student:
        changes: dict[str, Any] = {"group_size": 1, "tasks_per_step": TASKS_PER_STEP}
        changes |= {"minibatches": MINIBATCHES, "optimizer": None, "learning_rate": RATE}
        changes |= {"teacher": options.cache / f"teacher-{seed}/model"}
        algorithm: Any = Distill(model, **{**of_recipe, **changes})
        if arm == "sampled":
            algorithm._scorer.score = partial(_without_states, algorithm._scorer.score)
    else:
        algorithm = LightningRL(model, **of_recipe)
    trainer = Trainer(
        algorithm,
        runners=16,
        steps=STEPS // 2 if arm == "half" else STEPS,
        checkpoint_every=4,
        folder=folder,
        engine=Transformers(num_blocks=64),
        cluster="phrasing",
        reporter=say,
    )
    started = time.monotonic()
    cache = ROOT / "examples/router/.cache"
    test = app.load_tasks(cache, "test")[: options.held_out]
    lines: list[dict[str, Any]] = []
    if arm != "start":
        trainer.fit(app.answer, app.load_tasks(cache, "train"), agents=app.AGENTS, resume=True)
        lines = [line for line in RunFolder(folder).metrics() if line["kind"] == "train"]
    evaluation = trainer.evaluate(app.answer, test, resume=arm != "start")
    interval = evaluation.interval
    last = lines[-1] if lines else {}
    return {
        "arm": arm,
        "seed": seed,
        "rollouts": int(sum(line["rollouts"] for line in lines)),
        "mean": round(evaluation.mean, 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "held_out": len(test),
        "engine_s": round(last.get("cpu_s/engine", 0.0), 1),
        "learner_s": round(last.get("cpu_s/learner", 0.0), 1),
        "wall_s": round(time.monotonic() - started),
        "reverse_kl": [round(line["distill/reverse_kl"], 4) for line in lines if is_student],
        "reward": [round(line["reward"], 4) for line in lines],
        "commit": _commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


async def _without_states(score: Any, *arguments: Any) -> Any:
    """Return a local teacher's scores as a server's, which has only those of sampled tokens."""
    return (await score(*arguments))._replace(states=None)


def _commit() -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return run.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())

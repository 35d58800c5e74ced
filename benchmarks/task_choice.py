"""Which tasks should rollouts be spent on? Adaptive tasks, dynamic sampling and replay, compared.

    python benchmarks/task_choice.py [--seeds 0 1 2] [--sets mixed letter_counting] [--json PATH]
    python benchmarks/task_choice.py --table         the table of the rows so far, without running

Needs `lightspan[train]`, the folder examples/common and, for two of the three sets, reasoning-gym
0.1.25. Each training appends a row to the results file when it ends, and the same command goes on
with those that are missing.

The design, written before the first run. A small model (0.7 million parameters) imitates flawed
demonstrations of a set once, and every training begins with it. The sets are

- `mixed`: 42 easy tasks (the first of three digits: all demonstrations right), 42 tasks of the
  right difficulty (the largest, 0.4 of the demonstrations wrong, and the smallest, 0.7 wrong) and
  42 hopeless ones (a product of three-digit numbers, all demonstrations wrong);
- `family_relationships` and `letter_counting` of reasoning-gym in their easiest settings, 126 tasks
  each, half of the demonstrations wrong.

A training has 2,048 rollouts: 32 steps of 8 tasks with 8 rollouts, so that shuffled order runs each
task about twice. All other settings are the defaults of `LightningRL`. The arms are `shuffled`,
`adaptive` (`tasks="adaptive"`), `resample` (`resample=3`, which stops when its rollouts are used
up, so it has fewer steps) and `replay` (`replay=Replay()`, which adds rows to updates, no
rollouts). Seeds are paired: the arms of a seed share the warm start, the tasks and the seed of
`LightningRL`.

A pilot had 48 tasks, 1,536 rollouts and a fixed uniform prior of the adaptive order. No arm of it
gained on held-out tasks, because so few tasks were learned by heart, and the prior predicted far
too few groups without a gradient. Its rows are in `results/task_choice_pilot.jsonl`; then the
numbers above were chosen, and the prior became that of the tasks.

Measured is the reward after training on 320 held-out tasks whose questions are in no training, all
of the right difficulty, sampled once at temperature 1. For `mixed`, 40 easy and 40 hopeless
held-out tasks are reported too. Before training, the same tasks are evaluated once. The main figure
of an arm is the mean over seeds of its difference from `shuffled`, with Student's 95 % interval.
A setting becomes a default only if this interval is above 0 for `mixed` and not below 0 for the
other two; the table is reported whole. Beside each row stands the score of the best constant answer
and the share of groups without a gradient, observed and as predicted for the drawn tasks and for
shuffled order.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import _task_choice_app as app
from _journal import Journal, Key
from _task_choice_table import ARMS, SHARES, rows_of, table

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks/results/task_choice.jsonl"
CACHE: Final = ROOT / ".cache/task_choice"
START: Final = "start"
TASKS: Final = 126
STEPS, TASKS_PER_STEP, GROUP_SIZE = 32, 8, 8
ROLLOUTS: Final = STEPS * TASKS_PER_STEP * GROUP_SIZE
HELD_OUT: Final = 320
OTHERS: Final = 40
"""Held-out tasks of each kind that is not of the right difficulty."""
DEMONSTRATIONS: Final = {app.MIXED: 4_800, "family_relationships": 4_800, "letter_counting": 4_800}


def main() -> int:
    """Run the trainings that are missing, and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--sets", nargs="+", default=list(app.SETS), choices=app.SETS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--json", type=Path, default=RESULTS, help="results file")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the warm starts")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    journal = Journal(options.json, design=design())
    keys = [Key(name, START, "rollout", 0) for name in options.sets]
    keys += [
        Key(name, arm, "rollout", seed)
        for seed in options.seeds
        for name in options.sets
        for arm in options.arms
    ]
    for key in [] if options.table else journal.left(keys):
        print(f"{key}: begins", file=sys.stderr, flush=True)
        journal.add(run(key, options.cache))
    print(table(rows_of(options.json)))
    return 0


def design() -> str:
    """Return a digest of the design: the docstring, the numbers above, and the tasks."""
    numbers = (TASKS, STEPS, TASKS_PER_STEP, GROUP_SIZE, HELD_OUT, OTHERS, DEMONSTRATIONS)
    source = Path(app.__file__).read_text("utf-8")
    return hashlib.sha256(f"{__doc__}{numbers}{source}".encode()).hexdigest()[:12]


# --- one training -------------------------------------------------------------------------------
def run(key: Key, cache: Path) -> dict[str, Any]:
    """Train and evaluate an arm; return its row, or one with the error."""
    row: dict[str, Any] = {**key._asdict(), "settings": GROUP_SIZE, "arm": key.rule}
    started, cpu = time.monotonic(), _cpu_s()
    try:
        with tempfile.TemporaryDirectory(prefix="task-choice-") as folder:
            row |= measured(key, cache, Path(folder) / "run")
    except Exception as error:
        return {**row, "warm_start": "", "error": f"{type(error).__name__}: {error}"[:300]}
    return {**row, "wall_s": round(time.monotonic() - started), "cpu_s": round(_cpu_s() - cpu, 1)}


def measured(key: Key, cache: Path, folder: Path) -> dict[str, Any]:
    """Return what a training, or the start, reached."""
    import torch

    from lightspan import LightningRL, LocalRunners, Replay, Trainer
    from lightspan.progress import SilentReporter
    from lightspan.training.folder import RunFolder

    torch.set_num_threads(1)

    class Bounded(LightningRL):
        """An algorithm whose steps do nothing once its rollouts are used up."""

        rollouts_left = ROLLOUTS

        async def run_step(self, trainer: Any) -> dict[str, float]:
            if self.rollouts_left < TASKS_PER_STEP * GROUP_SIZE:
                return {"rollouts": 0, "scored": 0, "failed": 0}
            metrics = await super().run_step(trainer)
            self.rollouts_left -= int(metrics["rollouts"])
            return metrics

    given: dict[str, dict[str, Any]] = {
        "adaptive": {"tasks": "adaptive"},
        "resample": {"resample": 3},
        "replay": {"replay": Replay()},
    }
    model = warm_start(key.task, cache)
    algorithm = Bounded(
        model,
        optimize="solver",
        group_size=GROUP_SIZE,
        tasks_per_step=TASKS_PER_STEP,
        seed=key.seed,
        **given.get(key.rule, {}),
    )
    trainer = Trainer(
        algorithm,
        runners=LocalRunners(32, processes=1),
        steps=STEPS,
        checkpoint_every=STEPS,
        folder=folder,
        reporter=SilentReporter(),
    )
    held_out = held_out_tasks(key.task)
    questions = frozenset(task["question"] for task in held_out)
    lines = []
    if not key.is_start:
        trainer.fit(app.answer, app.tasks(key.task, "train", TASKS, avoid=questions))
        lines = [line for line in RunFolder(folder).metrics() if line.get("rollouts")]
    evaluation = trainer.evaluate(app.answer, held_out, resume=not key.is_start)
    by_kind = defaultdict(list)
    for task in held_out:
        reward = evaluation.rewards.get(task["id"])
        by_kind[task["kind"]].append(0.0 if reward is None else reward)
    constants = Counter(task["answer"] for task in held_out if task["kind"] == "right")
    return {
        "warm_start": _digest(Path(model)),
        "held_out": {
            **{kind: fmean(rewards) for kind, rewards in by_kind.items()},
            "scored": len(evaluation.rewards),
            "unscored": evaluation.unscored,
        },
        "constant": max(constants.values()) / constants.total(),
        "training": training_row(lines),
    }


def held_out_tasks(name: str) -> list[dict[str, Any]]:
    """Return the held-out tasks of a set, with ids."""
    kinds = {"right": HELD_OUT}
    kinds |= dict.fromkeys(("easy", "hopeless"), OTHERS) if name == app.MIXED else {}
    found = [task for kind, n in kinds.items() for task in app.tasks(name, "test", n, (kind,))]
    return [{**task, "id": f"held out {number}"} for number, task in enumerate(found)]


def training_row(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return sums and courses of the training steps; None without a step."""
    if not lines:
        return None
    courses = ["reward", "batch/rows", "replay/groups", "replay/age", "replay/row_share"]
    courses += [f"tasks/zero_gradient{share}" for share in SHARES]
    return {
        "scored": int(sum(line["scored"] for line in lines)),
        "unscored": int(sum(line["rollouts"] - line["scored"] for line in lines)),
        "rollouts": int(sum(line["rollouts"] for line in lines)),
        "steps": len(lines),
        "learner_s": round(lines[-1].get("cpu_s/learner", 0.0), 2),
        **{name: [round(line[name], 4) for line in lines] for name in courses if name in lines[-1]},
    }


def warm_start(name: str, cache: Path) -> str:
    """Return the folder of the model that has imitated the demonstrations of a set."""
    sys.path.append(str(ROOT / "examples/common"))
    from lightspan.progress import SilentReporter
    from lightspan_examples import small_model
    from lightspan_examples.recipe import Imitation
    from lightspan_examples.warm_start import make_sft

    folder = cache / f"{design()}-{name}"
    if not (folder / "complete").exists():
        count = DEMONSTRATIONS[name]
        chats = app.demonstrations(name, count)
        base = cache / f"{folder.name}-untrained"
        small_model.build_model(base, chats[:3000], seed=0, vocabulary=896, context=512)
        sft = make_sft(base, 0, Imitation(demonstrations=count))
        sft.fit(chats, folder, reporter=SilentReporter(), resume=True)
        (folder / "complete").touch()
    return str(folder)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    raise SystemExit(main())

"""Which defaults of LightningRL learn best, at equal rollouts? (docs/evidence/defaults.md)

    python benchmarks/defaults.py --stage screening            all runs of the stage that are left
    python benchmarks/defaults.py --stage screening --tasks gcd --arms today minibatches-4 --seeds 0
    python benchmarks/defaults.py --stage screening --minutes 60      begin no run after an hour
    python benchmarks/defaults.py --stage confirmation --chosen minibatches-4
    python benchmarks/defaults.py --report         write the tables, and say what has not been run

What is compared, why, and how it is judged was written before any run: see
docs/evidence/defaults.md, with the numbers in `_defaults_plan.py`. Each run is a line of
benchmarks/results/defaults.jsonl, which is committed, so the same command continues where it
stopped, also on another day. `--report` prints the tables and writes them to defaults.json beside
that file, for benchmarks/tables.py.

Screening runs all arms on development tasks. Confirmation runs the arm that screening chose,
today's defaults and the control on test tasks, with other seeds. Its table alone may change a
default.

The tasks of others need reasoning-gym 0.1.25 and textworld 1.7.0 beside lightspan[train], those of
SmolLM2 the router's pretrained model, and the examples their frameworks. Tasks that cannot run here
are left out, and said.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib
import json
import math
import os
import platform
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from _defaults_plan import (
    ARMS,
    HELD_OUT,
    STAGES,
    TASKS,
    TODAY,
    Key,
    TaskPlan,
    design,
    runs,
)
from _defaults_table import stage_report
from _report import commit
from credit import evenly
from learning import ROOT, SAY, subject_of

from lightspan import LightningRL, LoRA, PolicyLoss, Trainer
from lightspan.training.folder import RunFolder
from lightspan.training.results import Evaluation, FitResult
from lightspan_testing.permuted_rewards import Permuted

RESULTS: Final = ROOT / "benchmarks" / "results" / "defaults.jsonl"
CACHE: Final = ROOT / ".cache" / "defaults"
MAX_TRIES: Final = 2
"""A run is given up after as many errors."""
NEEDS: Final = {"reasoning": "reasoning_gym", "textworld": "textworld"}
"""Kind of a task → the module that it needs."""
FRAMEWORKS: Final = {
    "sql": "langgraph",
    "math": "autogen_agentchat",
    "rag": "agents",
    "quest": "langgraph",
}
TRAIN_TASKS: Final = 384
"""Training tasks of reasoning-gym: as many as the arm with the smallest groups needs."""
TRAIN_GAMES: Final = 128


# --- tasks ----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Subject:
    """The app and data of one task in one stage."""

    app: Any
    train: Sequence[Any]
    held_out: Sequence[Any]
    model: Callable[[int], Path]
    """Function seed → folder of the weights to start with."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of LightningRL that belong to the app and not to the comparison."""
    cluster: str | None = None
    constant: Callable[[], tuple[str, float]]
    """Function that returns the best constant answer and its score."""


def load_subject(task: str, split: str, cache: Path) -> Subject:
    """Return the app and the data of a task.

    Args:
        task: key of `TASKS`.
        split: split of the held-out tasks, `dev` or `test`.
        cache: folder of games and warm starts.
    """
    plan = TASKS[task]
    load = {"reasoning": _reasoning, "textworld": _textworld, "example": _example}[plan.kind]
    return load(task, split, cache, plan)


def _reasoning(task: str, split: str, cache: Path, plan: TaskPlan) -> Subject:
    import _reasoning_tasks as tasks

    held_out = {"test": tasks.make_tasks(task, "test", HELD_OUT)}
    other = tasks.questions_of(held_out["test"])
    held_out["dev"] = tasks.make_tasks(task, "dev", HELD_OUT, without=other)
    unseen = other | tasks.questions_of(held_out["dev"])
    train = tasks.make_tasks(task, "train", TRAIN_TASKS, without=unseen)

    def chats(count: int, seed: int) -> list[dict[str, Any]]:
        return tasks.demonstrations(task, count, seed, plan.wrong, without=unseen)

    return Subject(
        app=tasks.answer,
        train=train,
        held_out=held_out[split],
        model=_warm_start(task, cache, plan, chats),
        constant=lambda: tasks.constant_score(held_out[split]),
    )


def _textworld(task: str, split: str, cache: Path, plan: TaskPlan) -> Subject:
    import _textworld_task as games

    folder = cache / "games"
    train = games.make_tasks(folder, "train", TRAIN_GAMES)
    held_out = games.make_tasks(folder, split, HELD_OUT)

    def chats(count: int, seed: int) -> list[dict[str, Any]]:
        return games.demonstrations(train, count, seed, plan.wrong)

    return Subject(
        app=games.play,
        train=train,
        held_out=held_out,
        model=_warm_start(task, cache, plan, chats),
        constant=lambda: ("random commands", games.chance(held_out)),
    )


def _example(task: str, split: str, cache: Path, plan: TaskPlan) -> Subject:
    del cache
    subject = subject_of(task)
    code = importlib.import_module(subject.training)
    folder = ROOT / "examples" / (subject.folder or task) / ".cache"
    recipe = replace(code.RECIPE, steps=plan.steps)
    train = code.load_tasks(folder, "train", recipe)
    held_out = evenly(code.load_tasks(folder, split, recipe), HELD_OUT, subject.cluster)
    kept = ("optimize", "frozen", "temperature", "failure_reward")
    options = {k: v for k, v in code.rl_options(0, recipe).items() if k in kept}

    def constant() -> tuple[str, float]:
        scores = subject.constant(train, held_out, folder)
        best = max(scores, key=lambda text: scores[text])
        return best, scores[best]

    return Subject(
        app=code.answer,
        train=train,
        held_out=held_out,
        model=lambda seed: code.warm_start(folder, seed, SAY, recipe)[0],
        options=options,
        cluster=subject.cluster,
        constant=constant,
    )


def _warm_start(
    task: str, cache: Path, plan: TaskPlan, chats: Callable[[int, int], list[dict[str, Any]]]
) -> Callable[[int], Path]:
    """Return the function seed → weights: SmolLM2, or the small model after demonstrations."""

    def model(seed: int) -> Path:
        if plan.model == "smollm2":
            from router_example.pretrained import pretrained

            return pretrained(ROOT / "examples" / "router" / ".cache", SAY)
        settings = {"demonstrations": plan.demonstrations, "wrong": plan.wrong}
        name = hashlib.sha256(json.dumps([task, settings]).encode()).hexdigest()[:8]
        folder = cache / "warm" / f"{task}-{name}-{seed}"
        if not (folder / "complete").exists():
            _imitate(folder, chats(plan.demonstrations, seed), seed)
            (folder / "complete").touch()
        return folder

    return model


def _imitate(folder: Path, chats: Sequence[Mapping[str, Any]], seed: int) -> None:
    """Train a small model on chats, in one pass, as the examples do."""
    from lightspan_examples import small_model
    from lightspan_examples.recipe import Imitation
    from lightspan_examples.warm_start import TOKENIZER_CHATS, make_sft

    settings = Imitation(demonstrations=len(chats))
    with tempfile.TemporaryDirectory() as base:
        small_model.build_model(
            base,
            chats[:TOKENIZER_CHATS],
            seed=seed,
            vocabulary=settings.vocabulary,
            context=settings.context,
        )
        make_sft(Path(base), seed, settings).fit(chats, folder, reporter=SAY)


# --- arms -----------------------------------------------------------------------------------
def algorithm_of(key: Key, model: Path, options: Mapping[str, Any]) -> LightningRL:
    """Return the algorithm of a run.

    Args:
        key: the run.
        model: weights to start with.
        options: arguments that belong to the app.
    """
    arm, kind = ARMS[key.arm], Permuted if ARMS[key.arm].permuted else LightningRL
    settings = {**options, **arm.options, "seed": key.seed}
    if arm.lora or TASKS[key.task].model == "smollm2":
        settings["lora"] = LoRA()
    if arm.clip_high is not None:
        settings["loss"] = PolicyLoss(clip_high=arm.clip_high)
    plain = kind(str(model), **settings)
    if (arm.rate, arm.warmup) == (1.0, 0):
        return plain
    changed = msgspec.structs.replace(
        plain.optimizer,
        learning_rate=plain.optimizer.learning_rate * arm.rate,
        warmup_steps=arm.warmup,
    )
    return kind(str(model), **settings, optimizer=changed)


class Bench:
    """Make the runs of one stage, and append their rows to a file."""

    def __init__(self, journal: Journal, cache: Path, scratch: Path) -> None:
        self._journal = journal
        self._cache = cache
        self._scratch = scratch
        self._subjects: dict[tuple[str, str], Subject] = {}

    def run(self, key: Key) -> bool:
        """Run an arm and append its row; return whether there was no error."""
        SAY.line(f"{key}: begins")
        started, row = time.monotonic(), {}
        try:
            row = self._measure(key)
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".replace(str(ROOT), ".")
            row = {"error": said.replace(str(Path.home()), "~")[:500]}
        wall = round(time.monotonic() - started, 1)
        self._journal.add({**key._asdict(), **row, "wall_s": wall, **circumstances()})
        SAY.line(f"{key}: {row.get('error') or row['end']['mean']} in {wall:.0f} s")
        return "error" not in row

    def _subject(self, key: Key) -> Subject:
        split = STAGES[key.stage].split
        if (key.task, split) not in self._subjects:
            subject = load_subject(key.task, split, self._cache)
            self._subjects[key.task, split] = subject
            if not self._journal.constant(key.stage, key.task):
                text, score = subject.constant()
                found = {"constant": text, "score": round(score, 4), "n": len(subject.held_out)}
                self._journal.add({"stage": key.stage, "task": key.task, **found})
        return self._subjects[key.task, split]

    def _measure(self, key: Key) -> dict[str, Any]:
        subject = self._subject(key)
        model = subject.model(key.seed)
        algorithm = algorithm_of(key, model, subject.options)
        before = cpu_s()
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            trainer = Trainer(
                algorithm,
                runners=16,
                steps=ARMS[key.arm].steps(TASKS[key.task].steps),
                folder=Path(folder) / "run",
                validate_every=10**6,  # before the first step and after the last
                checkpoint_every=10**6,
                cluster=subject.cluster,
                reporter=SAY,
            )
            result = trainer.fit(subject.app, subject.train, subject.held_out)
            after = cpu_s()
            names = [task["id"] for task in subject.held_out]
            first, last = result.evaluations[0], result.evaluations[-1]
            return {
                "warm_start": weights_digest(model),
                "learning_rate": algorithm.optimizer.learning_rate,
                "start": held_out_of(first, names),
                "end": held_out_of(last, names),
                "clusters": cluster_numbers(last, names),
                "training": training_of(result),
                "cpu_s": {
                    "engine": round(result.seconds["engine"], 1),
                    "learner": round(result.seconds["learner"], 1),
                    "process": round(after[0] - before[0], 1),
                    "children": round(after[1] - before[1], 1),
                },
            }


def held_out_of(evaluation: Evaluation, names: Sequence[str]) -> dict[str, Any]:
    """Return the mean and all rewards of an evaluation.

    Args:
        evaluation: the evaluation.
        names: ids of the held-out tasks. The rewards are in their order; None has no reward.
    """
    found = [evaluation.rewards.get(name) for name in names]
    return {
        "mean": round(evaluation.mean, 4),
        "exact": evaluation.dimensions.get("dimension/exact"),
        "unscored": evaluation.unscored,
        "failed": evaluation.failed,
        "rewards": [_compact(reward) for reward in found],
    }


def _compact(reward: float | None) -> float | None:
    """Return a reward rounded, as a whole number if it is one, which is shorter in the file."""
    if reward is None:
        return None
    return int(reward) if reward == int(reward) else round(reward, 3)


def cluster_numbers(evaluation: Evaluation, names: Sequence[str]) -> list[int]:
    """Return the number of each task's cluster, in the order of `names`; [] without clusters."""
    numbers: dict[str, int] = {}
    found = [evaluation.clusters.get(name, name) for name in names] if evaluation.clusters else []
    return [numbers.setdefault(name, len(numbers)) for name in found]


def training_of(result: FitResult) -> dict[str, Any]:
    """Return figures of each step, and sums over all of them."""
    lines = [line for line in RunFolder(result.folder).metrics() if line["kind"] == "train"]

    def course(name: str) -> list[float]:
        return [float(f"{line[name]:.4g}") for line in lines if name in line]

    return {
        "reward": course("reward"),
        "approx_kl": course("learner/approx_kl"),
        "ratio_max": max(course("learner/ratio_max"), default=None),
        "clip_fraction": course("learner/clip_fraction"),
        "kl_skipped": sum(course("learner/kl_skipped")),
        "rollouts": sum(int(line["rollouts"]) for line in lines),
        "failed": sum(int(line["failed"]) for line in lines),
    }


def weights_digest(model: Path) -> str:
    """Return a digest of the weights in a folder."""
    hashed = hashlib.sha256()
    for file in sorted(Path(model).glob("*.safetensors")):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:12]


def cpu_s() -> tuple[float, float]:
    """Return the CPU seconds of this process, and of its ended children: the runners."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return used[0].ru_utime + used[0].ru_stime, used[1].ru_utime + used[1].ru_stime


def circumstances() -> dict[str, Any]:
    """Return date, commit, machine and versions of a run."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(but="benchmarks/results"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": round(os.getloadavg()[2], 1),
        "torch": torch.__version__,
    }


# --- the results ----------------------------------------------------------------------------
class Journal:
    """The rows of a results file, each of which is written at the end of its run.

    Args:
        path: the file, which is created with the first row.

    Raises:
        SystemExit: the file has a row of another design.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(self.rows, 1):
            if row["design"] != design():
                raise SystemExit(
                    f"{path}:{number} is of the design {row['design']}, and this is {design()}: "
                    "name another file"
                )

    def left(self, keys: Sequence[Key]) -> list[Key]:
        """Return those of `keys` that have to be run."""
        named = [row for row in self.rows if "arm" in row]
        done = {Key.of(row) for row in named if "error" not in row}
        errors = [Key.of(row) for row in named if "error" in row]
        return [key for key in keys if key not in done and errors.count(key) < MAX_TRIES]

    def constant(self, stage: str, task: str) -> dict[str, Any] | None:
        """Return the row with the score of a constant answer; None if there is none."""
        found = (
            r for r in self.rows if "constant" in r and (r["stage"], r["task"]) == (stage, task)
        )
        return next(found, None)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row to the file, as a whole or not at all."""
        whole = {"design": design(), **row}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(whole, separators=(",", ":")) + "\n")
        self.rows.append(whole)


# --- the command ----------------------------------------------------------------------------
def main() -> int:
    """Make the runs that are left, or print the report; return the exit status."""
    options = _parser().parse_args()
    journal = Journal(options.json)
    if options.report:
        parts = {stage: stage_report(journal.rows, stage) for stage in STAGES}
        options.json.with_suffix(".json").write_text(json.dumps({"stages": parts}, indent=2) + "\n")
        print("\n\n".join(f"### {stage.title()}\n\n{text}" for stage, text in parts.items()))
        return 0
    chosen = [
        key
        for key in runs(options.stage, options.chosen)
        if (options.tasks is None or key.task in options.tasks)
        and (options.arms is None or key.arm in options.arms)
        and (options.seeds is None or key.seed in options.seeds)
    ]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        return run_all(_runnable(chosen), Bench(journal, options.cache, Path(scratch)), options)


def run_all(keys: Sequence[Key], bench: Bench, options: argparse.Namespace) -> int:
    """Make those of `keys` that are left, until `options.minutes` are over.

    Returns:
        1 if two runs in a row ended with an error, after which no further run begins; else 0.
    """
    started, failed = time.monotonic(), 0
    for key in Journal(options.json).left(keys):
        if time.monotonic() - started >= 60 * options.minutes:
            SAY.line(f"{options.minutes:g} minutes are over: no further run is begun")
            return 0
        failed = 0 if bench.run(key) else failed + 1
        if failed == 2:
            SAY.line("two runs in a row ended with an error: see to it, then go on")
            return 1
    return 0


def _runnable(keys: Sequence[Key]) -> list[Key]:
    """Return the runs whose packages are installed; print the tasks that are left out."""
    missing: dict[str, str] = {}
    for task in dict.fromkeys(key.task for key in keys):
        needs = NEEDS.get(TASKS[task].kind) or FRAMEWORKS[task]
        if find_spec(needs) is None:
            missing[task] = needs
    for task, needs in missing.items():
        SAY.line(f"left out: {task} needs {needs}, which is not in this environment")
    return [key for key in keys if key.task not in missing]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=list(STAGES), default="screening")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="(all)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="(all of the stage)")
    parser.add_argument("--seeds", nargs="+", type=int, help="(all of the stage)")
    others = [name for name in ARMS if name != TODAY]
    parser.add_argument("--chosen", choices=others, help="the arm that screening chose")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no run after so many"
    )
    parser.add_argument("--report", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--json", type=Path, default=RESULTS, help="(benchmarks/results/defaults.jsonl)"
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="games and warm starts (.cache/defaults)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

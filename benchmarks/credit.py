"""Does any rule of credit train better than the final reward? (docs/explain/credit.md)

    python benchmarks/credit.py                       all runs that are left and can be run here
    python benchmarks/credit.py --task quest --minutes 60     begin no run after an hour
    python benchmarks/credit.py --rule terminal anchor --seed 0 1
    python benchmarks/credit.py --world               six seeds of two rules on the quest
    python benchmarks/credit.py --list                what is done and what is left, and how long
    python benchmarks/credit.py --table               the table, as Markdown; of some tasks and
                                                      rules with --task and --rule

What is compared, why, and how it is judged was written before any run: see
docs/evidence/credit-comparison.md, with the numbers in `_credit_plan.py`. Each run is a line of
benchmarks/results/credit.jsonl, which is committed, so the same command continues where it stopped,
also on another day. Each framework has an environment of its own (`nox -s credit` uses all of
them); tasks whose framework is not installed are left out. Results of another design, of other
settings or of another warm start are refused. Several processes may run at the same time with
different --task.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import math
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from _credit_plan import (
    ALL_RULES,
    PLANS,
    SEEDS,
    START,
    WORLD,
    Plan,
    design,
    digest,
    every_run,
    options_of,
    world_keys,
)
from _credit_table import listed, narrowed, table
from _journal import Journal, Key
from _report import commit
from learning import ROOT, SAY, children_cpu, subject_of

from lightspan import LightningRL, Trainer
from lightspan.training.folder import RunFolder
from lightspan.training.results import Evaluation, FitResult

RESULTS: Final = ROOT / "benchmarks" / "results" / "credit.jsonl"
LATER: Final = {"overlap": 0, "target_kl": None}
"""Options of LightningRL that were added after the first results, with the value that corresponds
to the behaviour before. With this value they are left out of an arm's description."""
LATER_OF_LOSS: Final = {"form": "clip", "importance_level": "token"}
"""The same for settings of `PolicyLoss`."""


# --- runs ---------------------------------------------------------------------------------------
class Bench:
    """The data of one task, and its runs.

    Args:
        plan: what is run; None for the design's plan.
        recipe: the settings; None for those of the example.
        split: split of the held-out tasks.
    """

    def __init__(
        self,
        task: str,
        cache: Path,
        scratch: Path,
        *,
        plan: Plan | None = None,
        recipe: Any = None,
        split: str = "test",
    ) -> None:
        self.task = task
        self.plan = plan or PLANS[task]
        self._subject = subject_of(task)
        self._cache = cache
        self._scratch = scratch
        self._code = importlib.import_module(self._subject.training)
        self.recipe = replace(recipe or self._code.RECIPE, steps=self.plan.steps)
        self._train = self._code.load_tasks(cache, "train", self.recipe)
        held_out = self._code.load_tasks(cache, split, self.recipe)
        self.held_out = evenly(held_out, self.plan.held_out, self._subject.cluster)
        self._warm: dict[int, tuple[Path, str]] = {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that all arms of the task share, as data."""
        data = (self._train, self.held_out)
        return {
            "recipe": asdict(self.recipe),
            "steps": self.plan.steps,
            "cluster": self._subject.cluster,
            "train, held out": [[_portable(task) for task in tasks] for tasks in data],
        }

    def warm_start(self, seed: int) -> tuple[Path, str]:
        """Return the weights with which all arms of a seed start, and their digest."""
        if seed not in self._warm:
            model, _ = self._code.warm_start(self._cache, seed, SAY, self.recipe)
            hashed = hashlib.sha256()
            for file in sorted(Path(model).glob("*.safetensors")):
                hashed.update(file.read_bytes())
            self._warm[seed] = (model, hashed.hexdigest()[:12])
        return self._warm[seed]

    def run(self, key: Key, journal: Journal) -> bool:
        """Run one arm and seed, and write its row; return whether there was no error.

        After an error, the row has the error's text.
        """
        started = time.monotonic()
        row: dict[str, Any] = {**key._asdict(), "settings": digest(self.settings)}
        journal.check(row)
        model, row["warm_start"] = self.warm_start(key.seed)
        algorithm = self._algorithm(key, model)
        row["arm"] = digest(_described(algorithm))
        row["learning_rate"] = algorithm.optimizer.learning_rate
        journal.check(row)
        SAY.line(f"{key}: begins")
        try:
            with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
                found = self._measure(key, algorithm, Path(folder) / "run")
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".replace(str(ROOT), ".")
            found = {"error": said.replace(str(Path.home()), "~")[:500]}
        seconds = {**found.pop("seconds", {}), "all": round(time.monotonic() - started, 1)}
        journal.add({**row, **found, "seconds": seconds, **_where()})
        SAY.line(f"{key}: {_said(found)} in {seconds['all'] / 60:.1f} minutes")
        return "error" not in found

    def _algorithm(self, key: Key, model: Path) -> LightningRL:
        changes = {} if key.is_start else options_of(key.task, key.rule, key.unit)
        options = {**self._code.rl_options(key.seed, self.recipe), **changes}
        return LightningRL(str(model), **options)

    def _measure(self, key: Key, algorithm: LightningRL, folder: Path) -> dict[str, Any]:
        before, started = children_cpu(), time.monotonic()
        trainer = Trainer(
            algorithm,
            runners=16,
            steps=self.plan.steps,
            folder=folder,
            checkpoint_every=1000,  # and after the last step, which is what is evaluated
            cluster=self._subject.cluster,
            reporter=SAY,
        )
        result = None if key.is_start else trainer.fit(self._code.answer, self._train)
        trained = time.monotonic()
        evaluation = trainer.evaluate(self._code.answer, self.held_out, resume=result is not None)
        return {
            "training": None if result is None else _training(result),
            "held_out": self._held_out(evaluation),
            "seconds": {
                "training": round(trained - started, 1),
                "evaluation": round(time.monotonic() - trained, 1),
                "apps_cpu": round(children_cpu() - before, 1),
                **({} if result is None else _rounded(result.seconds)),
            },
        }

    def _held_out(self, evaluation: Evaluation) -> dict[str, Any]:
        """Return the sum and the number of the rewards, and all rewards by cluster.

        The rewards of a cluster are in the order of its tasks.
        """
        rewards: dict[str, list[float | None]] = {}
        for number, task in enumerate(self.held_out):
            cluster = self._subject.cluster
            name = str(number) if cluster is None else str(task[cluster])
            found = evaluation.rewards.get(task["id"])
            rewards.setdefault(name, []).append(None if found is None else round(found, 6))
        return {
            "sum": round(math.fsum(evaluation.rewards.values()), 6),
            "scored": len(evaluation.rewards),
            "unscored": evaluation.unscored,
            "failed": evaluation.failed,
            "rewards": rewards,
        }


def evenly(tasks: Sequence[Any], count: int, cluster: str | None) -> list[Any]:
    """Return the first `count` tasks, as many of each cluster.

    `cluster` is the key of a task that names its cluster; None if there are no clusters.
    """
    if cluster is None:
        return list(tasks[:count])
    groups: dict[Any, list[Any]] = {}
    for task in tasks:
        groups.setdefault(task[cluster], []).append(task)
    ranked = [(place, task) for group in groups.values() for place, task in enumerate(group)]
    return [task for _, task in sorted(ranked, key=lambda each: each[0])][:count]


def _portable(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task without the path of its data on this machine."""
    return {name: value for name, value in task.items() if name != "data"}


def _described(algorithm: LightningRL) -> dict[str, Any]:
    """Return an arm's settings, without the path of the weights and the seed."""
    config = algorithm.config()
    later = [name for name, before in LATER.items() if config[name] == before]
    loss = {k: v for k, v in config["loss"].items() if (k, v) not in LATER_OF_LOSS.items()}
    left_out = ("model", "seed", *later)
    return {name: value for name, value in {**config, "loss": loss}.items() if name not in left_out}


def _training(result: FitResult) -> dict[str, Any]:
    """Return the sum of unshaped rewards and the number of scored rollouts of each step."""
    lines = [line for line in RunFolder(result.folder).metrics() if line["kind"] == "train"]
    steps = [(line.get("reward", 0.0) * line["scored"], line["scored"]) for line in lines]
    return {
        "steps": [[round(total, 6), int(scored)] for total, scored in steps],
        "scored": result.outcomes.rollouts - result.outcomes.unscored,
        "unscored": result.outcomes.unscored,
        "failed": result.outcomes.failed,
        "calls": sum(int(line["calls"]) for line in lines),
    }


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in seconds.items()}


def _where() -> dict[str, Any]:
    """Return date, commit, versions and machine of a run."""
    names = ("lightspan", "torch", "transformers")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(but="benchmarks/results"),
        "versions": {"python": platform.python_version(), **{n: version(n) for n in names}},
        "cores": os.cpu_count(),
        "processor": platform.machine(),
    }


def _said(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    held_out = found["held_out"]
    return f"held-out reward {held_out['sum'] / max(1, held_out['scored']):.3f}"


# --- the command --------------------------------------------------------------------------------
def main() -> int:
    """Run what is left, or print what `--list` or `--table` asks for; return the exit status."""
    parser = _parser()
    options = parser.parse_args()
    journal = Journal(options.results, digest(design()))
    if options.table:
        print(table(journal, SEEDS, narrowed(options.task, options.rule)))
        return 0
    chosen = _chosen(options)
    if not chosen:
        parser.error("no run of the comparison has these tasks, rules, units and seeds")
    if options.list:
        print("\n".join(listed(chosen, journal)))
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        run_all(_runnable(chosen), journal, Path(scratch), options)
    print("\n".join(listed(chosen, journal)))
    return 0


def run_all(
    chosen: Sequence[Key], journal: Journal, scratch: Path, options: argparse.Namespace
) -> None:
    """Run those of `chosen` that are left, until `options.minutes` are over.

    Raises:
        SystemExit: two runs in a row ended with an error.
    """
    started = time.monotonic()
    benches: dict[str, Bench] = {}
    failed = 0
    for key in [*chosen, *chosen]:  # what failed once is tried again after the others
        journal.read()  # another session may have made it meanwhile
        if not journal.left([key]):
            continue
        if time.monotonic() - started >= 60 * options.minutes:
            SAY.line(f"{options.minutes:g} minutes are over: no further run is begun")
            return
        if key.task not in benches:
            folder = subject_of(key.task).folder or key.task
            cache = options.cache or ROOT / "examples" / folder / ".cache"
            benches[key.task] = Bench(key.task, cache, scratch)
        failed = 0 if benches[key.task].run(key, journal) else failed + 1
        if failed == 2:
            raise SystemExit("two runs in a row ended with an error: see to it, then go on")


def _chosen(options: argparse.Namespace) -> list[Key]:
    wanted = {"task": options.task, "rule": options.rule, "unit": options.unit}
    return [
        key
        for key in (world_keys() if options.world else every_run())
        if all(names is None or getattr(key, name) in names for name, names in wanted.items())
        and (options.seed is None or key.seed in options.seed)
    ]


def _runnable(chosen: Sequence[Key]) -> list[Key]:
    """Return the runs whose framework is installed; print the tasks that are left out."""
    missing = {key.task for key in chosen if find_spec(PLANS[key.task].framework) is None}
    for task in sorted(missing):
        needs = f"{task} needs {PLANS[task].framework}, which is not in this environment"
        SAY.line(f"left out: {needs} (`nox -s credit -- --task {task}`)")
    return [key for key in chosen if key.task not in missing]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rules = [START[0], *ALL_RULES]
    parser.add_argument("--task", nargs="+", choices=list(PLANS), help="(all that can be run here)")
    parser.add_argument("--rule", nargs="+", choices=rules, help="(all)")
    parser.add_argument("--unit", nargs="+", choices=["rollout", "agent"], help="(both)")
    parser.add_argument("--seed", nargs="+", type=int, help="(all)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no run after so many (no limit)"
    )
    parser.add_argument("--world", action="store_true", help=f"{WORLD}, six seeds, two rules only")
    parser.add_argument("--list", action="store_true", help="what is done, and what is left")
    parser.add_argument("--table", action="store_true", help="the results as Markdown")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="(benchmarks/results/credit.jsonl)"
    )
    parser.add_argument(
        "--cache", type=Path, help="data and warm starts (examples/<example>/.cache)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

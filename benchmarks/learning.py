"""Does the SQL example really learn? The figures of its README, with their controls, in one run.

    python benchmarks/learning.py                  seeds 0, 1 and 2, and every control
    python benchmarks/learning.py --seeds 0        one seed
    python benchmarks/learning.py --parts rl       without the controls
    python benchmarks/learning.py --json out.json  keep the figures

Needs `lightspan[train]`, `lightspan-langgraph` and the SQL example. Everything is evaluated on the
test schemas, with the temperature of training, the same settings before and after. CPU-seconds are
those of the engine's and the learner's threads while training; evaluation is apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lightspan import LightningRL, Policy, Trainer
from lightspan.algorithms import Metrics, World
from lightspan.lightning.episode import Episode
from lightspan.progress import PlainReporter
from lightspan.routing import BASE_POLICY
from lightspan.trainer import FitResult
from sql_example import training
from sql_example.demonstrations import demonstrate
from sql_example.reward import constant_query_scores

CONSTANT_CEILING = 0.05
PARTS = ("rl", "permuted", "rewriter", "sft", "constant")
SAY = PlainReporter(sys.stderr)


@dataclass
class Run:
    """One training run, measured."""

    name: str
    seed: int
    start: float
    middle: float
    end: float
    gain: str
    n: int
    engine_cpu_s: float
    learner_cpu_s: float
    app_cpu_s: float
    wall_s: float
    warm_start_cpu_s: float = 0.0
    draft_start: float | None = None
    draft_end: float | None = None
    checker_unchanged: bool | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def cpu_s(self) -> float:
        return self.engine_cpu_s + self.learner_cpu_s


class Watched(LightningRL):
    """LightningRL that notes the hash of the frozen checker's weights at every step."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self.hashes: list[str] = []

    async def run_step(self, world: World) -> Metrics:
        self.hashes.append(world.engine.weight_hash(BASE_POLICY))  # type: ignore[attr-defined]
        metrics = await super().run_step(world)
        self.hashes.append(world.engine.weight_hash(BASE_POLICY))  # type: ignore[attr-defined]
        return metrics


class Permuted(Watched):
    """The control whose rewards are permuted within each group: nothing can be learned."""

    async def collect(self, world: World) -> list[Episode]:
        episodes = await super().collect(world)
        groups: dict[str, list[int]] = defaultdict(list)
        for index, episode in enumerate(episodes):
            groups[episode.group_id].append(index)
        rng = random.Random(f"permuted/{self.seed}/{world.step}")
        for members in groups.values():
            rewards = [episodes[index].reward for index in members]
            rng.shuffle(rewards)
            for index, reward in zip(members, rewards, strict=True):
                episodes[index] = replace(episodes[index], reward=reward)
        return episodes


def main() -> int:
    """Run everything, print the table; returns the exit status."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    started = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options.cache, Path(scratch), options.held_out, options.steps)
        report = bench.report(options.seeds, options.parts)
    report["machine"] = {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "minutes": round((time.time() - started) / 60, 1),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2, default=asdict) + "\n")
    _print(report)
    missed = list(_missed(report))
    for target in missed:
        print(f"MISSED: {target}")
    return 1 if missed else 0


class Bench:
    """The example's data, and ways to train and evaluate on it."""

    def __init__(self, cache: Path, scratch: Path, held_out: int, steps: int | None) -> None:
        self._cache = cache
        self._scratch = scratch
        self.recipe = training.RECIPE
        if steps is not None:
            self.recipe = replace(self.recipe, steps=steps)
        self.train = training.load_tasks(cache, "train", self.recipe)
        self.test = training.load_tasks(cache, "test", self.recipe)[:held_out]
        self._drafts = [{**task, "id": f"draft {task['id']}", "max_turns": 1} for task in self.test]

    def report(self, seeds: Sequence[int], parts: Sequence[str]) -> dict[str, Any]:
        """Every part asked for; the controls of one run take the first seed."""
        runs = [self.learn("RL", seed, Watched) for seed in seeds] if "rl" in parts else []
        report: dict[str, Any] = {"runs": runs, "recipe": asdict(self.recipe), "controls": []}
        if "permuted" in parts:
            report["controls"].append(self.learn("rewards permuted", seeds[0], Permuted))
        if "rewriter" in parts:
            report["controls"].append(self.rewriter_alone(seeds[0]))
        if "sft" in parts:
            report["more_sft"] = [self.more_sft(run) for run in runs]
        if "constant" in parts:
            report["constant_query"] = self.constant_query()
        return report

    def rewriter_alone(self, seed: int) -> Run:
        """Train the rewriter, with the writer frozen as it started.

        The statistics are the rewriter's own (`unit="agent"`): it acts on failing drafts only, and
        compared with all rollouts of a group it would be blamed for the drafts.
        """
        options = {"optimize": ["rewrite_query"], "unit": "agent"}
        return self.learn("rewriter alone", seed, Watched, options, drafts=True)

    def learn(
        self,
        name: str,
        seed: int,
        kind: type[Watched],
        changes: Mapping[str, Any] | None = None,
        *,
        drafts: bool = False,
    ) -> Run:
        """Warm start and train; evaluated before, in the middle and after.

        Args:
            changes: what differs from the recipe's arguments of LightningRL.
            drafts: evaluate first drafts too, before and after, with the app cut to one turn.
        """
        SAY.line(f"{name}, seed {seed}")
        model, warm = training.warm_start(self._cache, seed, SAY, self.recipe)
        options = {**training.rl_options(seed, self.recipe), **(changes or {})}
        algorithm = kind(str(model), **options)
        folder = self._scratch / f"{name.replace(' ', '-')}-{seed}"
        before, started = _children_cpu(), time.monotonic()
        result = Trainer(
            algorithm,
            runners=16,
            steps=self.recipe.steps,
            folder=folder,
            validate_every=max(1, self.recipe.steps // 2),
            checkpoint_every=1000,
            reporter=SAY,
        ).fit(training.answer, self.train, self.test)
        run = _run(name, seed, result, _children_cpu() - before, time.monotonic() - started)
        run.warm_start_cpu_s = round(warm, 1)
        run.checker_unchanged = len(set(algorithm.hashes)) == 1
        if drafts:
            trained = options["optimize"]
            name = f"{folder.name}-drafts"
            run.draft_start = self.evaluate(model, model, self._drafts, f"{name}-0", trained)
            run.draft_end = self.evaluate(result.model, model, self._drafts, f"{name}-1", trained)
        SAY.line(str(run))
        return run

    def evaluate(
        self,
        model: Path,
        base: Path,
        tasks: Sequence[Any],
        name: str,
        agents: Sequence[str] = tuple(training.TRAINED),
    ) -> float:
        """Accuracy with a model behind these agents, and the base behind the others."""
        options = training.rl_options(0, self.recipe)
        policy = Policy(name="sql", model=str(model))
        options["optimize"] = dict.fromkeys(agents, policy)
        algorithm = LightningRL(str(base), **options)
        trainer = Trainer(algorithm, runners=16, folder=self._scratch / name, reporter=SAY)
        return trainer.evaluate(training.answer, tasks).interval.mean

    def more_sft(self, run: Run) -> dict[str, float]:
        """As many CPU-seconds of further imitation of the same demonstrations as RL had."""
        SAY.line(f"more SFT, seed {run.seed}")
        model, _ = training.warm_start(self._cache, run.seed, SAY, self.recipe)
        demonstrations = demonstrate(self.recipe.demonstrations, seed=run.seed)
        chats = [{"messages": list(demo.messages)} for demo in demonstrations]
        sft = training.make_sft(model, run.seed, self.recipe, max_cpu_seconds=run.cpu_s)
        target = self._scratch / f"more-sft-{run.seed}"
        result = sft.fit(chats, target, reporter=SAY)
        accuracy = self.evaluate(target, model, self.test, f"more-sft-run-{run.seed}")
        return {"seed": run.seed, "cpu_s": round(result.seconds, 1), "end": accuracy, "rl": run.end}

    def constant_query(self) -> dict[str, Any]:
        """The best that one query for every question can do on the test tasks."""
        queries = ["SELECT 1", "SELECT 0", *(task["gold"] for task in [*self.train, *self.test])]
        data = self._cache / "data"
        scores = constant_query_scores(queries, self.test, data)
        best = max(scores, key=lambda query: scores[query])
        return {"queries": len(scores), "best": best, "score": scores[best]}


def _run(name: str, seed: int, result: FitResult, app_cpu: float, wall: float) -> Run:
    means = [evaluation.interval.mean for evaluation in result.evaluations]
    assert result.gain is not None
    return Run(
        name=name,
        seed=seed,
        start=means[0],
        middle=means[len(means) // 2],
        end=means[-1],
        gain=f"{result.gain.mean:+.3f} ({result.gain.low:+.3f}..{result.gain.high:+.3f})",
        n=result.evaluations[-1].interval.n,
        engine_cpu_s=round(result.seconds["engine"], 1),
        learner_cpu_s=round(result.seconds["learner"], 1),
        app_cpu_s=round(app_cpu, 1),
        wall_s=round(wall, 1),
    )


def _missed(report: dict[str, Any]) -> Iterator[str]:
    """What the example promises, and did not keep."""
    for run in report["runs"]:
        who = f"RL, seed {run.seed}"
        if run.start < 0.35 or run.end < 0.70:
            yield f"{who}: {run.start:.3f} -> {run.end:.3f}, promised from 0.35 to 0.70"
        if run.cpu_s > 45:
            yield f"{who}: {run.cpu_s:.1f} CPU-seconds, promised 45"
    for run in [*report["runs"], *report["controls"]]:
        if not run.checker_unchanged:
            yield f"{run.name}, seed {run.seed}: the frozen checker's weights changed"
        if run.name == "rewards permuted" and run.end - run.start >= 0.05:
            yield f"permuted rewards gained {run.end - run.start:.3f}, promised below 0.05"
        if run.draft_start is not None and run.draft_end is not None:
            # two samples of one distribution differ by less than this in 95 of 100 cases
            noise = 1.96 * math.sqrt(2 * 0.25 / run.n)
            if abs(run.draft_end - run.draft_start) > noise:
                yield f"first drafts moved: {run.draft_start:.3f} -> {run.draft_end:.3f}"
    for more in report.get("more_sft", []):
        if more["end"] >= more["rl"]:
            yield f"more SFT, seed {more['seed']}: {more['end']:.3f}, RL {more['rl']:.3f}"
    constant = report.get("constant_query")
    if constant and constant["score"] > CONSTANT_CEILING:
        yield f"a constant query scores {constant['score']:.3f}, promised {CONSTANT_CEILING}"


def _children_cpu() -> float:
    """CPU-seconds of processes that have ended: the runners, evaluation included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _print(report: dict[str, Any]) -> None:
    print(
        "| run | seed | start | middle | end | gain (95% CI) | n | engine + learner CPU-s |", end=""
    )
    print(" app CPU-s, evaluation included | wall s | warm start CPU-s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for run in [*report["runs"], *report.get("controls", [])]:
        print(
            f"| {run.name} | {run.seed} | {run.start:.3f} | {run.middle:.3f} | {run.end:.3f} | "
            f"{run.gain} | {run.n} | {run.engine_cpu_s} + {run.learner_cpu_s} | {run.app_cpu_s} | "
            f"{run.wall_s} | {run.warm_start_cpu_s} |"
        )
    for run in [*report["runs"], *report.get("controls", [])]:
        print(f"{run.name}, seed {run.seed}: checker's weights unchanged: {run.checker_unchanged}")
        if run.draft_start is not None:
            print(f"  first drafts: {run.draft_start:.3f} -> {run.draft_end:.3f}")
    for more in report.get("more_sft", []):
        print(f"more SFT, seed {more['seed']}, {more['cpu_s']} CPU-s: {more['end']:.3f}", end=" ")
        print(f"(RL: {more['rl']:.3f})")
    constant = report.get("constant_query")
    if constant:
        print(f"best of {constant['queries']} constant queries: {constant['score']:.3f}", end=" ")
        print(f"(at most {CONSTANT_CEILING}): {constant['best']}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--steps", type=int, help="iterations (the recipe's)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write the figures here too")
    default = Path(__file__).parents[1] / "examples" / "sql" / ".cache"
    parser.add_argument("--cache", type=Path, default=default)
    return parser


if __name__ == "__main__":
    sys.exit(main())

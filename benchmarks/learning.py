"""Do the examples really learn? The figures of their READMEs, with their controls, in one run.

    python benchmarks/learning.py                        SQL: seeds 0, 1 and 2, and every control
    python benchmarks/learning.py --example rag          likewise; or rag-crewai, math,
                                                         router, router-pydantic-ai,
                                                         quest
    python benchmarks/learning.py --seeds 0              one seed
    python benchmarks/learning.py --parts rl             without the controls
    python benchmarks/learning.py --parts air            SQL with and without intermediate rewards,
                                                         seeds 0 to 4
    python benchmarks/learning.py --json out.json        keep each run's figures as it ends: the
                                                         same command goes on where it stopped
    python benchmarks/learning.py --plot curve.png       mean and interval over seeds
    python benchmarks/learning.py --keep runs/sql        keep the runs, to be inspected

Needs `lightspan[train]`, the example and its adapter. The test split is looked at before and after
training only; the points of a curve between them, and its ends, are of the dev split. All are
sampled at the temperature of training. CPU-seconds are those of the engine's and the learner's
threads while training; evaluation is apart.

The parts: `rl` is the recipe; `permuted` permutes the rewards within each group, with each seed;
`sft` imitates the same demonstrations for as many CPU-seconds more, annealed: its rate falls to a
twentieth over the updates that fit into them, as in the warm start (the router has none: it begins
with a published model); `constant` is the best that one answer to everything can do; `rewriter`
(SQL) trains one agent alone. Others compare arms with the same seeds, each against the first, which
is the recipe: `air` (SQL) ways to use rewards on the way, `agents` (the crew) which agents learn,
`policies` (the router) one policy behind both agents with one behind each, which are then swapped.
What the app is for is evaluated, never a shaped reward.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import platform
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from _curves import Arm, crossed_interval, draw, seed_interval, steps_of

from lightspan import LightningRL, Policy, Trainer
from lightspan.algorithms import Metrics, TrainerContext
from lightspan.progress import PlainReporter
from lightspan.schema.routing import BASE_POLICY
from lightspan.trainer import FitResult
from lightspan.training.folder import RunFolder
from lightspan.training.statistics import Interval
from lightspan_testing.permuted_rewards import Permuted

PERMUTED: Final = "rewards permuted"
NOISE_SHARE: Final = 0.25
"""Of the gain with rewards, which permuted ones may reach by chance."""
FIXED_PLANS: Final = 200
"""Plans of the train quests and of the test's that are tried in every quest of the test."""
SAY: Final = PlainReporter(sys.stderr)
ROOT: Final = Path(__file__).parents[1]
HEADS: Final = (
    "| run | seed | start | middle (dev) | end | gain (95% CI) | n | engine + learner CPU-s | "
    "app CPU-s, evaluation included | wall s | warm start CPU-s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


# --- what is measured -----------------------------------------------------------------------
def constant_query(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """The score of each query as the answer to every question of the test."""
    from sql_example.reward import constant_query_scores

    queries = ["SELECT 1", "SELECT 0", *(task["gold"] for task in [*train, *test])]
    return constant_query_scores(queries, test, cache / "data")


def constant_name(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """The score of each gold answer as the answer to every question of the test."""
    from rag_example.reward import constant_answer_scores

    candidates = (text for task in [*train, *test] for text in task["answers"])
    return constant_answer_scores(candidates, [task["answers"] for task in test])


def constant_number(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """The score of each answer of the test as the answer to every problem of it."""
    from math_example.reward import constant_answer_scores

    return constant_answer_scores(task["answer"] for task in test)


def constant_ticket(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """The score of each pair of a department and a product as the answer to every message."""
    del cache
    departments = Counter({task["department"]: 0 for task in train})
    departments.update(task["department"] for task in test)
    products = Counter({task["product"]: 0 for task in train})
    products.update(task["product"] for task in test)
    return {
        f"{department}, {product}": (departments[department] + products[product]) / (2 * len(test))
        for department, product in itertools.product(departments, products)
    }


def fixed_plan(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """The share of the test's quests that each plan of a quest solves, and that chance does."""
    from quest_example.reward import plan_scores, random_score
    from quest_example.training import RECIPE, plans_of
    from quest_example.world import TrainerContext

    worlds = [TrainerContext.from_json(task["world"]) for task in test]
    plans = plans_of([*train[:FIXED_PLANS], *test[:FIXED_PLANS]])
    chance = {"any action that does something": random_score(worlds, RECIPE.max_calls)}
    return {**plan_scores(plans, worlds, RECIPE.max_calls), **chance}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An example: where its training is, which controls it has, and what it promises."""

    training: str
    """The module with RECIPE, TRAINED, answer, load_tasks, warm_start, rl_options, chats."""
    metric: str
    constant: Callable[[Sequence[Any], Sequence[Any], Path], Mapping[str, float]]
    constant_ceiling: float
    folder: str | None = None
    """Below `examples`, if it is not the example's name."""
    cpu_s: float = math.inf
    """Engine and learner at most."""
    start: float = 0.0
    """Before training, at least."""
    end: float = 0.0
    """After, at least."""
    gain: float = 0.0
    """At least."""
    cluster: str | None = None
    """The key of a task that names what tasks share; None: each stands for itself."""
    alone: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Part → the options of LightningRL with which an agent is trained alone."""
    first_try: Mapping[str, Any] | None = None
    """How a task is changed so that only the agents that are not trained alone act."""
    imitates: bool = True
    """Whether it begins with imitated demonstrations, of which there may be more."""
    comparison: str | None = None
    """The part that compares arms."""
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arm → options of LightningRL; the first is the recipe's own."""

    @property
    def parts(self) -> list[str]:
        """What can be asked for."""
        compared = [self.comparison] if self.comparison else []
        imitated = ["sft"] if self.imitates else []
        return ["rl", "permuted", *self.alone, *imitated, "constant", *compared]


def _air_arms() -> dict[str, Mapping[str, Any]]:
    from sql_example.training import AIR_OPTIONS

    # the second differs from the third by the intermediate rewards alone
    return {"terminal": {}, "discounted": {"credit": "discounted"}, "air": AIR_OPTIONS}


def _policy_arms() -> dict[str, Mapping[str, Any]]:
    from router_example.training import optimized

    return {"shared": {}, "separate": {"optimize": optimized("separate")}}


def subject_of(example: str) -> Subject:
    """What the benchmark knows of an example."""
    return SUBJECTS[example]()


SUBJECTS: Final[Mapping[str, Callable[[], Subject]]] = {
    "sql": lambda: Subject(
        training="sql_example.training",
        metric="execution accuracy",
        constant=constant_query,
        constant_ceiling=0.05,
        cluster="schema",
        cpu_s=45,
        start=0.35,
        end=0.70,
        # Statistics of its own: it acts on failing drafts only, and compared with all rollouts of a
        # group it would be blamed for the drafts.
        alone={"rewriter": {"optimize": ["rewrite_query"], "unit": "agent"}},
        first_try={"max_turns": 1},
        comparison="air",
        arms=_air_arms(),
    ),
    "rag": lambda: Subject(
        training="rag_example.training",
        metric="0.9 F1 + 0.1 form",
        constant=constant_name,
        constant_ceiling=0.2,
        cluster="documents",
        cpu_s=40,
        gain=0.35,
    ),
    "rag-crewai": lambda: Subject(
        folder="rag",
        training="rag_example.crew_training",
        metric="0.9 F1 + 0.1 form",
        constant=constant_name,
        constant_ceiling=0.2,
        cluster="documents",
        comparison="agents",
        arms={
            "both": {},
            "searcher only": {"optimize": ["searcher"]},
            "answerer only": {"optimize": ["answerer"]},
        },
    ),
    "math": lambda: Subject(
        training="math_example.training",
        metric="exact answers",
        constant=constant_number,
        constant_ceiling=0.05,
        cpu_s=40,
        gain=0.40,
    ),
    "router": lambda: Subject(
        training="router_example.training",
        metric="department and product right",
        constant=constant_ticket,
        constant_ceiling=0.16,
        cluster="phrasing",
        gain=0.30,
        imitates=False,
        comparison="policies",
        arms=_policy_arms(),
    ),
    "router-pydantic-ai": lambda: Subject(
        folder="router",
        training="router_example.pydantic_ai_training",
        metric="department and product right",
        constant=constant_ticket,
        constant_ceiling=0.16,
        cluster="phrasing",
        gain=0.30,
        imitates=False,
    ),
    "quest": lambda: Subject(
        training="quest_example.training",
        metric="quests solved",
        constant=fixed_plan,
        constant_ceiling=0.05,
        start=0.2,
        end=0.6,
    ),
}


@dataclass
class Run:
    """One training run, measured."""

    name: str
    seed: int
    points: list[tuple[int, float]]
    """(step, mean) of the curve, the first before training: of the dev split."""
    gain: str
    n: int
    engine_cpu_s: float
    learner_cpu_s: float
    app_cpu_s: float
    wall_s: float
    warm_start_cpu_s: float = 0.0
    first_try: tuple[float, float] | None = None
    """Before and after, where an agent was trained alone."""
    frozen_unchanged: bool | None = None
    """None: nothing is frozen."""
    swapped: tuple[float, float] | None = None
    """With several policies: each behind its own agent, and behind the next one."""
    training: dict[str, float] = field(default_factory=dict)
    """Means over the steps: the reward without shaping, and what AIR did."""
    before: dict[str, float] = field(default_factory=dict)
    """Task → reward, of the test split before training. Without it the points are of the test."""
    after: dict[str, float] = field(default_factory=dict)
    clusters: dict[str, str] = field(default_factory=dict)
    """Task → the cluster that it is in; empty where each stands for itself."""
    odd: dict[str, int] = field(default_factory=dict)
    """How many tasks and rollouts were unscored, and on how many the app failed."""

    @property
    def start(self) -> float:
        return _mean(self.before) if self.before else self.points[0][1]

    @property
    def middle(self) -> float:
        return self.points[len(self.points) // 2][1]

    @property
    def end(self) -> float:
        return _mean(self.after) if self.after else self.points[-1][1]

    @property
    def gains(self) -> dict[str, float]:
        """Task → what it gained, where it was scored before and after."""
        return _differences(self.after, self.before)

    @property
    def gained(self) -> float:
        """What training changed."""
        return self.end - self.start

    @property
    def cpu_s(self) -> float:
        return self.engine_cpu_s + self.learner_cpu_s

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Run:
        """From the JSON."""
        return cls(**{**found, "points": [(step, mean) for step, mean in found["points"]]})


class Watched(LightningRL):
    """LightningRL that notes the hash of the frozen agents' weights at every step."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self.hashes: list[str] = []

    async def run_step(self, world: TrainerContext) -> Metrics:
        self._note(world)
        metrics = await super().run_step(world)
        self._note(world)
        return metrics

    def _note(self, world: TrainerContext) -> None:
        if self.frozen == "base":
            self.hashes.append(world.engine.weight_hash(BASE_POLICY))  # type: ignore[attr-defined]


class WatchedPermuted(Permuted, Watched):
    """The control whose rewards are permuted."""


# --- figures that are kept ------------------------------------------------------------------
class Kept:
    """Figures by name, written to a file as each is known.

    Args:
        path: None keeps them in memory only.
        settings: what they depend on; figures of other settings are not mixed with them.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = json.loads(json.dumps(settings))
        self._figures: dict[str, Any] = {}
        if path is not None and path.exists():
            self._read(path)

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The figures of this name, as JSON has them; measured unless they are there."""
        if name in self._figures:
            SAY.line(f"{name}: kept in {self._path}")
        else:
            self._figures[name] = json.loads(json.dumps(measure(), default=asdict))
            self.write()
        return self._figures[name]

    def write(self, **more: Any) -> None:
        """Write the file anew, whole or not at all."""
        if self._path is None:
            return
        near = self._path.with_name(f"{self._path.name}.new")
        whole = {**more, "settings": self._settings, "figures": self._figures}
        near.write_text(json.dumps(whole, indent=2) + "\n")
        near.replace(self._path)

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            settings, self._figures = found["settings"], found["figures"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path} holds no figures of this script: name another") from error
        differing = sorted(
            key
            for key in {*settings, *self._settings}
            if settings.get(key) != self._settings.get(key)
        )
        if differing:
            raise SystemExit(
                f"{path} holds figures with another {', '.join(differing)}: name another file, or "
                "remove it to measure everything again"
            )


# --- measuring ------------------------------------------------------------------------------
class Bench:
    """An example's data, and ways to train and evaluate on it.

    Args:
        recipe: None for the example's.
        evaluations: of a run, beside the one before training and, if it is another, the last.
        split: what is evaluated; "dev" while settings are chosen.
        on_the_way: tasks of the dev split, for the evaluations between.
    """

    def __init__(
        self,
        example: str,
        cache: Path,
        scratch: Path,
        *,
        held_out: int = 500,
        steps: int | None = None,
        evaluations: int = 4,
        recipe: Any = None,
        split: str = "test",
        on_the_way: int = 200,
        kept: Path | None = None,
    ) -> None:
        self.example = example
        self.subject = subject_of(example)
        self._cache = cache
        self._scratch = scratch
        self._code = importlib.import_module(self.subject.training)
        self.recipe = self._code.RECIPE if recipe is None else recipe
        if steps is not None:
            self.recipe = replace(self.recipe, steps=steps)
        self.train = self._code.load_tasks(cache, "train", self.recipe)
        self.test = self._code.load_tasks(cache, split, self.recipe)[:held_out]
        self.dev = None
        if split != "dev":
            self.dev = self._code.load_tasks(cache, "dev", self.recipe)[:on_the_way]
        self._evaluations = evaluations
        settings = {"example": example, "recipe": asdict(self.recipe), "split": split}
        sizes = {
            "held_out": len(self.test),
            "evaluations": evaluations,
            "on_the_way": None if self.dev is None else len(self.dev),
            "imitation": "annealed",
        }
        self.kept = Kept(kept, {**settings, **sizes})

    def report(
        self, parts: Sequence[str], seeds: Sequence[int], arms: Sequence[str] | None = None
    ) -> Report:
        """Every part asked for; an agent is trained alone with the first seed."""
        report = Report(self.example, self.subject)
        if "rl" in parts or "sft" in parts:
            report.runs = [self.learn("RL", seed) for seed in seeds]
        if "permuted" in parts:
            report.controls += [self.learn(PERMUTED, seed, kind=WatchedPermuted) for seed in seeds]
        for part, changes in self.subject.alone.items():
            if part in parts:
                name = f"{part} alone"
                report.controls.append(self.learn(name, seeds[0], changes, first_try=True))
        if "sft" in parts:
            report.more_sft = [self.more_sft(run) for run in report.runs]
        if "constant" in parts:
            report.constant = self.kept.get("constant", self.constant)
        if self.subject.comparison in parts:
            # a seed of every arm at a time: an interrupted comparison is of whole seeds
            for seed, arm in itertools.product(seeds, arms or self.subject.arms):
                report.compared.setdefault(arm, []).append(self.arm(arm, seed))
        return report

    def arm(self, name: str, seed: int) -> Run:
        """A seed of one arm; the first is the recipe itself."""
        changes = self.subject.arms[name]
        return self.learn(name, seed, changes) if changes else self.learn("RL", seed)

    def learn(
        self,
        name: str,
        seed: int,
        changes: Mapping[str, Any] | None = None,
        *,
        kind: type[Watched] = Watched,
        first_try: bool = False,
    ) -> Run:
        """Warm start and train; evaluated before, on the way and after.

        Args:
            changes: what differs from the recipe's arguments of LightningRL.
            first_try: evaluate the agents that are not trained apart, before and after.
        """
        return Run.of(
            self.kept.get(
                f"{name}, seed {seed}",
                lambda: self._learn(name, seed, dict(changes or {}), kind, first_try),
            )
        )

    def _learn(
        self, name: str, seed: int, changes: dict[str, Any], kind: type[Watched], first_try: bool
    ) -> Run:
        SAY.line(f"{name}, seed {seed}")
        model, warm = self._code.warm_start(self._cache, seed, SAY, self.recipe)
        options = {**self._code.rl_options(seed, self.recipe), **changes}
        algorithm = kind(str(model), **options)
        folder = self._scratch / f"{name.replace(' ', '-')}-{seed}"
        before, started = children_cpu(), time.monotonic()
        result = Trainer(
            algorithm,
            runners=16,
            steps=self.recipe.steps,
            folder=folder,
            validate_every=max(1, self.recipe.steps // self._evaluations),
            checkpoint_every=1000,
            cluster=self.subject.cluster,
            reporter=SAY,
        ).fit(self._code.answer, self.train, self.test, selection=self.dev)
        run = _run(name, seed, result, children_cpu() - before, time.monotonic() - started)
        run.warm_start_cpu_s = round(warm, 1)
        run.frozen_unchanged = len(set(algorithm.hashes)) == 1 if algorithm.hashes else None
        if first_try:
            run.first_try = self._first_try(folder.name, model, result.model, options["optimize"])
        if len(algorithm.policies()) > 1:
            run.swapped = self._swapped(folder.name, model, result.model)
        SAY.line(str(run))
        return run

    def _swapped(self, name: str, base: Path, trained: Path) -> tuple[float, float]:
        """The score with each policy behind its own agent, and with each behind the next one."""
        agents = list(self._code.TRAINED)
        models = {agent: _plain(trained / agent) for agent in agents}
        others = dict(zip(agents, [*agents[1:], agents[0]], strict=True))
        crossed = {agent: models[other] for agent, other in others.items()}
        return (
            self.evaluate(models, base, self.test, f"{name}-own"),
            self.evaluate(crossed, base, self.test, f"{name}-swapped"),
        )

    def _first_try(
        self, name: str, base: Path, trained: Path, agents: Sequence[str]
    ) -> tuple[float, float]:
        changes = self.subject.first_try or {}
        tasks = [{**task, **changes, "id": f"first try {task['id']}"} for task in self.test]
        return (
            self.evaluate(dict.fromkeys(agents, base), base, tasks, f"{name}-first-0"),
            self.evaluate(dict.fromkeys(agents, trained), base, tasks, f"{name}-first-1"),
        )

    def evaluate(
        self, models: Mapping[str, Path], base: Path, tasks: Sequence[Any], name: str
    ) -> float:
        """The score with these models behind the agents, and the base behind the others."""
        options = self._code.rl_options(0, self.recipe)
        names = {model: f"policy-{n}" for n, model in enumerate(dict.fromkeys(models.values()))}
        options["optimize"] = {
            agent: Policy(name=names[model], model=str(model)) for agent, model in models.items()
        }
        algorithm = LightningRL(str(base), **options)
        trainer = Trainer(algorithm, runners=16, folder=self._scratch / name, reporter=SAY)
        return trainer.evaluate(self._code.answer, tasks).mean

    def more_sft(self, run: Run) -> dict[str, float]:
        """As many CPU-seconds of further imitation of the same demonstrations as RL had, annealed:
        cut off in the middle, at a rate that is still high, it would be a weak control."""
        found: dict[str, float] = self.kept.get(
            f"more SFT, seed {run.seed}", lambda: self._more_sft(run)
        )
        return found

    def _more_sft(self, run: Run) -> dict[str, float]:
        from lightspan_examples.warm_start import make_sft

        SAY.line(f"more SFT, seed {run.seed}")
        imitation = self.recipe.imitation
        model, warm = self._code.warm_start(self._cache, run.seed, SAY, self.recipe)
        updates = updates_within(run.cpu_s, warm, imitation.demonstrations // imitation.batch)
        sft = make_sft(model, run.seed, imitation, updates=updates)
        target = self._scratch / f"more-sft-{run.seed}"
        chats = self._code.chats(imitation.demonstrations, run.seed)
        result = sft.fit(chats, target, reporter=SAY)
        name = f"more-sft-run-{run.seed}"
        models = dict.fromkeys(self._code.TRAINED, target)
        end = self.evaluate(models, model, self.test, name)
        spent = {"cpu_s": round(result.seconds, 1), "updates": updates}
        return {"seed": run.seed, **spent, "end": end, "rl": run.end}

    def constant(self) -> dict[str, Any]:
        """The best that one answer to everything can do on the test tasks."""
        scores = self.subject.constant(self.train, self.test, self._cache)
        best = max(scores, key=lambda answer: scores[answer])
        return {"answers": len(scores), "best": best, "score": scores[best]}


def updates_within(cpu_s: float, warm_s: float, updates: int) -> int:
    """The updates of imitation that fit into CPU-seconds, by what those of the warm start took.
    There are 60 at least, twice as many as its rate takes to rise."""
    return max(60, round(updates * cpu_s / max(warm_s, 1e-9)))


def _plain(folder: Path) -> Path:
    """A model of this folder's weights: an adapter is merged with what it was trained on."""
    from lightspan_torch.engine.hub import is_adapter
    from lightspan_torch.learner.policy_model import merge_adapter

    merged = folder.with_name(f"{folder.name}-merged")
    return merge_adapter(folder, merged) if is_adapter(folder) else folder


def _run(name: str, seed: int, result: FitResult, app_cpu: float, wall: float) -> Run:
    assert result.gain is not None
    first, last = result.evaluations[0], result.evaluations[-1]
    curve = RunFolder(result.folder).evaluations("selection") or result.evaluations
    return Run(
        name=name,
        seed=seed,
        points=[(found.step, found.mean) for found in curve],
        before=first.rewards,
        after=last.rewards,
        clusters=last.clusters,
        odd={
            "unscored before": first.unscored,
            "unscored after": last.unscored,
            "failed before": first.failed,
            "failed after": last.failed,
            "unscored in training": result.outcomes.unscored,
            "failed in training": result.outcomes.failed,
        },
        gain=f"{result.gain.mean:+.3f} ({result.gain.low:+.3f}..{result.gain.high:+.3f})",
        n=result.evaluations[-1].interval.n,
        engine_cpu_s=round(result.seconds["engine"], 1),
        learner_cpu_s=round(result.seconds["learner"], 1),
        app_cpu_s=round(app_cpu, 1),
        wall_s=round(wall, 1),
        training=_training(result.folder),
    )


def _training(folder: Path) -> dict[str, float]:
    """Means over the training steps of the plain reward and of what AIR did."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    values: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        for key, value in line.items() if line["kind"] == "train" else ():
            if key == "reward" or (key.startswith("air/") and not key.endswith("/seen")):
                values[key].append(value)
    return {key: round(math.fsum(found) / len(found), 4) for key, found in values.items()}


def _mean(rewards: Mapping[str, float]) -> float:
    return math.fsum(rewards.values()) / len(rewards)


def _differences(more: Mapping[str, float], less: Mapping[str, float]) -> dict[str, float]:
    """Task → the difference, of those that have both."""
    return {task: value - less[task] for task, value in more.items() if task in less}


def children_cpu() -> float:
    """CPU-seconds of processes that have ended: the runners, evaluation included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- what is said ---------------------------------------------------------------------------
@dataclass
class Report:
    """The parts that were measured."""

    example: str
    subject: Subject
    runs: list[Run] = field(default_factory=list)
    controls: list[Run] = field(default_factory=list)
    more_sft: list[dict[str, float]] = field(default_factory=list)
    constant: dict[str, Any] | None = None
    compared: dict[str, list[Run]] = field(default_factory=dict)
    """Arm → a run for each seed."""

    @property
    def all_runs(self) -> list[Run]:
        """Each once."""
        compared = [run for runs in self.compared.values() for run in runs]
        found = {(run.name, run.seed): run for run in [*self.runs, *self.controls, *compared]}
        return list(found.values())

    @property
    def arms(self) -> list[Arm]:
        """The curves to draw."""
        found: Mapping[str, list[Run]] = self.compared
        if not found:
            names = dict.fromkeys(run.name for run in self.controls)
            controls = {name: [r for r in self.controls if r.name == name] for name in names}
            found = {"RL": self.runs, **controls}
        return [Arm(name, [run.points for run in runs]) for name, runs in found.items() if runs]

    @property
    def permuted(self) -> list[Run]:
        """Of each seed."""
        return [run for run in self.controls if run.name == PERMUTED]

    def missed(self) -> Iterator[str]:
        """What the example promises, and did not keep."""
        for run in self.runs:
            yield from self._missed_by(run)
        for run in self.all_runs:
            if run.frozen_unchanged is False:
                yield f"{run.name}, seed {run.seed}: the frozen agents' weights changed"
        for run in self.controls:
            if run.first_try is not None:
                before, after = run.first_try
                if abs(after - before) > _noise(run.n):
                    yield f"{run.name}: first tries moved: {before:.3f} -> {after:.3f}"
        yield from self._missed_by_swapped()
        yield from self._missed_by_permuted()
        for more in self.more_sft:
            if more["end"] >= more["rl"]:
                yield f"more SFT, seed {more['seed']}: {more['end']:.3f}, RL {more['rl']:.3f}"
        ceiling = self.subject.constant_ceiling
        if self.constant and self.constant["score"] > ceiling:
            yield f"a constant answer scores {self.constant['score']:.3f}, promised {ceiling}"

    def _missed_by_swapped(self) -> Iterator[str]:
        """A policy that has learned its own agent's part is worse behind another."""
        for run in self.all_runs:
            if run.swapped is not None:
                own, crossed = run.swapped
                if own - crossed <= _noise(run.n):
                    yield f"{run.name}, seed {run.seed}: swapped {crossed:.3f}, own {own:.3f}"

    def _missed_by_permuted(self) -> Iterator[str]:
        """Permuted rewards are noise, which moves a policy by chance: one run may end a little
        higher than it began. It must be little beside what the same seed's rewards taught, and
        nothing over seeds."""
        taught = {run.seed: run.gained for run in self.runs}
        for run in self.permuted:
            if run.seed in taught and run.gained >= NOISE_SHARE * taught[run.seed]:
                yield (
                    f"permuted rewards, seed {run.seed}: gained {run.gained:.3f}, promised below "
                    f"{NOISE_SHARE:g} of what rewards taught ({taught[run.seed]:.3f})"
                )
        if len(self.permuted) > 1:
            found = seed_interval([run.gained for run in self.permuted])
            if found.low > 0:
                yield (
                    f"permuted rewards gained {found.mean:.3f} over seeds, {found.low:.3f} or more"
                )

    def _missed_by(self, run: Run) -> Iterator[str]:
        who, promised = f"{run.name}, seed {run.seed}", self.subject
        if run.start < promised.start or run.end < promised.end:
            yield (
                f"{who}: {run.start:.3f} -> {run.end:.3f}, promised from {promised.start} to "
                f"{promised.end}"
            )
        if run.gained < promised.gain:
            yield f"{who}: gained {run.gained:.3f}, promised {promised.gain}"
        if run.cpu_s > promised.cpu_s:
            yield f"{who}: {run.cpu_s:.1f} CPU-seconds, promised {promised.cpu_s}"

    def text(self) -> str:
        """The table, and a line for each control."""
        runs = self.all_runs
        lines = [HEADS, *map(_row, runs)] if runs else []
        for run in runs:
            who = f"{run.name}, seed {run.seed}"
            if run.frozen_unchanged is not None:
                lines.append(f"{who}: frozen agents' weights unchanged: {run.frozen_unchanged}")
            if run.first_try is not None:
                before, after = run.first_try
                lines.append(f"{who}: first tries: {before:.3f} -> {after:.3f}")
            if run.swapped is not None:
                own, crossed = run.swapped
                lines.append(
                    f"{who}: each policy behind its own agent {own:.3f}, swapped {crossed:.3f}"
                )
            odd = ", ".join(f"{count} {what}" for what, count in run.odd.items() if count)
            lines += [f"{who}: {odd}"] if odd else []
        lines += [f"{name}: {_over_seeds(found)}" for name, found in self._of_seeds.items()]
        lines += [
            f"more SFT, seed {more['seed']}, {more['cpu_s']} CPU-s: {more['end']:.3f} "
            f"(RL: {more['rl']:.3f})"
            for more in self.more_sft
        ]
        if self.constant:
            lines.append(
                f"best of {self.constant['answers']} constant answers: "
                f"{self.constant['score']:.3f} (at most {self.subject.constant_ceiling}): "
                f"{self.constant['best']}"
            )
        return "\n".join([*lines, *self._compared_text()])

    @property
    def _of_seeds(self) -> dict[str, list[Run]]:
        """Name → its runs, of those that have several seeds."""
        found: dict[str, list[Run]] = {}
        for run in self.all_runs:
            found.setdefault(run.name, []).append(run)
        return {name: runs for name, runs in found.items() if len(runs) > 1 and runs[0].after}

    def _compared_text(self) -> Iterator[str]:
        """Each arm over seeds, and its paired difference from the first."""
        if not self.compared:
            return
        yield f"\n{self.subject.metric} on dev, mean over seeds (95% interval over seeds):"
        for arm in self.arms:
            points = "  ".join(
                f"step {step}: {found.mean:.3f} ({found.low:.3f}..{found.high:.3f})"
                for step, found in steps_of(arm)
            )
            yield f"{arm.name}: {points}"
        (first, plain), *others = self.compared.items()
        for name, runs in others:
            pairs = list(zip(runs, plain, strict=True))
            for what, value in (("end", _end), ("mean of the curve", _area)):
                found = seed_interval([value(run) - value(base) for run, base in pairs])
                both, more = [found], ""
                if what == "end" and runs[0].after:
                    differences = [_differences(run.after, base.after) for run, base in pairs]
                    both.append(crossed_interval(differences, runs[0].clusters))
                    more = f"; with tasks drawn too {_crossed(both[1], len(pairs))}"
                yield (
                    f"{name} against {first}, {what}: {found.mean:+.3f} "
                    f"({found.low:+.3f}..{found.high:+.3f}, {found.n} paired seeds{more}): "
                    f"{_verdict(*both)}"
                )
        for name, runs in self.compared.items():
            for run in runs:
                yield f"{name}, seed {run.seed}, training: {run.training}"


def _noise(n: int) -> float:
    """Means of two samples of one distribution, between 0 and 1, differ by less in 95 of 100
    cases."""
    return 1.96 * math.sqrt(2 * 0.25 / n)


def _verdict(*found: Interval) -> str:
    if all(each.low > 0 for each in found):
        return "better"
    is_worse = all(each.high < 0 for each in found)
    return "worse" if is_worse else "no difference that can be told from chance"


def _over_seeds(runs: Sequence[Run]) -> str:
    """The gain over seeds: how much seeds vary, and how much seeds and tasks do."""
    seeds = seed_interval([run.gained for run in runs])
    crossed = crossed_interval([run.gains for run in runs], runs[0].clusters)
    return (
        f"gain over {seeds.n} seeds {seeds.mean:+.3f} ({seeds.low:+.3f}..{seeds.high:+.3f} by "
        f"Student's t over seeds; with tasks drawn too {_crossed(crossed, seeds.n)})"
    )


def _crossed(found: Interval, seeds: int) -> str:
    return f"{found.low:+.3f}..{found.high:+.3f}, {seeds} seeds x {found.clusters} clusters"


def _end(run: Run) -> float:
    return run.end


def _area(run: Run) -> float:
    """How high the curve is on average after the start: who learns sooner is higher."""
    later = [mean for _, mean in run.points[1:]]
    return math.fsum(later) / len(later)


def _row(run: Run) -> str:
    return (
        f"| {run.name} | {run.seed} | {run.start:.3f} | {run.middle:.3f} | {run.end:.3f} | "
        f"{run.gain} | {run.n} | {run.engine_cpu_s} + {run.learner_cpu_s} | {run.app_cpu_s} | "
        f"{run.wall_s} | {run.warm_start_cpu_s} |"
    )


def main() -> int:
    """Run everything, print the table; returns the exit status."""
    parser = _parser()
    options = parser.parse_args()
    if options.evaluations < 1:
        parser.error(f"--evaluations {options.evaluations}: at least 1")
    subject = subject_of(options.example)
    parts = options.parts or [part for part in subject.parts if part != subject.comparison]
    _check_names(parser, f"{options.example} has no part", parts, subject.parts)
    _check_names(parser, f"{options.example} has no arm", options.arms or [], subject.arms)
    seeds = options.seeds or ([0, 1, 2, 3, 4] if parts == ["air"] else [0, 1, 2])
    torch.set_num_threads(1)
    started = time.time()
    folder = subject.folder or options.example
    cache = options.cache or ROOT / "examples" / folder / ".cache"
    with contextlib.ExitStack() as stack:
        scratch = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(
            options.example,
            cache,
            scratch,
            held_out=options.held_out,
            steps=options.steps,
            evaluations=options.evaluations,
            split=options.split,
            kept=options.json,
        )
        report = bench.report(parts, seeds, options.arms)
    bench.kept.write(machine=_machine(started))
    if options.plot is not None:
        title = f"{options.example}: the mean over seeds, and its 95% interval"
        draw(report.arms, options.plot, title=title, metric=subject.metric)
    print(report.text())
    missed = list(report.missed())
    for target in missed:
        print(f"MISSED: {target}")
    return 1 if missed else 0


def _check_names(
    parser: argparse.ArgumentParser, what: str, given: Sequence[str], known: Collection[str]
) -> None:
    for name in given:
        if name not in known:
            parser.error(f"{what} {name}: {', '.join(known)}")


def _machine(started: float) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "minutes": round((time.time() - started) / 60, 1),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--example", choices=list(SUBJECTS), default="sql")
    parser.add_argument("--seeds", type=int, nargs="+", help="0 1 2; of --parts air 0 1 2 3 4")
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--steps", type=int, help="iterations (the recipe's)")
    parser.add_argument(
        "--evaluations", type=int, default=4, help="as often after the first; the last step too (4)"
    )
    parser.add_argument("--parts", nargs="+", help="those of the example that compare no arms")
    parser.add_argument("--arms", nargs="+", help="of the part air, agents or policies (all)")
    parser.add_argument(
        "--split",
        choices=["test", "dev"],
        default="test",
        help="what is evaluated; dev to choose settings",
    )
    parser.add_argument("--json", type=Path, help="keep the figures there, and go on from them")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the curves there")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep there the folder of every run made now"
    )
    parser.add_argument(
        "--cache", type=Path, help="data and warm starts (examples/<example>/.cache)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

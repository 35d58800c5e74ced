"""Do the examples really learn? The figures of docs/evidence, with their controls, in one run.

    python benchmarks/learning.py                        SQL: seeds 0, 1 and 2, and every control
    python benchmarks/learning.py --example rag          the same of RAG; or rag-crewai, math,
                                                         router, router-pydantic-ai,
                                                         quest, terminal, textworld, charts
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
(SQL) trains one agent alone. After each training the charts are exchanged too: every question is
asked about another one's picture. Others compare arms with the same seeds, each against the first,
which is the recipe: `air` (SQL) ways to use rewards on the way, `agents` (the crew) which agents
learn, `policies` (the router) one policy behind both agents with one behind each, which are then
swapped. What the app is for is evaluated, never a shaped reward.
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
from _report import circumstances
from lightspan_learning import merged

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
"""Permuted rewards may gain at most this share of what real rewards gain."""
FIXED_PLANS: Final = 200
"""Number of plans, of train and of test quests each, that are tried in every test quest."""
SAY: Final = PlainReporter(sys.stderr)
ROOT: Final = Path(__file__).parents[1]
HEADS: Final = (
    "| run | seed | start | middle (dev) | end | gain (95% CI) | n | engine + learner CPU-s | "
    "app CPU-s, evaluation included | wall s | warm start CPU-s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


# --- what is measured -----------------------------------------------------------------------
def constant_query(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """Return the score of each query, if it answers all test questions."""
    from sql_example.reward import constant_query_scores

    queries = ["SELECT 1", "SELECT 0", *(task["gold"] for task in [*train, *test])]
    return constant_query_scores(queries, test, cache / "data")


def constant_name(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """Return the score of each gold answer, if it answers all test questions."""
    from rag_example.reward import constant_answer_scores

    candidates = (text for task in [*train, *test] for text in task["answers"])
    return constant_answer_scores(candidates, [task["answers"] for task in test])


def constant_number(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """Return the score of each answer of the test split, if it answers all its problems."""
    from math_example.reward import constant_answer_scores

    return constant_answer_scores(task["answer"] for task in test)


def constant_ticket(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """Return the score of each pair of department and product, if it answers all messages."""
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
    """Return the share of test quests that each plan solves, and that random actions solve."""
    from quest_example.reward import plan_scores, random_score
    from quest_example.training import RECIPE, plans_of
    from quest_example.world import World

    worlds = [World.from_json(task["world"]) for task in test]
    plans = plans_of([*train[:FIXED_PLANS], *test[:FIXED_PLANS]])
    chance = {"any action that does something": random_score(worlds, RECIPE.max_calls)}
    return {**plan_scores(plans, worlds, RECIPE.max_calls), **chance}


def textworld_player(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """Return the share of test games that each player without a model wins, chance included."""
    from textworld_example.reward import constant_scores

    games = dict.fromkeys(Path(task["game"]) for task in test)
    return constant_scores(list(games), [task["route"] for task in test])


def terminal_guess(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """Return the share of test packages that are repaired without reading, by the bug guessed."""
    from terminal_example.packages import guess_scores

    return guess_scores(test)


def chart_guess(train: Sequence[Any], test: Sequence[Any], cache: Path) -> Mapping[str, float]:
    """Return the share of test questions that each answer is right for, and that other charts
    answer.
    """
    from charts_example.reward import constant_scores, exchanged_score

    chance = {"what another chart shows": exchanged_score(test)}
    return {**constant_scores(test), **chance}


def exchanged_charts(test: Sequence[Any]) -> list[Any]:
    """Return the test questions, each about the chart of another one."""
    from charts_example.reward import exchanged

    return exchanged(test)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An example: its training module, its controls and the targets of its figures."""

    training: str
    """Name of the module with RECIPE, TRAINED, answer, load_tasks, warm_start, rl_options and
    chats."""
    metric: str
    constant: Callable[[Sequence[Any], Sequence[Any], Path], Mapping[str, float]]
    constant_ceiling: float
    folder: str | None = None
    """Folder below `examples`; None if it has the example's name."""
    cpu_s: float = math.inf
    """Promised maximum of the engine's and the learner's CPU seconds."""
    start: float = 0.0
    """Promised minimum of the score before training."""
    end: float = 0.0
    """Promised minimum of the score after training."""
    gain: float = 0.0
    """Promised minimum of the gain."""
    cluster: str | None = None
    """Key of a task that names its cluster; None if each task is a cluster of its own."""
    kind: str | None = None
    """Key of a task that names its kind, by which scores are told apart; None for no kinds."""
    alone: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Part → the options of LightningRL with which an agent is trained alone."""
    first_try: Mapping[str, Any] | None = None
    """Changes of a task with which only those agents act that are not trained in `alone`; None if
    that is not possible."""
    exchanged: Callable[[Sequence[Any]], list[Any]] | None = None
    """Function from the test tasks to tasks with equal questions about other inputs; None if there
    are none."""
    imitates: bool = True
    """Whether the example starts with fine-tuning on demonstrations, of which more can be made."""
    comparison: str | None = None
    """Name of the part that compares arms; None if the example has none."""
    arms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arm → arguments of LightningRL that differ from the recipe's; the first arm is the recipe."""

    @property
    def parts(self) -> list[str]:
        """The parts that can be run for this example."""
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
    """Return the subject for the name of an example."""
    return SUBJECTS[example]()


SUBJECTS: Final[Mapping[str, Callable[[], Subject]]] = {
    "charts": lambda: Subject(
        training="charts_example.training",
        metric="answers right",
        constant=chart_guess,
        constant_ceiling=0.25,  # the best answer for each kind of question
        exchanged=exchanged_charts,
    ),
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
    "terminal": lambda: Subject(
        training="terminal_example.training",
        metric="packages repaired",
        constant=terminal_guess,
        constant_ceiling=0.3,
        cluster="name",
        kind="kind",
        gain=0.15,
    ),
    "textworld": lambda: Subject(
        training="textworld_example.training",
        metric="games won",
        constant=textworld_player,
        constant_ceiling=0.4,  # the last command of the offer: commands are sorted
        cluster="route",
        start=0.15,
        end=0.5,
        gain=0.2,
    ),
}


@dataclass
class Run:
    """One training run and its measurements."""

    name: str
    seed: int
    points: list[tuple[int, float]]
    """(step, mean) of the learning curve on the dev split; the first point is before training."""
    gain: str
    n: int
    engine_cpu_s: float
    learner_cpu_s: float
    app_cpu_s: float
    wall_s: float
    warm_start_cpu_s: float = 0.0
    first_try: tuple[float, float] | None = None
    """Score of the first try (before, after) if one agent was trained alone; None otherwise."""
    frozen_unchanged: bool | None = None
    """Whether the frozen agents' weights stayed the same; None if no agent is frozen."""
    swapped: tuple[float, float] | None = None
    """With several policies, the score with each behind (its own agent, the next agent); else
    None."""
    exchanged: float | None = None
    """Score after training if each task has another one's input; None if it was not measured."""
    training: dict[str, float] = field(default_factory=dict)
    """Means over the training steps of the unshaped reward and of AIR's metrics."""
    before: dict[str, float] = field(default_factory=dict)
    """Task → reward on the test split before training. If empty, `points` are of the test split."""
    after: dict[str, float] = field(default_factory=dict)
    clusters: dict[str, str] = field(default_factory=dict)
    """Task → its cluster; empty if each task is a cluster of its own."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Task → its kind; empty if the example's tasks have no kinds."""
    circumstances: dict[str, Any] = field(default_factory=dict)
    """Date, commit, machine and load."""
    odd: dict[str, int] = field(default_factory=dict)
    """Number of tasks and rollouts without a score, and of those whose app failed."""

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
        """Task → the gain by training, for tasks with a score before and after."""
        return _differences(self.after, self.before)

    @property
    def gained(self) -> float:
        """The gain of the mean score by training."""
        return self.end - self.start

    @property
    def cpu_s(self) -> float:
        return self.engine_cpu_s + self.learner_cpu_s

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Run:
        """Return a run from its JSON."""
        return cls(**{**found, "points": [(step, mean) for step, mean in found["points"]]})


class Watched(LightningRL):
    """LightningRL that records a hash of the frozen agents' weights at every step."""

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
    """The control in which rewards are permuted."""


# --- figures that are kept ------------------------------------------------------------------
class Kept:
    """Figures by name, written to a file as soon as each is measured.

    Args:
        path: the file; None to keep the figures in memory only.
        settings: what the figures depend on. Figures with other settings are not mixed with them.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = json.loads(json.dumps(settings))
        self._figures: dict[str, Any] = {}
        if path is not None and path.exists():
            self._read(path)

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the figures `name`, as from JSON; call `measure` if they are not there yet."""
        if name in self._figures:
            SAY.line(f"{name}: kept in {self._path}")
        else:
            self._figures[name] = json.loads(json.dumps(measure(), default=asdict))
            self.write()
        return self._figures[name]

    def write(self, **more: Any) -> None:
        """Write the file again, as a whole or not at all."""
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
    """An example's data, and methods to train and evaluate on it.

    Args:
        recipe: the settings; None for the example's.
        evaluations: number of evaluations of a run after the one before training, the last
            included.
        split: split that is evaluated; "dev" while settings are being chosen.
        on_the_way: number of tasks of the dev split for the evaluations during training.
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
        """Run all `parts`, and return the report. The part "alone" uses the first seed only."""
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
        """Run one arm with one seed; the first arm is the recipe itself."""
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
        """Warm-start and train; evaluate before, during and after training.

        Args:
            name: name of the arm.
            seed: the seed.
            changes: arguments of LightningRL that differ from the recipe's; None for none.
            kind: the algorithm's class.
            first_try: whether to also evaluate, before and after training, the first try alone, in
                which no trained agent acts.
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
        run.circumstances = circumstances()
        if self.subject.kind is not None:
            run.kinds = {task["id"]: task[self.subject.kind] for task in self.test}
        run.frozen_unchanged = len(set(algorithm.hashes)) == 1 if algorithm.hashes else None
        if first_try:
            run.first_try = self._first_try(folder.name, model, result.model, options["optimize"])
        if len(algorithm.policies()) > 1:
            run.swapped = self._swapped(folder.name, model, result.model)
        if self.subject.exchanged is not None:
            run.exchanged = self._exchanged(folder.name, model, result.model)
        SAY.line(str(run))
        return run

    def _exchanged(self, name: str, base: Path, trained: Path) -> float:
        """Return the score on the test tasks, each with the input of another one."""
        assert self.subject.exchanged is not None
        tasks = [
            {**task, "id": f"exchanged {task['id']}"} for task in self.subject.exchanged(self.test)
        ]
        models = dict.fromkeys(self._code.TRAINED, trained)
        return self.evaluate(models, base, tasks, f"{name}-exchanged")

    def _swapped(self, name: str, base: Path, trained: Path) -> tuple[float, float]:
        """Return the score with each policy behind its own agent, and behind the next agent."""
        agents = list(self._code.TRAINED)
        models = {agent: merged(trained / agent) for agent in agents}
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
        """Return the score on `tasks`: `models` run their agents, `base` runs the other agents."""
        options = self._code.rl_options(0, self.recipe)
        names = {model: f"policy-{n}" for n, model in enumerate(dict.fromkeys(models.values()))}
        options["optimize"] = {
            agent: Policy(name=names[model], model=str(model)) for agent, model in models.items()
        }
        algorithm = LightningRL(str(base), **options)
        trainer = Trainer(algorithm, runners=16, folder=self._scratch / name, reporter=SAY)
        return trainer.evaluate(self._code.answer, tasks).mean

    def more_sft(self, run: Run) -> dict[str, float]:
        """Return the result of as many CPU seconds of further fine-tuning as RL took.

        The learning rate decays to the end: without a decay, this would be a weak control.
        """
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
        """Return the best score that one constant answer reaches on the test tasks."""
        scores = self.subject.constant(self.train, self.test, self._cache)
        best = max(scores, key=lambda answer: scores[answer])
        return {"answers": len(scores), "best": best, "score": scores[best]}


def updates_within(cpu_s: float, warm_s: float, updates: int) -> int:
    """Return how many fine-tuning updates fit into `cpu_s` seconds, but at least 60.

    `updates` updates of the warm start took `warm_s` seconds. 60 is twice the number of warm-up
    steps of the learning rate.
    """
    return max(60, round(updates * cpu_s / max(warm_s, 1e-9)))


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
    """Return the means, over training steps, of the unshaped reward and of AIR's metrics."""
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
    """Return task → more - less, for tasks that are in both."""
    return {task: value - less[task] for task, value in more.items() if task in less}


def children_cpu() -> float:
    """Return the CPU seconds of ended child processes: the runners, evaluations included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- what is said ---------------------------------------------------------------------------
@dataclass
class Report:
    """The parts that were measured, and their evaluation."""

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
        """All runs, each once."""
        compared = [run for runs in self.compared.values() for run in runs]
        found = {(run.name, run.seed): run for run in [*self.runs, *self.controls, *compared]}
        return list(found.values())

    @property
    def arms(self) -> list[Arm]:
        """The learning curves to draw."""
        found: Mapping[str, list[Run]] = self.compared
        if not found:
            names = dict.fromkeys(run.name for run in self.controls)
            controls = {name: [r for r in self.controls if r.name == name] for name in names}
            found = {"RL": self.runs, **controls}
        return [Arm(name, [run.points for run in runs]) for name, runs in found.items() if runs]

    @property
    def permuted(self) -> list[Run]:
        """The runs with permuted rewards, one for each seed."""
        return [run for run in self.controls if run.name == PERMUTED]

    def missed(self) -> Iterator[str]:
        """Yield a line for each promise of the example that a run did not keep."""
        for run in self.runs:
            yield from self._missed_by(run)
        for run in self.all_runs:
            if run.frozen_unchanged is False:
                yield f"{run.name}, seed {run.seed}: the frozen agents' weights changed"
            if run.exchanged is not None and run.exchanged > self.subject.constant_ceiling:
                yield (
                    f"{run.name}, seed {run.seed}: {run.exchanged:.3f} with other inputs, promised "
                    f"at most {self.subject.constant_ceiling}"
                )
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
        """Yield a line for each run whose policies are not worse behind each other's agent."""
        for run in self.all_runs:
            if run.swapped is not None:
                own, crossed = run.swapped
                if own - crossed <= _noise(run.n):
                    yield f"{run.name}, seed {run.seed}: swapped {crossed:.3f}, own {own:.3f}"

    def _missed_by_permuted(self) -> Iterator[str]:
        """Yield a line if permuted rewards seem to have taught something.

        Permuted rewards are noise, which moves a policy at random, so that one run may end a little
        better. Its gain must be small compared with the same seed's gain by real rewards. Over all
        seeds, the gain must not differ from 0.
        """
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
        """Return the table of runs, and a line for each control."""
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
            if run.exchanged is not None:
                lines.append(f"{who}: with the input of another task: {run.exchanged:.3f}")
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
        """Return name → its runs, for names with several seeds."""
        found: dict[str, list[Run]] = {}
        for run in self.all_runs:
            found.setdefault(run.name, []).append(run)
        return {name: runs for name, runs in found.items() if len(runs) > 1 and runs[0].after}

    def _compared_text(self) -> Iterator[str]:
        """Yield each arm's results over seeds, and its paired difference from the first arm."""
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
    """Return a bound for the difference of two means that differ by chance only.

    It holds in 95 of 100 cases, for means of `n` values between 0 and 1.
    """
    return 1.96 * math.sqrt(2 * 0.25 / n)


def _verdict(*found: Interval) -> str:
    if all(each.low > 0 for each in found):
        return "better"
    is_worse = all(each.high < 0 for each in found)
    return "worse" if is_worse else "no difference that can be told from chance"


def _over_seeds(runs: Sequence[Run]) -> str:
    """Return a text on the mean gain, with intervals over seeds and over seeds and tasks."""
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
    """Return the mean of the curve after its start; faster learning gives a higher mean."""
    later = [mean for _, mean in run.points[1:]]
    return math.fsum(later) / len(later)


def _row(run: Run) -> str:
    return (
        f"| {run.name} | {run.seed} | {run.start:.3f} | {run.middle:.3f} | {run.end:.3f} | "
        f"{run.gain} | {run.n} | {run.engine_cpu_s} + {run.learner_cpu_s} | {run.app_cpu_s} | "
        f"{run.wall_s} | {run.warm_start_cpu_s} |"
    )


def main() -> int:
    """Run all parts and print the table; return the exit status."""
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

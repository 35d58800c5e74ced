"""The app as lightspan trains it, and the one frozen recipe that the README's figures come from.

This is all that the example needs beside the app: `answer` runs the untouched graph on a task and
scores the query that it ends with. Everything was tuned on the development schemas; the test
schemas were looked at once, to report.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import lightspan_langgraph
from lightspan import SFT, LightningRL, LoRA, Optimizer, PolicyLoss, rollout
from lightspan.progress import Reporter
from sql_example import worlds
from sql_example.app import Graph, State, build_graph, chat_model
from sql_example.demonstrations import COUNT, TRUNCATE_LENGTH, demonstrate
from sql_example.reward import execution_accuracy
from sql_example.worlds import Task, app_input

TRAINED = ["write_query", "rewrite_query"]
"""The agents that learn; the checker stays frozen."""
AGENTS = lightspan_langgraph.agents(build_graph()).paths
"""Every agent of the app: a misspelt name is an error before anything runs."""


@dataclass(frozen=True)
class Recipe:
    """Every setting of the example's training."""

    demonstrations: int = COUNT
    sft_batch: int = 16
    sft_learning_rate: float = 3e-3
    sft_muon_learning_rate: float = 0.01
    prompt_weight: float = 0.2
    steps: int = 20
    group_size: int = 8
    tasks_per_step: int = 16
    minibatches: int = 2
    learning_rate: float = 4e-4
    temperature: float = 0.7
    max_tokens: int = 48
    max_turns: int = 2


RECIPE = Recipe()
REAL_MODEL = replace(RECIPE, steps=400, learning_rate=1e-6, max_tokens=512, max_turns=3)
"""The recipe for a model that was not built here; not yet run on a GPU."""


class TrainingTask(Task):
    """A task with where its databases are, and how the app is to be run."""

    data: str
    max_tokens: int
    max_turns: int


lightspan_langgraph.instrument()


@rollout
def answer(task: TrainingTask) -> float:
    """Run the app on a task; the reward is execution accuracy. The gold query stays out here."""
    data = Path(task["data"])
    graph = _graph(task["max_tokens"], task["max_turns"])
    final = graph.invoke(cast(State, app_input(task, data)))
    return execution_accuracy(final["query"], task, data)


@cache
def _graph(max_tokens: int, max_turns: int) -> Graph:
    # Where the client points does not matter in training: the calls of optimised agents go to the
    # model that learns, and with frozen="base" the others to the one that it started from.
    model = chat_model(
        "sql",
        base_url="http://localhost/v1",
        api_key="unused",
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )
    return build_graph(model, max_turns=max_turns, truncate_length=TRUNCATE_LENGTH)


def load_tasks(cache_dir: Path, split: worlds.Split, recipe: Recipe = RECIPE) -> list[TrainingTask]:
    """The tasks of a split as `answer` takes them; databases are generated on the first call."""
    data = cache_dir / "data"
    if not (data / "complete").exists():
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(parents=True)
        worlds.generate(data)
        (data / "complete").touch()
    where, tokens, turns = str(data.resolve()), recipe.max_tokens, recipe.max_turns
    return [
        TrainingTask(**task, data=where, max_tokens=tokens, max_turns=turns)
        for task in worlds.load(data, split)
    ]


def warm_start(
    cache_dir: Path, seed: int, reporter: Reporter, recipe: Recipe = RECIPE
) -> tuple[Path, float]:
    """The small model, taught by imperfect demonstrations; cached by recipe and seed.

    Returns:
        Its folder, and the CPU-seconds that the learner spent, now or when it was cached.
    """
    from sql_example.model import build_model

    folder = cache_dir / f"warm-start-{_digest(recipe)}-{seed}"
    complete = folder / "complete"
    if complete.exists():
        reporter.line(f"warm start of seed {seed}: cached in {folder}")
        return folder, float(complete.read_text())
    demonstrations = demonstrate(recipe.demonstrations, seed=seed)
    base = folder.with_name(f"{folder.name}-untrained")
    build_model(base, demonstrations[:3000], seed=seed)
    sft = make_sft(base, seed, recipe)
    chats = [{"messages": list(demo.messages)} for demo in demonstrations]
    result = sft.fit(chats, folder, reporter=reporter)
    shutil.rmtree(base)
    complete.write_text(f"{result.seconds:.1f}")
    return folder, result.seconds


def make_sft(
    model: Path, seed: int, recipe: Recipe = RECIPE, *, max_cpu_seconds: float | None = None
) -> SFT:
    """Supervised fine-tuning as the warm start does it."""
    steps = recipe.demonstrations // recipe.sft_batch
    optimizer = Optimizer(
        name="muon",
        learning_rate=recipe.sft_learning_rate,
        muon_learning_rate=recipe.sft_muon_learning_rate,
        warmup_steps=30,
        decay_steps=steps,
    )
    return SFT(
        model,
        optimizer=optimizer,
        batch_size=recipe.sft_batch,
        prompt_weight=recipe.prompt_weight,
        max_cpu_seconds=max_cpu_seconds,
        seed=seed,
    )


def make_algorithm(
    model: str | Path, seed: int, recipe: Recipe = RECIPE, *, lora: LoRA | None = None
) -> LightningRL:
    """LightningRL as the example uses it: writer and rewriter learn, the checker is frozen."""
    return LightningRL(str(model), lora=lora, **rl_options(seed, recipe))


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """The arguments of LightningRL that the recipe fixes."""
    return {
        "optimize": TRAINED,
        "frozen": "base",
        "group_size": recipe.group_size,
        "tasks_per_step": recipe.tasks_per_step,
        "minibatches": recipe.minibatches,
        "learning_rate": recipe.learning_rate,
        "temperature": recipe.temperature,
        "loss": PolicyLoss(clip_low=0.2, clip_high=0.28),
        "failure_reward": 0.0,
        "seed": seed,
    }


def _digest(recipe: Recipe) -> str:
    """Of what a warm start depends on."""
    names = ("demonstrations", "prompt_weight")
    kept = {k: v for k, v in asdict(recipe).items() if k.startswith("sft") or k in names}
    source = Path(__file__).with_name("demonstrations.py").read_bytes()
    source += Path(__file__).with_name("worlds.py").read_bytes()
    source += Path(__file__).with_name("model.py").read_bytes()
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode() + source).hexdigest()[:12]

"""The app with its reward, and the recipe that docs/evidence/sql.md measures.

`answer` runs the unchanged graph on a task and scores its last query. Everything was tuned on the
development schemas; the test schemas were used once, for the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import lightspan_langgraph
from lightspan import AIR, LightningRL, LoRA, rollout
from lightspan.progress import Reporter
from lightspan_examples import recipe as common
from lightspan_examples.data import generated, report_loaded
from lightspan_examples.recipe import Imitation
from lightspan_examples.warm_start import WarmStart
from sql_example import demonstrations, spider, worlds
from sql_example.app import Graph, State, build_graph, chat_model
from sql_example.demonstrations import COUNT, TRUNCATE_LENGTH
from sql_example.reward import execution_accuracy
from sql_example.signals import draft_error
from sql_example.worlds import Task, app_input

TRAINED = ["write_query", "rewrite_query"]
"""The agents that are trained; the checker stays frozen."""
AGENTS = lightspan_langgraph.agents(build_graph()).paths
"""All agents of the app, so that a misspelt name raises an error before training."""


@dataclass(frozen=True, kw_only=True)
class Recipe(common.Recipe):
    """Settings of the example's training; `max_turns` is the maximum of queries per question."""

    max_turns: int = 2


RECIPE = Recipe(
    imitation=Imitation(demonstrations=COUNT),
    steps=20,
    group_size=8,
    tasks_per_step=16,
    minibatches=2,
    temperature=0.7,
    max_tokens=48,
)
REAL_MODEL = replace(RECIPE, steps=400, max_tokens=512, max_turns=3)
"""Recipe for a model of `--model`; it has not been run on a GPU yet."""
AIR_OPTIONS: Mapping[str, Any] = {"air": AIR(signals=(draft_error,), scale=0.6)}
"""Arguments of `LightningRL` for intermediate rewards, chosen on the development schemas.

A query is rewritten only after an error, and is then right much less often than a first draft: on
the training schemas 0.17, against 0.82 over all questions. The scale is about that difference.
"""


class TrainingTask(Task):
    """A task with the folder of its databases and the app's settings."""

    data: str
    max_tokens: int
    max_turns: int


lightspan_langgraph.instrument()


@rollout
def answer(task: TrainingTask) -> float:
    """Run the app on a task; return its execution accuracy. The app does not see the gold query."""
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


def load_tasks(
    cache_dir: Path,
    split: worlds.Split,
    recipe: Recipe = RECIPE,
    reporter: Reporter | None = None,
) -> list[TrainingTask]:
    """Return the tasks of a split for `answer`; the first call generates the databases."""
    data = generated(cache_dir, worlds.generate, "databases and questions", reporter)
    return [_training_task(task, data, recipe) for task in worlds.load(data, split)]


def load_data(
    data: Path,
    split: spider.Split,
    reporter: Reporter,
    recipe: Recipe,
    *,
    limit: int | None = None,
) -> list[TrainingTask]:
    """Return the tasks of a split of Spider for `answer` (see `sql_example.spider`)."""
    loaded = spider.load(data, split, limit=limit)
    report_loaded(split, loaded, "questions", reporter)
    return [_training_task(task, data, recipe) for task in loaded.tasks]


def _training_task(task: Task, data: Path, recipe: Recipe) -> TrainingTask:
    return TrainingTask(
        **task,
        data=str(data.resolve()),
        max_tokens=recipe.max_tokens,
        max_turns=recipe.max_turns,
    )


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` demonstrations as chats."""
    return [
        {"messages": list(demonstration.messages)}
        for demonstration in demonstrations.demonstrate(count, seed=seed)
    ]


warm_start = WarmStart(RECIPE, chats, [demonstrations, worlds])


def make_algorithm(
    model: str | Path,
    seed: int,
    recipe: Recipe = RECIPE,
    *,
    lora: LoRA | None = None,
    air: bool = False,
) -> LightningRL:
    """Return `LightningRL` for the example: writer and rewriter are trained, the checker is frozen.

    Args:
        lora: LoRA settings; None trains the full weights.
        air: whether to use intermediate rewards (`AIR_OPTIONS`).
    """
    options = {**rl_options(seed, recipe), **(AIR_OPTIONS if air else {})}
    return LightningRL(str(model), lora=lora, **options)


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return the arguments of `LightningRL` that the recipe sets."""
    return {"optimize": TRAINED, "frozen": "base", "seed": seed, **recipe.settings}

"""The app with its reward, and the recipe that docs/evidence/charts.md measures.

`answer` draws a chart, runs the unchanged graph on it and scores the computed answer. Everything
was tuned on the development charts; the test charts are for the report.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import lightspan_langgraph
from charts_example import app, charts, demonstrations, questions, tasks
from charts_example.app import Graph, build_graph, chat_model
from charts_example.charts import draw
from charts_example.demonstrations import COUNT
from charts_example.reward import score
from charts_example.tasks import Split, Task
from lightspan import rollout
from lightspan.progress import Reporter
from lightspan_examples.recipe import Imitation, Recipe
from lightspan_examples.warm_start import WarmStart

TRAINED = ["reader"]
"""The agents that are trained. `computer` follows rules."""
AGENTS = lightspan_langgraph.agents(build_graph()).paths
"""All agents of the app, so that a misspelt name raises an error before training."""


class VisionImitation(Imitation):
    """Settings of a warm start that trains the vision part too."""

    train_vision: ClassVar[bool] = True


RECIPE = Recipe(
    imitation=VisionImitation(
        demonstrations=COUNT,
        learning_rate=1e-3,
        muon_learning_rate=5e-3,  # at 0.01 the loss stays at .55 for twice as many updates
        prompt_weight=0.0,
    ),
    steps=30,
    group_size=8,
    tasks_per_step=32,
    minibatches=2,
    learning_rate=4e-4,
    warmup=8,  # updates; without, at 1e-3, the reward fell from .43 to .20 in three steps
    decay=1.0,
    temperature=0.7,
    max_tokens=16,
)
REAL_MODEL = replace(
    RECIPE, steps=100, tasks_per_step=16, learning_rate=None, warmup=0, decay=None, max_tokens=32
)
"""Recipe for a model of `--model`; it has not been run on a GPU yet."""


class TrainingTask(Task):
    """A task with the app's settings."""

    max_tokens: int


lightspan_langgraph.instrument()


@rollout
def answer(task: TrainingTask) -> float:
    """Draw the chart and ask the app; return 1 for the right answer, else 0."""
    graph = _graph(task["max_tokens"])
    final = graph.invoke({"chart": draw(task["chart"]), "question": task["question"]})
    return score(final["answer"], task)


@cache
def _graph(max_tokens: int) -> Graph:
    # Where the client points does not matter in training: calls go to the model that learns.
    model = chat_model(
        "charts",
        base_url="http://localhost/v1",
        api_key="unused",
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )
    return build_graph(model)


def load_tasks(
    cache_dir: Path, split: Split, recipe: Recipe = RECIPE, reporter: Reporter | None = None
) -> list[TrainingTask]:
    """Return the tasks of a split for `answer`."""
    del cache_dir, reporter  # nothing has to be kept
    return [TrainingTask(**task, max_tokens=recipe.max_tokens) for task in tasks.tasks(split)]


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` demonstrations as chats."""
    return demonstrations.demonstrate(count, seed)


warm_start = WarmStart(
    RECIPE,
    chats,
    [app, charts, demonstrations, questions, tasks],
    builder="charts_example.vision_model",
)


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return the arguments of `LightningRL` that the recipe sets."""
    return {"optimize": TRAINED, "frozen": None, "seed": seed, **recipe.settings}

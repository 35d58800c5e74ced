"""The app with its reward, and the recipe that docs/evidence/quest.md measures.

`answer` runs the unchanged graph on a quest and scores its last position. Everything was tuned on
the development worlds; the test worlds are for the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightspan_langgraph
from lightspan import rollout
from lightspan.progress import Reporter
from lightspan_examples import recipe as common
from lightspan_examples.data import generated
from lightspan_examples.recipe import Imitation
from lightspan_examples.warm_start import WarmStart
from quest_example import app, demonstrations, player, prompts, world, worlds
from quest_example.app import MAX_CALLS, Graph, build_graph, chat_model
from quest_example.demonstrations import COUNT
from quest_example.reward import solved
from quest_example.world import Action, World
from quest_example.worlds import Task

TRAINED = ["explore"]
"""The agents that are trained."""
AGENTS = lightspan_langgraph.agents(build_graph()).paths
"""All agents of the app, so that a misspelt name raises an error before training."""


@dataclass(frozen=True, kw_only=True)
class Recipe(common.Recipe):
    """Settings of the example's training; `max_calls` is the maximum of model calls per quest."""

    max_calls: int = MAX_CALLS


RECIPE = Recipe(
    imitation=Imitation(demonstrations=COUNT, prompt_weight=0.2),
    steps=12,
    group_size=8,
    tasks_per_step=16,
    minibatches=4,
    learning_rate=5e-4,
    warmup=8,  # updates: AdamW's first ones are long in every direction, whatever is known
    decay=1.0,  # at a constant rate a run fell to 0 when few groups still varied
    temperature=0.7,
    max_tokens=48,
)
REAL_MODEL = replace(RECIPE, steps=400, learning_rate=None, warmup=0, decay=None, max_tokens=512)
"""Recipe for a model of `--model`; it has not been run on a GPU yet."""


class TrainingTask(Task):
    """A quest with the app's settings."""

    max_tokens: int
    max_calls: int


lightspan_langgraph.instrument()


@rollout
def answer(task: TrainingTask) -> float:
    """Play a quest; return 1 if it was solved, else 0."""
    graph = _graph(task["max_tokens"], task["max_calls"])
    final = graph.invoke({"world": World.from_json(task["world"])})
    return solved(final["position"])


@cache
def _graph(max_tokens: int, max_calls: int) -> Graph:
    # Where the client points does not matter in training: calls go to the model that learns.
    model = chat_model(
        "quest",
        base_url="http://localhost/v1",
        api_key="unused",
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )
    return build_graph(model, max_calls=max_calls)


def load_tasks(
    cache_dir: Path,
    split: worlds.Split,
    recipe: Recipe = RECIPE,
    reporter: Reporter | None = None,
) -> list[TrainingTask]:
    """Return the quests of a split for `answer`; the first call generates the worlds."""
    data = generated(cache_dir, worlds.generate, "worlds", reporter)
    return [
        TrainingTask(**task, max_tokens=recipe.max_tokens, max_calls=recipe.max_calls)
        for task in worlds.load(data, split)
    ]


def plans_of(tasks: Sequence[Task]) -> dict[str, list[Action]]:
    """Return id of a quest → actions of a careful player; quests that the player loses are left
    out.
    """
    return {
        task["id"]: [action for _, action in path]
        for task in tasks
        if (path := player.careful_path(World.from_json(task["world"]), MAX_CALLS)) is not None
    }


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` demonstrations as chats."""
    return demonstrations.demonstrate(count, seed)


warm_start = WarmStart(RECIPE, chats, [demonstrations, app, player, prompts, world, worlds])


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return the arguments of `LightningRL` that the recipe sets."""
    return {"optimize": TRAINED, "frozen": None, "seed": seed, **recipe.settings}

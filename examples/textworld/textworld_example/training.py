"""The app with its reward, and the recipe that docs/evidence/textworld.md measures.

`answer` runs the unchanged graph on a game and scores its last state. Everything was tuned on the
development games; the test games are for the report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import lightspan_langgraph
from lightspan import rollout
from lightspan.progress import Reporter
from lightspan_examples import recipe as common
from lightspan_examples.data import generated
from lightspan_examples.recipe import Imitation
from lightspan_examples.warm_start import WarmStart
from textworld_example import app, demonstrations, games
from textworld_example.app import LIMIT, Graph, build_graph, chat_model
from textworld_example.demonstrations import COUNT
from textworld_example.games import Split, Task
from textworld_example.reward import won

CACHE: Final = Path(__file__).parents[1] / ".cache"
"""Default folder of games and warm starts."""
TRAINED = ["play"]
"""The agents that are trained."""
AGENTS = lightspan_langgraph.agents(build_graph()).paths
"""All agents of the app, so that a misspelt name raises an error before training."""
ATTEMPTS: Final = {"train": 1, "dev": 2, "test": 4}
"""How often a game of a split is played in an evaluation: games take longer to make than to play.
"""


@dataclass(frozen=True, kw_only=True)
class Recipe(common.Recipe):
    """Settings of the example's training; `limit` is the maximum of commands per game."""

    limit: int = LIMIT


RECIPE = Recipe(
    imitation=Imitation(demonstrations=COUNT),
    steps=12,
    group_size=8,
    tasks_per_step=16,
    minibatches=4,
    learning_rate=4e-4,
    warmup=8,  # updates; without, the first four of a step ended the learning of another game
    decay=1.0,
    temperature=0.7,
    max_tokens=16,
)
REAL_MODEL = replace(RECIPE, steps=400, learning_rate=None, warmup=0, decay=None)
"""Recipe for a model of `--model`; it has not been run on a GPU yet."""


class TrainingTask(Task):
    """A game with the app's settings."""

    max_tokens: int
    limit: int


lightspan_langgraph.instrument()


@rollout
def answer(task: TrainingTask) -> float:
    """Play a game; return 1 if it was won, else 0."""
    final = _graph(task["max_tokens"], task["limit"]).invoke({"game": task["game"]})
    return won(final["now"])


@cache
def _graph(max_tokens: int, limit: int) -> Graph:
    # Where the client points does not matter in training: calls go to the model that learns.
    model = chat_model(
        "textworld",
        base_url="http://localhost/v1",
        api_key="unused",
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )
    return build_graph(model, limit=limit)


def load_tasks(
    cache_dir: Path, split: Split, recipe: Recipe = RECIPE, reporter: Reporter | None = None
) -> list[TrainingTask]:
    """Return the games of a split for `answer`; the first call generates them, in minutes.

    Each game is there `ATTEMPTS` times, once after all others.
    """
    data = _data(cache_dir, reporter)
    return [
        TrainingTask(
            id=f"{task['id']}/{attempt}",
            game=str(data / task["game"]),
            route=task["route"],
            max_tokens=recipe.max_tokens,
            limit=recipe.limit,
        )
        for attempt in range(ATTEMPTS[split])
        for task in games.load(data, split)
    ]


def _data(cache_dir: Path, reporter: Reporter | None) -> Path:
    return generated(cache_dir.resolve(), games.generate, "games", reporter)


def chats(count: int, seed: int, cache_dir: Path = CACHE) -> list[dict[str, Any]]:
    """Return `count` demonstrations as chats, of the training games of a cache."""
    data = _data(cache_dir, None)
    paths = [data / task["game"] for task in games.load(data, "train")]
    return demonstrations.demonstrate(paths, count, seed)


def warm_start(
    cache_dir: Path, seed: int, reporter: Reporter, recipe: Recipe | None = None
) -> tuple[Path, float]:
    """Return a small model trained on demonstrations, and the CPU-seconds that it took."""
    make_chats = partial(chats, cache_dir=cache_dir)
    start = WarmStart(RECIPE, make_chats, [demonstrations, app, games])
    return start(cache_dir, seed, reporter, recipe)


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return the arguments of `LightningRL` that the recipe sets."""
    return {"optimize": TRAINED, "frozen": None, "seed": seed, **recipe.settings}

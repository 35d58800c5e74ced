"""The app with its reward, and the recipe that docs/evidence/math.md measures.

`answer` runs the unchanged agent on a problem and scores its reply. Settings were chosen on the
development stories; that earlier recipes failed was seen on the test stories (see that page).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from autogen_core.models import ChatCompletionClient

import lightspan_autogen
from lightspan import rollout
from lightspan.progress import Reporter
from lightspan_examples import recipe as common
from lightspan_examples.data import report_loaded
from lightspan_examples.recipe import Imitation
from lightspan_examples.warm_start import WarmStart
from math_example import (
    calculator,
    datasets,
    demonstrations,
    expressions,
    records,
    words,
    worlds,
)
from math_example.app import AGENT, chat_client, shared_calculator, solve
from math_example.reward import exact_answer
from math_example.words import Split
from math_example.worlds import Task

TRAINED = [AGENT]
"""The agents that are trained."""
AGENTS = (AGENT,)
"""All agents of the app, so that a misspelt name raises an error before training."""


@dataclass(frozen=True, kw_only=True)
class Recipe(common.Recipe):
    """Settings of the example's training; `max_calls` is the maximum of model calls per problem."""

    max_calls: int = 2


RECIPE = Recipe(
    imitation=Imitation(demonstrations=demonstrations.COUNT),
    steps=14,
    group_size=8,
    tasks_per_step=16,
    minibatches=2,
    learning_rate=4e-4,
    decay=1.0,  # at a constant rate one of five runs fell below its start
    temperature=0.7,
    max_tokens=48,
)
REAL_MODEL = replace(RECIPE, steps=400, learning_rate=None, decay=None, max_tokens=512, max_calls=6)
"""Recipe for a model of `--model`; it has not been run on a GPU yet."""


class TrainingTask(Task):
    """A task with the app's settings."""

    max_tokens: int
    max_calls: int


lightspan_autogen.instrument()


@rollout
async def answer(task: TrainingTask) -> float:
    """Run the app on a problem; return 1 if its answer is exactly right, else 0.

    The app does not see the right answer.
    """
    client = _client(task["max_tokens"])
    async with shared_calculator() as workbench:
        reply = await solve(task["problem"], client, workbench, max_calls=task["max_calls"])
    return exact_answer(reply, task["answer"])


@cache
def _client(max_tokens: int) -> ChatCompletionClient:
    # Where the client points does not matter in training: the calls of optimised agents go to the
    # model that learns.
    return chat_client(
        "math",
        base_url="http://localhost/v1",
        api_key="unused",
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )


def load_tasks(
    cache_dir: Path,
    split: Split,
    recipe: Recipe = RECIPE,
    reporter: Reporter | None = None,
) -> list[TrainingTask]:
    """Return the tasks of a split for `answer`; they are generated anew in a second."""
    del cache_dir, reporter
    return [_training_task(task, recipe) for task in worlds.make_tasks(split)]


def load_data(
    data: Path,
    split: records.Split,
    reporter: Reporter,
    recipe: Recipe,
    *,
    limit: int | None = None,
) -> list[TrainingTask]:
    """Return the tasks of a split of Calc-X or GSM8K for `answer` (see `datasets`)."""
    loaded = datasets.load(data, split, limit=limit)
    report_loaded(split, loaded, "problems", reporter)
    return [_training_task(task, recipe) for task in loaded.tasks]


def _training_task(task: Task, recipe: Recipe) -> TrainingTask:
    return TrainingTask(**task, max_tokens=recipe.max_tokens, max_calls=recipe.max_calls)


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` demonstrations as chats."""
    return demonstrations.demonstrate(count, seed)


warm_start = WarmStart(RECIPE, chats, [demonstrations, worlds, words, expressions, calculator])


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return the arguments of `LightningRL` that the recipe sets."""
    return {"optimize": TRAINED, "seed": seed, **recipe.settings}

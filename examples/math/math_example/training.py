"""The app as lightspan trains it, and the one frozen recipe that the README's figures come from.

This is all that the example needs beside the app: `answer` runs the untouched agent on a problem
and scores its reply. Settings were chosen on the development stories; that earlier recipes failed
was seen on the test stories (see the README).
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
"""The agents that learn."""
AGENTS = (AGENT,)
"""Every agent of the app: a misspelt name is an error before anything runs."""


@dataclass(frozen=True, kw_only=True)
class Recipe(common.Recipe):
    """Every setting of the example's training."""

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
"""The recipe for a model that was not built here; not yet run on a GPU."""


class TrainingTask(Task):
    """A task with how the app is to be run."""

    max_tokens: int
    max_calls: int


lightspan_autogen.instrument()


@rollout
async def answer(task: TrainingTask) -> float:
    """Run the app on a problem; the reward is exact. The answer stays out here."""
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
    """The tasks of a split as `answer` takes them; they are generated in a second, not cached."""
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
    """The tasks of a split of Calc-X or GSM8K as `answer` takes them (see `datasets`)."""
    loaded = datasets.load(data, split, limit=limit)
    report_loaded(split, loaded, "problems", reporter)
    return [_training_task(task, recipe) for task in loaded.tasks]


def _training_task(task: Task, recipe: Recipe) -> TrainingTask:
    return TrainingTask(**task, max_tokens=recipe.max_tokens, max_calls=recipe.max_calls)


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """The demonstrations as chats."""
    return demonstrations.demonstrate(count, seed)


warm_start = WarmStart(RECIPE, chats, [demonstrations, worlds, words, expressions, calculator])


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """The arguments of LightningRL that the recipe fixes."""
    return {"optimize": TRAINED, "seed": seed, **recipe.settings}

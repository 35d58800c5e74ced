"""The app as lightspan trains it, and the one frozen recipe that the README's figures come from.

This is all that the example needs beside the app: `answer` runs the untouched graph on a message
and scores where it went and what it was taken to be about. The recipe is that of every model: the
published one that training begins with is no other case than a folder or a name of yours. Settings
were chosen on the development messages; those of the test were looked at once, to report.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import lightspan_langgraph
from lightspan import LoRA, Policy, rollout
from lightspan.progress import Reporter
from lightspan_examples.recipe import Recipe
from router_example import messages
from router_example.app import Graph, State, build_graph, chat_model
from router_example.messages import Split, Task
from router_example.pretrained import pretrained
from router_example.reward import score

TRAINED = ["route", "answer"]
"""The agents that learn: all that there are."""
AGENTS = lightspan_langgraph.agents(build_graph()).paths
"""Every agent of the app: a misspelt name is an error before anything runs."""
LORA = LoRA(rank=16)
"""Adapters: a fraction of the memory and of the time to save."""

RECIPE = Recipe(
    steps=24,
    group_size=8,
    tasks_per_step=8,
    minibatches=2,
    learning_rate=2e-4,
    temperature=0.7,
    max_tokens=6,
)
REAL_MODEL = RECIPE
"""The recipe for a model that is named: the same."""

Policies = Literal["shared", "separate"]


class TrainingTask(Task):
    """A task with how the app is to be run."""

    max_tokens: int


lightspan_langgraph.instrument()


@rollout
def answer(task: TrainingTask) -> dict[str, float]:
    """Run the app on a message. Department and product stay out here."""
    final = _graph(task["max_tokens"]).invoke({"message": task["message"]})
    return score(cast(State, final), task)


@cache
def _graph(max_tokens: int) -> Graph:
    # Where the client points does not matter in training: both agents' calls go to the models that
    # learn.
    model = chat_model(
        "router",
        base_url="http://localhost/v1",
        api_key="unused",
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )
    return build_graph(model)


def load_tasks(
    cache_dir: Path, split: Split, recipe: Recipe = RECIPE, reporter: Reporter | None = None
) -> list[TrainingTask]:
    """The tasks of a split as `answer` takes them."""
    del cache_dir, reporter  # nothing has to be kept
    return [TrainingTask(**task, max_tokens=recipe.max_tokens) for task in messages.tasks(split)]


def warm_start(
    cache_dir: Path, seed: int, reporter: Reporter, recipe: Recipe | None = None
) -> tuple[Path, float]:
    """What training begins with: the published model as it is, for every seed, after 0 s."""
    del seed, recipe
    return pretrained(cache_dir, reporter), 0.0


def optimized(policies: Policies, lora: LoRA | None = LORA) -> list[str] | dict[str, str | Policy]:
    """The argument `optimize` of LightningRL: one policy behind both agents, or one behind each."""
    if policies == "shared":
        return list(TRAINED)
    return {agent: Policy(lora=lora) for agent in TRAINED}


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """The arguments of LightningRL that the recipe fixes."""
    return {"optimize": optimized("shared"), "lora": LORA, "seed": seed, **recipe.settings}

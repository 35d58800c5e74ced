"""Model, settings and data of training, which are the same for both frameworks.

The recipe is the same for the pretrained model and for a model of `--model`. Settings were chosen
on the development messages; the test messages were used once, for the report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightspan import LoRA, Policy
from lightspan.progress import Reporter
from lightspan_examples.recipe import Recipe
from router_example import messages
from router_example.messages import Split, Task
from router_example.pretrained import pretrained

TRAINED = ["route", "answer"]
"""The agents that are trained: all agents of the app."""
LORA = LoRA(rank=16)
"""LoRA adapters, which need a fraction of the memory and of the time to save."""

RECIPE = Recipe(
    steps=24,
    group_size=8,
    tasks_per_step=8,
    minibatches=2,
    temperature=0.7,
    max_tokens=6,
)
REAL_MODEL = RECIPE
"""Recipe for a model of `--model`: the same as `RECIPE`."""

Policies = Literal["shared", "separate"]


class TrainingTask(Task):
    """A task with the app's settings."""

    max_tokens: int


def load_tasks(
    cache_dir: Path, split: Split, recipe: Recipe = RECIPE, reporter: Reporter | None = None
) -> list[TrainingTask]:
    """Return the tasks of a split for `answer`."""
    del cache_dir, reporter  # nothing has to be kept
    return [TrainingTask(**task, max_tokens=recipe.max_tokens) for task in messages.tasks(split)]


def warm_start(
    cache_dir: Path, seed: int, reporter: Reporter, recipe: Recipe | None = None
) -> tuple[Path, float]:
    """Return the folder of the pretrained model, and 0.0 CPU-seconds, for every seed."""
    del seed, recipe
    return pretrained(cache_dir, reporter), 0.0


def optimized(policies: Policies, lora: LoRA | None = LORA) -> list[str] | dict[str, str | Policy]:
    """Return the argument `optimize` of `LightningRL`.

    It gives one policy to both agents ("shared"), or one to each ("separate").
    """
    if policies == "shared":
        return list(TRAINED)
    return {agent: Policy(lora=lora) for agent in TRAINED}


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return the arguments of `LightningRL` that the recipe sets."""
    return {"optimize": optimized("shared"), "lora": LORA, "seed": seed, **recipe.settings}

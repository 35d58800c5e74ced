"""What the training of the app has, whichever framework it is written with: data, recipe, model.

The recipe is that of every model: the published one that training begins with is no other case than
a folder or a name of yours. Settings were chosen on the development messages; those of the test
were looked at once, to report.
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
"""The agents that learn: all that there are."""
LORA = LoRA(rank=16)
"""Adapters: a fraction of the memory and of the time to save."""

RECIPE = Recipe(
    steps=24,
    group_size=8,
    tasks_per_step=8,
    minibatches=2,
    temperature=0.7,
    max_tokens=6,
)
REAL_MODEL = RECIPE
"""The recipe for a model that is named: the same."""

Policies = Literal["shared", "separate"]


class TrainingTask(Task):
    """A task with how the app is to be run."""

    max_tokens: int


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

"""The app as lightspan trains it.

This is all that the example needs beside the app: `answer` runs the untouched agent on a question
and scores what it says last. The recipe is in `recipes`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from agents import RunConfig
from openai import AsyncOpenAI

import lightspan_openai_agents
from lightspan import rollout
from lightspan.progress import Reporter
from lightspan_examples import recipe as common
from rag_example import demonstrations, index, library, names, prompts, worlds
from rag_example.app import ask, researcher, run_config
from rag_example.recipes import (
    REAL_MODEL,
    RECIPE,
    Recipe,
    TrainingTask,
    library_of,
    load_data,
    load_tasks,
)
from rag_example.reward import score

TRAINED = ["researcher"]
"""The agents that learn."""
AGENTS = lightspan_openai_agents.agents(researcher).paths
"""Every agent of the app: a misspelt name is an error before anything runs."""

lightspan_openai_agents.instrument()


@rollout
async def answer(task: TrainingTask) -> float:
    """Run the app on a question and score its answer. The gold answers stay out here."""
    said = await ask(
        task["question"],
        library_of(task),
        config=_config(task["max_tokens"]),
        max_searches=task["max_searches"],
    )
    return score(said, task["answers"])


@cache
def _config(max_tokens: int) -> RunConfig:
    # Where the client points does not matter in training: calls go to the model that learns.
    return run_config(
        "rag",
        client=AsyncOpenAI(base_url="http://localhost/v1", api_key="unused"),
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )


def warm_start(
    cache_dir: Path, seed: int, reporter: Reporter, recipe: Recipe = RECIPE
) -> tuple[Path, float]:
    """The small model, taught by imperfect demonstrations; cached by recipe and seed.

    Returns:
        Its folder, and the CPU-seconds that the learner spent, now or when it was cached.
    """
    from lightspan_examples.warm_start import warm_start

    sources = [demonstrations, index, library, names, prompts, worlds]
    return warm_start(cache_dir, seed, reporter, recipe.imitation, chats, sources)


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """The demonstrations as chats."""
    return demonstrations.demonstrate(count, seed)


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """The arguments of LightningRL that the recipe fixes."""
    return {"optimize": TRAINED, **common.rl_options(recipe, seed)}


__all__ = [
    "AGENTS",
    "REAL_MODEL",
    "RECIPE",
    "TRAINED",
    "Recipe",
    "TrainingTask",
    "answer",
    "chats",
    "load_data",
    "load_tasks",
    "rl_options",
    "warm_start",
]

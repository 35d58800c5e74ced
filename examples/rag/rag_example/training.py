"""The app as lightspan trains it.

This is all that the example needs beside the app: `answer` runs the untouched agent on a question
and scores what it says last. The recipe is in `recipes`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from agents import RunConfig
from openai import AsyncOpenAI

import lightspan_openai_agents
from lightspan import rollout
from lightspan_examples.warm_start import WarmStart
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
FROZEN = None
"""No agent is left that does not."""
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


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """The demonstrations as chats."""
    return demonstrations.demonstrate(count, seed)


warm_start = WarmStart(RECIPE, chats, [demonstrations, index, library, names, prompts, worlds])


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """The arguments of LightningRL that the recipe fixes."""
    return {"optimize": TRAINED, "frozen": FROZEN, "seed": seed, **recipe.settings}


__all__ = [
    "AGENTS",
    "FROZEN",
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

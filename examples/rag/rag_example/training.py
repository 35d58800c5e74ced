"""The app on the OpenAI Agents SDK with its reward.

`answer` runs the unchanged agent on a question and scores its last message. The recipe is in
`recipes`.
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
"""The agents that are trained."""
FROZEN = None
"""Model of agents that are not trained; None, because the app has no further agent."""
AGENTS = lightspan_openai_agents.agents(researcher).paths
"""All agents of the app, so that a misspelt name raises an error before training."""

lightspan_openai_agents.instrument()


@rollout
async def answer(task: TrainingTask) -> float:
    """Run the app on a question and score its answer; the app does not see the gold answers."""
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
    """Return `count` demonstrations as chats."""
    return demonstrations.demonstrate(count, seed)


warm_start = WarmStart(RECIPE, chats, [demonstrations, index, library, names, prompts, worlds])


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return the arguments of `LightningRL` that the recipe sets."""
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

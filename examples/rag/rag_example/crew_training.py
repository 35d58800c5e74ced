"""The crew with its reward; `training` is the same for the app on the OpenAI Agents SDK."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

# before CrewAI is imported: it asks the internet otherwise
os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")

from crewai import LLM

import lightspan_crewai
from lightspan import rollout
from lightspan_examples.warm_start import WarmStart
from rag_example import (
    crew_demonstrations,
    demonstrations,
    index,
    library,
    names,
    prompts,
    recipes,
    worlds,
)
from rag_example.crew import ask, build_crew, chat_model
from rag_example.prompts import ANSWERER, SEARCHER
from rag_example.recipes import REAL_MODEL, Recipe, TrainingTask, library_of, load_data, load_tasks
from rag_example.reward import score

TRAINED = [SEARCHER.role, ANSWERER.role]
"""The agents that are trained."""
FROZEN = "base"
"""Model of agents that are not trained: the starting weights."""
AGENTS = (SEARCHER.role, ANSWERER.role)
"""All agents of the crew, so that a misspelt name raises an error before training."""
RECIPE = recipes.CREW

# it warns at every call that it cannot count the tokens of a model that it does not know
logging.getLogger("crewai.llms.base_llm").setLevel(logging.ERROR)

lightspan_crewai.instrument()


@rollout
def answer(task: TrainingTask) -> float:
    """Run the crew on a question and score its answer; the crew does not see the gold answers."""
    crew = build_crew(library_of(task), _llm(task["max_tokens"]), max_searches=task["max_searches"])
    return score(ask(task["question"], crew), task["answers"])


@cache
def _llm(max_tokens: int) -> LLM:
    # Where the client points does not matter in training: the calls of optimised agents go to the
    # model that learns, and with frozen="base" the others to the one that it started from.
    return chat_model(
        "rag",
        base_url="http://localhost/v1",
        api_key="unused",
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )


def chats(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` demonstrations as chats."""
    return crew_demonstrations.demonstrate(count, seed)


warm_start = WarmStart(
    RECIPE, chats, [crew_demonstrations, demonstrations, index, library, names, prompts, worlds]
)


def rl_options(seed: int, recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return the arguments of `LightningRL` that the recipe sets.

    An agent that is not in `optimize` uses the starting weights.
    """
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

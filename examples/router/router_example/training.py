"""The LangGraph app with its reward.

`answer` runs the unchanged graph on a message, and scores the department and the product that it
finds. The recipe and the data are in `recipes`.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import lightspan_langgraph
from lightspan import rollout
from router_example.app import Graph, build_graph, chat_model
from router_example.recipes import (
    LORA,
    REAL_MODEL,
    RECIPE,
    TRAINED,
    TrainingTask,
    load_tasks,
    optimized,
    rl_options,
    warm_start,
)
from router_example.reward import score
from router_example.state import State

AGENTS = lightspan_langgraph.agents(build_graph()).paths
"""All agents of the app, so that a misspelt name raises an error before training."""

lightspan_langgraph.instrument()


@rollout
def answer(task: TrainingTask) -> dict[str, float]:
    """Run the app on a message and score the outcome; the app does not see the labels."""
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


__all__ = [
    "AGENTS",
    "LORA",
    "REAL_MODEL",
    "RECIPE",
    "TRAINED",
    "TrainingTask",
    "answer",
    "load_tasks",
    "optimized",
    "rl_options",
    "warm_start",
]

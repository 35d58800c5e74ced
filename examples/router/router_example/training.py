"""The app as lightspan trains it, and the one frozen recipe that the README's figures come from.

This is all that the example needs beside the app: `answer` runs the untouched graph on a message
and scores where it went and what it was taken to be about. The rest is in `recipes`.
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
"""Every agent of the app: a misspelt name is an error before anything runs."""

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

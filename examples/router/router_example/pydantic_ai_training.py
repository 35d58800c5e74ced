"""The Pydantic AI app with its reward; `training` is the same for the LangGraph app.

It uses no adapter: the framework's own spans show which agent acts (`lightspan_otel`).
"""

from __future__ import annotations

from functools import cache

import lightspan_otel as otel
from lightspan import rollout
from router_example.pydantic_ai_app import CustomerService, chat_model
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

AGENTS = ("route", "answer")
"""All agents of the app, so that a misspelt name raises an error before training."""

otel.instrument("pydantic-ai")


@rollout
async def answer(task: TrainingTask) -> dict[str, float]:
    """Run the app on a message and score the outcome; the app does not see the labels."""
    return score(await _service(task["max_tokens"]).serve(task["message"]), task)


@cache
def _service(max_tokens: int) -> CustomerService:
    # Where the client points does not matter in training: both agents' calls go to the models that
    # learn.
    model = chat_model(
        "router",
        base_url="http://localhost/v1",
        api_key="unused",
        temperature=RECIPE.temperature,
        max_tokens=max_tokens,
    )
    return CustomerService(model)


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

"""The app of Pydantic AI as lightspan trains it: what `training` is to the LangGraph app.

No adapter: the framework's own spans say which agent acts (`lightspan_otel`).
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
"""Every agent of the app: a misspelt name is an error before anything runs."""

otel.instrument("pydantic-ai")


@rollout
async def answer(task: TrainingTask) -> dict[str, float]:
    """Run the app on a message. Department and product stay out here."""
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

"""The app with Pydantic AI: two agents with the prompts of the LangGraph app, and no graph.

It needs the extra `pydantic-ai`, and does not import lightspan.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from router_example.prompts import (
    ANSWER,
    ANSWERED,
    DEFAULT_MODEL,
    MODEL_VARIABLE,
    ROUTE,
    ROUTED,
    compose,
    parse_department,
    parse_product,
)
from router_example.state import State


def chat_model(
    model: str | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> OpenAIChatModel:
    """Return a client of an OpenAI-compatible endpoint.

    Args:
        model: name of the model; None for the environment variable ROUTER_MODEL, or else the
            default.
        base_url: URL of the endpoint; None for OPENAI_BASE_URL.
        api_key: key of the endpoint; None for OPENAI_API_KEY.
        temperature: sampling temperature; None for the endpoint's default.
        max_tokens: maximum tokens of an answer; None for the endpoint's default.
    """
    settings = ModelSettings()
    if temperature is not None:
        settings["temperature"] = temperature
    if max_tokens is not None:
        settings["max_tokens"] = max_tokens
    return OpenAIChatModel(
        model or os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL,
        provider=OpenAIProvider(base_url=base_url, api_key=api_key),
        settings=settings,
    )


class CustomerService:
    """The app's two agents, which are called one after the other."""

    def __init__(self, model: OpenAIChatModel) -> None:
        # an agent that says nothing is not asked again: that message goes to nobody
        given: dict[str, Any] = {"model": model, "retries": 0}
        self.route: Agent[object, str] = Agent(name="route", instructions=ROUTE, **given)
        self.answer: Agent[object, str] = Agent(name="answer", instructions=ANSWER, **given)

    async def serve(self, message: str) -> State:
        """Route and answer a message."""
        department = parse_department(await _asked(self.route, ROUTED, message))
        product = parse_product(await _asked(self.answer, ANSWERED, message))
        return State(
            message=message,
            department=department,
            product=product,
            answer=compose(department, product),
        )


async def _asked(agent: Agent[object, str], shown: Sequence[tuple[str, str]], message: str) -> str:
    """Return an agent's answer to a message; empty if its model gave no usable answer.

    Args:
        shown: example messages with their answers, as earlier turns.
    """
    history: list[ModelMessage] = []
    for asked, said in shown:
        history.append(ModelRequest(parts=[UserPromptPart(asked)]))
        history.append(ModelResponse(parts=[TextPart(said)]))
    try:
        return (await agent.run(message, message_history=history)).output
    except UnexpectedModelBehavior:
        return ""

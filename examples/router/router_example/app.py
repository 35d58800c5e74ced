"""An ordinary LangGraph app that routes a customer's message and answers it.

    route -> answer -> done

Two agents share one chat model: the first names the department for the message, the second the
product in it. The answer is the department's text about that product.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from router_example.prompts import (
    DEFAULT_MODEL,
    MODEL_VARIABLE,
    answer_prompt,
    compose,
    parse_department,
    parse_product,
    route_prompt,
)
from router_example.state import State

Graph = CompiledStateGraph[State, None, State, State]


def chat_model(
    model: str | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> ChatOpenAI:
    """Return a client of an OpenAI-compatible endpoint.

    Args:
        model: name of the model; None for the environment variable ROUTER_MODEL, or else the
            default.
        base_url: URL of the endpoint; None for OPENAI_BASE_URL.
        api_key: key of the endpoint; None for OPENAI_API_KEY.
        temperature: sampling temperature; None for the endpoint's default.
        max_tokens: maximum tokens of an answer; None for the endpoint's default.
    """
    options: dict[str, Any] = {
        "model": model or os.environ.get(MODEL_VARIABLE) or DEFAULT_MODEL,
        "base_url": base_url,
        "api_key": api_key,
        "temperature": temperature,
        "max_tokens": max_tokens,
    }
    return ChatOpenAI(**{name: value for name, value in options.items() if value is not None})


def build_graph(model: BaseChatModel | None = None) -> Graph:
    """Compile the app. None for `model` makes one from environment variables at the first call."""
    agents = _Agents((lambda: model) if model is not None else cache(chat_model))
    builder = StateGraph(State)
    builder.add_node("route", agents.route)
    builder.add_node("answer", agents.answer)
    builder.add_edge(START, "route")
    builder.add_edge("route", "answer")
    return builder.compile()


class _Agents:
    """The nodes of the graph."""

    def __init__(self, get_model: Callable[[], BaseChatModel]) -> None:
        self._get_model = get_model

    def route(self, state: State) -> dict[str, Any]:
        return {"department": parse_department(self._ask(route_prompt(state["message"])))}

    def answer(self, state: State) -> dict[str, Any]:
        product = parse_product(self._ask(answer_prompt(state["message"])))
        return {"product": product, "answer": compose(state["department"], product)}

    def _ask(self, prompt: Sequence[tuple[str, str]]) -> str:
        return self._get_model().invoke(list(prompt)).text


graph = build_graph()
"""The app with its defaults, compiled at import; the first call makes its client."""

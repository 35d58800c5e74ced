"""An ordinary LangGraph app that answers a question about a chart.

    reader -> computer

`reader` sees the chart and writes down its values. `computer` follows rules, without a model: it
computes the answer to the question from the reader's text.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Required, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from charts_example.questions import parse, parse_reading

MODEL_VARIABLE: Final = "CHARTS_MODEL"
DEFAULT_MODEL: Final = "gpt-5-mini"
ASKED: Final = "Read the chart, like: A 3, B 7, C 5"


class State(TypedDict, total=False):
    """State of the graph; the caller passes `chart` and `question`."""

    chart: Required[bytes]
    """The chart, a PNG file."""
    question: Required[str]
    reading: str
    """What the reader wrote."""
    answer: int | None
    """None if the reading lacks a value that the question needs."""


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
        model: name of a vision model; None for the environment variable CHARTS_MODEL, or else
            the default.
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


def prompt(chart: bytes) -> HumanMessage:
    """Return the reader's prompt: what it is asked to do, and the chart."""
    picture = {
        "type": "image",
        "mime_type": "image/png",
        "base64": base64.b64encode(chart).decode(),
    }
    return HumanMessage(content=[{"type": "text", "text": ASKED}, picture])


def build_graph(model: BaseChatModel | None = None) -> Graph:
    """Compile the app; None for `model` makes one from environment variables at the first call."""
    make: Callable[[], BaseChatModel] = chat_model if model is None else lambda: model
    get_model = cache(make)

    def reader(state: State) -> dict[str, Any]:
        read = get_model().invoke([prompt(state["chart"])])
        return {"reading": read.text.strip()}

    def computer(state: State) -> dict[str, Any]:
        values = parse_reading(state["reading"])
        return {"answer": parse(state["question"]).answer(values)}

    builder = StateGraph(State)
    builder.add_node("reader", reader)
    builder.add_node("computer", computer)
    builder.add_edge(START, "reader")
    builder.add_edge("reader", "computer")
    builder.add_edge("computer", END)
    return builder.compile()


graph = build_graph()
"""The app with its defaults, compiled at import; the first call makes its client."""

"""An ordinary LangGraph app that answers questions about a SQLite database.

    write_query -> execute_query -> check_query -> done, or
                        ^                 |
                        +- rewrite_query <+

Three agents share one chat model: the writer drafts a query, the checker looks at its result,
the rewriter corrects it. At most `max_turns` queries are executed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Required, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

from sql_example.database import schema_text
from sql_example.prompts import (
    approves,
    check_prompt,
    parse_query,
    rewrite_prompt,
    run_query,
    write_prompt,
)

MAX_TURNS = 3
TRUNCATE_LENGTH = 400
MODEL_VARIABLE = "SQL_MODEL"
DEFAULT_MODEL = "gpt-5-mini"


class State(TypedDict, total=False):
    """State of the graph; the caller passes `question` and `db`."""

    question: Required[str]
    db: Required[str]
    """Path of the database file."""
    schema: str
    """Description of the database for the agents; made from the file if the caller omits it."""
    query: str
    outcome: str
    """Result of `query`, or its error, as text for the agents."""
    feedback: str
    """The checker's reply."""
    turns: int
    """Number of queries written so far."""


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
        model: name of the model; None for the environment variable SQL_MODEL, or else the default.
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


def build_graph(
    model: BaseChatModel | None = None,
    *,
    max_turns: int = MAX_TURNS,
    truncate_length: int = TRUNCATE_LENGTH,
) -> Graph:
    """Compile the app.

    Args:
        model: chat model; None makes one from environment variables at the first call.
        max_turns: maximum number of queries that are written.
        truncate_length: maximum number of characters of a result that the agents see.

    Raises:
        ValueError: `max_turns` is below 1.
    """
    if max_turns < 1:
        raise ValueError(f"max_turns is {max_turns}; at least one query has to be written")
    get_model = (lambda: model) if model is not None else cache(chat_model)
    agents = _Agents(get_model, max_turns, truncate_length)
    builder = StateGraph(State)
    builder.add_node("write_query", agents.write_query)
    builder.add_node("execute_query", agents.execute_query)
    builder.add_node("check_query", agents.check_query)
    builder.add_node("rewrite_query", agents.rewrite_query)
    builder.add_edge(START, "write_query")
    builder.add_edge("write_query", "execute_query")
    builder.add_conditional_edges("execute_query", agents.after_execution)
    builder.add_conditional_edges("check_query", agents.after_check)
    builder.add_edge("rewrite_query", "execute_query")
    return builder.compile()


class _Agents:
    """The nodes of the graph."""

    def __init__(
        self, get_model: Callable[[], BaseChatModel], max_turns: int, truncate_length: int
    ) -> None:
        self._get_model = get_model
        self._max_turns = max_turns
        self._truncate_length = truncate_length

    def write_query(self, state: State) -> dict[str, Any]:
        schema = state.get("schema") or schema_text(state["db"])
        reply = self._ask(write_prompt(schema, state["question"]))
        return {"schema": schema, "query": parse_query(reply), "turns": 1}

    def execute_query(self, state: State) -> dict[str, Any]:
        return {"outcome": run_query(state["db"], state["query"], self._truncate_length)}

    def check_query(self, state: State) -> dict[str, Any]:
        prompt = check_prompt(state["question"], state["query"], state["outcome"])
        return {"feedback": self._ask(prompt)}

    def rewrite_query(self, state: State) -> dict[str, Any]:
        prompt = rewrite_prompt(
            state["schema"],
            state["question"],
            state["query"],
            state["outcome"],
            state["feedback"],
        )
        return {"query": parse_query(self._ask(prompt)), "turns": state["turns"] + 1}

    def after_execution(self, state: State) -> Literal["check_query", "__end__"]:
        return "check_query" if state["turns"] < self._max_turns else "__end__"

    def after_check(self, state: State) -> Literal["rewrite_query", "__end__"]:
        return "__end__" if approves(state["feedback"]) else "rewrite_query"

    def _ask(self, prompt: str) -> str:
        return self._get_model().invoke([HumanMessage(prompt)]).text.strip()


graph = build_graph()
"""The app with its defaults, compiled at import; the first call makes its client."""

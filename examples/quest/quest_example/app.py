"""An ordinary LangGraph app that plays a text adventure with tools.

    explore -> tools -> explore -> ... until the crown is taken or `max_calls` calls are made

Its one agent, the explorer, has three tools: `go`, `take` and `unlock`. A prompt shows only the
current state of the world (see `prompts`), so prompts do not grow during a quest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Final, Literal, Required, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import InjectedToolCallId, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import InjectedState, ToolNode
from langgraph.types import Command

from quest_example import world as worlds
from quest_example.prompts import RULES, SAID_NOTHING, describe
from quest_example.world import BEGINNING, Outcome, Position, World, observation

MAX_CALLS: Final = 20
MODEL_VARIABLE: Final = "QUEST_MODEL"
DEFAULT_MODEL: Final = "gpt-5-mini"


class State(TypedDict, total=False):
    """State of the graph; the caller passes `world`."""

    world: Required[World]
    position: Position
    messages: Sequence[AnyMessage]
    """The last tool call, and after its execution its result; earlier messages are dropped."""
    calls: int
    """Number of model calls so far."""


Graph = CompiledStateGraph[State, None, State, State]


# --- the tools ------------------------------------------------------------------------------
_State = Annotated[dict[str, Any], InjectedState]
_CallId = Annotated[str, InjectedToolCallId]


@tool
def go(exit: str, state: _State, call_id: _CallId) -> Command[Any]:
    """Leave by an exit."""
    return _result(worlds.go(state["world"], state["position"], exit), call_id)


@tool
def take(state: _State, call_id: _CallId) -> Command[Any]:
    """Take what lies here."""
    return _result(worlds.take(state["world"], state["position"]), call_id)


@tool
def unlock(exit: str, key: str, state: _State, call_id: _CallId) -> Command[Any]:
    """Use a key on a door."""
    return _result(worlds.unlock(state["world"], state["position"], exit, key), call_id)


TOOLS: Final = (go, take, unlock)


def _result(outcome: Outcome, call_id: str) -> Command[Any]:
    status: Literal["success", "error"] = "success" if outcome.is_done else "error"
    message = ToolMessage(outcome.told, tool_call_id=call_id, status=status)
    return Command(update={"position": outcome.position, "messages": [message]})


# --- the graph ------------------------------------------------------------------------------
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
        model: name of the model; None for the environment variable QUEST_MODEL, or else the
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


def build_graph(model: BaseChatModel | None = None, *, max_calls: int = MAX_CALLS) -> Graph:
    """Compile the app.

    Args:
        model: chat model; None makes one from environment variables at the first call.
        max_calls: maximum number of calls of the model.

    Raises:
        ValueError: `max_calls` is below 1.
    """
    if max_calls < 1:
        raise ValueError(f"max_calls is {max_calls}; the model has to be asked at least once")
    get_model = (lambda: model) if model is not None else cache(chat_model)
    explorer = _Explorer(get_model, max_calls)
    builder = StateGraph(State)
    builder.add_node("explore", explorer.explore)
    builder.add_node("tools", ToolNode(TOOLS))
    builder.add_edge(START, "explore")
    builder.add_conditional_edges("explore", explorer.after_answer)
    builder.add_conditional_edges("tools", explorer.after_tool)
    # Two steps of the graph for each call, and one to begin with.
    return builder.compile().with_config(recursion_limit=2 * max_calls + 2)


class _Explorer:
    """The agent's node, and the edges that decide whether the model is called again."""

    def __init__(self, get_model: Callable[[], BaseChatModel], max_calls: int) -> None:
        self._get_model = cache(lambda: get_model().bind_tools(TOOLS))
        self._max_calls = max_calls

    def explore(self, state: State) -> dict[str, Any]:
        position = state.get("position") or Position()
        seen = describe(told(state), observation(state["world"], position))
        answer = self._get_model().invoke([SystemMessage(RULES), HumanMessage(seen)])
        if len(answer.tool_calls) > 1:  # the world is another one after the first
            answer = answer.model_copy(update={"tool_calls": answer.tool_calls[:1]})
        return {"position": position, "messages": [answer], "calls": state.get("calls", 0) + 1}

    def after_answer(self, state: State) -> Literal["explore", "tools", "__end__"]:
        return "tools" if is_asked(state) else self._again(state)

    def after_tool(self, state: State) -> Literal["explore", "__end__"]:
        return "__end__" if state["position"].is_won else self._again(state)

    def _again(self, state: State) -> Literal["explore", "__end__"]:
        return "explore" if state["calls"] < self._max_calls else "__end__"


def told(state: State) -> str:
    """Return the result of the last tool call as text, or the text that replaces a missing one."""
    messages = state.get("messages")
    if not messages:
        return BEGINNING
    return messages[-1].text if isinstance(messages[-1], ToolMessage) else SAID_NOTHING


def is_asked(state: State) -> bool:
    """Return whether the last message calls a tool that has not run yet."""
    last = state["messages"][-1]
    return isinstance(last, AIMessage) and bool(last.tool_calls)


graph = build_graph()
"""The app with its defaults, compiled at import; the first call makes its client."""

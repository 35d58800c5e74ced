"""An ordinary LangGraph app that plays games of TextWorld, Microsoft's engine of text adventures.

    open_game -> play -> act -> play -> act -> ... until the game ends, or `limit` commands are used

Its one agent, `play`, answers with a command. A prompt shows only the current state of the game, so
prompts do not grow during a game.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Literal, Required, TypedDict

import textworld
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

LIMIT: Final = 7
"""Maximum number of commands in a game."""
MODEL_VARIABLE: Final = "TEXTWORLD_MODEL"
DEFAULT_MODEL: Final = "gpt-5-mini"
RULES: Final = "You play a text game. Reply with one of the commands and nothing else."
INFOS: Final = textworld.EnvInfos(
    description=True, inventory=True, admissible_commands=True, objective=True, won=True, lost=True
)
IDLE: Final = ("examine ", "inventory", "look")
"""Beginnings of commands that are always possible and change nothing; they are not offered."""
LOADING: Final = threading.Lock()  # all threads share the parser with which textworld loads games


class State(TypedDict, total=False):
    """State of the graph; the caller passes `game`."""

    game: Required[str]
    """Path of a `.z8` file, beside which its `.json` lies."""
    env: Any
    """The running game."""
    now: Any
    """The `textworld.GameState` after the last command."""
    done: list[str]
    """The commands so far; an answer that is no command is `nothing`."""
    command: str
    """The model's last answer."""


Graph = CompiledStateGraph[State, None, State, State]


def start(game: str, infos: textworld.EnvInfos = INFOS) -> Any:
    """Load a game and return its environment; threads load one at a time."""
    with LOADING:
        return textworld.start(game, infos)


def commands(now: Any) -> list[str]:
    """Return the commands that a state offers: all that can change something."""
    return [each for each in now.admissible_commands if not each.startswith(IDLE)]


def describe(now: Any, done: list[str]) -> str:
    """Return the user message of a state; what is equal within a game comes first."""
    seen = " ".join(f"{now.description} {now.inventory}".split())
    before, offered = ", ".join(done) or "nothing", ", ".join(commands(now))
    return f"{now.objective}\nDone: {before}\n{seen}\nCommands: {offered}"


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
        model: name of the model; None for the environment variable TEXTWORLD_MODEL, or else the
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


def build_graph(model: BaseChatModel | None = None, *, limit: int = LIMIT) -> Graph:
    """Compile the app.

    Args:
        model: chat model; None makes one from environment variables at the first call.
        limit: maximum number of commands.

    Raises:
        ValueError: `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; a game takes at least one command")
    make: Callable[[], BaseChatModel] = chat_model if model is None else lambda: model
    get_model = cache(make)

    def open_game(state: State) -> dict[str, Any]:
        env = start(state["game"])
        return {"env": env, "now": env.reset(), "done": []}

    def play(state: State) -> dict[str, Any]:
        seen = describe(state["now"], state["done"])
        answer = get_model().invoke([SystemMessage(RULES), HumanMessage(seen)])
        return {"command": answer.text.strip()}

    def act(state: State) -> dict[str, Any]:
        command, done = state["command"], state["done"]
        if command not in commands(state["now"]):
            return {"done": [*done, "nothing"]}  # the attempt is used up
        return {"now": state["env"].step(command)[0], "done": [*done, command]}

    def after(state: State) -> Literal["play", "__end__"]:
        is_over = state["now"].won or state["now"].lost or len(state["done"]) >= limit
        return "__end__" if is_over else "play"

    builder = StateGraph(State)
    builder.add_node("open_game", open_game)
    builder.add_node("play", play)
    builder.add_node("act", act)
    builder.add_edge(START, "open_game")
    builder.add_edge("open_game", "play")
    builder.add_edge("play", "act")
    builder.add_conditional_edges("act", after)
    # Two steps of the graph for each command, and two to begin with.
    return builder.compile().with_config(recursion_limit=2 * limit + 3)


graph = build_graph()
"""The app with its defaults, compiled at import; the first call makes its client."""

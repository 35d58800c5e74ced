"""State: what a call was made in, and what tells two states apart (credit rules that compare calls
of one agent in the same state).

Whole histories never repeat, so a state is told by a *key*: by default the last observation, which
is the text of the last message that the call answers. One's own key is a function of a `State`:

    anchor(key=lambda state: state.observation.splitlines()[0])    # "You are in the cellar."
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any

from lightspan.errors import ConfigError
from lightspan.lightning.episode import Call
from lightspan.schema import genai_messages


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a call was made in: what it was asked, and nothing of what came of it."""

    task_id: str
    agent_path: str
    turn: int
    """As `lightspan.lightning.transitions` counts them from 0."""
    messages: Sequence[Mapping[str, Any]]
    """What the model was sent, as OpenAI chat messages; empty where no prompt was recorded."""

    @property
    def observation(self) -> str:
        """The text of the last message; empty where there is none."""
        content = self.messages[-1].get("content") if self.messages else ""
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, list) else []
        texts = [str(part.get("text") or "") for part in parts if isinstance(part, Mapping)]
        return "\n".join(texts)


StateKey = Callable[[State], Hashable]
"""State → what it is told by; None: this call has no state to share."""


def observation(state: State) -> str | None:
    """The last observation, None where nothing was recorded."""
    return state.observation or None


def state_of(call: Call, task_id: str, turn: int) -> State:
    """The state of a call."""
    asked: Sequence[Mapping[str, Any]] = ()
    if call.span is not None:
        try:
            asked = genai_messages.input_messages_of(call.span.attributes)
        except ValueError:  # cut, or no JSON
            asked = ()
    return State(task_id=task_id, agent_path=call.agent_path, turn=turn, messages=asked)


def key_of(key: StateKey, state: State) -> Hashable:
    """What the key says of a state.

    Raises:
        ConfigError: it failed, or what it says cannot be compared.
    """
    where = f"credit: key={key_name(key)} on task {state.task_id}, turn {state.turn}:"
    try:
        told = key(state)
    except Exception as error:
        raise ConfigError(
            f"{where} {type(error).__name__}: {error}; return None where it has nothing to say"
        ) from error
    try:
        hash(told)
    except TypeError as error:
        raise ConfigError(
            f"{where} it returned {told!r}: return a text, a number or a tuple"
        ) from error
    return told


def check_key(key: object) -> None:
    """Raise `ConfigError` unless it is a plain function."""
    if not callable(key):
        raise ConfigError(f"credit: key={key!r}: use a function of a state, or leave it out")
    if iscoroutinefunction(key):
        raise ConfigError(f"credit: key={key_name(key)} is async: use a plain function")


def key_name(key: StateKey) -> str:
    """The key's name, for people and `config.json`: whether its code has changed cannot be told."""
    if key is observation:
        return "observation"
    kind = type(key)
    name = getattr(key, "__qualname__", kind.__qualname__)
    return f"{getattr(key, '__module__', kind.__module__)}:{name}"

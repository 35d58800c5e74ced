"""State of a call, and the key that identifies it.

Credit rules compare calls of one agent that are in the same state. Two calls hardly ever have the
same history, so the state is identified by a shorter *key*. By default it is the last observation:
the text of the last message that the call answers. A custom key is a function of a `State`:

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
from lightspan.schema.genai_messages import joined_text


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The input of a call, from which a key of its state is computed."""

    task_id: str
    agent_path: str
    turn: int
    """Turn of the call, from 0: its depth in the causal order."""
    messages: Sequence[Mapping[str, Any]]
    """Prompt as OpenAI chat messages; empty if no prompt was recorded."""

    @property
    def observation(self) -> str:
        """Text of the last message; empty if there is no message or no text."""
        return joined_text(self.messages[-1].get("content")) if self.messages else ""


StateKey = Callable[[State], Hashable]
"""Function that returns the key of a state; None if the state equals no other call's state."""


def observation(state: State) -> str | None:
    """Return the text of the last message as the key of `state`; None if it is empty."""
    return state.observation or None


def state_of(call: Call, task_id: str, turn: int) -> State:
    """Return the state of a call, without messages if they are unknown or truncated."""
    messages: Sequence[Mapping[str, Any]] = ()
    if call.span is not None:
        try:
            messages = genai_messages.input_messages_of(call.span.attributes)
        except ValueError:  # truncated, or not JSON
            messages = ()
    return State(task_id=task_id, agent_path=call.agent_path, turn=turn, messages=messages)


def key_of(key: StateKey, state: State, setting: str = "credit: key") -> Hashable:
    """Return the key of `state`, by which calls in the same state are found.

    None means that no other call counts as being in the same state.

    Args:
        key: function that computes the key.
        state: state of a call.
        setting: name of the setting that has the function, for the error message.

    Raises:
        ConfigError: the function failed, or its result is not hashable.
    """
    where = f"{setting}={key_name(key)} on task {state.task_id}, turn {state.turn}:"
    try:
        value = key(state)
        hash(value)
    except Exception as error:
        raise ConfigError(
            f"{where} {type(error).__name__}: {error}; return a text, a number or a tuple, or None "
            "for a state without a key"
        ) from error
    return value


def check_key(key: object, setting: str = "credit: key") -> None:
    """Raise `ConfigError`, which names `setting`, unless `key` is callable and not async."""
    if not callable(key):
        raise ConfigError(f"{setting}={key!r}: use a function of a state, or leave it out")
    if iscoroutinefunction(key):
        raise ConfigError(f"{setting}={key_name(key)} is async: use a plain function")


def key_name(key: StateKey) -> str:
    """Return the name of a key function, for display and `config.json`."""
    return "observation" if key is observation else qualified_name(key)


def qualified_name(function: object) -> str:
    """Return `module:name` of a function, or of a callable object's class.

    A change of the function's code does not change the name.
    """
    kind = type(function)
    name = getattr(function, "__qualname__", kind.__qualname__)
    return f"{getattr(function, '__module__', kind.__module__)}:{name}"

"""Imperfect demonstrations of the explorer: the warm start before reinforcement learning.

They teach the model to read an observation and to call the tools, and leave it something to learn:
each kind of mistake occurs at a rate of its own where there is an occasion for it. Three of them
lose the quest for good (`worlds.Ruin`), two cost calls. All stay below one half: a model that
ignores the cue altogether can't be brought back by reinforcement.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from langchain_core.utils.function_calling import convert_to_openai_tool

from quest_example import app
from quest_example.app import MAX_CALLS
from quest_example.player import careful
from quest_example.prompts import RULES, describe
from quest_example.world import (
    BEGINNING,
    Action,
    Exit,
    Position,
    World,
    act,
    is_closed,
    lit,
    observation,
    thing_here,
)
from quest_example.worlds import worlds

Chat: TypeAlias = dict[str, Any]
Mistake: TypeAlias = Literal["key", "door", "slide", "turn", "locked"]

COUNT: Final = 10_000
"""Demonstrations of a warm start: calls."""
MISTAKE_RATES: Final[Mapping[Mistake, float]] = {
    "key": 0.3,
    "door": 0.4,
    "slide": 0.3,
    "turn": 0.25,
    "locked": 0.1,
}
"""How often another key is put into the lit door, a dark door is unlocked that a key in the bag
fits, the slide is taken while something else is lit, a dark passage is taken, a locked door is
walked into: at each occasion."""
TOOLS: Final[list[dict[str, Any]]] = [convert_to_openai_tool(tool) for tool in app.TOOLS]
"""The tools as LangChain describes them to the model."""


class Demonstrated(NamedTuple):
    """One call: the prompt after the rules, and what the demonstrator did."""

    prompt: str
    action: Action


def demonstrate(count: int = COUNT, seed: int = 0) -> list[Chat]:
    """Calls of the explorer in worlds of train, their own, in random order.

    Equal arguments give equal lists.
    """
    rng = random.Random(f"demonstrations {seed}")
    found: list[Demonstrated] = []
    for world in worlds("train", f"demonstrations {seed}"):
        found += play(world, rng)
        if len(found) >= count:
            break
    rng.shuffle(found)
    return [_chat(each) for each in found[:count]]


def play(world: World, rng: random.Random) -> list[Demonstrated]:
    """One imperfect run of the app; it ends early where no key is left for the lit door."""
    calls: list[Demonstrated] = []
    position, told = Position(), BEGINNING
    while not position.is_won and len(calls) < MAX_CALLS:
        action = careless(world, position, rng)
        if action is None:
            break
        calls.append(Demonstrated(describe(told, observation(world, position)), action))
        position, told, _ = act(world, position, action)
    return calls


def careless(world: World, position: Position, rng: random.Random) -> Action | None:
    """What the demonstrator does: at each occasion a mistake, at its rate, else what is right."""
    for mistake, occasions in _occasions(world, position):
        if occasions and rng.random() < MISTAKE_RATES[mistake]:
            return rng.choice(occasions)
    return careful(world, position)


def _occasions(world: World, position: Position) -> Iterator[tuple[Mistake, Sequence[Action]]]:
    """Each kind of mistake, and what it would be here."""
    if thing_here(world, position) is not None:
        return
    light = lit(world, position)
    exits = world.exits[position.room]
    dark = [way for way in exits if way.direction != light]
    closed = [way for way in exits if is_closed(way, position)]
    right = [way for way in closed if way.direction == light and way.lock in position.bag]
    yield (
        "key",
        [_unlock(way, key) for way in right for key in set(position.bag) - {way.lock}],
    )
    yield (
        "door",
        [_unlock(way, str(way.lock)) for way in dark if way in closed and way.lock in position.bag],
    )
    yield "slide", [_go(way) for way in dark if way.is_slide]
    yield "turn", [_go(way) for way in dark if not way.is_slide and way not in closed]
    yield "locked", [_go(way) for way in closed]


def _go(way: Exit) -> Action:
    return Action("go", {"exit": way.direction})


def _unlock(way: Exit, key: str) -> Action:
    return Action("unlock", {"exit": way.direction, "key": key})


def _chat(demonstrated: Demonstrated) -> Chat:
    action = demonstrated.action
    function = {"name": action.tool, "arguments": json.dumps(action.arguments)}
    call = {"id": "call_0", "type": "function", "function": function}
    return {
        "messages": [
            {"role": "system", "content": RULES},
            {"role": "user", "content": demonstrated.prompt},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": TOOLS,
    }

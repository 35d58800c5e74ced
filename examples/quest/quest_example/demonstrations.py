"""Imperfect demonstrations of the explorer, for the warm start before reinforcement learning.

They teach the model to read an observation and to call the tools. They also contain mistakes that
reinforcement learning can remove; each kind has its own rate where it is possible. Three kinds lose
the quest for good (`worlds.Ruin`), two cost calls. All rates stay below one half, because
reinforcement cannot help a model that ignores the light altogether.

Most mistakes that lose the quest are demonstrated without being executed: the run then continues as
if the right call had been made. Otherwise few runs would show the rooms behind the doors.
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

COUNT: Final = 16_000
"""Number of demonstrated calls of a warm start. With half as many, only some models learn to name
the key of a door.
"""
KEPT: Final[Mapping[str, float]] = {"go": 0.25, "take": 0.15, "unlock": 1.0}
"""Right tool of a call → share of such calls that are demonstrated.

`unlock` is the hardest to learn. The share goes by the right tool and not by the demonstrated tool,
which would change the rates of mistakes.
"""
MISTAKE_RATES: Final[Mapping[Mistake, float]] = {
    "key": 0.25,
    "door": 0.35,
    "slide": 0.3,
    "turn": 0.2,
    "locked": 0.1,
}
"""Mistake → its probability wherever it is possible.

- `key`: a wrong key is used on the lit door.
- `door`: a dark door is unlocked with a fitting key from the bag.
- `slide`: the slide is taken while another exit is lit.
- `turn`: a dark passage is taken.
- `locked`: the player walks into a locked door.
"""
FATAL: Final[frozenset[Mistake]] = frozenset({"key", "door", "slide"})
TAKEN_BACK: Final = 0.75
"""Probability that a fatal mistake is not executed, and the run continues with the right call."""
RUNS_PER_WORLD: Final = 3
TOOLS: Final[list[dict[str, Any]]] = [convert_to_openai_tool(tool) for tool in app.TOOLS]
"""The tools as LangChain describes them to the model."""


class Demonstrated(NamedTuple):
    """A demonstrated call: the prompt after the rules, the demonstrated action, and the right
    action.
    """

    prompt: str
    action: Action
    right: Action


class Mistaken(NamedTuple):
    """A mistake: its kind, and the action that replaces the right action."""

    kind: Mistake
    action: Action


def demonstrate(count: int = COUNT, seed: int = 0) -> list[Chat]:
    """Return demonstrated calls in random order, from newly generated worlds of train.

    Equal arguments give equal lists.
    """
    rng = random.Random(f"demonstrations {seed}")
    found: list[Demonstrated] = []
    for world in worlds("train", f"demonstrations {seed}"):
        played = [each for _ in range(RUNS_PER_WORLD) for each in play(world, rng)]
        found += [each for each in played if rng.random() < KEPT[each.right.tool]]
        if len(found) >= count:
            break
    rng.shuffle(found)
    return [_chat(each) for each in found[:count]]


def play(world: World, rng: random.Random) -> list[Demonstrated]:
    """Return the calls of an imperfect run; it ends early if no key is left for the lit door."""
    calls: list[Demonstrated] = []
    position, told = Position(), BEGINNING
    while not position.is_won and len(calls) < MAX_CALLS:
        right = careful(world, position)
        mistake = mistaken(world, position, rng)
        if right is None:
            break
        action = right if mistake is None else mistake.action
        prompt = describe(told, observation(world, position))
        calls.append(Demonstrated(prompt, action, right))
        if mistake is not None and mistake.kind in FATAL and rng.random() < TAKEN_BACK:
            action = right
        position, told, _ = act(world, position, action)
    return calls


def mistaken(world: World, position: Position, rng: random.Random) -> Mistaken | None:
    """Return a mistake for this position, at random by its rate; None for no mistake."""
    for kind, occasions in _occasions(world, position):
        if occasions and rng.random() < MISTAKE_RATES[kind]:
            return Mistaken(kind, rng.choice(occasions))
    return None


def _occasions(world: World, position: Position) -> Iterator[tuple[Mistake, Sequence[Action]]]:
    """Yield each kind of mistake with the actions that make it in this position."""
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

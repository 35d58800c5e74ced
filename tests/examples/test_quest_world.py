"""Test the text world: answers of its tools, observations, and which positions can be won."""

from __future__ import annotations

import pytest

from quest_example.chart import Chart
from quest_example.reward import plan_scores, random_score, solved
from quest_example.world import Action, Exit, Position, World, act, actions, observation


def small_world() -> World:
    """Return a world of six rooms, with a slide and two red doors, one of which leads nowhere.

    hall -e- den(red)      hall -slide- cave -n[red]- crypt(crown)
                                        cave -e[red]- pantry
                                        cave -s- mill(blue)
    """
    return World(
        rooms=("hall", "den", "cave", "crypt", "pantry", "mill"),
        exits=(
            (Exit("east", 1), Exit("down", 2)),
            (Exit("west", 0),),
            (Exit("north", 3, "red"), Exit("east", 4, "red"), Exit("south", 5)),
            (Exit("south", 2, "red"),),
            (Exit("west", 2, "red"),),
            (Exit("north", 2),),
        ),
        things={1: "red", 3: "crown", 5: "blue"},
    )


WORLD = small_world()
START = Position()
WON = Position(3, ("blue",), frozenset({1, 3, 5}), frozenset({(2, 3)}), True)


def do(*said: str, world: World = WORLD) -> tuple[Position, list[str]]:
    """Do some actions; return the final position and the answers.

    An action is a text such as "go east", "take" or "unlock north red".
    """
    position, told = START, []
    for text in said:
        position, answer, _ = act(world, position, action(text))
        told.append(answer)
    return position, told


def action(text: str) -> Action:
    tool, *values = text.split()
    return Action(tool, dict(zip(("exit", "key"), values, strict=False)))


TO_CAVE = ("go east", "take", "go west", "go down")
TO_CROWN = (*TO_CAVE, "go south", "take", "go north", "unlock north red", "go north", "take")


def test_a_quest_and_what_it_tells() -> None:
    position, told = do(*TO_CROWN)
    assert told == [
        "You go east.",
        "You take the red key.",
        "You go west.",
        "You slide down.",
        "You go south.",
        "You take the blue key.",
        "You go north.",
        "The red key is used up, the door is open.",
        "You go north.",
        "You take the crown.",
    ]
    assert position == WON
    assert (solved(position), solved(START)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("go north", "There is no exit north."),
        ("take", "Nothing lies here."),
        ("unlock west red", "There is no exit west."),
        ("unlock east red", "Nothing is locked east."),
    ],
)
def test_what_cannot_be_done_changes_nothing(said: str, told: str) -> None:
    tool, *values = said.split(" ")
    outcome = act(WORLD, START, Action(tool, dict(zip(("exit", "key"), values, strict=False))))
    assert outcome == (START, told, False)


def test_doors() -> None:
    before, _ = do(*TO_CAVE)
    assert act(WORLD, before, action("go north")) == (before, "The red door is locked.", False)
    assert act(WORLD, before, action("unlock north blue")) == (
        before,
        "You have no blue key.",
        False,
    )
    opened = act(WORLD, before, action("unlock north red"))
    assert opened.position.opened == {(2, 3)}
    assert act(WORLD, opened.position, action("unlock north red")).told == (
        "Nothing is locked north."
    )
    beyond = act(WORLD, opened.position, action("go north")).position
    assert act(WORLD, beyond, action("go south")).position.room == 2, "open from both sides"
    named = act(WORLD, before, Action("unlock", {"exit": "north", "key": "red key"}))
    assert named == opened


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ((), "You are in the hall.\neast: passage, lit\ndown: slide\nBag:\nnothing"),
        (("go east",), "You are in the den.\nwest: passage\nHere: red key\nBag:\nnothing"),
        (
            ("go down",),
            "You are in the cave.\nnorth: red door\neast: red door\nsouth: passage, lit\n"
            "Bag:\nnothing",
        ),
        (
            TO_CROWN[:7],
            "You are in the cave.\nnorth: red door, lit\neast: red door\nsouth: passage\n"
            "Bag:\nred key\nblue key",
        ),
        (TO_CROWN[:9], "You are in the crypt.\nsouth: open door\nHere: crown\nBag:\nblue key"),
    ],
)
def test_what_is_seen(said: tuple[str, ...], seen: str) -> None:
    assert observation(WORLD, do(*said)[0]) == seen


def test_what_can_still_be_won() -> None:
    chart = Chart(WORLD)
    assert chart.calls_to_win(START) == 7
    assert chart.fatal(START) == [action("go down")]
    cave, _ = do(*TO_CAVE)
    assert chart.calls_to_win(cave) == 3
    assert chart.fatal(cave) == [action("unlock east red")]
    both, _ = do(*TO_CROWN[:7])
    assert chart.fatal(both) == [action("unlock east red")], "the blue key is of no use"
    lost, _ = do("go down")
    assert chart.calls_to_win(lost) is None
    assert chart.fatal(lost) == list(actions(WORLD, lost)) == [action("go south")]


def test_the_chart_agrees_with_playing() -> None:
    """Compare the chart with a separate search from every position."""
    chart = Chart(WORLD)
    waiting, seen = [START], {START}
    while waiting:
        here = waiting.pop()
        assert Chart(WORLD, here).calls_to_win(here) == chart.calls_to_win(here)
        for each in [] if here.is_won else actions(WORLD, here):
            there = act(WORLD, here, each).position
            if there not in seen:
                seen.add(there)
                waiting.append(there)
    assert len(seen) == chart.reachable


def test_fixed_plans_and_chance() -> None:
    right = [action(text) for text in TO_CROWN]
    plans = {"right": right, "hasty": [action("go down"), *right], "late": [action("take"), *right]}
    assert plan_scores(plans, [WORLD], 11) == {"right": 1.0, "hasty": 0.0, "late": 1.0}
    assert plan_scores(plans, [WORLD], 10) == {"right": 1.0, "hasty": 0.0, "late": 0.0}
    assert 0.0 < random_score([WORLD] * 200, 20) < 0.5

"""Test generated quests and their demonstrations."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from quest_example.app import MAX_CALLS
from quest_example.chart import Chart
from quest_example.demonstrations import (
    play,
)
from quest_example.player import careful_path
from quest_example.reward import plan_scores, random_score
from quest_example.world import (
    BEGINNING,
    COLOURS,
    COMPASS,
    DOWN,
    OPPOSITE,
    Exit,
    Position,
    World,
    act,
    observation,
)
from quest_example.worlds import (
    MAX_CALLS as MOST,
    MIN_CALLS,
    RUINS,
    SPLITS,
    Split,
    generate,
    load,
    ruins,
    structure,
    structure_split,
    worlds,
)

COUNTS: dict[Split, int] = {"train": 24, "dev": 8, "test": 16}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quests")
    generate(folder, counts=COUNTS)
    return folder


@pytest.fixture(scope="module")
def quests(data: Path) -> dict[Split, list[World]]:
    return {
        split: [World.from_json(task["world"]) for task in load(data, split)] for split in SPLITS
    }


def every(quests: dict[Split, list[World]]) -> list[World]:
    return [world for found in quests.values() for world in found]


# --- the worlds -----------------------------------------------------------------------------
def test_equal_seeds_give_equal_quests(data: Path, tmp_path: Path) -> None:
    few: dict[Split, int] = {"test": 3}
    again = generate(tmp_path, counts=few)["test"]
    assert again == load(tmp_path, "test") == load(data, "test")[:3]
    assert [task["id"] for task in again] == ["test-0000", "test-0001", "test-0002"]
    other = tmp_path / "other"
    other.mkdir()
    assert generate(other, seed=1, counts=few)["test"] != again


def test_rooms_are_a_tree_with_ways_back(quests: dict[Split, list[World]]) -> None:
    for world in every(quests):
        assert len(set(world.rooms)) == len(world.rooms) == len(world.exits)
        ways = [(room, way) for room, found in enumerate(world.exits) for way in found]
        slides = [way for _, way in ways if way.is_slide]
        assert len(slides) == 1
        assert len(ways) == 2 * (len(world.rooms) - 1) - len(slides)
        for room, way in ways:
            if not way.is_slide:
                back = Exit(OPPOSITE[way.direction], room, way.lock)
                assert back in world.exits[way.to]
        for found in world.exits:
            listed = [[*COMPASS, DOWN].index(way.direction) for way in found]
            assert listed == sorted(set(listed))


def test_a_careful_player_wins_in_time(quests: dict[Split, list[World]]) -> None:
    """Check that the shortest solution fits into the budget, with some calls to spare."""
    lengths = set()
    for world in every(quests):
        path = careful_path(world, MAX_CALLS)
        assert path is not None
        assert MIN_CALLS <= len(path) <= MOST < MAX_CALLS
        assert Chart(world).calls_to_win(Position()) == len(path)
        position, action = path[-1]
        assert act(world, position, action).position.is_won
        lengths.add(len(path))
    assert len(lengths) > 1


def test_each_kind_of_ruin_is_met_and_is_fatal(quests: dict[Split, list[World]]) -> None:
    """Check by exhaustive search that no sequence of actions wins after a ruinous one."""
    for world in every(quests):
        chart = Chart(world)
        met: Counter[str] = Counter()
        path = careful_path(world, MOST)
        assert path is not None
        for position, right in path:
            fatal = chart.fatal(position)
            assert right not in fatal
            met.update(ruins(world, chart, position))
            for action in fatal:
                after = act(world, position, action)
                assert after.is_done
                assert Chart(world, after.position).calls_to_win(after.position) is None
                assert re.fullmatch(
                    r"You slide down\.|The \w+ key is used up(, the door is open)?\.", after.told
                ), "nothing says so"
        assert set(met) == set(RUINS)


def test_a_plan_without_eyes_is_worth_nothing(quests: dict[Split, list[World]]) -> None:
    """Check that a quest's solution solves at most one other quest, and random actions hardly
    any.
    """
    found = every(quests)
    plans = {
        str(number): [action for _, action in careful_path(world, MOST) or []]
        for number, world in enumerate(found)
    }
    assert max(plan_scores(plans, found, MAX_CALLS).values()) <= 2 / len(found)
    assert random_score(found * 5, MAX_CALLS) < 0.05


def test_splits_share_no_structure(quests: dict[Split, list[World]]) -> None:
    structures = {split: [structure(world) for world in found] for split, found in quests.items()}
    for split, found in structures.items():
        assert len(set(found)) == len(found) == COUNTS[split]
        assert {structure_split(name) for name in found} == {split}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not set(structures[one]) & set(structures[other])


def test_demonstrations_share_no_structure_with_dev_or_test() -> None:
    found = itertools.islice(worlds("train", "demonstrations 0"), 12)
    assert {structure_split(structure(world)) for world in found} == {"train"}


def renamed(world: World, rng: random.Random) -> World:
    """Return the world with other names of rooms, colours and directions, and other room
    numbers.
    """
    colours = dict(zip(COLOURS, rng.sample(COLOURS, len(COLOURS)), strict=True))
    order = [0, *rng.sample(range(1, len(world.rooms)), len(world.rooms) - 1)]
    exits: dict[int, tuple[Exit, ...]] = {}
    for room, found in enumerate(world.exits):
        compass = iter(rng.sample(COMPASS, len(COMPASS)))
        exits[order[room]] = tuple(
            Exit(
                DOWN if way.is_slide else next(compass),
                order[way.to],
                None if way.lock is None else colours[way.lock],
            )
            for way in rng.sample(found, len(found))
        )
    return World(
        rooms=tuple(f"room {number}" for number in range(len(world.rooms))),
        exits=tuple(exits[number] for number in range(len(exits))),
        things={order[room]: colours.get(thing, thing) for room, thing in world.things.items()},
    )


@given(number=st.integers(0, 47), seed=st.integers())
def test_names_are_no_part_of_the_structure(
    quests: dict[Split, list[World]], number: int, seed: int
) -> None:
    world = every(quests)[number]
    assert structure(renamed(world, random.Random(seed))) == structure(world)


# --- the demonstrations ---------------------------------------------------------------------


def test_demonstrated_prompts_are_those_of_the_app(
    quests: dict[Split, list[World]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quest_example.demonstrations.TAKEN_BACK", 0.0)
    world = quests["train"][0]
    first, second, *_ = play(world, random.Random(1))
    assert first.prompt == f"{BEGINNING}\n\n{observation(world, Position())}"
    after = act(world, Position(), first.action)
    assert second.prompt == f"{after.told}\n\n{observation(world, after.position)}"

"""Tests of token and cost budgets of both searches: by how much they are exceeded, and what is
stored.

1. No request is sent after a budget is used up: only what was in flight, one evaluation or the
   concurrent reflections, may exceed it.
2. Candidates compared by then are in the result, and the best of them is chosen.
3. Resuming with the same budget sends no request and has the same result.
4. Resuming with more has the result of a fresh search with more, and repeats no request.
5. A search killed at any point has the result of an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings, strategies as st
from msgspec.structs import replace

from lightspan import Price
from lightspan.errors import ConfigError
from lightspan.lightning.episode import Episode
from lightspan_prompts.search.candidates import SearchResult
from lightspan_testing.scripted import ScriptedServer
from packages.prompts.tests.made_up import SMALL, World, apo, call, gepa, pool, reflects

PER_ROLLOUT = 20
APP = [call(1, "small", 15, 5)]
PRICES = {"thinker": Price(input=1e4, output=1e4), "small": Price(input=1e4, output=1e4)}
"""A token costs 0.01."""


@pytest.fixture(scope="module")
def thinker() -> Iterator[ScriptedServer]:
    with ScriptedServer(reflects) as running:
        yield running


class Life(NamedTuple):
    """Results of a search in one process."""

    found: SearchResult
    batches: list[int]
    """Rollouts that were requested together."""
    questions: int


async def live(make: Any, server: ScriptedServer, folder: Path, **options: Any) -> Life:
    world, before = World(folder, calls=APP), len(server.requests)
    algorithm = make(server, **options)
    await algorithm.run_step(world)
    return Life(algorithm.found, world.batches, len(server.requests) - before)


def journal(folder: Path) -> Path:
    [path] = (folder / "journal").glob("*.jsonl")
    return path


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal(folder).read_text().splitlines()[1:]]


def tokens(entry: dict[str, Any]) -> int:
    if entry["type"] == "evaluation":
        return PER_ROLLOUT * len(entry["seen"])
    return int(entry["input_tokens"] + entry["output_tokens"])


def under_way(logged: list[dict[str, Any]], batch: int, at_once: int) -> int:
    """Return the tokens of the requests that were in flight last: rollouts or reflections."""
    kind, most = logged[-1]["type"], at_once
    if kind == "evaluation":
        return PER_ROLLOUT * batch
    total = 0
    for entry in reversed(logged):
        if entry["type"] != kind or most == 0:
            break
        total, most = total + tokens(entry), most - 1
    return total


async def check(
    make: Any, server: ScriptedServer, limit: int, is_money: bool, at_once: int, **options: Any
) -> None:
    """Check the five properties of the module's docstring."""

    def budget(most: int) -> dict[str, Any]:
        money = {"max_cost": most / 100, "prices": PRICES}
        return {**options, **(money if is_money else {"max_tokens": most})}

    with TemporaryDirectory() as name:
        folder, other = Path(name) / "run", Path(name) / "other"
        life = await live(make, server, folder, **budget(limit))
        logged = entries(folder)
        assert life.found.tokens == sum(map(tokens, logged))
        if "is used up" not in life.found.ended:
            assert life.found.tokens < limit
            return
        assert life.found.tokens >= limit
        assert life.found.tokens - under_way(logged, life.batches[-1], at_once) < limit
        whole = [each.mean if each.is_whole else -1.0 for each in life.found.candidates]
        assert whole[life.found.chosen] == max(whole)
        assert all(each.rewards for each in life.found.candidates)

        again = await live(make, server, folder, **budget(limit))
        assert (again.batches, again.questions) == ([], 0)
        assert again.found == life.found

        more = await live(make, server, folder, **budget(2 * limit))
        at_a_time = await live(make, server, other, **budget(2 * limit))
        assert pool(more.found) == pool(at_a_time.found)
        assert sum(life.batches) + sum(more.batches) == sum(at_a_time.batches)
        assert life.questions + more.questions == at_a_time.questions

        lines = journal(other).read_bytes().splitlines(keepends=True)
        for cut in range(1, len(lines), max(1, len(lines) // 2)):
            journal(other).write_bytes(b"".join(lines[:cut]))
            killed = await live(make, server, other, **budget(2 * limit))
            assert pool(killed.found) == pool(at_a_time.found)


@settings(max_examples=2, deadline=None)
@example(limit=500, is_money=False, proposals=1)
@example(limit=450, is_money=True, proposals=2)
@given(limit=st.integers(1, 1500), is_money=st.booleans(), proposals=st.integers(1, 2))
async def test_gepa(thinker: ScriptedServer, limit: int, is_money: bool, proposals: int) -> None:
    await check(gepa, thinker, limit, is_money, 1, proposals=proposals)


@settings(max_examples=2, deadline=None)
@example(limit=500, is_money=False)
@example(limit=450, is_money=True)
@given(limit=st.integers(1, 3000), is_money=st.booleans())
async def test_apo(thinker: ScriptedServer, limit: int, is_money: bool) -> None:
    await check(apo, thinker, limit, is_money, 1, reflections_at_once=1)


@settings(max_examples=3, deadline=None)
@example(limit=500, at_once=2)
@given(limit=st.integers(1, 3000), at_once=st.integers(2, 4))
async def test_reflections_at_once(thinker: ScriptedServer, limit: int, at_once: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        options = {"max_tokens": limit, "reflections_at_once": at_once}
        life = await live(apo, thinker, folder, **options)
        logged = entries(folder)
        questions = sum(entry["type"] == "reflection" for entry in logged)
        assert questions == life.questions == life.found.reflections
        if "is used up" in life.found.ended:
            assert life.found.tokens - under_way(logged, life.batches[-1], at_once) < limit
        again = await live(apo, thinker, folder, **options)
        assert (again.batches, again.questions, again.found) == ([], 0, life.found)


# --- interrupted rollouts -------------------------------------------------------------------
class Ended(Exception):
    """End of a process."""


class Mortal(World):
    """A world that ends in its batch number `last`, and leaves the batch's rollouts in the store.

    Args:
        folder: folder of the run.
        stored: episodes of all processes so far.
        last: number of the last batch; None for a process that ends by itself.
    """

    def __init__(self, folder: Path, stored: list[Episode], last: int | None = None) -> None:
        super().__init__(folder, calls=APP)
        self.stored = stored
        self.last = last
        self.rollouts_done = len(stored)  # names them apart

    async def rollouts(self, *args: Any, **options: Any) -> list[Episode]:
        episodes = await super().rollouts(*args, **options)
        self.stored += episodes
        if len(self.batches) == self.last:
            raise Ended
        return episodes


async def lives(
    make: Any, server: ScriptedServer, folder: Path, ends: list[int], **options: Any
) -> tuple[SearchResult, list[Episode], list[Mortal]]:
    """Run a search in processes that end in the batches `ends`, and in one that ends by itself."""
    stored: list[Episode] = []
    worlds = [Mortal(folder, stored, last) for last in [*ends, None]]
    for world in worlds:
        world.rollouts_done = len(stored)
        algorithm = make(server, **options)
        with suppress(Ended):
            await algorithm.run_step(world)
    return algorithm.found, stored, worlds


def counted(notes: list[str]) -> list[str]:
    return [note for note in notes if "interrupted rollout" in note]


@pytest.mark.parametrize("make", [gepa, apo])
@pytest.mark.parametrize("ends", [[1], [2, 1, 1], [3, 2]])
async def test_interrupted_rollouts_are_counted_once(
    make: Any, thinker: ScriptedServer, tmp_path: Path, ends: list[int]
) -> None:
    options = {"max_rollouts": 400, "max_reflections": 4, "prices": PRICES}
    whole = (await live(make, thinker, tmp_path / "whole", **options)).found
    found, stored, worlds = await lives(make, thinker, tmp_path / "run", ends, **options)
    assert pool(found) == pool(whole)
    assert [len(world.batches) for world in worlds[:-1]] == ends
    lost = sum(world.batches[-1] for world in worlds[:-1])
    assert (found.interrupted, found.rollouts) == (lost, len(stored))
    assert found.rollouts == whole.rollouts + lost
    assert found.tokens == whole.tokens + PER_ROLLOUT * lost
    assert found.cost == pytest.approx((whole.cost or 0) + 0.01 * PER_ROLLOUT * lost)
    assert found.usage["small"] == (15 * len(stored), 5 * len(stored))
    assert found.mean == whole.mean
    assert [counted(world.notes)[:1] for world in worlds] == [
        [],
        *(
            [f"{world.batches[-1]} interrupted rollouts, their tokens and cost are counted"]
            for world in worlds[:-1]
        ),
    ]
    assert (
        f"{lost} rollouts of this search ended with an interrupted process: they, their tokens "
        "and cost are counted, without calls that were cut off"
    ) in found.spending()
    again = Mortal(tmp_path / "run", stored)
    algorithm = make(thinker, **options)
    await algorithm.run_step(again)
    assert (again.batches, counted(again.notes)) == ([], [])
    assert replace(algorithm.found, proposals=[]) == replace(found, proposals=[])


@pytest.mark.parametrize("make", [gepa, apo])
@pytest.mark.parametrize("ends", [[2], [2, 1], [2, 1, 1, 1], [3, 2, 1], [5, 1]])
@pytest.mark.parametrize("limit", [30, 41, 60])
async def test_max_rollouts_holds_over_several_processes(
    make: Any, thinker: ScriptedServer, tmp_path: Path, ends: list[int], limit: int
) -> None:
    options = {"max_rollouts": limit, **({"beam_width": 1} if make is apo else {})}
    found, stored, _ = await lives(make, thinker, tmp_path, ends, **options)
    assert found.rollouts == len(stored) <= limit
    again = Mortal(tmp_path, stored)
    algorithm = make(thinker, **options)
    await algorithm.run_step(again)
    assert again.batches == []
    assert replace(algorithm.found, proposals=[]) == replace(found, proposals=[])
    if make is gepa:  # the other's budget of rollouts may not change
        more = Mortal(tmp_path, stored)
        algorithm = make(thinker, **{**options, "max_rollouts": 150})
        await algorithm.run_step(more)
        assert algorithm.found.rollouts == len(stored) <= 150
        assert len(algorithm.found.candidates) >= len(found.candidates)


@pytest.mark.parametrize("make", [gepa, apo])
async def test_a_search_that_never_came_to_a_result(
    make: Any, thinker: ScriptedServer, tmp_path: Path
) -> None:
    message = r"max_rollouts=22 .*: 20 interrupted rollouts came before any result; give a larger"
    with pytest.raises(ConfigError, match=message):
        await lives(
            make, thinker, tmp_path, [1] * 4, max_rollouts=22, **(SMALL if make is apo else {})
        )
    message = "max_tokens=300 is used up: 300 tokens: 15 interrupted rollouts"
    with pytest.raises(ConfigError, match=message):
        await lives(make, thinker, tmp_path / "tokens", [1] * 4, max_tokens=300)

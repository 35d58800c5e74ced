"""Budgets of tokens and money of a search for prompts: exceeded by what was under way alone, with
everything kept that was paid for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests.core.algorithms import made_up, test_apo
from tests.core.algorithms.made_up import World, call, pool

from lightspan import APO, GEPA, Price
from lightspan.algorithms.prompts.candidates import Found
from lightspan.testing.scripted import ScriptedServer

CALLS = [call(1, "small", 3, 2)]
"""Of each rollout: five tokens."""
PRICES = {"small": Price(input=1e6, output=1e6), "thinker": Price(input=1e6, output=1e6)}
"""A token costs one."""


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ScriptedServer]]:
    with ScriptedServer(made_up.reflects) as gepa, ScriptedServer(test_apo.reflects) as apo:
        yield {"gepa": gepa, "apo": apo}


def made(name: str, server: ScriptedServer, **options: Any) -> GEPA | APO:
    if name == "gepa":
        return made_up.gepa(server, max_rollouts=100, **options)
    return test_apo.apo(server, max_rollouts=200, **options)


def searched(name: str, server: ScriptedServer, folder: Path, **options: Any) -> Found:
    algorithm = made(name, server, **options)
    asyncio.run(algorithm.run_step(World(folder, calls=CALLS)))  # type: ignore[arg-type]
    assert algorithm.found is not None
    return algorithm.found


def bought(folder: Path, name: str) -> list[tuple[str, int]]:
    """Kind and tokens of all that was asked, in order."""
    lines = (folder / "journal" / f"{name}.jsonl").read_text().splitlines()[1:]
    entries = [json.loads(line) for line in lines]
    return [
        (
            each["type"],
            sum(seen["tokens"] for seen in each["seen"])
            if "seen" in each
            else each["input_tokens"] + each["output_tokens"],
        )
        for each in entries
    ]


def last_asked(name: str, entries: list[tuple[str, int]]) -> int:
    """Tokens of what may have been under way last: evaluations, or questions, side by side."""
    kind, tokens = entries[-1][0], 0
    for place, (each, spent) in enumerate(reversed(entries)):
        if each != kind or (kind == "reflection" and place == AT_ONCE[name]):
            break
        tokens += spent
    return tokens


AT_ONCE = {"gepa": 1, "apo": 4}
"""Questions that are under way together."""


@pytest.mark.parametrize("name", ["gepa", "apo"])
@settings(max_examples=5)
@given(budget=st.integers(1, 4000), money=st.booleans())
def test_what_was_under_way_alone_exceeds_it(
    servers: dict[str, ScriptedServer], name: str, budget: int, money: bool
) -> None:
    limits: dict[str, Any] = {"max_tokens": budget}
    if money:
        limits = {"max_cost": float(budget), "prices": PRICES}
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        found = searched(name, servers[name], folder / "one", **limits)
        entries = bought(folder / "one", name)
        total = sum(tokens for _, tokens in entries)
        assert found.tokens == total
        assert found.cost == (pytest.approx(total) if money else None)
        if "is used up" not in found.ended:
            assert total < budget or "rounds" in found.ended
        elif len(entries) > 1:  # the prompts as they are are evaluated whatever that takes
            assert total - last_asked(name, entries) < budget <= total
        assert all(each.rewards for each in found.candidates)
        assert found.candidates[found.chosen].mean == max(
            each.mean for each in found.candidates if each.is_whole
        )
        # what it has is what the beginning of a search without a budget has, which it goes on to
        before = (folder / "one" / "journal" / f"{name}.jsonl").read_bytes()
        more = searched(name, servers[name], folder / "one")
        assert (folder / "one" / "journal" / f"{name}.jsonl").read_bytes().startswith(before)
        whole = searched(name, servers[name], folder / "two")
        assert pool(more) == pool(whole)
        assert (more.rollouts, more.reflections) == (whole.rollouts, whole.reflections)


@pytest.mark.parametrize("name", ["gepa", "apo"])
def test_one_that_went_on_stops_where_it_did(
    servers: dict[str, ScriptedServer], tmp_path: Path, name: str
) -> None:
    first = searched(name, servers[name], tmp_path, max_tokens=900)
    asked = len(servers[name].requests)
    again = searched(name, servers[name], tmp_path, max_tokens=900)
    assert (pool(again), again.tokens, again.ended) == (pool(first), first.tokens, first.ended)
    assert len(servers[name].requests) == asked

"""Some thousands of hostile requests; `nox -s attack` sends a million."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.attack.attacker import Outcome
from tests.attack.delays import Delays
from tests.attack.hostile import requests
from tests.attack.run import attacked
from tests.attack.victims import VICTIMS

REQUESTS = 1_000
"""To each of the two."""
GROWTH = 200 * 2**20
"""Bytes by which memory may grow: nothing that is sent is kept, and some of it has megabytes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", VICTIMS)
def test_every_hostile_request_is_answered(name: str, tmp_path: Path) -> None:
    with VICTIMS[name](tmp_path) as victim:
        asyncio.run(attacked(victim, 100, seed=0))  # what is loaded at first use
        before = victim.memory()
        outcome = asyncio.run(attacked(victim, REQUESTS, seed=1))
        grown = victim.memory() - before
    assert outcome.tried == REQUESTS
    assert outcome.wrong == []
    assert (outcome.failed, outcome.unanswered) == (0, 0)
    assert outcome.statuses[200] > REQUESTS / 20  # it was not refused at the door
    assert grown < GROWTH


def test_equal_seeds_send_equal_requests() -> None:
    first, second, third = (requests(seed, host="h", token=lambda: "t") for seed in (1, 1, 2))
    sent = [[next(several).data for _ in range(200)] for several in (first, second, third)]
    assert sent[0] == sent[1] != sent[2]


def test_growth_is_measured_from_the_first_look() -> None:
    outcome = Outcome(memory=[(25_000, 500 * 2**20), (250_000, 900 * 2**20), (425_000, 2**30)])
    assert outcome.grown == (524 * 2**20, 128 * 2**20 + 512 * 400_000)
    assert Outcome().grown == (0, 128 * 2**20)


def test_a_wait_is_looked_at_beyond_its_share() -> None:
    """Of three requests in flight and its own: a quarter."""
    waits = {"nothing": (0.002, 0.02), "one": (0.05, 0.2)}
    delays = Delays(waits, alone=(0.001, 0.0125))
    assert delays.beyond["one"] == (pytest.approx(0.046), pytest.approx(0.15))
    assert delays.failed
    assert not Delays({"one": (0.1, 0.145)}, alone=(0.001, 0.0125)).failed

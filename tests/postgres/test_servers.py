"""Test several `lightspan serve` that share one PostgreSQL."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from serve_process import serving_store  # type: ignore[import-not-found]

from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite import LEASE_S, make_report, make_rollout
from packages.core.tests.stores.lives import check_once, live
from packages.gateway.tests.remote_store.served import RUNNER, TRAINER
from tests.conftest import APPS, questions, rl  # noqa: F401 - fixtures

KEYS = ("--trainer-key-env", "TRAINER_KEY", "--runner-key-env", "RUNNER_KEY")
IN_ENVIRONMENT = {"TRAINER_KEY": TRAINER, "RUNNER_KEY": RUNNER}


@pytest.fixture
def servers(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Run two servers that start together; the first one creates the tables."""
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", TRAINER)
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(serving_store(url, *KEYS, **IN_ENVIRONMENT))[0] for _ in range(2)
        )
        yield one, other


async def test_a_life_at_two_servers(servers: tuple[str, str]) -> None:
    """Check that a write at one server is visible once at the other."""
    one, other = servers
    await live(one)
    await check_once(other)


async def test_no_rollout_is_claimed_twice(servers: tuple[str, str]) -> None:
    """Check claims at both servers at the same time, with leases by the database's clock."""
    names = [f"ro-{number}" for number in range(60)]

    async def work(store: Store, runner: str) -> list[str]:
        done = []
        while claims := await store.claim(runner, 2, LEASE_S):
            for claim in claims:
                assert await store.report([make_report(claim.attempt)]) == [True]
                done.append(claim.rollout.rollout_id)
        return done

    async with open_store(servers[0]) as here, open_store(servers[1]) as there:
        await here.enqueue([make_rollout(name) for name in names])
        both = [work(store, f"{n}") for n in range(4) for store in (here, there)]
        done = Counter(name for some in await asyncio.gather(*both) for name in some)
        assert done == dict.fromkeys(names, 1)

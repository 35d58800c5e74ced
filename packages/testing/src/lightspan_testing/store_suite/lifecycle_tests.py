"""Tests of opening, closing, reopening and sharing a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from lightspan.errors import StoreClosedError
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Attempt
from lightspan.schema.reward import Reward
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    LEASE_S,
    Clock,
    StoreTests,
    claim_one,
    make_call,
    make_peer,
    make_production,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
)


async def _dump(store: Store, attempts: Sequence[Attempt]) -> list[Any]:
    """Return the whole content of a store."""
    ids = [attempt.attempt_id for attempt in attempts]
    states = await store.rollouts()
    return [
        states,
        await store.count(),
        await store.watch(),
        await store.attempts([state.rollout.rollout_id for state in states]),
        await store.spans(ids),
        await store.token_records(ids),
        await store.policy_versions("sql"),
    ]


class LifecycleTests(StoreTests):
    """A closed store raises; a durable one is unchanged after reopening."""

    async def test_a_closed_store_says_so(self, name: str, clock: Clock) -> None:
        store = self.make_store(name, clock)
        operations = self._every_operation(store)
        for operation in operations:
            with pytest.raises(StoreClosedError):
                await operation()
        await store.open()
        await store.open()
        await store.count()
        await store.close()
        await store.close()
        for operation in operations:
            with pytest.raises(StoreClosedError):
                await operation()

    def _every_operation(self, store: Store) -> Sequence[Callable[[], Awaitable[Any]]]:
        attempt = Attempt(attempt_id="at-1", rollout_id="ro-1", number=1, epoch=1)
        return [
            lambda: store.put_resources({}),
            lambda: store.get_resources("re-1"),
            lambda: store.allot_version("sql"),
            lambda: store.policy_versions("sql"),
            lambda: store.enqueue([make_rollout()]),
            lambda: store.start([make_production()]),
            lambda: store.claim("runner", 1, LEASE_S),
            lambda: store.heartbeat([ref(attempt)], LEASE_S),
            lambda: store.report([make_report(attempt)]),
            lambda: store.expire(),
            lambda: store.cancel(["ro-1"]),
            lambda: store.rollouts(),
            lambda: store.watch(),
            lambda: store.count(),
            lambda: store.announce(make_peer("runner-1")),
            lambda: store.withdraw("runner-1"),
            lambda: store.peers(),
            lambda: store.attempts(["ro-1"]),
            lambda: store.attempt("at-1"),
            lambda: store.claim_of_token("token"),
            lambda: store.mark_damaged("at-1", "reason"),
            lambda: store.add_spans(ref(attempt), [make_span(attempt)]),
            lambda: store.add_calls([make_call(attempt)]),
            lambda: store.mark_call("at-1", "call-1", CallOutcome.OK),
            lambda: store.spans(["at-1"]),
            lambda: store.token_records(["at-1"]),
        ]

    async def test_close_waits_for_writes_under_way(self, name: str, clock: Clock) -> None:
        store = self.make_store(name, clock)
        await store.open()
        writes = [asyncio.create_task(store.enqueue([make_rollout(f"ro-{i}")])) for i in range(50)]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*writes)

    async def test_close_ends_a_watch(self, name: str, clock: Clock) -> None:
        store = self.make_store(name, clock)
        await store.open()
        watching = asyncio.create_task(store.watch(timeout_s=60))
        await asyncio.sleep(0.01)
        await store.close()
        with pytest.raises(StoreClosedError):
            await watching

    async def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url

    async def test_everything_is_there_after_reopening(self, name: str, clock: Clock) -> None:
        store = self.make_store(name, clock)
        if not store.capabilities.durable:
            pytest.skip("not durable")
        async with store:
            attempt = await start(store)
            await store.enqueue([make_rollout("ro-2")])
            await store.add_calls([make_call(attempt)])
            await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.CANCELLED)
            await store.report([make_report(attempt, reward=Reward(0.5))])
            await store.allot_version("sql")
            resources = await store.put_resources({"p": PromptTemplate(template="x")})
            before = await _dump(store, [attempt])
        async with self.make_store(name, clock) as again:
            assert await _dump(again, [attempt]) == before
            assert await again.allot_version("sql") == 2
            assert await again.get_resources(resources) == {"p": PromptTemplate(template="x")}
            assert (await claim_one(again)).rollout_id == "ro-2"

    async def test_two_stores_on_one_content(self, stores: list[Store]) -> None:
        one, other = stores
        await one.enqueue([make_rollout(f"ro-{i}") for i in range(200)])
        watching = asyncio.create_task(other.watch((await other.watch()).cursor, timeout_s=60))

        async def drain(store: Store) -> list[str]:
            names: list[str] = []
            while claims := await store.claim("runner", 3, LEASE_S):
                names += [claim.rollout.rollout_id for claim in claims]
            return names

        first, second = await asyncio.gather(drain(one), drain(other))
        assert sorted(first + second) == sorted(f"ro-{i}" for i in range(200))
        assert (await watching).rollouts
        assert await one.rollouts() == await other.rollouts()

"""Tests of opening, closing, reopening, sharing and pruning a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from lightspan.errors import NotFoundError, StoreClosedError, StoreError
from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import Attempt, AttemptStatus, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    IMAGE,
    LEASE_S,
    Clock,
    StoreTests,
    claim_one,
    content_of,
    make_call,
    make_peer,
    make_production,
    make_report,
    make_rollout,
    make_span,
    records_of,
    ref,
    start,
)

_DAY_S = 86_400.0


class LifecycleTests(StoreTests):
    """Test opening, closing, reopening and pruning a store.

    Every operation on a closed store raises an error. A durable store is unchanged after reopening.
    Pruning deletes rollouts that ended long ago.
    """

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

    async def test_a_store_opened_for_reading_changes_nothing(
        self, store: Store, name: str, clock: Clock
    ) -> None:
        attempt = await start(store)
        await store.add_calls([make_call(attempt)])
        before = await content_of(store, attempt)
        reader: Any = self.make_store(name, clock) if store.capabilities.durable else store
        if not hasattr(reader, "read_only"):
            pytest.skip("cannot be opened for reading only")
        reader.read_only = True
        async with reader:
            assert await content_of(reader, attempt) == before
            assert await reader.search("call-1") == [attempt.attempt_id]
            for operation in self._every_write(reader, attempt):
                with pytest.raises(StoreError, match="reading only"):
                    await operation()
            assert await content_of(reader, attempt) == before
        if reader is not store:
            assert await content_of(store, attempt) == before

    def _every_operation(self, store: Store) -> Sequence[Callable[[], Awaitable[Any]]]:
        attempt = Attempt(attempt_id="at-1", rollout_id="ro-1", number=1, epoch=1)
        return [
            *self._every_write(store, attempt),
            lambda: store.get_resources("re-1"),
            lambda: store.policy_versions("sql"),
            lambda: store.rollouts(),
            lambda: store.watch(),
            lambda: store.summaries(),
            lambda: store.search("text"),
            lambda: store.count(),
            lambda: store.peers(),
            lambda: store.attempts(["ro-1"]),
            lambda: store.attempt("at-1"),
            lambda: store.claim_of_token("token"),
            lambda: store.spans(["at-1"]),
            lambda: store.token_records(["at-1"]),
            lambda: store.images([IMAGE.digest]),
        ]

    def _every_write(
        self, store: Store, attempt: Attempt
    ) -> Sequence[Callable[[], Awaitable[Any]]]:
        return [
            lambda: store.put_resources({}),
            lambda: store.allot_version("sql"),
            lambda: store.enqueue([make_rollout()]),
            lambda: store.start([make_production()]),
            lambda: store.claim("runner", 1, LEASE_S),
            lambda: store.heartbeat([ref(attempt)], LEASE_S),
            lambda: store.report([make_report(attempt)]),
            lambda: store.finish(make_report(attempt), [make_span(attempt)]),
            lambda: store.expire(),
            lambda: store.cancel(["ro-1"]),
            lambda: store.prune(0),
            lambda: store.announce(make_peer("runner-1")),
            lambda: store.withdraw("runner-1"),
            lambda: store.mark_damaged(attempt.attempt_id, "reason"),
            lambda: store.add_spans(ref(attempt), [make_span(attempt)]),
            lambda: store.add_calls([make_call(attempt)]),
            lambda: store.add_images(ref(attempt), [IMAGE]),
            lambda: store.mark_call(attempt.attempt_id, "call-1", CallOutcome.OK),
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
            await store.add_images(ref(attempt), [IMAGE])
            await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.CANCELLED)
            await store.report([make_report(attempt, reward=Reward(0.5))])
            await store.allot_version("sql")
            resources = await store.put_resources({"p": PromptTemplate(template="x")})
            before = await content_of(store, attempt)
        async with self.make_store(name, clock) as again:
            assert await content_of(again, attempt) == before
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

    # --- prune ----------------------------------------------------------------------------
    async def test_what_ended_long_ago_is_forgotten(self, store: Store, clock: Clock) -> None:
        runs = [make_production("ro-running"), make_production("ro-late", "token-2")]
        await store.start(runs)
        running, late = (claim.attempt for claim in runs)
        await store.add_calls([make_call(running)])
        lost = await start(store)
        await store.report([make_report(lost, AttemptStatus.LOST)])
        retried = await claim_one(store)
        for attempt in (lost, retried):
            await store.add_spans(ref(attempt), [make_span(attempt)])
            await store.add_calls([make_call(attempt)])
            await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.UNDELIVERED)
        await store.report([make_report(retried, reward=Reward(1.0))])
        await store.enqueue([make_rollout("ro-cancelled")])
        await store.cancel(["ro-cancelled"])
        clock.advance(2 * _DAY_S)
        recent = await start(store, "ro-recent")
        await store.report([make_report(recent, reward=Reward(0.5))])
        await store.report([make_report(late)])  # ended just now, though it is old
        assert await store.prune(_DAY_S) == 2
        assert await store.count() == {RolloutStatus.SUCCEEDED: 2, RolloutStatus.RUNNING: 1}
        deleted = [lost.attempt_id, retried.attempt_id]
        assert await store.attempts(["ro-1", "ro-cancelled"]) == []
        assert await store.spans(deleted) == {one: [] for one in deleted}
        assert await store.token_records(deleted) == {one: [] for one in deleted}
        assert await store.claim_of_token(retried.call_token) is None
        for ask in (
            store.rollouts(["ro-1"]),
            store.attempt(retried.attempt_id),
            store.add_spans(ref(retried), [make_span(retried)]),
        ):
            with pytest.raises(NotFoundError):
                await ask
        assert len(await records_of(store, running)) == 1
        assert [await store.prune(_DAY_S) for _ in range(2)] == [0, 0]

    async def test_a_cursor_misses_nothing(self, store: Store, clock: Clock) -> None:
        """Pruning keeps the rollout that was created last and the one that changed last.

        Stores number rollouts and changes. Without these two, numbers would be used again, and a
        client that asks for changes after a number would miss some.
        """
        first = await start(store, "ro-1")
        await store.enqueue([make_rollout("ro-2"), make_rollout("ro-3")])
        await store.cancel(["ro-2", "ro-3"])
        await store.report([make_report(first)])
        cursor = (await store.watch()).cursor
        clock.advance(_DAY_S)
        assert await store.prune(0.0) == 1
        ids = [state.rollout.rollout_id for state in await store.rollouts()]
        assert ids == ["ro-1", "ro-3"]
        await store.enqueue([make_rollout("ro-4")])
        changes = await store.watch(cursor)
        assert [state.rollout.rollout_id for state in changes.rollouts] == ["ro-4"]
        assert changes.cursor > cursor
        assert (await claim_one(store)).rollout_id == "ro-4"

    async def test_so_many_at_once_oldest_first(self, store: Store, clock: Clock) -> None:
        names = [f"ro-{number:03}" for number in range(300)]
        await store.enqueue([make_rollout(name) for name in names])
        await store.cancel(names)
        clock.advance(_DAY_S)
        assert await store.prune(1.0, 2) == 2
        ids = [state.rollout.rollout_id for state in await store.rollouts()]
        assert ids == names[2:]
        assert await store.prune(1.0, 290) == 290
        assert await store.prune(1.0) == 7
        assert [state.rollout.rollout_id for state in await store.rollouts()] == names[-1:]

    async def test_leases_and_queues_go_on(self, store: Store, clock: Clock) -> None:
        """A pruned rollout does not expire and is not claimed; its id can be used again."""
        old = await start(store, "ro-old")
        await store.enqueue([make_rollout("ro-cancelled")])
        await store.cancel(["ro-cancelled"])
        await store.report([make_report(old)])
        await store.enqueue([make_rollout("ro-new", max_infrastructure_tries=1)])
        await claim_one(store)
        clock.advance(LEASE_S + 1)
        assert await store.prune(1.0) == 2
        assert await store.expire() == 1
        assert await store.claim("runner", 5, LEASE_S) == []
        await store.enqueue([make_rollout("ro-old")])  # its id is free again
        assert (await claim_one(store)).number == 1

"""Tests of large content, many clients, and numbers that stores refuse."""

from __future__ import annotations

import asyncio

import pytest

from lightspan.errors import ConflictError, NotFoundError
from lightspan.schema.records import Claim, RolloutStatus
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    LEASE_S,
    StoreTests,
    make_call,
    make_report,
    make_rollout,
    make_span,
    ref,
    spans_of,
    start,
    state_of,
)


class LimitTests(StoreTests):
    """Test thousands of rollouts, megabytes in one rollout, many clients, and invalid numbers.

    A store refuses an invalid number with an error that names the field, and writes nothing.
    """

    async def test_batches_of_a_thousand(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(1000)])
        claims = await store.claim("runner", 1000, LEASE_S)
        names = [claim.rollout.rollout_id for claim in claims]
        assert names == [f"ro-{i}" for i in range(1000)]
        attempts = [claim.attempt for claim in claims]
        assert await store.heartbeat([ref(attempt) for attempt in attempts], LEASE_S) == []
        assert await store.add_calls([make_call(a) for a in attempts]) == [False] * 1000
        first = attempts[0]
        spans = [make_span(first, number) for number in range(1000)]
        assert await store.add_spans(ref(first), spans) == 0
        assert (await spans_of(store, first))[1:] == spans
        ids = [attempt.attempt_id for attempt in attempts]
        records = await store.token_records(ids)
        assert list(records) == ids
        assert all(len(of_attempt) == 1 for of_attempt in records.values())
        assert await store.report([make_report(a) for a in attempts[:500]]) == [True] * 500
        assert await store.cancel(names) == 500
        assert await store.count() == {RolloutStatus.SUCCEEDED: 500, RolloutStatus.CANCELLED: 500}
        assert len((await store.watch()).rollouts) == 1000
        assert len(await store.attempts(names)) == 1000

    async def test_large_values(self, store: Store) -> None:
        attempt = await start(store, task="x" * 2_000_000)
        span = make_span(attempt, attributes={"text": "y" * 3_000_000})
        assert await store.add_spans(ref(attempt), [span]) == 0
        assert await spans_of(store, attempt) == [span]
        assert len((await state_of(store)).rollout.task) == 2_000_000

    async def test_200_mixed_operations_at_once(self, store: Store) -> None:
        """When many operations run concurrently, each rollout is claimed once and ends once.

        Every call is stored.
        """
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(100)])

        async def run_one() -> Claim:
            [claim] = await store.claim("runner", 1, LEASE_S)
            attempt = claim.attempt
            await asyncio.gather(
                store.add_calls([make_call(attempt)]),
                store.add_spans(ref(attempt), [make_span(attempt)]),
                store.heartbeat([ref(attempt)], LEASE_S),
            )
            assert await store.report([make_report(attempt)]) == [True]
            return claim

        async def disturb() -> None:
            with pytest.raises(NotFoundError):
                await store.mark_damaged("at-nobody", "reason")
            with pytest.raises(ConflictError):
                await store.enqueue([make_rollout("ro-1", task="another")])

        results = await asyncio.gather(
            *(run_one() for _ in range(100)),
            *(disturb() for _ in range(50)),
            *(store.count() for _ in range(50)),
        )
        claims = [result for result in results if isinstance(result, Claim)]
        assert len({claim.rollout.rollout_id for claim in claims}) == 100
        assert await store.count() == {RolloutStatus.SUCCEEDED: 100}
        ids = [claim.attempt.attempt_id for claim in claims]
        for records in (await store.token_records(ids)).values():
            assert [record.late for record in records] == [False]
        assert [len(spans) for spans in (await store.spans(ids)).values()] == [2] * 100

    async def test_an_operation_given_up_leaves_the_store_usable(self, store: Store) -> None:
        tasks = [asyncio.create_task(store.enqueue([make_rollout(f"ro-{i}")])) for i in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        names = {state.rollout.rollout_id for state in await store.rollouts()}
        assert names >= {f"ro-{i}" for i in range(1, 50, 2)}

    # --- numbers --------------------------------------------------------------------------

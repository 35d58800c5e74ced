"""Run the operations of a small training on a store, and check that each took effect once."""

from __future__ import annotations

import asyncio

import pytest

from lightspan.errors import ConflictError
from lightspan.schema.records import AttemptStatus, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.stores import open_store
from lightspan_testing.store_suite import (
    IMAGE,
    LEASE_S,
    make_call,
    make_production,
    make_report,
    make_rollout,
    make_span,
    ref,
)


async def live(url: str) -> None:
    """Run the operations of a small training and of a recorded production rollout."""
    async with open_store(url) as store:
        await store.put_resources({})
        assert [await store.allot_version("sql", "run", step) for step in range(3)] == [1, 2, 3]
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(20)])
        with pytest.raises(ConflictError):
            await store.enqueue([make_rollout("ro-0", task="another")])

        async def run(number: int) -> None:
            name = f"runner-{number}"
            while claims := await store.claim(name, 3, LEASE_S):
                for claim in claims:
                    attempt = claim.attempt
                    assert await store.heartbeat([ref(attempt)], LEASE_S) == []
                    assert await store.add_spans(ref(attempt), [make_span(attempt)]) == 0
                    await store.add_images(ref(attempt), [IMAGE])
                    assert await store.add_calls([make_call(attempt)]) == [False]
                    report = make_report(attempt, reward=Reward(0.5))
                    assert await store.report([report]) == [True]

        await asyncio.gather(*(run(number) for number in range(3)))
        production = make_production("ro-served")
        await store.start([production])
        await store.mark_damaged(production.attempt.attempt_id, "reason")
        await store.report([make_report(production.attempt)])


async def check_once(url: str) -> None:
    """Check that everything that `live` wrote is stored once."""
    async with open_store(url) as store:
        assert await store.count() == {RolloutStatus.SUCCEEDED: 21}
        attempts = await store.attempts([f"ro-{i}" for i in range(20)])
        assert [attempt.number for attempt in attempts] == [1] * 20
        assert [attempt.reward for attempt in attempts] == [Reward(0.5)] * 20
        assert {attempt.status for attempt in attempts} == {AttemptStatus.SUCCEEDED}
        ids = [attempt.attempt_id for attempt in attempts]
        spans, records = await store.spans(ids), await store.token_records(ids)
        assert [len(spans[attempt_id]) for attempt_id in ids] == [2] * 20
        assert [len(records[attempt_id]) for attempt_id in ids] == [1] * 20
        assert await store.images([IMAGE.digest]) == {IMAGE.digest: IMAGE}
        assert not any(span.late for stored in spans.values() for span in stored)
        assert [version.version for version in await store.policy_versions("sql")] == [1, 2, 3]

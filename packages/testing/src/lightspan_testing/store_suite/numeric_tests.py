"""Tests of numbers that stores refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from lightspan.errors import DataError
from lightspan.schema.records import AttemptRef, RolloutStatus
from lightspan.schema.reward import LARGEST, Reward
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    LEASE_S,
    StoreTests,
    make_call,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
    status_of,
)

_NO_SECONDS = [math.nan, math.inf, -math.inf, -1.0, 1e300]
_TOO_LARGE = 2**63


class NumericTests(StoreTests):
    """They are refused by name without writing anything, and the store is not reported as
    damaged."""

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 2 * LARGEST])
    async def test_a_reward_that_is_no_number(self, store: Store, number: float) -> None:
        """NaN would not equal the same report when retried; a batch that contains one is refused
        whole."""
        attempt = await start(store, "ro-1")
        other = await start(store, "ro-2")
        for reward in (Reward(number), Reward(0.5, {"reward": 0.5, "style": number})):
            with pytest.raises(DataError, match="parse_reward"):
                await store.report([make_report(other), make_report(attempt, reward=reward)])
        for name in ("ro-1", "ro-2"):
            assert await status_of(store, name) is RolloutStatus.RUNNING
        largest = make_report(attempt, reward=Reward(LARGEST, {"least": -LARGEST}))
        assert [await store.report([largest]) for _ in range(2)] == [[True], [True]]

    @pytest.mark.parametrize("seconds", _NO_SECONDS)
    async def test_seconds_that_are_none(self, store: Store, seconds: float) -> None:
        attempt = await start(store)
        await store.enqueue([make_rollout("ro-2")])
        before = await store.attempts(["ro-1", "ro-2"])
        for ask in (
            lambda: store.claim("runner", 1, seconds),
            lambda: store.heartbeat([ref(attempt)], seconds),
        ):
            with pytest.raises(DataError, match="lease_s="):
                await ask()
        with pytest.raises(DataError, match="timeout_s="):
            await store.watch(99, timeout_s=seconds)
        assert await store.attempts(["ro-1", "ro-2"]) == before

    @pytest.mark.parametrize("number", [-1, _TOO_LARGE, 2**64])
    async def test_integers_that_no_column_takes(self, store: Store, number: int) -> None:
        attempt = await start(store)
        lost = AttemptRef(attempt.attempt_id, number)
        refused: list[Callable[[], Any]] = [
            lambda: store.allot_version("sql", step=number),
            lambda: store.rollouts(step=number),
            lambda: store.rollouts(limit=number),
            lambda: store.watch(number),
            lambda: store.enqueue([make_rollout("ro-2", step=number)]),
            lambda: store.add_spans(lost, [make_span(attempt)]),
            lambda: store.add_calls([make_call(attempt, epoch=number)]),
        ]
        before = await store.watch()
        for ask in refused:
            with pytest.raises(DataError):
                await ask()
        assert await store.watch() == before
        assert await store.policy_versions("sql") == []
        if number > 0:
            with pytest.raises(DataError):
                await store.claim("runner", number, LEASE_S)

"""Tests of the reads for tables and search: `Store.summaries` and `Store.search`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import pytest

from lightspan.errors import DataError, NotFoundError
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Fork,
    Mode,
    Outcome,
    RolloutStatus,
    RolloutSummary,
)
from lightspan.schema.reward import Reward
from lightspan.schema.semconv import FEEDBACK, REWARD_CALL_ID, REWARD_DIMENSION, REWARD_VALUE
from lightspan.schema.spans import Span, SpanKind
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    LEASE_S,
    UNICODE,
    Clock,
    StoreTests,
    claim_one,
    make_call,
    make_production,
    make_report,
    make_rollout,
    make_span,
    ref,
    spans_of,
    start,
    state_of,
)


def make_feedback(
    attempt: Attempt, number: int, value: float, attributes: Mapping[str, Any] = {}
) -> Span:
    """Build a span of feedback on the attempt, with further attributes."""
    fields = {FEEDBACK: True, REWARD_VALUE: value, **attributes}
    return make_span(attempt, 0xFEED_0000 + number, kind=SpanKind.REWARD, attributes=fields)


class ReadTests(StoreTests):
    """Test that rollouts are listed with their latest attempts, and spans are found by their text.

    `summaries` agrees with `rollouts` and `attempts`, misses no change after a cursor, and pages
    from the newest rollout to the oldest.
    """

    async def test_a_summary_has_the_rollout_and_its_latest_attempt(
        self, store: Store, clock: Clock
    ) -> None:
        fork = Fork("at-1", "call-1", "ro-0")
        rollout = make_rollout(task_id="task-7", run_id="run", group_id="group", step=3, fork=fork)
        await store.enqueue([rollout])
        [queued] = (await store.summaries()).rows
        assert queued == RolloutSummary(
            rollout_id="ro-1",
            run_id="run",
            group_id="group",
            task_id="task-7",
            mode=Mode.TRAIN,
            step=3,
            status=RolloutStatus.QUEUED,
            created_at=clock.now,
            position=queued.position,
            change=(await state_of(store)).change,
            fork=fork,
        )
        lost = await claim_one(store)
        await store.report([make_report(lost, AttemptStatus.LOST, outcome="infrastructure")])
        clock.advance(5)
        attempt = await claim_one(store)
        [running] = (await store.summaries()).rows
        assert (running.attempt_id, running.started_at) == (attempt.attempt_id, clock.now)
        assert (running.reward, running.outcome, running.ended_at) == (None, None, None)
        clock.advance(5)
        report = make_report(
            attempt,
            AttemptStatus.FAILED,
            outcome=Outcome.APP_ERROR,
            message=UNICODE,
            reward=Reward(0.25, {"style": 0.5}),
            capture_errors=["one", "two"],
        )
        await store.report([report])
        [row] = (await store.summaries()).rows
        assert (row.status, row.outcome) == (RolloutStatus.FAILED, Outcome.APP_ERROR)
        assert (row.message, row.reward) == (UNICODE, Reward(0.25, {"style": 0.5}))
        assert (row.runner_id, row.ended_at, row.capture_errors) == ("runner", clock.now, 2)
        assert row.position == queued.position
        assert row.change == (await state_of(store)).change

    async def test_summaries_from_every_cursor(self, store: Store) -> None:
        """They are the changes that `watch` returns, in its order and with its cursor."""
        assert (await store.summaries()).rows == []
        await store.enqueue([make_rollout(f"ro-{i}", run_id="ab"[i % 2]) for i in range(4)])
        first, second = await claim_one(store), await claim_one(store)
        await store.report([make_report(second), make_report(first, AttemptStatus.LOST)])
        await store.cancel(["ro-3"])
        for run_id in (None, "b", "none"):
            for cursor in range((await store.watch()).cursor + 2):
                changes = await store.watch(cursor, run_id=run_id)
                later = await store.summaries(run_id, after=cursor)
                names = [state.rollout.rollout_id for state in changes.rollouts]
                assert [row.rollout_id for row in later.rows] == names
                assert [row.change for row in later.rows] == [s.change for s in changes.rollouts]
                assert changes.cursor <= later.cursor
                assert (await store.summaries(run_id, after=later.cursor)).rows == []

    @pytest.mark.parametrize("limit", [1, 2, 3])
    async def test_changes_by_limit_miss_none(self, store: Store, limit: int) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(5)])
        await store.cancel(["ro-1"])
        names: list[str] = []
        cursor = 0
        while rows := (page := await store.summaries(after=cursor, limit=limit)).rows:
            assert len(rows) <= limit
            names += [row.rollout_id for row in rows]
            cursor = page.cursor
        assert names == ["ro-0", "ro-2", "ro-3", "ro-4", "ro-1"]
        assert cursor == (await store.watch()).cursor

    async def test_pages_from_the_newest(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}", run_id="ab"[i % 2]) for i in range(7)])
        await store.cancel(["ro-4"])
        for run_id, order in ((None, "6543210"), ("b", "531")):
            names: list[str] = []
            before = None
            while rows := (await store.summaries(run_id, before=before, newest=True, limit=2)).rows:
                names += [row.rollout_id for row in rows]
                before = rows[-1].position
            assert names == [f"ro-{n}" for n in order]
        newest = await store.summaries(newest=True, limit=3)
        assert newest.cursor == (await store.watch()).cursor
        await store.cancel(["ro-0", "ro-2"])
        later = await store.summaries(after=newest.cursor, newest=True)
        assert [row.rollout_id for row in later.rows] == ["ro-2", "ro-0"]

    async def test_summaries_by_mode(self, store: Store) -> None:
        await store.enqueue([make_rollout("ro-1"), make_rollout("ro-2", mode=Mode.VAL)])
        await store.start([make_production("ro-3", run_id="service")])
        for mode, name in ((Mode.TRAIN, "ro-1"), (Mode.VAL, "ro-2"), (Mode.PRODUCTION, "ro-3")):
            assert [row.rollout_id for row in (await store.summaries(mode=mode)).rows] == [name]
        assert (await store.summaries("service", mode=Mode.VAL)).rows == []

    async def test_many_summaries(self, store: Store) -> None:
        """More rows than one query of a store reads."""
        names = [f"ro-{i:05d}" for i in range(5_000)]
        await store.enqueue([make_rollout(name) for name in names])
        everything = await store.summaries()
        assert [row.rollout_id for row in everything.rows] == names
        assert everything.cursor == everything.rows[-1].change
        newest = await store.summaries(newest=True, limit=4_999)
        assert [row.rollout_id for row in newest.rows] == names[:0:-1]

    # --- feedback -------------------------------------------------------------------------
    async def test_feedback_is_a_change_of_its_rollout(self, store: Store) -> None:
        await store.start([make_production(f"ro-{n}", token=f"t-{n}") for n in range(3)])
        attempts = await store.attempts(["ro-0", "ro-1", "ro-2"])
        await store.report([make_report(attempt, reward=Reward(1.0)) for attempt in attempts])
        before = await store.summaries()
        watching = asyncio.create_task(store.watch(before.cursor, timeout_s=60))
        await asyncio.sleep(0)
        rated = attempts[1]
        spans = [
            make_feedback(rated, 1, 0.25, {REWARD_CALL_ID: "call-1"}),
            make_feedback(rated, 2, 0.5, {REWARD_DIMENSION + "style": 0.75}),
            make_feedback(rated, 3, 0.0, {REWARD_CALL_ID: "call-2"}),
        ]
        expected = [Reward(0.25), Reward(0.5, {"style": 0.75}), Reward(0.5, {"style": 0.75})]
        cursor = before.cursor
        for span, feedback in zip(spans, expected, strict=True):
            assert await store.add_spans(ref(rated), [span]) == 1
            page = await store.summaries(after=cursor)
            [row] = page.rows
            assert (row.rollout_id, row.feedback, row.reward) == ("ro-1", feedback, Reward(1.0))
            assert row.status is RolloutStatus.SUCCEEDED
            cursor = page.cursor
        [state] = (await watching).rollouts
        assert state.rollout.rollout_id == "ro-1"
        # a repeated span changes nothing, even if another came later
        await store.add_spans(ref(rated), spans)
        assert (await store.summaries(after=cursor)).rows == []
        assert await spans_of(store, rated) == [span.replace(late=True) for span in spans]
        assert (await store.attempt(rated.attempt_id)).reward == Reward(1.0)
        newest = await store.summaries("", newest=True)
        assert [row.feedback for row in newest.rows] == [None, expected[-1], None]

    async def test_feedback_before_the_end_and_in_a_batch(self, store: Store) -> None:
        attempt = await start(store)
        spans = [make_span(attempt, 9), make_feedback(attempt, 1, 1), make_feedback(attempt, 2, 2)]
        await store.add_spans(ref(attempt), spans)
        [row] = (await store.summaries()).rows
        assert (row.status, row.feedback) == (RolloutStatus.RUNNING, Reward(2.0))
        await store.report([make_report(attempt, AttemptStatus.LOST)])
        assert len(await store.claim("runner", 1, LEASE_S)) == 1  # it is still queued once
        assert await store.claim("runner", 1, LEASE_S) == []

    async def test_feedback_that_is_no_number(self, store: Store) -> None:
        attempt = await start(store)
        await store.add_spans(ref(attempt), [make_feedback(attempt, 1, math.nan)])
        assert (await store.summaries()).rows[0].feedback == Reward(None)

    # --- search ---------------------------------------------------------------------------
    async def test_attempts_by_a_text_of_their_spans(self, store: Store) -> None:
        attempts = [await start(store, f"ro-{i}", run_id="ab"[i % 2]) for i in range(6)]
        texts = ["refund", "Refund", "a refund of 5", "other", "ünïcode 🙂", "refund"]
        for attempt, text in zip(attempts, texts, strict=True):
            span = make_span(attempt, attributes={"message": text})
            await store.add_spans(ref(attempt), [span, make_span(attempt, 2)])
        ids = [attempt.attempt_id for attempt in attempts]
        assert await store.search("refund") == [ids[5], ids[2], ids[0]]
        assert await store.search("Refund") == [ids[1]]
        assert await store.search("refund", "a") == [ids[2], ids[0]]
        assert await store.search("ïcode 🙂") == [ids[4]]
        assert await store.search("nowhere") == await store.search("refund", "none") == []
        assert await store.search("refund", limit=2) == [ids[5], ids[2]]
        assert await store.search("refund", before=ids[2], limit=2) == [ids[0]]
        assert await store.search("refund", before=ids[0]) == []
        # ids, names and keys count too, and every attempt is named once
        assert await store.search(ids[3]) == [ids[3]]
        assert await store.search("span 2") == ids[::-1]
        assert await store.search("message") == ids[::-1]

    async def test_text_in_a_json_attribute(self, store: Store) -> None:
        attempt = await start(store)
        messages = '[{"content":"line one\\nsays \\"two\\""}]'
        await store.add_spans(ref(attempt), [make_span(attempt, attributes={"m": messages})])
        for text in ('one\nsays "two"', 'one\\nsays \\"two\\"', '"content":'):
            assert await store.search(text) == [attempt.attempt_id]
        assert await store.search("one says") == []

    async def test_search_in_every_attempt_of_a_rollout(self, store: Store) -> None:
        await store.enqueue([make_rollout()])
        attempts = []
        for number in range(3):
            [claim] = await store.claim("runner", 1, LEASE_S)
            attempts.append(claim.attempt)
            span = make_span(claim.attempt, attributes={"text": "all" if number != 1 else "x"})
            await store.add_spans(ref(claim.attempt), [span])
            await store.report([make_report(claim.attempt, AttemptStatus.LOST, counts=False)])
        first, _, last = (attempt.attempt_id for attempt in attempts)
        assert await store.search("all") == [last, first]
        assert await store.search("all", before=last) == [first]
        assert await store.search("all", limit=1) == [last]

    async def test_search_by_call_and_response_id(self, store: Store) -> None:
        attempt = await start(store)
        await store.add_calls([make_call(attempt, 17)])
        assert await store.search("call-17") == [attempt.attempt_id]

    async def test_search_without_text_or_from_nowhere(self, store: Store) -> None:
        attempt = await start(store)
        wrong: list[dict[str, Any]] = [
            {"text": ""},
            {"text": "\ud800"},
        ]
        for arguments in wrong:
            with pytest.raises(DataError):
                await store.search(**arguments)
        with pytest.raises(NotFoundError, match="at-none"):
            await store.search("x", before="at-none")
        assert await store.search("x", before=attempt.attempt_id) == []

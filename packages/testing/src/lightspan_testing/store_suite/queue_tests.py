"""Tests of enqueuing, reading, claiming, cancelling and watching rollouts."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from lightspan.errors import ConflictError, DataError, IllegalMoveError, NotFoundError
from lightspan.schema.records import AttemptStatus, Claim, Fork, Mode, Outcome, RolloutStatus
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    LEASE_S,
    NUL,
    UNICODE,
    Clock,
    StoreTests,
    claim_one,
    make_production,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
    state_of,
    status_of,
)


class QueueTests(StoreTests):
    """Test enqueuing, reading, claiming and watching rollouts.

    A rollout is enqueued once. Every filter that fits it returns it. Claims return the oldest
    rollouts first. `watch` returns the changes after a given place in the history of changes (a
    cursor).
    """

    async def test_enqueued_rollouts_are_read_back(self, store: Store, clock: Clock) -> None:
        rollout = make_rollout(
            UNICODE,
            task={
                "text": UNICODE,
                "nul": NUL,
                "list": [1, 2.5, None, True],
                "deep": {"a": {"b": []}},
            },
            task_id=UNICODE,
            run_id="run",
            group_id="group",
            mode=Mode.VAL,
            resources_id="re-1",
            step=7,
            timeout_s=1.5,
            max_infrastructure_tries=9,
            fork=Fork(attempt_id=UNICODE, call_id="call-1"),
        )
        await store.enqueue([rollout])
        state = await state_of(store, UNICODE)
        assert state.rollout == rollout
        assert state.status is RolloutStatus.QUEUED
        assert (state.created_at, state.finished_at, state.attempt_id) == (clock.now, None, None)

    async def test_enqueue_repeated_is_a_no_op(self, store: Store) -> None:
        await store.enqueue([make_rollout(), make_rollout()])
        first = await store.watch()
        await store.enqueue([make_rollout(task={"question": "ro-1"})])
        await store.enqueue([])
        assert await store.watch() == first
        assert len(await store.rollouts()) == 1

    async def test_conflicting_ids_queue_nothing(self, store: Store) -> None:
        batch = [make_rollout(f"ro-{i}") for i in range(30)]
        with pytest.raises(ConflictError, match="ro-1"):
            await store.enqueue([*batch, make_rollout(task="another")])
        assert await store.rollouts() == []
        await store.enqueue([make_rollout()])
        with pytest.raises(ConflictError, match="ro-1"):
            await store.enqueue([make_rollout("new"), make_rollout(task="another")])
        assert await store.count() == {RolloutStatus.QUEUED: 1}

    async def test_a_task_that_is_no_json(self, store: Store) -> None:
        with pytest.raises(DataError, match="ro-1"):
            await store.enqueue([make_rollout("fine"), make_rollout(task=object())])
        with pytest.raises(DataError, match="ro-1"):
            await store.enqueue([make_rollout(task="\ud800")])
        with pytest.raises(DataError, match="ro-1"):
            await store.enqueue([make_rollout(task={"a": [0, {1: 2}]})])
        assert await store.rollouts() == []

    async def test_keys_of_a_task_stay_in_order(self, store: Store) -> None:
        """A rollout with the same task and another order of keys is the same rollout."""
        task = {"question": 1, "answer": {"z": 1, "b": [{"y": 1, "a": 2}]}}
        await store.enqueue([make_rollout(task=task)])
        await store.enqueue([make_rollout(task={key: task[key] for key in sorted(task)})])
        [claim] = await store.claim("runner", 1, LEASE_S)
        [state] = await store.rollouts(["ro-1"])
        assert repr(claim.rollout.task) == repr(state.rollout.task) == repr(task)
        with pytest.raises(ConflictError, match="ro-1"):
            await store.enqueue([make_rollout(task={**task, "question": True})])

    async def test_what_an_app_does_to_its_task_stays_there(self, store: Store) -> None:
        task = {"list": [1]}
        await store.enqueue([make_rollout(task=task)])
        task["list"].append(2)
        [claim] = await store.claim("runner", 1, LEASE_S)
        claim.rollout.task["list"].append(3)
        await store.report([make_report(claim.attempt, AttemptStatus.LOST)])
        [again] = await store.claim("runner", 1, LEASE_S)
        assert again.rollout.task == {"list": [1]}
        assert (await state_of(store)).rollout.task == {"list": [1]}

    async def test_rollouts_by_every_filter(self, store: Store) -> None:
        rollouts = [
            make_rollout(f"{run}-{mode}-{step}", run_id=run, mode=mode, step=step)
            for run in ("a", "b")
            for mode in (Mode.TRAIN, Mode.VAL)
            for step in (0, 1)
        ]
        await store.enqueue(rollouts)
        for run, mode, step in itertools.product(
            (None, "a", "b", "c"), (None, Mode.TRAIN, Mode.VAL, Mode.DEV), (None, 0, 1, 2)
        ):
            states = await store.rollouts(run_id=run, mode=mode, step=step)
            assert [state.rollout for state in states] == [
                rollout
                for rollout in rollouts
                if run in (None, rollout.run_id)
                and mode in (None, rollout.mode)
                and step in (None, rollout.step)
            ]

    async def test_rollouts_by_status_id_and_limit(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(6)])
        await store.claim("runner", 2, LEASE_S)
        await store.cancel(["ro-5"])

        async def names(**filters: Any) -> list[str]:
            return [state.rollout.rollout_id for state in await store.rollouts(**filters)]

        assert await names(status=[RolloutStatus.RUNNING]) == ["ro-0", "ro-1"]
        ended = [RolloutStatus.RUNNING, RolloutStatus.CANCELLED]
        assert await names(status=ended) == ["ro-0", "ro-1", "ro-5"]
        assert await names(status=[]) == []
        assert await names(rollout_ids=["ro-4", "ro-0", "ro-4"]) == ["ro-0", "ro-4"]
        assert await names(rollout_ids=[]) == []
        assert await names(limit=3) == ["ro-0", "ro-1", "ro-2"]
        assert await names(limit=0) == []
        with pytest.raises(NotFoundError, match="nobody"):
            await store.rollouts(["ro-1", "nobody"])

    async def test_count(self, store: Store) -> None:
        assert await store.count() == {}
        await store.enqueue([make_rollout(f"a-{i}", run_id="a") for i in range(3)])
        await store.enqueue([make_rollout(f"b-{i}", run_id="b") for i in range(2)])
        await store.claim("runner", 1, LEASE_S)
        assert await store.count() == {RolloutStatus.QUEUED: 4, RolloutStatus.RUNNING: 1}
        assert await store.count("a") == {RolloutStatus.QUEUED: 2, RolloutStatus.RUNNING: 1}
        assert await store.count("b") == {RolloutStatus.QUEUED: 2}
        assert await store.count("c") == {}

    # --- claim ----------------------------------------------------------------------------
    async def test_a_claim_says_all_that_a_runner_needs(self, store: Store, clock: Clock) -> None:
        await store.enqueue([make_rollout()])
        [claim] = await store.claim(UNICODE, 1, LEASE_S)
        attempt = claim.attempt
        assert claim.rollout == make_rollout()
        assert (attempt.rollout_id, attempt.number, attempt.runner_id) == ("ro-1", 1, UNICODE)
        assert (attempt.started_at, attempt.lease_until) == (clock.now, clock.now + LEASE_S)
        assert attempt.status is AttemptStatus.RUNNING
        assert await store.attempt(attempt.attempt_id) == attempt
        state = await state_of(store)
        assert (state.status, state.attempt_id) == (RolloutStatus.RUNNING, attempt.attempt_id)

    async def test_claims_are_oldest_first_of_one_run_or_across_runs(self, store: Store) -> None:
        runs = ["b", "a", "c", "a", "", "b", "c", "a"]
        await store.enqueue([make_rollout(f"ro-{i}", run_id=run) for i, run in enumerate(runs)])
        await store.cancel(["ro-4"])
        claimed = []
        for slots, run in (
            (1, "a"),
            (9, "d"),
            (0, None),
            (-1, None),
            (2, None),
            (9, "a"),
            (9, None),
        ):
            claims = await store.claim("runner", slots, LEASE_S, run)
            claimed.append([claim.rollout.rollout_id for claim in claims])
        assert claimed == [
            ["ro-1"],
            [],
            [],
            [],
            ["ro-0", "ro-2"],
            ["ro-3", "ro-7"],
            ["ro-5", "ro-6"],
        ]

    async def test_production_starts_by_itself_and_is_never_claimed(
        self, store: Store, clock: Clock
    ) -> None:
        claim = make_production(run_id="support")
        await store.start([claim, claim])
        clock.advance(1e9)  # no lease expires
        assert await store.expire() == 0
        assert await store.claim("runner", 10, LEASE_S) == []
        assert await store.claim("runner", 10, LEASE_S, run_id="support") == []
        assert await store.attempt("at-ro-1") == claim.attempt
        [state] = await store.rollouts(run_id="support", mode=Mode.PRODUCTION)
        assert (state.status, state.attempt_id) == (RolloutStatus.RUNNING, "at-ro-1")
        assert await store.add_spans(ref(claim.attempt), [make_span(claim.attempt)]) == 0
        assert await store.report([make_report(claim.attempt)]) == [True]
        [state] = await store.rollouts(["ro-1"])
        assert (state.status, state.finished_at) == (RolloutStatus.SUCCEEDED, clock.now)
        assert await store.add_spans(ref(claim.attempt), [make_span(claim.attempt, 1)]) == 1
        assert await store.claim("runner", 10, LEASE_S) == []

    async def test_only_production_starts_by_itself(self, store: Store) -> None:
        good = make_production()
        replace = msgspec.structs.replace
        trained = Claim(rollout=replace(good.rollout, mode=Mode.TRAIN), attempt=good.attempt)
        second = Claim(rollout=good.rollout, attempt=replace(good.attempt, number=2, epoch=2))
        ended = replace(good.attempt, status=AttemptStatus.SUCCEEDED)
        others = replace(good.attempt, rollout_id="ro-2")
        for wrong in (trained, second, replace(good, attempt=ended), replace(good, attempt=others)):
            with pytest.raises(IllegalMoveError):
                await store.start([make_production("ro-0", "token-0"), wrong])
        assert await store.rollouts() == []
        await store.start([good])
        with pytest.raises(ConflictError):
            await store.start([make_production("ro-0", "token-0"), make_production(task_id="no")])
        assert [state.rollout.rollout_id for state in await store.rollouts()] == ["ro-1"]

    async def test_a_call_token_that_is_no_ascii(self, store: Store) -> None:
        attempt = await start(store)
        assert await store.claim_of_token(f"{attempt.attempt_id}.\u00e9") is None

    async def test_call_tokens_open_one_attempt_each(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(3)])
        claims = await store.claim("runner", 3, LEASE_S)
        tokens = {claim.attempt.call_token for claim in claims}
        assert len(tokens) == 3
        assert all(len(token) >= 22 for token in tokens)  # at least 128 bits
        for claim in claims:
            assert await store.claim_of_token(claim.attempt.call_token) == claim
        for wrong in ("", "wrong", claims[0].attempt.call_token[:-1], UNICODE, "\udc80"):
            assert await store.claim_of_token(wrong) is None
        await store.report([make_report(claims[0].attempt)])
        claim_after = await store.claim_of_token(claims[0].attempt.call_token)
        assert claim_after is not None
        assert claim_after.attempt.sealed

    # --- cancel ---------------------------------------------------------------------------
    async def test_cancel(self, store: Store, clock: Clock) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(3)])
        claims = await store.claim("runner", 2, LEASE_S)
        await store.report([make_report(claims[0].attempt)])
        clock.advance(1)
        assert await store.cancel(["ro-0", "ro-1", "ro-2", "ro-1"]) == 2
        assert await store.cancel(["ro-0", "ro-1", "ro-2"]) == 0
        assert await store.cancel([]) == 0
        cancelled = await store.attempt(claims[1].attempt.attempt_id)
        assert (cancelled.status, cancelled.outcome) == (AttemptStatus.CANCELLED, Outcome.CANCELLED)
        assert cancelled.ended_at == clock.now
        assert await status_of(store, "ro-0") is RolloutStatus.SUCCEEDED
        assert (await state_of(store, "ro-2")).finished_at == clock.now
        assert await store.report([make_report(claims[1].attempt)]) == [False]

    async def test_cancel_of_an_unknown_rollout_cancels_nothing(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(30)])
        with pytest.raises(NotFoundError, match="nobody"):
            await store.cancel([*(f"ro-{i}" for i in range(30)), "nobody"])
        assert await store.count() == {RolloutStatus.QUEUED: 30}

    # --- watch ----------------------------------------------------------------------------
    async def test_watch_from_every_cursor(self, store: Store) -> None:
        """Watching from any cursor returns the later changes, once each, oldest first."""
        empty = await store.watch(timeout_s=0.01)
        assert (empty.cursor, empty.rollouts) == (0, [])
        await store.enqueue([make_rollout(f"ro-{i}", run_id="ab"[i % 2]) for i in range(4)])
        first = await claim_one(store)
        second = await claim_one(store)
        await store.report([make_report(second), make_report(first, AttemptStatus.LOST)])
        await store.cancel(["ro-3"])
        everything = await store.watch()
        names = [state.rollout.rollout_id for state in everything.rollouts]
        assert names == ["ro-2", "ro-1", "ro-0", "ro-3"]
        changes = [state.change for state in everything.rollouts]
        assert changes == sorted(set(changes))
        assert everything.cursor == changes[-1]
        for cursor in range(everything.cursor + 2):
            later = await store.watch(cursor)
            assert later.rollouts == [s for s in everything.rollouts if s.change > cursor]
            assert later.cursor == max(cursor, everything.cursor)
            of_run = await store.watch(cursor, run_id="b")
            assert of_run.rollouts == [s for s in later.rollouts if s.rollout.run_id == "b"]
            assert cursor <= of_run.cursor <= later.cursor
        assert await store.rollouts() == sorted(
            everything.rollouts, key=lambda state: state.rollout.rollout_id
        )

    async def test_watch_wakes_up(self, store: Store) -> None:
        watching = asyncio.create_task(store.watch(timeout_s=60))
        await asyncio.sleep(0)
        await store.enqueue([make_rollout()])
        changes = await watching
        assert [state.rollout.rollout_id for state in changes.rollouts] == ["ro-1"]

    async def test_watch_sees_every_ending(self, store: Store) -> None:
        """A client that watches the store from cursor to cursor sees every rollout end."""
        names = {f"ro-{i}" for i in range(40)}

        async def work() -> None:
            while claims := await store.claim("runner", 3, LEASE_S):
                await store.report([make_report(claim.attempt) for claim in claims])

        async def follow() -> set[str]:
            ended: set[str] = set()
            cursor = 0
            while ended != names:
                changes = await store.watch(cursor, timeout_s=10)
                assert changes.rollouts
                cursor = changes.cursor
                ended |= {s.rollout.rollout_id for s in changes.rollouts if s.status.final}
            return ended

        await store.enqueue([make_rollout(name) for name in sorted(names)])
        _, _, ended = await asyncio.gather(work(), work(), follow())
        assert ended == names

    async def test_writes_that_move_nothing_wake_nobody(self, store: Store) -> None:
        attempt = await start(store)
        before = await store.watch()
        await store.add_spans(ref(attempt), [make_span(attempt)])
        await store.heartbeat([ref(attempt)], LEASE_S)
        assert await store.watch() == before

    async def test_work_is_what_is_queued_of_the_runs_that_are_asked_for(
        self, store: Store
    ) -> None:
        assert [await store.await_work(runs) for runs in (None, [], ["a"])] == [False] * 3
        await store.enqueue([make_rollout("ro-1", run_id="a")])
        asked: tuple[list[str] | None, ...] = (None, [], ["a"], ["b"], ["b", "a"])
        assert [await store.await_work(runs) for runs in asked] == [True, False, True, False, True]
        first = await claim_one(store)
        assert [await store.await_work(runs) for runs in asked] == [False] * 5
        await store.report([make_report(first, AttemptStatus.LOST, alone=True)])
        assert [await store.await_work(runs) for runs in asked] == [True, False, True, False, True]

    async def test_who_waits_for_work_is_woken_by_it(self, store: Store) -> None:
        waiting = [
            asyncio.create_task(store.await_work(runs, timeout_s=60.0)) for runs in (None, ["a"])
        ]
        other = asyncio.create_task(store.await_work(["b"], timeout_s=60.0))
        await store.enqueue([make_rollout("ro-1", run_id="a")])
        assert await asyncio.gather(*waiting) == [True, True]
        assert not other.done()
        await store.enqueue([make_rollout("ro-2", run_id="b")])
        assert await other

"""Tests of leases, reports and attempts."""

from __future__ import annotations

from typing import Any

import pytest

from lightspan.errors import IllegalMoveError, NotFoundError
from lightspan.schema.records import (
    AttemptRef,
    AttemptStatus,
    Outcome,
    RolloutStatus,
)
from lightspan.schema.reward import Reward
from lightspan.stores._state_machine import MAX_UNCOUNTED_LOSSES
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    LEASE_S,
    NUL,
    UNICODE,
    Clock,
    StoreTests,
    claim_one,
    make_call,
    make_report,
    make_rollout,
    make_span,
    records_of,
    ref,
    start,
    state_of,
    status_of,
)


class LeaseTests(StoreTests):
    """Test leases (the time until a claimed rollout counts as lost) and reports.

    Heartbeats extend leases. An attempt without heartbeats is lost. The first report ends an
    attempt.
    """

    async def test_uncounted_losses_use_up_no_try_but_end(self, store: Store) -> None:
        """A loss that is reported with `counts=False` does not use up one of the rollout's tries.

        Only the first `MAX_UNCOUNTED_LOSSES` are exempt. Every further loss uses up a try.
        """
        await store.enqueue([make_rollout(max_infrastructure_tries=2)])
        for expected in [0] * MAX_UNCOUNTED_LOSSES + [1, 2]:
            attempt = await claim_one(store)
            report = make_report(attempt, AttemptStatus.LOST, counts=False)
            assert await store.report([report]) == [True]
            assert (await state_of(store)).infrastructure_tries == expected
        assert await status_of(store) is RolloutStatus.LOST

    async def test_a_heartbeat_keeps_the_lease(self, store: Store, clock: Clock) -> None:
        attempt = await start(store)
        for _ in range(5):
            clock.advance(LEASE_S - 1)
            assert await store.heartbeat([ref(attempt)], LEASE_S) == []
            assert await store.expire() == 0
        attempt_after = await store.attempt(attempt.attempt_id)
        assert attempt_after.lease_until == clock.now + LEASE_S

    async def test_a_lease_that_runs_out_is_lost(self, store: Store, clock: Clock) -> None:
        attempt = await start(store)
        clock.advance(LEASE_S - 0.5)
        assert await store.expire() == 0
        clock.advance(0.5)
        assert await store.expire() == 1
        assert await store.expire() == 0
        attempt_after = await store.attempt(attempt.attempt_id)
        assert (attempt_after.status, attempt_after.outcome) == (
            AttemptStatus.LOST,
            Outcome.INFRASTRUCTURE,
        )
        assert "runner" in attempt_after.message
        assert attempt_after.ended_at == clock.now
        assert await status_of(store) is RolloutStatus.QUEUED

    async def test_heartbeat_returns_what_must_stop(self, store: Store, clock: Clock) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(4)])
        attempts = [claim.attempt for claim in await store.claim("runner", 4, LEASE_S)]
        await store.report([make_report(attempts[0])])
        await store.cancel(["ro-1"])
        wrong_epoch = AttemptRef(attempts[2].attempt_id, attempts[2].epoch + 1)
        unknown = AttemptRef("at-nobody", 1)
        refs = [ref(attempts[0]), ref(attempts[1]), wrong_epoch, unknown, ref(attempts[3])]
        assert await store.heartbeat(refs, 2 * LEASE_S) == refs[:4]
        clock.advance(LEASE_S)
        assert await store.expire() == 1
        assert await store.heartbeat([], LEASE_S) == []

    async def test_what_is_to_be_run_alone(self, store: Store, clock: Clock) -> None:
        """A rollout that must run alone is claimed first, and by itself.

        Only a runner without other rollouts (idle) can claim it.
        """
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(5)])
        claims = await store.claim("runner", 4, LEASE_S)
        assert [claim.alone for claim in claims] == [False] * 4
        for claim in claims[1:3]:
            fields = {"counts": False, "alone": True}
            await store.report([make_report(claim.attempt, AttemptStatus.LOST, **fields)])
        assert await store.claim("runner", 0, LEASE_S) == []
        others = await store.claim("busy", 9, LEASE_S, idle=False)
        assert [(claim.rollout.rollout_id, claim.alone) for claim in others] == [("ro-4", False)]
        for name in ("ro-1", "ro-2"):
            await store.enqueue([make_rollout(f"after-{name}")])
            [alone] = await store.claim("runner", 9, LEASE_S)
            assert (alone.rollout.rollout_id, alone.alone) == (name, True)
        # the next attempt may run with others, unless requested again
        await store.report([make_report(alone.attempt, AttemptStatus.LOST)])
        again, *_ = await store.claim("runner", 9, LEASE_S)
        assert (again.rollout.rollout_id, again.alone) == ("ro-2", False)

    async def test_bad_neighbours_time_and_again(self, store: Store) -> None:
        """After three losses with `counts=False`, a rollout is marked to run alone.

        None of them uses up a try.
        """
        await store.enqueue([make_rollout()])
        alone_flags = []
        for _ in range(4):
            [claim] = await store.claim("runner", 1, LEASE_S)
            alone_flags.append(claim.alone)
            await store.report([make_report(claim.attempt, AttemptStatus.LOST, counts=False)])
        assert alone_flags == [False, False, False, True]
        assert (await state_of(store)).infrastructure_tries == 0

    async def test_a_lost_epoch_changes_nothing(self, store: Store, clock: Clock) -> None:
        old = await start(store)
        clock.advance(LEASE_S)
        new = await claim_one(store)
        state, attempts = await state_of(store), await store.attempts(["ro-1"])
        assert await store.report([make_report(old, reward=Reward(1.0))]) == [False]
        assert await store.heartbeat([ref(old)], LEASE_S) == [ref(old)]
        assert await store.add_spans(ref(old), [make_span(old)]) == 1
        assert await store.add_calls([make_call(old)]) == [True]
        assert await state_of(store) == state
        assert await store.attempts(["ro-1"]) == attempts
        assert await store.report([make_report(new)]) == [True]
        [late] = await records_of(store, old)
        assert late.late

    # --- report ---------------------------------------------------------------------------
    async def test_a_report_is_kept_whole(self, store: Store, clock: Clock) -> None:
        attempt = await start(store)
        clock.advance(3)
        report = make_report(
            attempt,
            AttemptStatus.FAILED,
            outcome=Outcome.APP_ERROR,
            reward=Reward(0.1 + 0.2, {"exact": 1e-300, UNICODE: -0.0}),
            message=UNICODE + NUL,
            capture_errors=["lost a span", UNICODE, NUL],
        )
        assert await store.report([report]) == [True]
        attempt_after = await store.attempt(attempt.attempt_id)
        assert attempt_after.reward == report.reward
        assert (attempt_after.outcome, attempt_after.message) == (report.outcome, report.message)
        assert (attempt_after.capture_errors, attempt_after.ended_at) == (
            report.capture_errors,
            clock.now,
        )
        state = await state_of(store)
        assert (state.status, state.finished_at) == (RolloutStatus.FAILED, clock.now)

    @pytest.mark.parametrize("reward", [None, Reward(None), Reward(0.0), Reward(None, {"a": 1.0})])
    async def test_unscored_is_not_zero(self, store: Store, reward: Reward | None) -> None:
        attempt = await start(store)
        await store.report([make_report(attempt, reward=reward)])
        assert (await store.attempt(attempt.attempt_id)).reward == reward

    async def test_report_twice(self, store: Store) -> None:
        """A repeated report succeeds without effect; a report that differs is refused."""
        attempt = await start(store)
        report = make_report(attempt, reward=Reward(1.0), capture_errors=["a"])
        assert await store.report([report, report]) == [True, True]
        before = await store.attempt(attempt.attempt_id), await store.watch()
        assert await store.report([report]) == [True]
        same: dict[str, Any] = {"reward": Reward(1.0), "capture_errors": ["a"]}
        for other in ({"reward": Reward(0.0)}, {"message": "x"}, {"capture_errors": ["b"]}):
            assert await store.report([make_report(attempt, **{**same, **other})]) == [False]
        assert (await store.attempt(attempt.attempt_id), await store.watch()) == before

    async def test_a_bad_report_refuses_its_batch(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(30)])
        claims = await store.claim("runner", 30, LEASE_S)
        good = [make_report(claim.attempt) for claim in claims]
        unknown = make_report(claims[0].attempt, attempt_id="at-nobody")
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.report([*good, unknown])
        with pytest.raises(IllegalMoveError):
            await store.report([*good[1:], make_report(claims[0].attempt, AttemptStatus.RUNNING)])
        assert await store.count() == {RolloutStatus.RUNNING: 30}
        assert await store.report([]) == []

    # --- attempts -------------------------------------------------------------------------
    async def test_attempts_in_the_order_asked(self, store: Store) -> None:
        await store.enqueue([make_rollout("b"), make_rollout("a")])
        for claim in await store.claim("runner", 2, LEASE_S):
            await store.report([make_report(claim.attempt, AttemptStatus.LOST)])
        await store.claim("runner", 2, LEASE_S)
        attempts = await store.attempts(["a", "nobody", "b"])
        order = [(attempt.rollout_id, attempt.number) for attempt in attempts]
        assert order == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
        assert await store.attempts([]) == []
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.attempt("at-nobody")

    async def test_mark_damaged(self, store: Store) -> None:
        attempt = await start(store)
        await store.mark_damaged(attempt.attempt_id, "first")
        report = make_report(attempt, capture_errors=["second", "first"])
        await store.report([report])
        await store.mark_damaged(attempt.attempt_id, UNICODE)  # allowed for a sealed attempt
        await store.mark_damaged(attempt.attempt_id, UNICODE)
        attempt_after = await store.attempt(attempt.attempt_id)
        assert attempt_after.capture_errors == ["first", "second", UNICODE]
        assert attempt_after.status is AttemptStatus.SUCCEEDED
        assert await store.report([report]) == [True]
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.mark_damaged("at-nobody", "reason")

    async def test_damage_is_a_change_of_its_rollout(self, store: Store) -> None:
        attempt = await start(store)
        for is_sealed in (False, True):
            for number, changes in enumerate((["ro-1"], [], ["ro-1"])):
                cursor = (await store.watch()).cursor
                await store.mark_damaged(attempt.attempt_id, f"{is_sealed} {number // 2}")
                rollouts = (await store.watch(cursor)).rollouts
                assert [each.rollout.rollout_id for each in rollouts] == changes
                rows = (await store.summaries(after=cursor)).rows
                assert [each.rollout_id for each in rows] == changes
            await store.report([make_report(attempt)])

    async def test_what_is_to_be_run_alone_waits_for_its_run(self, store: Store) -> None:
        attempt = await start(store, run_id="a")
        await store.report([make_report(attempt, AttemptStatus.LOST, alone=True)])
        await store.enqueue([make_rollout("ro-2", run_id="b")])
        for run_id, name, alone in (("b", "ro-2", False), ("a", "ro-1", True)):
            [claim] = await store.claim("runner", 9, LEASE_S, run_id)
            assert (claim.rollout.rollout_id, claim.alone) == (name, alone)

    async def test_a_report_under_another_epoch(self, store: Store) -> None:
        """A report for another epoch of the attempt has no effect and is refused.

        This holds before the attempt ends and after it.
        """
        attempt = await start(store)
        other = make_report(attempt, epoch=attempt.epoch + 1)
        assert await store.report([other]) == [False]
        assert await status_of(store) is RolloutStatus.RUNNING
        assert await store.report([make_report(attempt)]) == [True]
        assert await store.report([other]) == [False]

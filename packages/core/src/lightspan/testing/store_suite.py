"""What every store must do: subclass `StoreSuite` and say how a store is made.

    class TestMyStore(StoreSuite):
        def make_store(self, name, clock):
            return MyStore(f"my-host/{name}", clock=clock)

Needs pytest, pytest-asyncio (`asyncio_mode = "auto"`) and hypothesis. A test is skipped only where
the store's capabilities say that it does not apply. No test looks at a clock but the injected one.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightspan.conventions import CALL_ID, CALL_OUTCOME
from lightspan.errors import (
    ConflictError,
    DataError,
    IllegalMoveError,
    NotFoundError,
    StoreClosedError,
)
from lightspan.llm import LLM
from lightspan.records import (
    LEGAL_ROLLOUT_MOVES,
    Attempt,
    AttemptRef,
    AttemptStatus,
    CallOutcome,
    Claim,
    FinishReason,
    Mode,
    Outcome,
    Peer,
    PeerRole,
    Report,
    Reward,
    Rollout,
    RolloutState,
    RolloutStatus,
    Sampling,
    TokenRecord,
)
from lightspan.resources import NamedResources, PromptTemplate
from lightspan.spans import Span, SpanEvent, SpanKind, SpanLink, SpanStatus
from lightspan.store import Store, StoredCall
from lightspan.stores._moves import MAX_UNCOUNTED_LOSSES
from lightspan.stores.memory import MemoryStore

UNICODE = "naïve 日本語 🙂 'quote\" %s ; -- \\ \t\n"
NUL = "a\x00b"
FINAL_ATTEMPTS = [status for status in AttemptStatus if status.final]
LEASE_S = 60.0


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_rollout(name: str = "ro-1", **fields: Any) -> Rollout:
    """A rollout with everything that a test does not care about."""
    given_fields = {"task": {"question": name}, "task_id": "task", **fields}
    return Rollout(rollout_id=name, **given_fields)


def make_production(name: str = "ro-1", token: str = "token", **fields: Any) -> Claim:
    """A rollout that nobody asked for, and its attempt, which runs already."""
    attempt = Attempt(
        attempt_id=f"at-{name}",
        rollout_id=name,
        number=1,
        epoch=1,
        runner_id="service",
        call_token=token,
        lease_until=math.inf,
        started_at=999_990.0,
    )
    return Claim(rollout=make_rollout(name, mode=Mode.PRODUCTION, **fields), attempt=attempt)


def make_span(attempt: Attempt, number: int = 0, **fields: Any) -> Span:
    """A span of the attempt."""
    defaults: dict[str, Any] = {
        "span_id": f"{number:016x}",
        "trace_id": "a" * 32,
        "name": f"span {number}",
        "rollout_id": attempt.rollout_id,
        "attempt_id": attempt.attempt_id,
    }
    return Span(**{**defaults, **fields})


def make_record(attempt: Attempt, call_id: str = "call-1", **fields: Any) -> TokenRecord:
    """A token record of the attempt."""
    defaults: dict[str, Any] = {
        "attempt_id": attempt.attempt_id,
        "call_id": call_id,
        "choice": 0,
        "policy": "main",
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5],
        "logprobs": [-0.5, -1.25],
        "versions": [(1, 2)],
    }
    return TokenRecord.create(**{**defaults, **fields})


def make_peer(name: str, **fields: Any) -> Peer:
    """A peer with everything that a test does not care about."""
    known = {"role": PeerRole.RUNNER, "app": "my_app:answer", "protocol": 1, "lightspan": "0.1.0"}
    return Peer(peer_id=name, **{**known, **fields})


def make_try(attempt: Attempt, outcome: CallOutcome, sequence_end: int) -> StoredCall:
    """One try of a call: the first was cancelled after two tokens, say, and the last finished."""
    call = make_call(attempt)
    attributes = {**call.span.attributes, CALL_OUTCOME: outcome.value}
    span = call.span.replace(attributes=attributes, sequence_end=sequence_end)
    records = [
        msgspec.structs.replace(record, outcome=outcome, sequence_end=sequence_end)
        for record in call.records
    ]
    return StoredCall(span=span, records=records, epoch=call.epoch)


def make_call(
    attempt: Attempt, number: int = 1, *, epoch: int | None = None, choices: int = 1
) -> StoredCall:
    """A model call of the attempt with a token record per choice."""
    call_id = f"call-{number}"
    span = make_span(
        attempt, 0xCA11_0000 + number, kind=SpanKind.LLM, attributes={CALL_ID: call_id}
    )
    records = [
        make_record(attempt, call_id, choice=choice, sequence_start=number)
        for choice in range(choices)
    ]
    return StoredCall(span=span, records=records, epoch=attempt.epoch if epoch is None else epoch)


def make_report(
    attempt: Attempt, status: AttemptStatus = AttemptStatus.SUCCEEDED, **fields: Any
) -> Report:
    """A report that ends the attempt."""
    return Report(
        **{"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "status": status, **fields}
    )


def ref(attempt: Attempt) -> AttemptRef:
    """How the attempt's runner refers to it."""
    return AttemptRef(attempt.attempt_id, attempt.epoch)


async def claim_one(store: Store, run_id: str | None = None) -> Attempt:
    """The attempt of the oldest queued rollout."""
    [claim] = await store.claim("runner", 1, LEASE_S, run_id)
    return claim.attempt


async def start(store: Store, name: str = "ro-1", **fields: Any) -> Attempt:
    """Enqueue one rollout and claim it; nothing else may be queued."""
    await store.enqueue([make_rollout(name, **fields)])
    return await claim_one(store)


async def status_of(store: Store, name: str = "ro-1") -> RolloutStatus:
    """The rollout's status."""
    return (await state_of(store, name)).status


async def state_of(store: Store, name: str = "ro-1") -> RolloutState:
    """The rollout's state."""
    [state] = await store.rollouts([name])
    return state


async def bring_attempt_to(store: Store, status: AttemptStatus) -> Attempt:
    """An attempt of `ro-1` in this status, as the store has it."""
    attempt = await start(store)
    if status is AttemptStatus.CANCELLED:
        await store.cancel(["ro-1"])
    elif status.final:
        await store.report([make_report(attempt, status)])
    return await store.attempt(attempt.attempt_id)


async def bring_rollout_to(store: Store, status: RolloutStatus) -> Attempt:
    """`ro-1` in this status, having had an attempt, which is returned."""
    attempt = await start(store, max_infrastructure_tries=2)
    match status:
        case RolloutStatus.RUNNING:
            return attempt
        case RolloutStatus.CANCELLED:
            await store.cancel(["ro-1"])
            return attempt
        case RolloutStatus.QUEUED:
            await store.report([make_report(attempt, AttemptStatus.LOST)])
            return attempt
        case RolloutStatus.LOST:
            await store.report([make_report(attempt, AttemptStatus.LOST)])
            attempt = await claim_one(store)
    await store.report([make_report(attempt, AttemptStatus(status))])
    return attempt


async def _claim(store: Store, clock: Clock, attempt: Attempt) -> None:
    await store.claim("other", 10, LEASE_S)


async def _cancel(store: Store, clock: Clock, attempt: Attempt) -> None:
    await store.cancel(["ro-1"])


async def _expire(store: Store, clock: Clock, attempt: Attempt) -> None:
    clock.advance(LEASE_S + 1)
    await store.expire()


def _reporting(status: AttemptStatus) -> Action:
    async def report(store: Store, clock: Clock, attempt: Attempt) -> None:
        await store.report([make_report(attempt, status)])

    return report


Action = Callable[[Store, Clock, Attempt], Awaitable[None]]
ACTIONS: dict[str, Action] = {
    "claim": _claim,
    "cancel": _cancel,
    "expire": _expire,
    **{status.value: _reporting(status) for status in FINAL_ATTEMPTS},
}
MOVES: dict[tuple[RolloutStatus, str], RolloutStatus] = {
    (RolloutStatus.QUEUED, "claim"): RolloutStatus.RUNNING,
    (RolloutStatus.QUEUED, "cancel"): RolloutStatus.CANCELLED,
    (RolloutStatus.RUNNING, "succeeded"): RolloutStatus.SUCCEEDED,
    (RolloutStatus.RUNNING, "failed"): RolloutStatus.FAILED,
    (RolloutStatus.RUNNING, "timeout"): RolloutStatus.FAILED,
    (RolloutStatus.RUNNING, "lost"): RolloutStatus.QUEUED,
    (RolloutStatus.RUNNING, "expire"): RolloutStatus.QUEUED,
    (RolloutStatus.RUNNING, "cancelled"): RolloutStatus.CANCELLED,
    (RolloutStatus.RUNNING, "cancel"): RolloutStatus.CANCELLED,
}
"""What each action does to a rollout; every pair that is not here leaves it as it is."""


class StoreSuite:
    """The protocol of `lightspan.store.Store`, stated once. See the module."""

    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def make_store(self, name: str, clock: Callable[[], float]) -> Store:
        """A store, not opened. Where stores are durable one name means one content."""
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def name(self) -> str:
        return self.new_name()

    def new_name(self) -> str:
        """A name that no other store of this session has."""
        return f"store-{next(self._numbers)}"

    @pytest.fixture
    async def store(self, name: str, clock: Clock) -> AsyncIterator[Store]:
        async with self.make_store(name, clock) as store:
            yield store

    @pytest.fixture
    async def stores(self, name: str, clock: Clock) -> AsyncIterator[list[Store]]:
        """Two open stores on one content."""
        first, second = self.make_store(name, clock), self.make_store(name, clock)
        if not first.capabilities.multi_process:
            pytest.skip("not shared between processes")
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(store) for store in (first, second)]

    # --- the state machine ----------------------------------------------------------------
    @pytest.mark.parametrize("after", AttemptStatus)
    @pytest.mark.parametrize("before", AttemptStatus)
    async def test_attempt_moves(
        self, store: Store, before: AttemptStatus, after: AttemptStatus
    ) -> None:
        """Every pair: running ends once, a final status never changes, running is no report."""
        attempt = await bring_attempt_to(store, before)
        report = make_report(attempt, after, message="second")
        if not after.final:
            with pytest.raises(IllegalMoveError, match=attempt.attempt_id):
                await store.report([report])
        else:
            assert await store.report([report]) == [not before.final]
        found = await store.attempt(attempt.attempt_id)
        assert found.status is (after if not before.final and after.final else before)
        assert found == attempt or found.message == "second"

    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("before", RolloutStatus)
    async def test_rollout_moves(
        self, store: Store, clock: Clock, before: RolloutStatus, action: str
    ) -> None:
        """Every pair of status and action."""
        attempt = await bring_rollout_to(store, before)
        assert await status_of(store) is before
        known = await state_of(store)
        await ACTIONS[action](store, clock, attempt)
        found = await state_of(store)
        assert found.status is MOVES.get((before, action), before)
        assert found == known or found.status is not before

    @pytest.mark.parametrize("ending", ["lost", "expire"])
    async def test_the_last_try_ends_lost(self, store: Store, clock: Clock, ending: str) -> None:
        attempt = await start(store, max_infrastructure_tries=1)
        await ACTIONS[ending](store, clock, attempt)
        state = await state_of(store)
        assert (state.status, state.infrastructure_tries) == (RolloutStatus.LOST, 1)
        assert state.finished_at == clock.now

    def test_the_table_covers_every_legal_move(self) -> None:
        lost = (RolloutStatus.RUNNING, RolloutStatus.LOST)
        covered = {(before, after) for (before, _), after in MOVES.items()} | {lost}
        assert covered == LEGAL_ROLLOUT_MOVES

    @pytest.mark.parametrize("tries", [1, 2, 3, 5])
    async def test_lost_attempts_are_retried(self, store: Store, tries: int) -> None:
        await store.enqueue([make_rollout(max_infrastructure_tries=tries)])
        for number in range(1, tries + 1):
            attempt = await claim_one(store)
            assert (attempt.number, attempt.status) == (number, AttemptStatus.RUNNING)
            assert await store.report([make_report(attempt, AttemptStatus.LOST)]) == [True]
            assert (await state_of(store)).infrastructure_tries == number
        assert await status_of(store) is RolloutStatus.LOST
        assert await store.claim("runner", 1, LEASE_S) == []
        attempts = await store.attempts(["ro-1"])
        assert [attempt.number for attempt in attempts] == list(range(1, tries + 1))
        assert [attempt.epoch for attempt in attempts] == sorted({a.epoch for a in attempts})

    async def test_uncounted_losses_use_up_no_try_but_end(self, store: Store) -> None:
        """A neighbour of a dead process is free, but not for ever."""
        await store.enqueue([make_rollout(max_infrastructure_tries=2)])
        for expected in [0] * MAX_UNCOUNTED_LOSSES + [1, 2]:
            attempt = await claim_one(store)
            report = make_report(attempt, AttemptStatus.LOST, counts=False)
            assert await store.report([report]) == [True]
            assert (await state_of(store)).infrastructure_tries == expected
        assert await status_of(store) is RolloutStatus.LOST

    async def test_counted_and_uncounted_losses_mix(self, store: Store) -> None:
        await store.enqueue([make_rollout(max_infrastructure_tries=3)])
        for counts, expected in [(True, 1), (False, 1), (True, 2), (False, 2), (True, 3)]:
            attempt = await claim_one(store)
            await store.report([make_report(attempt, AttemptStatus.LOST, counts=counts)])
            assert (await state_of(store)).infrastructure_tries == expected
        assert await status_of(store) is RolloutStatus.LOST

    # --- enqueue and read -----------------------------------------------------------------
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
        assert await store.watch() == first
        assert len(await store.rollouts()) == 1

    async def test_enqueue_of_nothing(self, store: Store) -> None:
        await store.enqueue([])
        assert await store.rollouts() == []

    @pytest.mark.parametrize("size", [1, 1000])
    async def test_conflicting_ids_queue_nothing(self, store: Store, size: int) -> None:
        await store.enqueue([make_rollout()])
        batch = [make_rollout(f"new-{i}") for i in range(size)]
        with pytest.raises(ConflictError, match="ro-1"):
            await store.enqueue([*batch, make_rollout(task="another")])
        assert len(await store.rollouts()) == 1

    async def test_conflict_inside_a_batch(self, store: Store) -> None:
        with pytest.raises(ConflictError, match="ro-1"):
            await store.enqueue([make_rollout(), make_rollout(task="another")])
        assert await store.rollouts() == []

    async def test_a_task_that_is_no_json(self, store: Store) -> None:
        with pytest.raises(DataError, match="ro-1"):
            await store.enqueue([make_rollout("fine"), make_rollout(task=object())])
        with pytest.raises(DataError, match="ro-1"):
            await store.enqueue([make_rollout(task="\ud800")])
        assert await store.rollouts() == []

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
            found = await store.rollouts(run_id=run, mode=mode, step=step)
            assert [state.rollout for state in found] == [
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
    async def test_claim_is_oldest_first_and_for_free_slots_only(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(5)])
        assert await store.claim("runner", 0, LEASE_S) == []
        assert await store.claim("runner", -1, LEASE_S) == []
        first = await store.claim("runner", 2, LEASE_S)
        rest = await store.claim("runner", 10, LEASE_S)
        names = [claim.rollout.rollout_id for claim in (*first, *rest)]
        assert names == [f"ro-{i}" for i in range(5)]
        assert (len(first), len(rest)) == (2, 3)
        assert await store.claim("runner", 1, LEASE_S) == []

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

    async def test_claim_of_one_run(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}", run_id="ab"[i % 2]) for i in range(6)])
        claims = await store.claim("runner", 10, LEASE_S, run_id="b")
        assert [claim.rollout.rollout_id for claim in claims] == ["ro-1", "ro-3", "ro-5"]
        assert await store.claim("runner", 10, LEASE_S, run_id="c") == []
        assert len(await store.claim("runner", 10, LEASE_S)) == 3

    async def test_claim_of_any_run_is_oldest_first_across_runs(self, store: Store) -> None:
        runs = ["b", "a", "c", "a", "", "b", "c", "a"]
        await store.enqueue([make_rollout(f"ro-{i}", run_id=run) for i, run in enumerate(runs)])
        await store.claim("runner", 1, LEASE_S, "a")
        await store.cancel(["ro-4"])
        claimed = []
        for slots in (2, 1, 10):
            claims = await store.claim("runner", slots, LEASE_S)
            claimed.append([claim.rollout.rollout_id for claim in claims])
        assert claimed == [["ro-0", "ro-2"], ["ro-3"], ["ro-5", "ro-6", "ro-7"]]

    async def test_a_retry_keeps_its_place_in_the_queue(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(3)])
        attempt = await claim_one(store)
        await store.report([make_report(attempt, AttemptStatus.LOST)])
        claims = await store.claim("runner", 3, LEASE_S)
        assert [claim.rollout.rollout_id for claim in claims] == ["ro-0", "ro-1", "ro-2"]

    async def test_cancelled_rollouts_are_not_claimed(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(3)])
        await store.cancel(["ro-0", "ro-2"])
        [claim] = await store.claim("runner", 3, LEASE_S)
        assert claim.rollout.rollout_id == "ro-1"

    async def test_production_starts_by_itself_and_is_never_claimed(
        self, store: Store, clock: Clock
    ) -> None:
        claim = make_production(run_id="support")
        await store.start([claim, claim])
        await store.start([claim])  # a repetition
        clock.advance(1e9)  # no lease runs out
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
        await store.start([claim])  # of what has ended, too
        assert (await store.attempt("at-ro-1")).status is AttemptStatus.SUCCEEDED
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
        with pytest.raises(IllegalMoveError, match="tasks_from_store"):
            await store.enqueue([make_rollout("ro-0"), good.rollout])
        assert await store.rollouts() == []
        await store.start([good])
        with pytest.raises(ConflictError):
            await store.start([make_production("ro-0", "token-0"), make_production(task_id="no")])
        assert [state.rollout.rollout_id for state in await store.rollouts()] == ["ro-1"]

    async def test_call_tokens_open_one_attempt_each(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(3)])
        claims = await store.claim("runner", 3, LEASE_S)
        tokens = {claim.attempt.call_token for claim in claims}
        assert len(tokens) == 3
        assert all(len(token) >= 22 for token in tokens)  # 128 bits and more
        for claim in claims:
            assert await store.claim_of_token(claim.attempt.call_token) == claim
        for wrong in ("", "wrong", claims[0].attempt.call_token[:-1], UNICODE, "\udc80"):
            assert await store.claim_of_token(wrong) is None
        await store.report([make_report(claims[0].attempt)])
        found = await store.claim_of_token(claims[0].attempt.call_token)
        assert found is not None
        assert found.attempt.sealed

    # --- leases ---------------------------------------------------------------------------
    async def test_a_heartbeat_keeps_the_lease(self, store: Store, clock: Clock) -> None:
        attempt = await start(store)
        for _ in range(5):
            clock.advance(LEASE_S - 1)
            assert await store.heartbeat([ref(attempt)], LEASE_S) == []
            assert await store.expire() == 0
        found = await store.attempt(attempt.attempt_id)
        assert found.lease_until == clock.now + LEASE_S

    async def test_a_lease_that_runs_out_is_lost(self, store: Store, clock: Clock) -> None:
        attempt = await start(store)
        clock.advance(LEASE_S - 0.5)
        assert await store.expire() == 0
        clock.advance(0.5)
        assert await store.expire() == 1
        assert await store.expire() == 0
        found = await store.attempt(attempt.attempt_id)
        assert (found.status, found.outcome) == (AttemptStatus.LOST, Outcome.INFRASTRUCTURE)
        assert "runner" in found.message
        assert found.ended_at == clock.now
        assert await status_of(store) is RolloutStatus.QUEUED

    async def test_claim_loses_expired_leases_first(self, store: Store, clock: Clock) -> None:
        first = await start(store)
        clock.advance(LEASE_S)
        second = await claim_one(store)
        assert (second.rollout_id, second.number) == (first.rollout_id, 2)
        assert second.epoch > first.epoch

    async def test_many_leases_run_out_at_once(self, store: Store, clock: Clock) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(300)])
        assert len(await store.claim("dead", 300, LEASE_S)) == 300
        clock.advance(LEASE_S)
        claims = await store.claim("alive", 300, LEASE_S)
        assert [claim.rollout.rollout_id for claim in claims] == [f"ro-{i}" for i in range(300)]
        clock.advance(LEASE_S)
        assert await store.expire() == 300

    async def test_heartbeat_returns_what_must_stop(self, store: Store, clock: Clock) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(4)])
        attempts = [claim.attempt for claim in await store.claim("runner", 4, LEASE_S)]
        await store.report([make_report(attempts[0])])
        await store.cancel(["ro-1"])
        wrong_epoch = AttemptRef(attempts[2].attempt_id, attempts[2].epoch + 1)
        unknown = AttemptRef("at-nobody", 1)
        asked = [ref(attempts[0]), ref(attempts[1]), wrong_epoch, unknown, ref(attempts[3])]
        assert await store.heartbeat(asked, 2 * LEASE_S) == asked[:4]
        clock.advance(LEASE_S)
        assert await store.expire() == 1
        assert await store.heartbeat([], LEASE_S) == []

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
        [late] = (await store.token_records([old.attempt_id]))[old.attempt_id]
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
            damage=["lost a span", UNICODE, NUL],
        )
        assert await store.report([report]) == [True]
        found = await store.attempt(attempt.attempt_id)
        assert found.reward == report.reward
        assert (found.outcome, found.message) == (report.outcome, report.message)
        assert (found.damage, found.ended_at) == (report.damage, clock.now)
        state = await state_of(store)
        assert (state.status, state.finished_at) == (RolloutStatus.FAILED, clock.now)

    @pytest.mark.parametrize("reward", [None, Reward(None), Reward(0.0), Reward(None, {"a": 1.0})])
    async def test_unscored_is_not_zero(self, store: Store, reward: Reward | None) -> None:
        attempt = await start(store)
        await store.report([make_report(attempt, reward=reward)])
        assert (await store.attempt(attempt.attempt_id)).reward == reward

    async def test_report_twice(self, store: Store) -> None:
        """Equal: in force, nothing happens. Different: refused, nothing happens."""
        attempt = await start(store)
        report = make_report(attempt, reward=Reward(1.0), damage=["a"])
        assert await store.report([report, report]) == [True, True]
        known = await store.attempt(attempt.attempt_id), await store.watch()
        assert await store.report([report]) == [True]
        same: dict[str, Any] = {"reward": Reward(1.0), "damage": ["a"]}
        for other in ({"reward": Reward(0.0)}, {"message": "x"}, {"damage": ["b"]}):
            assert await store.report([make_report(attempt, **{**same, **other})]) == [False]
        assert (await store.attempt(attempt.attempt_id), await store.watch()) == known

    async def test_report_under_a_wrong_epoch(self, store: Store) -> None:
        attempt = await start(store)
        wrong = make_report(attempt, epoch=attempt.epoch + 1)
        assert await store.report([wrong, make_report(attempt), wrong]) == [False, True, False]

    @pytest.mark.parametrize("size", [1, 300])
    async def test_a_bad_report_refuses_its_batch(self, store: Store, size: int) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(size)])
        claims = await store.claim("runner", size, LEASE_S)
        good = [make_report(claim.attempt) for claim in claims]
        unknown = make_report(claims[0].attempt, attempt_id="at-nobody")
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.report([*good, unknown])
        with pytest.raises(IllegalMoveError):
            await store.report([*good, make_report(claims[0].attempt, AttemptStatus.RUNNING)])
        assert await store.count() == {RolloutStatus.RUNNING: size}
        assert await store.report([]) == []

    async def test_a_late_report_after_success(self, store: Store) -> None:
        attempt = await start(store)
        await store.report([make_report(attempt, reward=Reward(1.0))])
        for status in FINAL_ATTEMPTS:
            late = make_report(attempt, status, reward=Reward(9.0))
            assert await store.report([late]) == [False]
        assert (await store.attempt(attempt.attempt_id)).reward == Reward(1.0)
        assert await status_of(store) is RolloutStatus.SUCCEEDED

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
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(300)])
        with pytest.raises(NotFoundError, match="nobody"):
            await store.cancel([*(f"ro-{i}" for i in range(300)), "nobody"])
        assert await store.count() == {RolloutStatus.QUEUED: 300}

    # --- watch ----------------------------------------------------------------------------
    async def test_watch_from_every_cursor(self, store: Store) -> None:
        """Whatever the cursor, the answer is what changed after it, once each, oldest first."""
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
            found = await store.watch(cursor)
            assert found.rollouts == [s for s in everything.rollouts if s.change > cursor]
            assert found.cursor == max(cursor, everything.cursor)
            of_run = await store.watch(cursor, run_id="b")
            assert of_run.rollouts == [s for s in found.rollouts if s.rollout.run_id == "b"]
            assert cursor <= of_run.cursor <= found.cursor
        assert await store.rollouts() == sorted(
            everything.rollouts, key=lambda state: state.rollout.rollout_id
        )

    async def test_watch_of_an_empty_store(self, store: Store) -> None:
        changes = await store.watch(timeout_s=0.01)
        assert (changes.cursor, changes.rollouts) == (0, [])

    async def test_watch_wakes_up(self, store: Store) -> None:
        watching = asyncio.create_task(store.watch(timeout_s=60))
        await asyncio.sleep(0)
        await store.enqueue([make_rollout()])
        changes = await watching
        assert [state.rollout.rollout_id for state in changes.rollouts] == ["ro-1"]

    async def test_watch_sees_every_ending(self, store: Store) -> None:
        """A watcher that only ever follows its cursor sees every rollout end."""
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
        await store.mark_damaged(attempt.attempt_id, "reason")
        assert await store.watch() == before

    # --- attempts -------------------------------------------------------------------------
    async def test_attempts_in_the_order_asked(self, store: Store) -> None:
        await store.enqueue([make_rollout("b"), make_rollout("a")])
        for claim in await store.claim("runner", 2, LEASE_S):
            await store.report([make_report(claim.attempt, AttemptStatus.LOST)])
        await store.claim("runner", 2, LEASE_S)
        found = await store.attempts(["a", "nobody", "b"])
        assert [(a.rollout_id, a.number) for a in found] == [
            ("a", 1),
            ("a", 2),
            ("b", 1),
            ("b", 2),
        ]
        assert await store.attempts([]) == []
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.attempt("at-nobody")

    async def test_mark_damaged(self, store: Store) -> None:
        attempt = await start(store)
        await store.mark_damaged(attempt.attempt_id, "first")
        await store.report([make_report(attempt, damage=["second", "first"])])
        await store.mark_damaged(attempt.attempt_id, UNICODE)  # sealed: still allowed
        await store.mark_damaged(attempt.attempt_id, UNICODE)
        found = await store.attempt(attempt.attempt_id)
        assert found.damage == ["first", "second", UNICODE]
        assert found.status is AttemptStatus.SUCCEEDED
        assert await store.report([make_report(attempt, damage=["second", "first"])]) == [True]
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.mark_damaged("at-nobody", "reason")

    # --- spans ----------------------------------------------------------------------------
    async def test_spans_come_back_whole_and_in_order(self, store: Store) -> None:
        attempt = await start(store)
        rich = make_span(
            attempt,
            99,
            name=UNICODE,
            kind=SpanKind.TOOL,
            parent_id="b" * 16,
            start_ns=2**62,
            end_ns=2**62 + 1,
            status=SpanStatus.ERROR,
            status_message=UNICODE,
            attributes={
                UNICODE: UNICODE,
                "nul": NUL,
                "bool": True,
                "int": -(2**63),
                "float": 1e-300,
                "strings": ["a", UNICODE],
                "floats": [0.1, math.inf],
                "empty": [],
            },
            events=[SpanEvent("event", 5, {"k": [1, 2]})],
            links=[SpanLink("c" * 32, "d" * 16, {"k": False})],
            resource={"service.name": "app"},
            sequence_start=3,
            sequence_end=2**40,
        )
        spans = [rich, *(make_span(attempt, number) for number in (3, 1, 2))]
        assert await store.add_spans(ref(attempt), spans[:2]) == 0
        assert await store.add_spans(ref(attempt), spans[2:]) == 0
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: spans}

    async def test_adding_a_span_twice(self, store: Store) -> None:
        attempt = await start(store)
        span = make_span(attempt)
        assert await store.add_spans(ref(attempt), [span, span]) == 0
        await store.report([make_report(attempt)])
        assert await store.add_spans(ref(attempt), [span, make_span(attempt, 1)]) == 1
        found = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert [(one.span_id, one.late) for one in found] == [
            (span.span_id, False),
            (make_span(attempt, 1).span_id, True),
        ]

    async def test_late_spans_are_kept_and_marked(self, store: Store) -> None:
        attempt = await start(store)
        wrong_epoch = AttemptRef(attempt.attempt_id, attempt.epoch + 1)
        assert await store.add_spans(wrong_epoch, [make_span(attempt, 1)]) == 1
        assert await store.add_spans(ref(attempt), [make_span(attempt, 2, late=True)]) == 1
        assert await store.add_spans(ref(attempt), [make_span(attempt, 3)]) == 0
        await store.report([make_report(attempt)])
        assert await store.add_spans(ref(attempt), [make_span(attempt, 4)]) == 1
        found = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert [span.late for span in found] == [True, True, False, True]

    async def test_spans_of_several_attempts(self, store: Store) -> None:
        await store.enqueue([make_rollout("a"), make_rollout("b")])
        first, second = [c.attempt for c in await store.claim("runner", 2, LEASE_S)]
        for attempt in (first, second):  # span ids are unique within an attempt only
            await store.add_spans(ref(attempt), [make_span(attempt)])
        asked = [second.attempt_id, "at-nobody", first.attempt_id, second.attempt_id]
        found = await store.spans(asked)
        assert found == {
            second.attempt_id: [make_span(second)],
            "at-nobody": [],
            first.attempt_id: [make_span(first)],
        }
        assert await store.spans([]) == {}

    async def test_spans_that_cannot_be_kept(self, store: Store) -> None:
        attempt = await start(store)
        unknown = AttemptRef("at-nobody", 1)
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.add_spans(unknown, [make_span(attempt, attempt_id="at-nobody")])
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.add_spans(unknown, [])
        with pytest.raises(DataError, match="at-other"):
            await store.add_spans(ref(attempt), [make_span(attempt, attempt_id="at-other")])
        bad: list[Any] = [object(), 2**70, "\ud800"]
        for value in bad:
            span = make_span(attempt, 1, attributes={"a": value})
            with pytest.raises(DataError, match="span 1"):
                await store.add_spans(ref(attempt), [span])
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: []}

    # --- calls ----------------------------------------------------------------------------
    async def test_token_records_are_bit_exact(self, store: Store) -> None:
        attempt = await start(store)
        record = make_record(
            attempt,
            UNICODE,
            choice=2,
            policy=UNICODE,
            prompt_ids=[0, 1, 2**31 - 1, -1],
            response_ids=list(range(1000)),
            logprobs=[-0.1 * i for i in range(1000)],
            versions=[(3, 999), (4, 1)],
            sampling=Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=9, stop=("a", "b")),
            finish_reason=FinishReason.TOOL_CALLS,
            span_id="e" * 16,
            agent_path="team/%2F/writer",
            sequence_start=5,
            sequence_end=9,
            outcome=CallOutcome.ERROR,
            constrained=True,
        )
        empty = make_record(
            attempt, "empty", prompt_ids=[], response_ids=[], logprobs=[], versions=[]
        )
        call = StoredCall(span=make_span(attempt), records=[record, empty], epoch=attempt.epoch)
        assert await store.add_calls([call]) == [False]
        found = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert found == [empty, record]
        assert found[1].logprob_data == record.logprob_data
        assert found[1].versions == [(3, 999), (4, 1)]

    async def test_records_by_sequence_call_and_choice(self, store: Store) -> None:
        attempt = await start(store)
        keys = [(2, "b", 1), (1, "z", 0), (2, "a", 0), (2, "b", 0), (10, "a", 1), (2, "é", 0)]
        for number, (sequence, call_id, choice) in enumerate(keys):
            record = make_record(attempt, call_id, choice=choice, sequence_start=sequence)
            span = make_span(attempt, number)
            await store.add_calls([StoredCall(span=span, records=[record], epoch=attempt.epoch)])
        found = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert [(r.sequence_start, r.call_id, r.choice) for r in found] == sorted(keys)

    async def test_adding_a_call_twice(self, store: Store) -> None:
        attempt = await start(store)
        call = make_call(attempt, choices=3)
        assert await store.add_calls([call, call]) == [False, False]
        await store.report([make_report(attempt)])
        assert await store.add_calls([call, make_call(attempt, 2)]) == [False, True]
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert [span.late for span in spans] == [False, True]
        assert [(r.call_id, r.choice, r.late) for r in records] == [
            ("call-1", 0, False),
            ("call-1", 1, False),
            ("call-1", 2, False),
            ("call-2", 0, True),
        ]

    async def test_calls_of_several_attempts_in_one_batch(self, store: Store) -> None:
        await store.enqueue([make_rollout("a"), make_rollout("b")])
        first, second = [c.attempt for c in await store.claim("runner", 2, LEASE_S)]
        await store.report([make_report(second)])
        calls = [make_call(first), make_call(second), make_call(first, 2, epoch=99)]
        assert await store.add_calls(calls) == [False, True, True]
        found = await store.token_records([first.attempt_id, second.attempt_id])
        assert [record.late for record in found[first.attempt_id]] == [False, True]
        assert [record.late for record in found[second.attempt_id]] == [True]

    async def test_calls_that_cannot_be_kept(self, store: Store) -> None:
        attempt = await start(store)
        good = make_call(attempt)
        unknown = make_call(Attempt(attempt_id="at-nobody", rollout_id="x", number=1, epoch=1))
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.add_calls([good, unknown])
        mixed = StoredCall(span=good.span, records=unknown.records, epoch=1)
        with pytest.raises(DataError, match="at-nobody"):
            await store.add_calls([good, mixed])
        assert await store.token_records([attempt.attempt_id]) == {attempt.attempt_id: []}
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: []}
        assert await store.add_calls([]) == []

    @pytest.mark.parametrize("before", [CallOutcome.CANCELLED, CallOutcome.ERROR])
    async def test_a_later_try_replaces_a_cancelled_or_failed_call(
        self, store: Store, before: CallOutcome
    ) -> None:
        """The completion of a retry replaces what was recorded of the try before it."""
        attempt = await start(store)
        first, last = make_try(attempt, before, 2), make_try(attempt, CallOutcome.OK, 4)
        other = make_call(attempt, 7)
        assert await store.add_calls([first, other]) == [False, False]
        assert await store.add_calls([first]) == [False]
        assert await store.add_calls([last, first]) == [False, False]  # and the old one stays away
        again = make_try(attempt, CallOutcome.ERROR, 6)
        assert await store.add_calls([again]) == [False]
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert spans == [last.span, other.span]  # in the place of the first
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert records == [*last.records, *other.records]

    async def test_a_late_try_replaces_nothing(self, store: Store) -> None:
        attempt = await start(store)
        first = make_try(attempt, CallOutcome.CANCELLED, 2)
        assert await store.add_calls([first]) == [False]
        await store.report([make_report(attempt)])
        assert await store.add_calls([make_try(attempt, CallOutcome.OK, 4)]) == [False]
        assert (await store.spans([attempt.attempt_id]))[attempt.attempt_id] == [first.span]

    async def test_a_span_that_came_first_loses_no_tokens(self, store: Store) -> None:
        """Spans come on two ways; a call whose span is there already still brings its tokens."""
        attempt = await start(store)
        call = make_call(attempt)
        early = call.span.replace(name="as the app saw it")
        assert await store.add_spans(ref(attempt), [early]) == 0
        assert await store.add_calls([call]) == [False]
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: [early]}
        assert await store.token_records([attempt.attempt_id]) == {attempt.attempt_id: call.records}

    async def test_tries_of_one_call_in_one_batch(self, store: Store) -> None:
        attempt = await start(store)
        first, last = (
            make_try(attempt, CallOutcome.CANCELLED, 2),
            make_try(attempt, CallOutcome.OK, 4),
        )
        assert await store.add_calls([first, last]) == [False, False]
        assert (await store.spans([attempt.attempt_id]))[attempt.attempt_id] == [last.span]
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert records == last.records

    async def test_mark_call(self, store: Store) -> None:
        attempt = await start(store)
        await store.add_calls([make_call(attempt, 1, choices=2), make_call(attempt, 2)])
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.CANCELLED)
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.UNDELIVERED)
        await store.add_calls([make_call(attempt, 1, choices=2)])  # repeating resets nothing
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        undelivered, ok = CallOutcome.UNDELIVERED, CallOutcome.OK
        assert [record.outcome for record in records] == [undelivered, undelivered, ok]
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert [span.attributes.get(CALL_OUTCOME) for span in spans] == ["undelivered", None]
        await store.report([make_report(attempt)])
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.OK)  # its retry came
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert {record.outcome for record in records} == {ok}

    async def test_mark_call_without_records(self, store: Store) -> None:
        """A frozen agent's call has a span and no tokens."""
        attempt = await start(store)
        await store.add_calls([make_call(attempt, choices=0)])
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.ERROR)
        [span] = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert span.attributes[CALL_OUTCOME] == "error"

    @pytest.mark.parametrize("call_id", ["call-2", "", UNICODE])
    async def test_mark_call_of_an_unknown_call(self, store: Store, call_id: str) -> None:
        attempt = await start(store)
        await store.add_calls([make_call(attempt)])
        await store.add_spans(ref(attempt), [make_span(attempt)])
        with pytest.raises(NotFoundError):
            await store.mark_call(attempt.attempt_id, call_id, CallOutcome.OK)
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.mark_call("at-nobody", "call-1", CallOutcome.OK)

    # --- resources and policies -----------------------------------------------------------
    async def test_resources(self, store: Store) -> None:
        resources: NamedResources = {
            "main_llm": LLM(
                base_url="http://127.0.0.1:1/v1", model=UNICODE, sampling={"temperature": 0.5}
            ),
            "prompt": PromptTemplate(template="{question} " + UNICODE),
        }
        name = await store.put_resources(resources)
        assert await store.put_resources(dict(reversed(resources.items()))) == name
        other = await store.put_resources({"prompt": PromptTemplate(template="")})
        assert other != name
        assert await store.get_resources(name) == resources
        assert await store.get_resources(await store.put_resources({})) == {}
        with pytest.raises(NotFoundError, match="re-nobody"):
            await store.get_resources("re-nobody")

    async def test_versions_grow_and_are_never_reused(self, store: Store) -> None:
        assert await store.policy_versions("sql") == []
        allotted = await asyncio.gather(*(store.allot_version("sql") for _ in range(20)))
        assert sorted(allotted) == list(range(1, 21))
        assert await store.allot_version("other", "run", 3) == 1
        assert await store.allot_version("sql", "run", 7) == 21
        [only] = await store.policy_versions("other")
        assert (only.policy, only.version, only.run_id, only.step) == ("other", 1, "run", 3)
        assert [one.version for one in await store.policy_versions("sql")] == list(range(1, 22))

    async def test_versions_of_two_stores(self, stores: list[Store]) -> None:
        asked = [store.allot_version("sql") for _ in range(20) for store in stores]
        assert sorted(await asyncio.gather(*asked)) == list(range(1, 41))

    # --- who works with it ----------------------------------------------------------------
    async def test_peers(self, store: Store, clock: Clock) -> None:
        """The latest word of each, with its age by the store's clock; forgotten after a day."""
        assert await store.peers() == []
        await store.announce(make_peer("runner-2"))
        clock.advance(3)
        await store.announce(make_peer("run-1", role=PeerRole.TRAINER, run_id="run-1"))
        await store.announce(make_peer("runner-2", app=UNICODE, slots=8, silent_s=77.0))
        clock.advance(2)
        await store.announce(make_peer("run-1", role=PeerRole.TRAINER, complete=True))
        trainer = make_peer("run-1", role=PeerRole.TRAINER, complete=True)
        runner = make_peer("runner-2", app=UNICODE, slots=8, silent_s=2.0)
        assert await store.peers() == [trainer, runner]
        await store.withdraw("run-1")
        await store.withdraw("run-1")
        assert await store.peers() == [runner]
        clock.advance(86_400)
        assert await store.peers() == []

    async def test_peers_of_two_stores(self, stores: list[Store]) -> None:
        one, other = stores
        await one.announce(make_peer("runner-1"))
        assert await other.peers() == [make_peer("runner-1")]

    # --- size and concurrency -------------------------------------------------------------
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
        assert (await store.spans([first.attempt_id]))[first.attempt_id][1:] == spans
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
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: [span]}
        assert len((await state_of(store)).rollout.task) == 2_000_000

    async def test_200_mixed_operations_at_once(self, store: Store) -> None:
        """Whatever is mixed, each rollout is claimed once and ends once, each call is kept."""
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
        for found in (await store.token_records(ids)).values():
            assert [record.late for record in found] == [False]
        assert [len(spans) for spans in (await store.spans(ids)).values()] == [2] * 100

    async def test_many_clients_one_rollout_after_the_other(self, store: Store) -> None:
        """Whoever claims it: each rollout is claimed once and its report is in force."""
        names = [f"ro-{i}" for i in range(320)]
        left = iter(names)
        claimed: list[str] = []

        async def work() -> None:
            for name in left:
                await store.enqueue([make_rollout(name)])
                [claim] = await store.claim("runner", 1, LEASE_S)
                assert await store.report([make_report(claim.attempt)]) == [True]
                claimed.append(claim.rollout.rollout_id)

        await asyncio.gather(*(work() for _ in range(32)))
        assert sorted(claimed) == sorted(names)
        assert await store.count() == {RolloutStatus.SUCCEEDED: 320}

    async def test_an_operation_given_up_leaves_the_store_usable(self, store: Store) -> None:
        tasks = [asyncio.create_task(store.enqueue([make_rollout(f"ro-{i}")])) for i in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        names = {state.rollout.rollout_id for state in await store.rollouts()}
        assert names >= {f"ro-{i}" for i in range(1, 50, 2)}

    # --- life ------------------------------------------------------------------------------
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

    # --- random operations ----------------------------------------------------------------
    def test_random_operations_against_a_model(self) -> None:
        """Any sequence of operations: the answers are a tiny model's and the memory store's."""

        @settings(
            max_examples=60,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(st.lists(_OPERATIONS, max_size=40))
        def check(operations: list[tuple[Any, ...]]) -> None:
            asyncio.run(self._check(operations))

        check()

    async def _check(self, operations: list[tuple[Any, ...]]) -> None:
        clock = Clock()
        async with (
            self.make_store(self.new_name(), clock) as store,
            MemoryStore(clock=clock) as oracle,
        ):
            tested, expected = _Driver(store, clock), _Driver(oracle, clock)
            model = _Model()
            for operation in operations:
                if operation[0] == "advance":
                    clock.advance(operation[1])
                    model.now += operation[1]
                    continue
                answer = await tested.apply(operation)
                assert answer == await expected.apply(operation)
                model.apply(operation, tested.claimed)
                assert await _statuses(store) == model.statuses()
            assert await tested.dump() == await expected.dump()


async def _dump(store: Store, attempts: Sequence[Attempt]) -> list[Any]:
    """Everything that a store says."""
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


async def _statuses(store: Store) -> dict[str, tuple[RolloutStatus, int]]:
    return {
        state.rollout.rollout_id: (state.status, state.infrastructure_tries)
        for state in await store.rollouts()
    }


_NAMES = st.sampled_from([f"ro-{i}" for i in range(5)])
_ATTEMPTS = st.integers(0, 6)
_OPERATIONS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("enqueue"), st.lists(_NAMES, min_size=1, max_size=3)),
    st.tuples(st.just("claim"), st.integers(0, 3), st.sampled_from([None, "even", "odd", "x"])),
    st.tuples(
        st.just("report"),
        _ATTEMPTS,
        st.sampled_from(FINAL_ATTEMPTS),
        st.booleans(),
        st.sampled_from([0, 0, 0, 1]),
    ),
    st.tuples(st.just("heartbeat"), st.lists(_ATTEMPTS, max_size=3)),
    st.tuples(st.just("advance"), st.sampled_from([1.0, LEASE_S / 2, LEASE_S])),
    st.tuples(st.just("expire")),
    st.tuples(st.just("cancel"), st.lists(_NAMES, max_size=2)),
    st.tuples(st.just("spans"), _ATTEMPTS, st.lists(st.integers(0, 3), max_size=3)),
    st.tuples(st.just("call"), _ATTEMPTS, st.integers(0, 2), st.sampled_from([0, 0, 1])),
    st.tuples(st.just("try"), _ATTEMPTS, st.sampled_from(CallOutcome), st.integers(1, 4)),
    st.tuples(st.just("mark"), _ATTEMPTS, st.integers(0, 2), st.sampled_from(CallOutcome)),
    st.tuples(st.just("damage"), _ATTEMPTS, st.sampled_from(["a", "b"])),
    st.tuples(st.just("watch"), st.integers(0, 30), st.sampled_from([None, "even"])),
)


def _rollout_named(name: str) -> Rollout:
    number = int(name.removeprefix("ro-"))
    return make_rollout(
        name, run_id="odd" if number % 2 else "even", max_infrastructure_tries=1 + number % 3
    )


class _Driver:
    """Applies operations to a store. Answers name attempts by what two stores have in common."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.claimed: list[Attempt] = []

    async def apply(self, operation: tuple[Any, ...]) -> Any:
        kind, *arguments = operation
        if kind in ("report", "spans", "call", "try", "mark", "damage"):
            if arguments[0] >= len(self.claimed):
                return None
            arguments[0] = self.claimed[arguments[0]]
        try:
            return await getattr(self, f"_{kind}")(*arguments)
        except NotFoundError as error:
            return type(error)

    async def _enqueue(self, names: list[str]) -> None:
        await self.store.enqueue([_rollout_named(name) for name in names])

    async def _claim(self, slots: int, run_id: str | None) -> list[Any]:
        claims = await self.store.claim("runner", slots, LEASE_S, run_id)
        self.claimed += [claim.attempt for claim in claims]
        return [(claim.rollout, self._plain(claim.attempt)) for claim in claims]

    async def _report(self, attempt: Attempt, status: AttemptStatus, counts: bool, off: int) -> Any:
        report = make_report(attempt, status, counts=counts, epoch=attempt.epoch + off)
        return await self.store.report([report])

    async def _heartbeat(self, numbers: list[int]) -> list[Any]:
        attempts = [self.claimed[number] for number in numbers if number < len(self.claimed)]
        mine = await self.store.heartbeat([ref(attempt) for attempt in attempts], LEASE_S)
        return [self._index(one.attempt_id) for one in mine]

    async def _expire(self) -> int:
        return await self.store.expire()

    async def _cancel(self, names: list[str]) -> int:
        return await self.store.cancel(names)

    async def _spans(self, attempt: Attempt, numbers: list[int]) -> int:
        spans = [make_span(attempt, number) for number in numbers]
        return await self.store.add_spans(ref(attempt), spans)

    async def _call(self, attempt: Attempt, number: int, off: int) -> list[bool]:
        call = make_call(attempt, number, epoch=attempt.epoch + off, choices=number)
        return await self.store.add_calls([call])

    async def _try(self, attempt: Attempt, outcome: CallOutcome, sequence_end: int) -> list[bool]:
        return await self.store.add_calls([make_try(attempt, outcome, sequence_end)])

    async def _mark(self, attempt: Attempt, number: int, outcome: CallOutcome) -> None:
        await self.store.mark_call(attempt.attempt_id, f"call-{number}", outcome)

    async def _damage(self, attempt: Attempt, reason: str) -> None:
        await self.store.mark_damaged(attempt.attempt_id, reason)

    async def _watch(self, cursor: int, run_id: str | None) -> Any:
        changes = await self.store.watch(cursor, run_id=run_id)
        return changes.cursor, [self._plain(state) for state in changes.rollouts]

    async def dump(self) -> list[Any]:
        """All that the store says, without the ids and tokens that it made up."""
        states = await self.store.rollouts()
        attempts = await self.store.attempts([state.rollout.rollout_id for state in states])
        ids = [attempt.attempt_id for attempt in self.claimed]
        spans = await self.store.spans(ids)
        records = await self.store.token_records(ids)
        return [
            [self._plain(value) for value in (*states, *attempts)],
            [[self._plain(span) for span in spans[one]] for one in ids],
            [[self._plain(record) for record in records[one]] for one in ids],
            await self.store.count(),
            [await self._watch(cursor, None) for cursor in range(5)],
        ]

    def _index(self, attempt_id: str | None) -> int | None:
        ids = [attempt.attempt_id for attempt in self.claimed]
        return None if attempt_id is None else ids.index(attempt_id)

    def _plain(self, value: Any) -> dict[str, Any]:
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        fields.pop("call_token", None)
        if "attempt_id" in fields:
            fields["attempt_id"] = self._index(fields["attempt_id"])
        return fields


class _Model:
    """The state machine again, as simply as it can be said; shares nothing with the stores."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rollouts: dict[str, list[Any]] = {}
        """Name: status, counted losses, uncounted losses, attempt that runs."""
        self.attempts: list[list[Any]] = []
        """Rollout, lease end, status."""

    def statuses(self) -> dict[str, tuple[RolloutStatus, int]]:
        return {name: (state[0], state[1]) for name, state in self.rollouts.items()}

    def apply(self, operation: tuple[Any, ...], claimed: Sequence[Attempt]) -> None:
        kind, *arguments = operation
        if kind == "enqueue":
            for name in arguments[0]:
                self.rollouts.setdefault(name, [RolloutStatus.QUEUED, 0, 0, None])
        elif kind == "claim":
            self._expire()
            self._claim(*arguments)
            assert [a.rollout_id for a in claimed] == [row[0] for row in self.attempts]
        elif kind == "report" and arguments[0] < len(self.attempts) and arguments[3] == 0:
            self._end(arguments[0], arguments[1], arguments[2])
        elif kind == "heartbeat":
            self._beat([n for n in arguments[0] if n < len(self.attempts)])
        elif kind == "expire":
            self._expire()
        elif kind == "cancel" and all(name in self.rollouts for name in arguments[0]):
            self._cancel(arguments[0])

    def _claim(self, slots: int, run_id: str | None) -> None:
        for name, state in self.rollouts.items():
            right = run_id in (None, _rollout_named(name).run_id)
            if slots and right and state[0] is RolloutStatus.QUEUED:
                slots -= 1
                state[0], state[3] = RolloutStatus.RUNNING, len(self.attempts)
                self.attempts.append([name, self.now + LEASE_S, AttemptStatus.RUNNING])

    def _beat(self, numbers: list[int]) -> None:
        for number in numbers:
            if self.attempts[number][2] is AttemptStatus.RUNNING:
                self.attempts[number][1] = self.now + LEASE_S

    def _expire(self) -> None:
        for number, (_, lease_until, _) in enumerate(self.attempts):
            if lease_until <= self.now:
                self._end(number, AttemptStatus.LOST, True)

    def _cancel(self, names: list[str]) -> None:
        for name in names:
            state = self.rollouts[name]
            if state[0] is RolloutStatus.RUNNING:
                self._end(state[3], AttemptStatus.CANCELLED, True)
            elif state[0] is RolloutStatus.QUEUED:
                state[0] = RolloutStatus.CANCELLED

    def _end(self, number: int, status: AttemptStatus, counts: bool) -> None:
        name, _, before = self.attempts[number]
        if before is not AttemptStatus.RUNNING:
            return
        self.attempts[number][2] = status
        state = self.rollouts[name]
        if status is AttemptStatus.LOST:
            counts = counts or state[2] >= MAX_UNCOUNTED_LOSSES
            state[1 if counts else 2] += 1
            left = state[1] < _rollout_named(name).max_infrastructure_tries
            state[0] = RolloutStatus.QUEUED if left else RolloutStatus.LOST
        elif status is AttemptStatus.TIMEOUT:
            state[0] = RolloutStatus.FAILED
        else:
            state[0] = RolloutStatus(status.value)

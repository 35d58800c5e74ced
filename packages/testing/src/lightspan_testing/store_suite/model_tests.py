"""Random operations against a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from hypothesis import HealthCheck, example, given, settings, strategies as st

from lightspan.errors import NotFoundError
from lightspan.schema.records import Attempt, AttemptStatus, Rollout, RolloutStatus, new_id
from lightspan.schema.token_records import CallOutcome
from lightspan.stores._state_machine import MAX_BAD_NEIGHBOURS, MAX_UNCOUNTED_LOSSES
from lightspan.stores.memory import MemoryStore
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    FINAL_ATTEMPTS,
    LEASE_S,
    Clock,
    StoreTests,
    make_call,
    make_report,
    make_rollout,
    make_span,
    make_try,
    ref,
)


async def _statuses(store: Store) -> dict[str, tuple[RolloutStatus, int]]:
    return {
        state.rollout.rollout_id: (state.status, state.infrastructure_tries)
        for state in await store.rollouts()
    }


_NAMES = st.sampled_from([f"ro-{i}" for i in range(5)])
_ATTEMPTS = st.integers(0, 6)
_OPERATIONS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("enqueue"), st.lists(_NAMES, min_size=1, max_size=3)),
    st.tuples(
        st.just("claim"),
        st.integers(0, 3),
        st.sampled_from([None, "even", "odd", "x"]),
        st.booleans(),
    ),
    st.tuples(st.just("again")),
    st.tuples(
        st.just("report"),
        _ATTEMPTS,
        st.sampled_from(FINAL_ATTEMPTS),
        st.booleans(),
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
    st.tuples(st.just("capture_errors"), _ATTEMPTS, st.sampled_from(["a", "b"])),
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
        self._latest: tuple[Any, ...] | None = None
        """The claim that was asked for last, and under which id."""

    async def apply(self, operation: tuple[Any, ...]) -> Any:
        kind, *arguments = operation
        if kind in ("report", "spans", "call", "try", "mark", "capture_errors"):
            if arguments[0] >= len(self.claimed):
                return None
            arguments[0] = self.claimed[arguments[0]]
        try:
            return await getattr(self, f"_{kind}")(*arguments)
        except NotFoundError as error:
            return type(error)

    async def _enqueue(self, names: list[str]) -> None:
        await self.store.enqueue([_rollout_named(name) for name in names])

    async def _claim(self, slots: int, run_id: str | None, idle: bool) -> list[Any]:
        self._latest = (slots, run_id, idle, new_id("claim"))
        return await self._ask_latest()

    async def _again(self) -> list[Any] | None:
        """As who got no answer."""
        return None if self._latest is None else await self._ask_latest()

    async def _ask_latest(self) -> list[Any]:
        assert self._latest is not None
        slots, run_id, idle, request_id = self._latest
        claims = await self.store.claim(
            "runner", slots, LEASE_S, run_id, idle, request_id=request_id
        )
        known = {attempt.attempt_id for attempt in self.claimed}
        made = [claim.attempt for claim in claims if claim.attempt.attempt_id not in known]
        self.claimed += made
        return [(claim.rollout, self._plain(claim.attempt), claim.alone) for claim in claims]

    async def _report(
        self, attempt: Attempt, status: AttemptStatus, counts: bool, alone: bool, off: int
    ) -> Any:
        epoch = attempt.epoch + off
        report = make_report(attempt, status, counts=counts, alone=alone, epoch=epoch)
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

    async def _capture_errors(self, attempt: Attempt, reason: str) -> None:
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


_LOST_TOGETHER: Final = [
    ("enqueue", ["ro-0", "ro-1"]),
    ("claim", 1, "odd", False),
    ("claim", 1, None, False),
    ("advance", LEASE_S),
    ("again",),
]
"""Two leases that run out at one moment, of rollouts that were claimed in the other order."""


class _Model:
    """The state machine again, as simply as it can be said; shares nothing with the stores."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rollouts: dict[str, list[Any]] = {}
        """Name: status, counted losses, uncounted losses, attempt that runs, to be run alone."""
        self.attempts: list[list[Any]] = []
        """Rollout, lease end, status."""
        self.latest: tuple[list[Any], range] | None = None
        """What the latest claim asked for, and the attempts that it began."""

    def statuses(self) -> dict[str, tuple[RolloutStatus, int]]:
        return {name: (state[0], state[1]) for name, state in self.rollouts.items()}

    def apply(self, operation: tuple[Any, ...], claimed: Sequence[Attempt]) -> None:
        kind, *arguments = operation
        if kind == "enqueue":
            for name in arguments[0]:
                self.rollouts.setdefault(name, [RolloutStatus.QUEUED, 0, 0, None, False])
        elif kind in ("claim", "again"):
            self._expire()
            if kind == "claim":
                self._claim(*arguments)
            else:
                self._again()
            assert [a.rollout_id for a in claimed] == [row[0] for row in self.attempts]
        elif kind == "report" and arguments[0] < len(self.attempts) and arguments[4] == 0:
            self._end(*arguments[:4])
        elif kind == "heartbeat":
            self._beat([n for n in arguments[0] if n < len(self.attempts)])
        elif kind == "expire":
            self._expire()
        elif kind == "cancel" and all(name in self.rollouts for name in arguments[0]):
            self._cancel(arguments[0])

    def _again(self) -> None:
        if self.latest is None:
            return
        asked, begun = self.latest
        if begun:
            self._beat(list(begun))
        else:
            self._claim(*asked)

    def _claim(self, slots: int, run_id: str | None, idle: bool) -> None:
        before, asked = len(self.attempts), [slots, run_id, idle]
        queued = {
            name: state
            for name, state in self.rollouts.items()
            if run_id in (None, _rollout_named(name).run_id) and state[0] is RolloutStatus.QUEUED
        }
        alone = idle and any(state[4] for state in queued.values())
        slots = min(slots, 1) if alone else slots
        for name, state in queued.items():
            if slots and state[4] == alone:
                slots -= 1
                state[0], state[3] = RolloutStatus.RUNNING, len(self.attempts)
                self.attempts.append([name, self.now + LEASE_S, AttemptStatus.RUNNING])
        self.latest = asked, range(before, len(self.attempts))

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

    def _end(self, number: int, status: AttemptStatus, counts: bool, alone: bool = False) -> None:
        name, _, before = self.attempts[number]
        if before is not AttemptStatus.RUNNING:
            return
        self.attempts[number][2] = status
        state = self.rollouts[name]
        if status is AttemptStatus.LOST:
            asked, counts = counts, counts or state[2] >= MAX_UNCOUNTED_LOSSES
            state[1 if counts else 2] += 1
            state[4] = alone or (not asked and state[2] >= MAX_BAD_NEIGHBOURS)
            left = state[1] < _rollout_named(name).max_infrastructure_tries
            state[0] = RolloutStatus.QUEUED if left else RolloutStatus.LOST
        elif status is AttemptStatus.TIMEOUT:
            state[0] = RolloutStatus.FAILED
        else:
            state[0] = RolloutStatus(status.value)


class ModelTests(StoreTests):
    """Whatever is done: a tiny model and the memory store would answer the same."""

    def test_random_operations_against_a_model(self) -> None:
        """Any sequence of operations: the answers are a tiny model's and the memory store's."""

        @settings(
            max_examples=60,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @example(_LOST_TOGETHER)
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

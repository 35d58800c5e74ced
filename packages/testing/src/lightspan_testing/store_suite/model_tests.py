"""Tests that run random operations on a store and on a simple imitation of it."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lightspan.schema.records import (
    Attempt,
    AttemptRef,
    AttemptStatus,
    RolloutState,
    RolloutStatus,
    new_id,
)
from lightspan.stores._state_machine import MAX_BAD_NEIGHBOURS, MAX_UNCOUNTED_LOSSES
from lightspan_testing.store_suite.base import (
    FINAL_ATTEMPTS,
    LEASE_S,
    Clock,
    StoreTests,
    make_report,
    make_rollout,
)

NAMES = [f"ro-{number}" for number in range(3)]


def _run_of(name: str) -> str:
    return "odd" if int(name[-1]) % 2 else "even"


def _tries_of(name: str) -> int:
    return 1 + int(name[-1]) % 3


class _Machine(RuleBasedStateMachine):
    """Run random operations on a store, and compare it with a simple imitation.

    The imitation (the model) shares no code with stores.
    """

    suite: StoreTests

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        self.clock = Clock()
        self.rollouts: dict[str, list[Any]] = {}
        """Rollout name → [status, counted losses, uncounted losses, running attempt, must run
        alone].
        """
        self.attempts: list[list[Any]] = []
        """[rollout, end of the lease, status] of each attempt."""
        self.claimed: list[Attempt] = []
        """The attempts as the store returned them."""
        self.latest: tuple[tuple[Any, ...], bool, list[int]] | None = None
        """The last claim: its arguments with the request id, whether its rollout has to run alone,
        and the indices of its attempts. None before the first claim.
        """

        self.states: dict[str, RolloutState] = {}
        """The states of the store after the last step."""

    def run(self, work: Any) -> Any:
        return self.loop.run(work)

    @initialize()
    def open(self) -> None:
        self.store = self.suite.make_store(self.suite.new_name(), self.clock)
        self.run(self.store.open())

    def teardown(self) -> None:
        self.run(self.store.close())
        self.loop.close()

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3))
    def enqueue(self, names: list[str]) -> None:
        rollouts = [
            make_rollout(name, run_id=_run_of(name), max_infrastructure_tries=_tries_of(name))
            for name in names
        ]
        self.run(self.store.enqueue(rollouts))
        for name in names:
            self.rollouts.setdefault(name, [RolloutStatus.QUEUED, 0, 0, None, False])

    @rule(
        slots=st.integers(0, 3),
        run_id=st.sampled_from([None, None, "even", "odd"]),
        idle=st.booleans(),
    )
    def claim(self, slots: int, run_id: str | None, idle: bool) -> None:
        self._expire()
        self._claim(slots, run_id, idle, new_id("claim"))

    @precondition(lambda self: self.latest is not None)
    @rule()
    def claim_again(self) -> None:
        """Repeat the last claim, as a client does that got no response to it."""
        assert self.latest is not None
        arguments, alone, numbers = self.latest
        self._expire()
        if not numbers:
            self._claim(*arguments)
            return
        running = [n for n in numbers if self.attempts[n][2] is AttemptStatus.RUNNING]
        for number in running:
            self.attempts[number][1] = self.clock.now + LEASE_S
        claims = self._ask(*arguments)
        assert [(claim.attempt.attempt_id, claim.alone) for claim in claims] == [
            (self.claimed[number].attempt_id, alone) for number in running
        ]

    def _ask(self, slots: int, run_id: str | None, idle: bool, request_id: str) -> list[Any]:
        claiming = self.store.claim("r", slots, LEASE_S, run_id, idle, request_id=request_id)
        return list(self.run(claiming))

    def _claim(self, slots: int, run_id: str | None, idle: bool, request_id: str) -> None:
        queued = {
            name: state
            for name, state in self.rollouts.items()
            if run_id in (None, _run_of(name)) and state[0] is RolloutStatus.QUEUED
        }
        alone = idle and any(state[4] for state in queued.values())
        names = [name for name, state in queued.items() if state[4] == alone]
        names = names[: min(slots, 1) if alone else slots]
        claims = self._ask(slots, run_id, idle, request_id)
        assert [(claim.rollout.rollout_id, claim.alone) for claim in claims] == [
            (name, alone) for name in names
        ]
        first = len(self.attempts)
        for number, (name, claim) in enumerate(zip(names, claims, strict=True), first):
            queued[name][0], queued[name][3] = RolloutStatus.RUNNING, number
            self.attempts.append([name, self.clock.now + LEASE_S, AttemptStatus.RUNNING])
            self.claimed.append(claim.attempt)
        numbers = list(range(first, len(self.attempts)))
        self.latest = (slots, run_id, idle, request_id), alone, numbers

    @precondition(lambda self: self.claimed)
    @rule(
        data=st.data(),
        status=st.sampled_from(FINAL_ATTEMPTS),
        counts=st.booleans(),
        alone=st.booleans(),
        off=st.sampled_from([0, 0, 0, 1]),
    )
    def report(
        self, data: st.DataObject, status: AttemptStatus, counts: bool, alone: bool, off: int
    ) -> None:
        number = data.draw(st.integers(0, len(self.claimed) - 1))
        attempt = self.claimed[number]
        is_running = self.attempts[number][2] is AttemptStatus.RUNNING
        report = make_report(attempt, status, counts=counts, alone=alone, epoch=attempt.epoch + off)
        [effective] = self.run(self.store.report([report]))
        assert effective or off or not is_running
        assert not (effective and off)
        if off == 0:
            self._end(number, status, counts, alone)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), off=st.sampled_from([0, 0, 1]))
    def heartbeat(self, data: st.DataObject, off: int) -> None:
        numbers = data.draw(st.sets(st.integers(0, len(self.claimed) - 1), max_size=3))
        refs = {
            number: AttemptRef(attempt.attempt_id, attempt.epoch + off)
            for number, attempt in enumerate(self.claimed)
            if number in numbers
        }
        alive = [n for n in refs if off == 0 and self.attempts[n][2] is AttemptStatus.RUNNING]
        ended = self.run(self.store.heartbeat(list(refs.values()), LEASE_S))
        assert ended == [one for number, one in refs.items() if number not in alive]
        for number in alive:
            self.attempts[number][1] = self.clock.now + LEASE_S

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def expire(self) -> None:
        assert self.run(self.store.expire()) == self._expire()

    @precondition(lambda self: self.rollouts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.rollouts)), max_size=2))
        ended = 0
        for name in names:
            state = self.rollouts[name]
            if state[0] is RolloutStatus.RUNNING:
                self._end(state[3], AttemptStatus.CANCELLED, True)
                ended += 1
            elif state[0] is RolloutStatus.QUEUED:
                state[0] = RolloutStatus.CANCELLED
                ended += 1
        assert self.run(self.store.cancel(names)) == ended

    def _expire(self) -> int:
        late = [n for n, one in enumerate(self.attempts) if one[1] <= self.clock.now]
        return sum(self._end(number, AttemptStatus.LOST, True) for number in late)

    def _end(self, number: int, status: AttemptStatus, counts: bool, alone: bool = False) -> bool:
        name, _, before = self.attempts[number]
        if before is not AttemptStatus.RUNNING:
            return False
        self.attempts[number][2] = status
        state = self.rollouts[name]
        if status is AttemptStatus.LOST:
            requested, counts = counts, counts or state[2] >= MAX_UNCOUNTED_LOSSES
            state[1 if counts else 2] += 1
            state[4] = alone or (not requested and state[2] >= MAX_BAD_NEIGHBOURS)
            has_tries = state[1] < _tries_of(name)
            state[0] = RolloutStatus.QUEUED if has_tries else RolloutStatus.LOST
        elif status is AttemptStatus.TIMEOUT:
            state[0] = RolloutStatus.FAILED
        else:
            state[0] = RolloutStatus(status.value)
        return True

    @invariant()
    def states_are_the_models(self) -> None:
        """Check that the store's rollouts have the statuses and tries that the model predicts.

        The model is a plain Python imitation of the store. The rest of a rollout's state may change
        only with a new status or a new attempt.
        """
        states = {state.rollout.rollout_id: state for state in self.run(self.store.rollouts())}
        assert {
            name: (state.status, state.infrastructure_tries) for name, state in states.items()
        } == {name: (state[0], state[1]) for name, state in self.rollouts.items()}
        for name, state in states.items():
            before = self.states.get(name, state)
            moved = (before.status, before.attempt_id) != (state.status, state.attempt_id)
            assert moved or state == before
            assert (state.finished_at is not None) == state.status.final
        self.states = states
        summaries = {row.rollout_id: row for row in self.run(self.store.summaries()).rows}
        assert {
            name: (row.status, row.attempt_id, row.change) for name, row in summaries.items()
        } == {name: (one.status, one.attempt_id, one.change) for name, one in states.items()}


class ModelTests(StoreTests):
    """Test that a store and a simple imitation agree after any sequence of operations."""

    def test_random_operations_against_a_model(self) -> None:
        machine = type("Machine", (_Machine,), {"suite": self})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=40,
                stateful_step_count=30,
                deadline=None,
                database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            ),
        )

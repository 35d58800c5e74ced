"""Conformance tests of runners (`lightspan.runners.protocol.Runners`).

Subclass `RunnersSuite` and override two fixtures: `runners` returns unstarted runners with at least
two slots, and `store` returns an open store that the runners can reach. The runners need access to
files of this machine, by which the tests communicate with the apps of `sample_apps`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightspan.errors import AppError
from lightspan.runners.protocol import RunnerPlan, Runners
from lightspan.schema.records import (
    AttemptStatus,
    Mode,
    Outcome,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.stores.protocol import Store

RUN = "run-1"
LEASE_S = 5.0


class RunnersSuite:
    """Tests of runners; the module's docstring shows how to subclass it."""

    @pytest.fixture
    def runners(self) -> Runners:
        """Return the runners under test."""
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> Store:
        """Return an open store that the runners can reach."""
        raise NotImplementedError

    async def test_is_a_set_of_runners(self, runners: Runners) -> None:
        assert isinstance(runners, Runners)
        runners.check()
        await runners.stop()  # returns at once without a start

    async def test_runs_what_its_training_asks_for(self, runners: Runners, store: Store) -> None:
        """Runners run the rollouts of their own training run, and no others."""
        await _enqueue(store, [{"number": 0}], run_id="another", first=100)
        async with _Started(runners, store, "right"):
            await _enqueue(store, [{"number": number} for number in range(7)])
            states = await _ended(runners, store, 7)
        assert [state.status for state in states] == [RolloutStatus.SUCCEEDED] * 7
        attempts = await store.attempts([state.rollout.rollout_id for state in states])
        assert [attempt.reward.value for attempt in attempts if attempt.reward] == [*range(7)]
        [other] = await store.rollouts(run_id="another")
        assert other.status is RolloutStatus.QUEUED

    async def test_an_app_that_is_not_there(self, runners: Runners, store: Store) -> None:
        with pytest.raises(AppError, match="sample_apps"):
            await runners.start(_plan(store, "no_such_app"))
        await runners.stop()

    async def test_what_is_stopped_is_queued_again(
        self, runners: Runners, store: Store, tmp_path: Path
    ) -> None:
        """A rollout that was running when its runners were stopped is run again after a restart."""
        files = {"begun": str(tmp_path / "begun"), "go": str(tmp_path / "go")}
        async with _Started(runners, store, "waits"):
            await _enqueue(store, [files])
            while not (tmp_path / "begun").exists():
                runners.check()
                await asyncio.sleep(0.02)
        [first, *_] = await store.attempts(["ro-0"])  # another runner may have claimed it since
        assert (first.status, first.outcome) == (AttemptStatus.LOST, Outcome.CANCELLED)
        await runners.stop()
        (tmp_path / "go").touch()
        async with _Started(runners, store, "waits"):
            [state] = await _ended(runners, store, 1)
        assert state.status is RolloutStatus.SUCCEEDED

    async def test_an_app_that_kills_its_process(
        self, runners: Runners, store: Store, tmp_path: Path
    ) -> None:
        """If an app kills its process once, every rollout is still completed.

        If it does so again and again, only its own rollout is lost.
        """
        once = {"number": 1, "died": str(tmp_path / "died")}
        async with _Started(runners, store, "dies_once"):
            await _enqueue(store, [once, *({"number": number} for number in range(2, 5))])
            states = await _ended(runners, store, 4)
        assert {state.status for state in states} == {RolloutStatus.SUCCEEDED}
        async with _Started(runners, store, "dies"):
            tasks = [{"number": 1, "dies": True}, {"number": 2}, {"number": 3}]
            await _enqueue(store, tasks, first=10)
            states = await _ended(runners, store, 7)
        ends = {state.rollout.rollout_id: state.status for state in states}
        assert ends.pop("ro-10") is RolloutStatus.LOST
        assert set(ends.values()) == {RolloutStatus.SUCCEEDED}


class _Started:
    """Context manager that starts the runners for an app, and stops them at the end."""

    def __init__(self, runners: Runners, store: Store, app: str) -> None:
        self._runners = runners
        self._plan = _plan(store, app)

    async def __aenter__(self) -> None:
        await self._runners.start(self._plan)

    async def __aexit__(self, *_: object) -> None:
        await self._runners.stop()


def _plan(store: Store, app: str) -> RunnerPlan:
    return RunnerPlan(
        store_url=store.url, app=f"lightspan_testing.sample_apps:{app}", run_id=RUN, lease_s=LEASE_S
    )


async def _enqueue(
    store: Store, tasks: Sequence[Any], *, run_id: str = RUN, first: int = 0
) -> None:
    await store.enqueue(
        [
            Rollout(
                rollout_id=f"ro-{number}",
                task=task,
                task_id=f"t{number}",
                mode=Mode.VAL,
                run_id=run_id,
            )
            for number, task in enumerate(tasks, first)
        ]
    )


async def _ended(runners: Runners, store: Store, count: int) -> list[RolloutState]:
    """Wait until `count` rollouts have ended; return their states."""
    while True:
        runners.check()
        states = await store.rollouts(run_id=RUN)
        if len(states) == count and all(state.status.final for state in states):
            return states
        await asyncio.sleep(0.02)

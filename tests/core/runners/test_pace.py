"""What time is to an attempt whose neighbours block the loop, or whose process is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.core.runners.misbehaving import (
    HERE,
    TIMEOUT_S,
    apps,
    attempt_of,
    finished,
    reaches,
    rollout,
    runners_of,
    until_lease,
)

from lightspan.runners.app import App
from lightspan.runners.guard import Guard
from lightspan.runners.runner import Runner, RunnerConfig
from lightspan.schema import clock
from lightspan.schema.records import (
    AttemptStatus,
    Outcome,
    RolloutStatus,
)
from lightspan.stores import open_store
from lightspan.stores.event_loop import within
from lightspan.stores.protocol import Store
from lightspan.testing.conditions import until


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        yield store


@asynccontextmanager
async def guarded(store: Store, tmp_path: Path) -> AsyncIterator[tuple[Guard, Runner, list[Any]]]:
    """A guard whose runner has two attempts under way that have a limit of 600 s; why it ended."""
    await store.enqueue(
        [
            rollout(0, "unlimited", tmp_path),
            *(rollout(number, "limited", tmp_path, timeout_s=600) for number in (1, 2)),
        ]
    )
    config, ended = RunnerConfig(guarded=True, grace_s=1.0), []
    runner = Runner(store, App(apps.waits_for_its_neighbours), config)
    async with Guard(runner, store.url, lambda: None, ended.append) as guard:
        working = asyncio.create_task(runner.run())
        await until((tmp_path / "marker-0").exists)
        try:
            yield guard, runner, ended
        finally:
            for number in (1, 2):
                (tmp_path / f"marker-{number}").touch()
            runner.stop()
            await working


def left(runner: Runner) -> dict[str, float]:
    """Rollout → what is left of its limit, roughly."""
    return {
        each.claim.rollout.rollout_id: pytest.approx(each.deadline - runner.pace.now(), abs=20)
        for each in runner.attempts
        if each.deadline is not None
    }


async def test_who_is_given_time(store: Store, tmp_path: Path) -> None:
    """Nobody more than once more its limit, and not who blocked the loop itself."""
    async with guarded(store, tmp_path) as (_, runner, _):
        pace, first = runner.pace, (await attempt_of(store, 1)).attempt_id

        def blocked(seconds: float, *blocking: str) -> dict[str, float]:
            pace.blocking |= set(blocking)
            pace.ticked -= seconds
            pace.catch_up()
            return left(runner)

        assert blocked(0) == {"ro-1": 600, "ro-2": 600}
        assert blocked(200, first) == {"ro-1": 600, "ro-2": 800}
        assert blocked(300, first) == {"ro-1": 600, "ro-2": 1100}
        assert blocked(300) == {"ro-1": 900, "ro-2": 1200}
        attempt = runner.attempt(first)
        assert attempt is not None
        attempt.deadline = pace.now()  # due before the tick, and executed first
        pace.ticked -= 200
        attempt._look_at_limit()
        assert left(runner) == {"ro-1": 200, "ro-2": 1200}


async def test_a_stopped_process_has_no_time(store: Store, tmp_path: Path) -> None:
    """However long, and whichever of its threads goes on first, even for a while; it may be told so
    at any time."""
    async with guarded(store, tmp_path) as (guard, runner, _):
        for ago_s, looked_ago_s in ((0, 5000), (0, 0), (3, 0)):
            now = clock.monotonic()
            runner.pace.ticked -= 4999
            for attempt in runner.attempts:
                if attempt.deadline is not None:
                    attempt.deadline -= 4999
            if not looked_ago_s:
                guard._away = (now - 5000 - ago_s, now - ago_s)
            guard._looked, guard._counted = now - looked_ago_s, -1e6
            os.kill(os.getpid(), signal.SIGCONT)
            os.kill(os.getpid(), signal.SIGCONT)
            assert left(runner) == {"ro-1": 600, "ro-2": 600}
        guard._away, guard._counted = (now - 5010, now - 10), -1e6  # Python's lock was kept, then
        os.kill(os.getpid(), signal.SIGCONT)
        assert left(runner) == {"ro-1": 600, "ro-2": 600}


async def test_a_loop_may_turn_before_it_is_known_that_its_process_was_stopped(
    store: Store, tmp_path: Path
) -> None:
    """Then no time is over yet. What blocks the loop and is told nothing is over a moment later."""
    async with guarded(store, tmp_path) as (guard, runner, _):
        attempts = [each for each in runner.attempts if each.deadline is not None]
        now = clock.monotonic()
        runner.pace.ticked -= 4999
        for attempt in attempts:
            assert attempt.deadline is not None
            attempt.deadline -= 4999
            attempt._look_at_limit()
        await asyncio.sleep(0.1)
        guard._away, guard._counted = (now - 5000, now), -1e6
        os.kill(os.getpid(), signal.SIGCONT)
        assert left(runner) == {"ro-1": 1200, "ro-2": 1200}  # they are given some all the same
        runner.pace.ticked -= 4999
        for attempt in attempts:
            assert attempt.deadline is not None
            attempt.deadline -= 4999
        await reaches(store, RolloutStatus.FAILED, 2)
    assert {(await attempt_of(store, number)).status for number in (1, 2)} == {
        AttemptStatus.TIMEOUT
    }


async def test_who_blocks_the_loop_again_and_again_runs_out_of_time(
    store: Store, tmp_path: Path
) -> None:
    """Each time for so long that the process might have been stopped, but for what is blocking."""
    async with guarded(store, tmp_path) as (_, runner, _):
        attempts = [each for each in runner.attempts if each.deadline is not None]
        for attempt in attempts:
            attempt._given_s = 600  # it gets no more
            attempt.deadline = runner.pace.now() - 1
            attempt._look_again()
        for _ in range(3):
            time.sleep(1.2)
            await asyncio.sleep(0.01)
        assert all(each._limit is None or each._limit.when() for each in attempts)
        await reaches(store, RolloutStatus.FAILED, 2)


async def test_what_a_guard_could_not_see_is_no_block(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept from looking for as long, and looks again before the loop turns."""
    looked, away = threading.Event(), threading.Event()

    async def kept_from_it(*args: Any) -> bool:
        is_over = await within(*args)
        if not is_over and not away.is_set():
            time.sleep(1.5)
            away.set()
            return False
        looked.set()
        return is_over

    async with guarded(store, tmp_path) as (_, runner, ended):
        for attempt in runner.attempts:
            if attempt.deadline is not None:
                attempt.deadline -= 700
        monkeypatch.setattr("lightspan.runners.guard.within", kept_from_it)
        looked.wait()  # blocks the loop
        runner.pace.ticked = runner.pace.now()  # their time is over, and nobody looks at it
        for attempt in runner.attempts:
            attempt.deadline = None
    assert ended == []


@pytest.mark.parametrize("at", [0.0, 4e9])
async def test_an_app_that_freezes_time(store: Store, tmp_path: Path, at: float) -> None:
    """Leases and limits go on; neither are they over at once, nor never."""
    first = rollout(0, "freezes", tmp_path, timeout_s=600)
    first.task["at"] = at
    await store.enqueue([first, rollout(1, "neighbour", tmp_path, timeout_s=600)])
    async with runners_of(store, "freezes_time", lease_s=2) as runners:
        await until((tmp_path / "marker-0").exists)
        await store.enqueue([rollout(2, "too long", tmp_path, timeout_s=TIMEOUT_S)])
        await reaches(store, RolloutStatus.FAILED)
        before = (await attempt_of(store, 1)).lease_until
        await until_lease(store, 1, before + 0.5)
        assert await store.expire() == 0
        for number in (1, 2):
            (tmp_path / f"marker-{number}").touch()
        states = await finished(store, runners)
    succeeded, failed = RolloutStatus.SUCCEEDED, RolloutStatus.FAILED
    assert [state.status for state in states] == [succeeded, succeeded, failed]
    assert (await attempt_of(store, 2)).outcome is Outcome.TIMEOUT


STOPPABLE = """
import asyncio, sys
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan

async def main(url, folder):
    runners = LocalRunners(3)
    app = "misbehaving_apps:waits_for_its_neighbours"
    await runners.start(RunnerPlan(store_url=url, app=app, sys_path=[folder], lease_s=3.0))
    print(runners.pids, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    runners.check()
    print(runners.pids, flush=True)
    await runners.stop()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_ctrl_z_ends_no_process(store: Store, tmp_path: Path) -> None:
    """All were stopped for longer than a process may say nothing, and more than twice the limit of
    an attempt; then all go on."""
    both = [rollout(number, "limited", tmp_path, timeout_s=8) for number in (1, 2)]
    await store.enqueue([rollout(0, "unlimited", tmp_path), *both])
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STOPPABLE, store.url, str(HERE)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        before = await program.stdout.readline()
        await until((tmp_path / "marker-0").exists)
        [runner] = json.loads(before)
        for pid in (runner, program.pid):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.5)  # what the one said last has been heard by the other
        await asyncio.sleep(17)  # a silence of 5 s is too long
        for pid in (program.pid, runner):
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.5)
        stopped = (await attempt_of(store, 0)).lease_until
        await until_lease(store, 0, stopped + 1)  # it goes on
        for number in (1, 2):
            (tmp_path / f"marker-{number}").touch()
        states = await finished(store)
        attempts = await store.attempts([state.rollout.rollout_id for state in states])
        told = [attempt.message for attempt in attempts]
        assert [state.status for state in states] == [RolloutStatus.SUCCEEDED] * 3, told
        program.stdin.write(b"\n")
        assert await program.stdout.readline() == before
        assert await program.wait() == 0
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()

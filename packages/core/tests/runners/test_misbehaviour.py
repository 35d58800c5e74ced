"""Test that apps that block, hang or kill their process lose only their own attempt."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightspan.runners.app import App
from lightspan.runners.loop_watchdog import LoopWatchdog
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import Runner
from lightspan.runners.timings import RunnerTimings
from lightspan.schema.records import AttemptStatus, Outcome, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.schema.spans import SpanStatus
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_testing.wait import until
from packages.core.tests.runners.runs import (
    TIMEOUT_S,
    attempt_of,
    misbehaving_apps,
    reaches,
    rollout,
    runners_of,
    until_lease,
    where,
)
from packages.core.tests.runners.test_local import finished


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        yield store


# --- what is left behind -------------------------------------------------------------------------
async def test_what_is_left_behind_blocks_no_later_rollout(store: Store, tmp_path: Path) -> None:
    first = rollout(0, "leaves", tmp_path, timeout_s=600)
    await store.enqueue([first])
    async with runners_of(store, "leaves_a_block") as runners:
        await finished(store, runners)
        pids = runners.pids
        reported = tmp_path / "marker-0-reported"
        reported.touch()
        await until(lambda: not reported.exists())
        await store.enqueue([rollout(1, "later", tmp_path, timeout_s=600)])
        states = await finished(store, runners)
        assert runners.pids != pids
    assert [(state.status, state.infrastructure_tries) for state in states] == [
        (RolloutStatus.SUCCEEDED, 0)
    ] * 2


# --- event loops ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "sources", "function"),
    [
        ("in a callback", ["time.sleep(603)"], "calls_back"),
        ("in a loop", ["while True:", "number += 1"], "spins"),
    ],
)
async def test_an_app_that_blocks_its_loop(
    store: Store, tmp_path: Path, kind: str, sources: list[str], function: str
) -> None:
    """Check that the app times out, and the other attempts are repeated without using up a try."""
    neighbours = [rollout(number, "neighbour", tmp_path, timeout_s=600) for number in (1, 2)]
    await store.enqueue([rollout(0, kind, tmp_path, timeout_s=TIMEOUT_S), *neighbours])
    async with runners_of(store, "blocks") as runners:
        first = runners.pids
        states = await finished(store, runners)
        assert runners.pids != first
    failed, succeeded = RolloutStatus.FAILED, RolloutStatus.SUCCEEDED
    assert [(state.status, state.infrastructure_tries) for state in states] == [
        (failed, 0),
        (succeeded, 0),
        (succeeded, 0),
    ]
    guilty = await attempt_of(store, 0)
    assert (guilty.status, guilty.outcome) == (AttemptStatus.TIMEOUT, Outcome.TIMEOUT)
    assert guilty.message in [
        f"the app ran longer than 1 s and blocked its event loop: {where(source, function)}"
        for source in sources
    ]
    spans = (await store.spans([guilty.attempt_id]))[guilty.attempt_id]
    assert [(span.name, span.status, span.status_message) for span in spans] == [
        ("attempt", SpanStatus.ERROR, guilty.message)
    ]
    for number in (1, 2):
        stopped, done = await store.attempts([f"ro-{number}"])
        assert (stopped.status, stopped.outcome) == (AttemptStatus.LOST, Outcome.CANCELLED)
        assert stopped.message.startswith("stopped: another attempt blocked the event loop: ")
        assert done.reward == Reward(1.0)


async def test_an_app_that_blocks_its_loop_in_its_own_environment(
    store: Store, tmp_path: Path, app_python: Path
) -> None:
    (tmp_path / "marker-1").touch()
    (tmp_path / "marker-2").touch()
    await store.enqueue([rollout(0, "at once", tmp_path, timeout_s=TIMEOUT_S)])
    async with runners_of(store, "blocks", python=app_python) as runners:
        await finished(store, runners)
    place = where("time.sleep(601)", "blocks")
    assert (await attempt_of(store, 0)).message == (
        f"the app ran longer than 1 s and blocked its event loop: {place}"
    )


async def test_leases_are_kept_while_the_loop_is_blocked(store: Store, tmp_path: Path) -> None:
    await store.enqueue([rollout(0, "alone", tmp_path)])
    async with runners_of(store, "blocks_for_a_while", lease_s=0.9) as runners:
        await until((tmp_path / "marker-0").exists)
        before = (await attempt_of(store, 0)).lease_until
        while (await attempt_of(store, 0)).lease_until < before + 1:  # longer than a lease
            assert await store.expire() == 0
            await asyncio.sleep(0.05)
        for number in (1, 2):
            (tmp_path / f"marker-{number}").touch()
        [state] = await finished(store, runners)
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.SUCCEEDED, 0)
    assert (await attempt_of(store, 0)).reward == Reward(1.0)


async def test_an_app_that_goes_on_when_it_is_cancelled(store: Store, tmp_path: Path) -> None:
    """Check that other attempts end in the same process, and later ones run in another."""
    await store.enqueue(
        [
            rollout(0, "swallows", tmp_path, timeout_s=TIMEOUT_S),
            rollout(1, "neighbour", tmp_path),
        ]
    )
    async with runners_of(store, "goes_on", slots=2) as runners:
        [first] = runners.pids
        await reaches(store, RolloutStatus.FAILED)
        await store.enqueue([rollout(3, "neighbour", tmp_path)])
        for number in (1, 2):
            (tmp_path / f"marker-{number}").touch()
        await finished(store, runners)
        [second] = runners.pids
    guilty, neighbour, after = [await attempt_of(store, number) for number in (0, 1, 3)]
    assert (guilty.status, guilty.outcome) == (AttemptStatus.TIMEOUT, Outcome.TIMEOUT)
    assert guilty.message == (
        "the app ran longer than 1 s and went on when it was cancelled: "
        + where("await asyncio.sleep(3600)", "goes_on")
    )
    assert (neighbour.reward, after.reward) == (Reward(float(first)), Reward(float(second)))
    assert first != second


async def test_who_blocks_the_loop_without_a_limit_is_named(
    store: Store,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Check that the app is named in one warning, because it has no time limit."""
    looks, ended = 0, []

    def beat() -> None:
        nonlocal looks
        looks += bool(caplog.records)
        if looks == 4:  # checked again without another warning
            (tmp_path / "marker-1").touch()
            (tmp_path / "marker-2").touch()

    await store.enqueue([rollout(0, "alone", tmp_path)])
    timings = RunnerTimings(blocked_warning_s=0.2)
    config = RunnerConfig(slots=1, grace_s=0.1, has_watchdog=True, timings=timings)
    runner = Runner(store, App(misbehaving_apps.blocks_for_a_while), config)
    async with LoopWatchdog(runner, store.url, beat, ended.append):
        working = asyncio.create_task(runner.run())
        await reaches(store, RolloutStatus.SUCCEEDED)
        runner.stop()
        await working
    attempt = await attempt_of(store, 0)
    assert [record.getMessage() for record in caplog.records] == [
        f"attempt {attempt.attempt_id} has blocked its event loop for 0.2 s: "
        + where("time.sleep(0.01)", "blocks_for_a_while")
        + ". 0 others wait for it: await there instead, or make the app a plain function (`def`), "
        "which gets a thread"
    ]
    assert ended == []


async def test_who_goes_on_after_a_block_is_not_named(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the time for which another attempt blocked the loop does not count."""
    looks = 0

    def beat() -> None:
        nonlocal looks
        if caplog.records:
            (tmp_path / "marker-0-done").touch()
        looks += (tmp_path / "marker-1").exists()
        if looks == 2:  # checked once in the second attempt's code
            (tmp_path / "marker-1-done").touch()

    await store.enqueue([rollout(0, "first", tmp_path), rollout(1, "second", tmp_path)])
    timings = RunnerTimings(blocked_warning_s=1.5)
    config = RunnerConfig(slots=2, grace_s=0.1, has_watchdog=True, timings=timings)
    runner = Runner(store, App(misbehaving_apps.blocks_in_turn), config)
    async with LoopWatchdog(runner, store.url, beat, print):
        working = asyncio.create_task(runner.run())
        await reaches(store, RolloutStatus.SUCCEEDED, 2)
        runner.stop()
        await working
    first = await attempt_of(store, 0)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"attempt {first.attempt_id} has blocked its event loop for 1.5 s: ")


@pytest.mark.parametrize("at", [0.0, 4e9])
async def test_an_app_that_freezes_time(store: Store, tmp_path: Path, at: float) -> None:
    """Check that leases and time limits still follow the real clock."""
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


# --- processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("app", "kind", "how"),
    [
        ("crashes", "crashes", "died by signal 11 (SIGSEGV)"),
        ("crashes", "is killed", "died by signal 9 (SIGKILL)"),
        ("crashes", "exits as if stuck", "ended with exit code 3"),
        (
            "keeps_the_lock",
            "keeps",
            "sent no heartbeat for 5 s (was the GIL held?) and was ended",
        ),
    ],
)
async def test_a_task_that_ends_its_process(
    store: Store, tmp_path: Path, app: str, kind: str, how: str
) -> None:
    """Check that the attempts of the process are run again, each alone.

    Only the rollout that ends its process uses up tries.
    """
    others = [rollout(number, "neighbour", tmp_path, timeout_s=600) for number in (1, 2)]
    await store.enqueue([rollout(0, kind, tmp_path, max_infrastructure_tries=1), *others])
    async with runners_of(store, app, lease_s=3.0) as runners:
        states = await finished(store, runners)
    lost, succeeded = RolloutStatus.LOST, RolloutStatus.SUCCEEDED
    results = [(state.status, state.infrastructure_tries) for state in states]
    assert results == [(lost, 1), (succeeded, 0), (succeeded, 0)]
    shared = f"it is run again, alone, because it ran with 2 others when the runner's process {how}"
    guilty = await store.attempts(["ro-0"])
    assert [re.sub(r"\d+ s,", "5 s,", each.message) for each in guilty] == [
        shared,
        f"only this attempt ran (rollout ro-0, task t0) when the runner's process {how}",
    ]
    for number in (1, 2):
        first, second = await store.attempts([f"ro-{number}"])
        assert (re.sub(r"\d+ s,", "5 s,", first.message), second.message) == (shared, "")
        assert len({first.runner_id, second.runner_id, *(one.runner_id for one in guilty)}) == 3


@pytest.mark.parametrize("kind", list(misbehaving_apps.HARMLESS))
async def test_what_does_no_harm(store: Store, tmp_path: Path, kind: str) -> None:
    """Check that all attempts end in the same process, each once."""
    kinds = [kind, "neighbour", "neighbour", "after"]
    tasks = [rollout(number, each, tmp_path) for number, each in enumerate(kinds)]
    for each in tasks:
        each.task["done"] = str(tmp_path / "done")
    await store.enqueue(tasks)
    async with runners_of(store, "harms") as runners:
        states = await finished(store, runners)
        [pid] = runners.pids
    assert {state.status for state in states} == {RolloutStatus.SUCCEEDED}
    for number in range(4):
        assert (await attempt_of(store, number)).reward == Reward(float(pid))


# --- the end --------------------------------------------------------------------------------
async def test_an_attempt_that_is_stopped_before_its_app_began_is_given_back(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = asyncio.Event()

    async def never(*_: Any) -> Any:
        reading.set()
        await asyncio.sleep(3600)

    await store.enqueue([rollout(0, "never", tmp_path)])
    runner = Runner(store, App(misbehaving_apps.waits_once))
    monkeypatch.setattr(runner, "resources_of", never)
    working = asyncio.create_task(runner.run())
    await reading.wait()
    runner.abort()
    await working
    [state] = await store.rollouts()
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.QUEUED, 0)
    attempt = await attempt_of(store, 0)
    assert (attempt.status, attempt.outcome) == (AttemptStatus.LOST, Outcome.CANCELLED)


async def test_a_blocked_process_without_a_parent_ends(store: Store, tmp_path: Path) -> None:
    """Its event loop reads no command, so it is ended after `orphan_timeout_s`."""
    await store.enqueue([rollout(0, "alone", tmp_path, timeout_s=600)])
    timings = RunnerTimings(orphan_timeout_s=0.1, exit_timeout_s=600.0)
    async with runners_of(store, "blocks_for_a_while", timings=timings) as runners:
        await until((tmp_path / "marker-0").exists)
        [worker] = runners._workers
        worker.parent_pipe.close()
        process = psutil.Process(worker.process.pid)
        await asyncio.to_thread(process.wait, 6)

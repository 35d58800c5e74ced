"""Test runner processes: their start, work, replacement and end."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from lightspan.errors import ConfigError, LightspanError, StoreError
from lightspan.runners import local, process_main
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan, Runners
from lightspan.runners.timings import RunnerTimings
from lightspan.schema.records import (
    AttemptStatus,
    Mode,
    Outcome,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.schema.reward import Reward
from lightspan.schema.routing import Routing
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_testing.runners_suite import RunnersSuite
from lightspan_testing.wait import until

HERE = str(Path(__file__).parent)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        yield store


def plan(store: Store, app: str, **fields: Any) -> RunnerPlan:
    return RunnerPlan(store_url=store.url, app=app, sys_path=[HERE], **fields)


async def enqueue(store: Store, tasks: list[Any], first: int = 0, **fields: Any) -> None:
    await store.enqueue(
        [
            Rollout(rollout_id=f"ro-{n}", task=task, task_id=f"t{n}", mode=Mode.VAL, **fields)
            for n, task in enumerate(tasks, first)
        ]
    )


def plan_of_source(store: Store, folder: Path, source: str, **fields: Any) -> RunnerPlan:
    """Return a plan whose app `answer` is in a module that begins with `source`.

    `SEEN` in the source is replaced by the path of a file.
    """
    code = source.replace("SEEN", repr(str(folder / "seen")))
    (folder / "app_of_test.py").write_text(f"{code}def answer(task):\n    return 1.0\n")
    paths = [HERE, str(folder)]
    return RunnerPlan(store_url=store.url, app="app_of_test:answer", sys_path=paths, **fields)


async def test_a_start_that_is_given_up_leaves_no_process(store: Store, tmp_path: Path) -> None:
    """Cancel the start while the app's import never ends."""
    source = "import os, time\nopen(SEEN, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    runners, marker = LocalRunners(1), tmp_path / "seen"
    starting = asyncio.create_task(runners.start(plan_of_source(store, tmp_path, source)))
    await until(lambda: marker.exists() and marker.read_text() != "")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not Path(f"/proc/{marker.read_text()}").exists())
    await runners.stop()


async def test_runners_that_are_stopped_while_one_is_replaced_leave_no_process(
    store: Store, tmp_path: Path
) -> None:
    """Stop the runners while the import of the app in a replaced process never ends."""
    source = (
        "import os, pathlib, time\n"
        "seen = pathlib.Path(SEEN)\n"
        "if seen.exists():\n"
        "    seen.write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "seen.touch()\n"
    )
    runners, marker = LocalRunners(1), tmp_path / "seen"
    await runners.start(plan_of_source(store, tmp_path, source))
    os.kill(runners.pids[0], signal.SIGKILL)
    await until(marker.read_text)
    await runners.stop()
    assert not Path(f"/proc/{marker.read_text()}").exists()


async def test_pools_of_processes_end_with_their_runner(store: Store, tmp_path: Path) -> None:
    """Check the platform's default start method of pools."""
    marker = tmp_path / "marker"
    await enqueue(store, [{"marker": str(marker)}])
    async with started(LocalRunners(1), plan(store, "runner_apps:keeps_a_pool")) as runners:
        await finished(store, runners)
        method, pids = json.loads(marker.read_text())
        workers = [psutil.Process(pid) for pid in pids]
        await runners.stop()
        await until(lambda: not any(map(is_alive, workers)))
    assert len(workers) == 2
    assert method == multiprocessing.get_start_method()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def finished(store: Store, runners: LocalRunners) -> list[RolloutState]:
    while True:
        states = await store.rollouts()
        if all(state.status.final for state in states):
            return states
        runners.check()
        await asyncio.sleep(0.02)


@asynccontextmanager
async def started(runners: LocalRunners, plan: RunnerPlan) -> AsyncIterator[LocalRunners]:
    assert isinstance(runners, Runners)
    await runners.start(plan)
    try:
        yield runners
    finally:
        await runners.stop()
        await runners.stop()


@pytest.mark.parametrize(("slots", "processes"), [(8, 1), (5, 2)])
async def test_processes_share_the_work(store: Store, slots: int, processes: int) -> None:
    await enqueue(store, [{"seconds": 0.01}] * 30)
    runners_of_test = LocalRunners(slots, processes=processes)
    async with started(runners_of_test, plan(store, "runner_apps:sleeps")) as runners:
        pids = runners.pids
        states = await finished(store, runners)
    assert {state.status for state in states} == {RolloutStatus.SUCCEEDED}
    assert len(pids) == processes
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_every_attempt_its_process(store: Store) -> None:
    """Check that the call token is in the environment, and that child processes are allowed."""
    resources = await store.put_resources({"routing": Routing(gateway_url="http://127.0.0.1:9")})
    await enqueue(store, [{}, {}], resources_id=resources)
    runners_of_test = LocalRunners(2, isolation="process")
    async with started(runners_of_test, plan(store, "runner_apps:shows_environment")) as runners:
        assert len(runners.pids) == 2
        await finished(store, runners)
    attempts = await store.attempts(["ro-0", "ro-1"])
    assert [(attempt.message, attempt.status) for attempt in attempts] == [
        ("", AttemptStatus.SUCCEEDED)
    ] * 2


async def test_a_stuck_process_is_replaced(store: Store) -> None:
    """Check that a sync app that never returns ends its process repeatedly, but not the run."""
    await enqueue(store, [{"seconds": 600}] * 2, timeout_s=0.3)
    await enqueue(store, [{"seconds": 0}], first=2)
    async with started(LocalRunners(1), plan(store, "runner_apps:sleeps")) as runners:
        first = runners.pids
        states = await finished(store, runners)
        assert runners.pids != first
    failed, succeeded = RolloutStatus.FAILED, RolloutStatus.SUCCEEDED
    assert [state.status for state in states] == [failed, failed, succeeded]
    attempts = await store.attempts(["ro-0", "ro-1"])
    assert [attempt.outcome for attempt in attempts] == [Outcome.TIMEOUT] * 2


async def test_a_store_that_is_away_when_a_process_dies_ends_no_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the attempt of the dead process ends with its lease."""

    async def away(*args: Any) -> Any:
        raise StoreError("the store cannot be reached")

    monkeypatch.setattr(local, "requeue_attempts", away)
    await enqueue(store, [{"marker": str(tmp_path / "died")}])
    app_plan = plan(store, "runner_apps:kills_itself", lease_s=1.0)
    async with started(LocalRunners(1), app_plan) as runners:
        while (await store.count()) != {RolloutStatus.SUCCEEDED: 1}:
            runners.check()
            await store.expire()
            await asyncio.sleep(0.01)
    first, done = await store.attempts(["ro-0"])
    assert (first.status, done.reward) == (AttemptStatus.LOST, Reward(1.0))
    assert "end with their leases: the store cannot be reached" in caplog.text


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
async def test_an_app_whose_own_task_ends_the_program(store: Store, kind: str) -> None:
    """Check that the attempt fails at once, and that other attempts and the process continue."""
    await enqueue(store, [{"kind": "none"}, {"kind": kind}, {"kind": "none"}])
    app = "runner_apps:ends_in_a_task_of_its_own"
    async with started(LocalRunners(2), plan(store, app)) as runners:
        states = await finished(store, runners)
        [pid] = runners.pids
    succeeded, failed = RolloutStatus.SUCCEEDED, RolloutStatus.FAILED
    assert [state.status for state in states] == [succeeded, failed, succeeded]
    before, ended, after = await store.attempts(["ro-0", "ro-1", "ro-2"])
    assert (before.reward, after.reward) == (Reward(float(pid)), Reward(float(pid)))
    assert (ended.outcome, ended.message) == (Outcome.APP_ERROR, f"{kind}: by the app")


async def test_processes_that_keep_dying(store: Store, tmp_path: Path) -> None:
    """Check processes that die before they claim anything: the app itself cannot start."""
    timings = RunnerTimings(max_quick_deaths=2, quick_death_s=600.0)
    source = (
        "import os, threading, time\n"
        "def die():\n"
        "    while not any(one.name == 'lightspan-watchdog' for one in threading.enumerate()):\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), 9)\n"
        "threading.Thread(target=die, daemon=True).start()\n"
    )
    message = (
        r"died 2 times within 600 s of starting, before they ran anything \(the last one died by "
        r"signal 9 \(SIGKILL\)\); run the app alone to see why"
    )
    await enqueue(store, [{}], run_id="another")
    dying_plan = plan_of_source(store, tmp_path, source, run_id="mine", timings=timings)
    async with started(LocalRunners(1), dying_plan) as runners:
        with pytest.raises(LightspanError, match=message):
            await finished(store, runners)


async def test_a_task_that_kills_its_process_ends_no_run(store: Store) -> None:
    """Check that the rollout is lost after its tries, and that later ones are run."""
    timings = RunnerTimings(max_quick_deaths=2)
    await enqueue(store, [{"dies": True}], max_infrastructure_tries=3)
    await enqueue(store, [{"dies": False}], first=1)
    async with started(
        LocalRunners(1), plan(store, "runner_apps:dies", timings=timings)
    ) as runners:
        states = await finished(store, runners)
    assert [(state.status, state.infrastructure_tries) for state in states] == [
        (RolloutStatus.LOST, 3),
        (RolloutStatus.SUCCEEDED, 0),
    ]


async def test_the_last_status_waits_while_the_pipe_is_full() -> None:
    """Check that a parent that was busy for minutes gets the final counts."""
    ours, theirs = multiprocessing.Pipe()
    parent = process_main._Parent(theirs, RunnerTimings(orphan_timeout_s=1e6))
    for _ in range(5_000):
        parent.report()
    last = asyncio.create_task(asyncio.to_thread(parent.report, "it is the last", "", 60.0))
    leaves = ""
    while not leaves:
        status = await asyncio.to_thread(ours.recv_bytes)
        leaves = msgspec.json.decode(status, type=process_main.WorkerStatus).leaves
    await last
    assert leaves == "it is the last"


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="slots=0 must be at least 1"):
        LocalRunners(0)
    with pytest.raises(ConfigError, match="slots='8' must be a whole number"):
        LocalRunners("8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"processes=2\.5 must be a whole number"):
        LocalRunners(2, processes=2.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="isolation='cage': use one of 'thread', 'process'"):
        LocalRunners(1, isolation="cage")


class TestLocal(RunnersSuite):
    @pytest.fixture
    def runners(self) -> Runners:
        return LocalRunners(4, processes=2)

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:  # type: ignore[override]
        async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
            yield store

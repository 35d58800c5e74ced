"""Test Ctrl-C: the first closes the run, the second ends the process; no child process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import Mode, Rollout, RolloutStatus
from lightspan.stores import open_store
from lightspan.stores.aio import run_sync
from lightspan_testing.wait import until
from packages.core.tests.runners.test_local import is_alive

HERE = str(Path(__file__).parent)
Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a function that starts a script with its output piped; kill the scripts at the end."""
    begun: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        begun.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def until_line(process: subprocess.Popen[str], word: str) -> None:
    """Read lines of output until one begins with `word`."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(word):
            return
    pytest.fail("\n".join(lines))


async def interrupted(events: list[str]) -> None:
    """Interrupt this process, and append "closed" to `events` when the task is cancelled."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(0)
        events.append("closed")


@pytest.mark.parametrize("where", ["script", "notebook"])
def test_a_first_one_closes_and_changes_no_handler(where: str) -> None:
    """Check a script and a notebook, whose event loop must survive."""
    events: list[str] = []

    def in_script() -> None:
        run_sync(interrupted(events))

    async def cell() -> None:
        in_script()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            loop.run_until_complete(cell()) if where == "notebook" else in_script()
        assert raised.value.__context__ is None
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        loop.close()
        signal.signal(signal.SIGINT, before)
    assert events == ["closed"]


CLOSING = """
import asyncio, time
from lightspan.stores.aio import run_sync

async def work():
    try:
        print("working", flush=True)
        await asyncio.sleep(1000)
    finally:
        print("closing", flush=True)
        await WAIT

run_sync(work())
"""


@pytest.mark.parametrize("ignored", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_sigterm_closes_too(run: Run, ignored: str) -> None:
    """Check that a service manager's SIGTERM ends a process like Ctrl-C, nohup or not."""
    wait = 'asyncio.sleep(0.01); print("closed", flush=True)'
    script = CLOSING.replace("WAIT", wait).replace("import asyncio, time", "import asyncio, signal")
    process = run(script.replace("\nrun_sync", f"\n{ignored}\nrun_sync"))
    until_line(process, "working")
    process.send_signal(signal.SIGTERM)
    until_line(process, "closed")
    rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("wait", ["asyncio.sleep(1000)", "asyncio.to_thread(time.sleep, 1000)"])
def test_a_second_one_ends_what_does_not_close(run: Run, wait: str) -> None:
    """Check that a second Ctrl-C ends a process that waits for a thread without an end."""
    process = run(CLOSING.replace("WAIT", wait))
    until_line(process, "working")
    process.send_signal(signal.SIGINT)
    until_line(process, "closing")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT  # 130 in a shell


RUNNERS = """
import asyncio, sys
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.stores.aio import run_sync

async def work(url, app, here):
    runners = LocalRunners(1)
    try:
        await runners.start(RunnerPlan(store_url=url, app=app, sys_path=[here], run_id="run"))
        print("working", flush=True)
        await asyncio.sleep(1000)
    finally:
        print("closing", flush=True)
        await runners.stop()

if __name__ == "__main__":
    run_sync(work(*sys.argv[1:4]))
"""


async def _enqueue(url: str, task: dict[str, Any]) -> None:
    rollout = Rollout(rollout_id="ro", task=task, task_id="t", mode=Mode.VAL, run_id="run")
    async with open_store(url) as store:
        await store.enqueue([rollout])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize(
    ("kind", "times"), [("sleeps", 2), ("keeps Python's lock", 1), ("runs a program", 2)]
)
def test_no_process_is_left_whatever_an_app_does(
    run: Run, tmp_path: Path, kind: str, times: int
) -> None:
    url, note = f"sqlite:///{tmp_path}/run.db", tmp_path / "note"
    asyncio.run(_enqueue(url, {"kind": kind, "note": str(note)}))
    process = run(RUNNERS, url, "misbehaving_apps:never_ends", HERE)
    until_line(process, "working")
    asyncio.run(until(note.exists))
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == (
        3 if kind == "runs a program" else 2
    )  # including multiprocessing's resource tracker
    process.send_signal(signal.SIGINT)
    until_line(process, "closing")
    if times == 2:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive


async def test_who_is_cancelled_while_it_stops_has_told_its_processes(tmp_path: Path) -> None:
    """Check that the runner processes end although `stop` is cancelled.

    Otherwise they would lose one rollout after another without a gateway.
    """
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        runners = LocalRunners(1)
        plan = RunnerPlan(store_url=store.url, app="runner_apps:returns", sys_path=[HERE])
        await runners.start(plan)
        processes = [psutil.Process(pid) for pid in runners.pids]
        stopping = asyncio.create_task(runners.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        try:
            await until(lambda: not any(map(is_alive, processes)))
        finally:
            await runners.stop()
        assert await store.count() == dict[RolloutStatus, int]()

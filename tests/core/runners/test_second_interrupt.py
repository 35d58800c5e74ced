"""A second Ctrl-C ends everything within seconds, whatever is waited for; a first one closes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import Mode, Rollout, RolloutStatus
from lightspan.stores import open_store
from lightspan.stores.event_loop import at_second_interrupt, run_sync
from lightspan.testing.conditions import until

HERE = str(Path(__file__).parent)

CLOSING = """
import asyncio, sys, threading
from lightspan.stores.event_loop import run_sync

def waits():
    print("closing", flush=True)
    threading.Event().wait()

async def in_the_loop():
    waits()

async def in_a_thread():
    await asyncio.to_thread(waits)

async def swallows():
    asyncio.get_running_loop().call_later(0.1, lambda: print("closing", flush=True))
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def work(close):
    try:
        print("working", flush=True)
        await asyncio.sleep(1000)
    finally:
        await close()

run_sync(work(globals()[sys.argv[1]]))
"""


Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Starts a script, to be read."""
    begun: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        pipe = subprocess.PIPE
        begun.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str], word: str) -> list[str]:
    """The lines that it prints up to this word."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(word):
            return lines
    pytest.fail("\n".join(lines))


def ended(process: subprocess.Popen[str]) -> str:
    """What else it prints, once a second Ctrl-C has ended it."""
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate()
    assert process.returncode == -signal.SIGINT  # 130, as a shell has it
    return rest


@pytest.mark.parametrize("close", ["in_the_loop", "in_a_thread", "swallows"])
def test_it_ends_a_process_that_does_not_close(run: Run, close: str) -> None:
    process = run(CLOSING, close)
    said(process, "working")
    process.send_signal(signal.SIGINT)
    said(process, "closing")
    ended(process)


UNDISTURBED = """
import asyncio, sys
from lightspan.stores import event_loop

event_loop.END_S = 600.0

def waits_for_a_line():
    print("closing", flush=True)
    sys.stdin.readline()

async def work():
    try:
        print("working", flush=True)
        await asyncio.sleep(1000)
    finally:
        await asyncio.to_thread(waits_for_a_line)
        print("closed", flush=True)

try:
    event_loop.run_sync(work())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_closing_that_is_under_way_is_not_disturbed(run: Run) -> None:
    """Neither cancelled again nor interrupted between two lines: asyncio did both."""
    process = run(UNDISTURBED)
    said(process, "working")
    process.send_signal(signal.SIGINT)
    said(process, "closing")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate("go on\n")
    assert rest.splitlines() == ["closed", "interrupted"]
    assert process.returncode == 0


UNSEEN = """
import asyncio, signal, sys, threading, time
from lightspan.stores import event_loop

def interrupt():
    # taken by this thread, it interrupts no system call of the main one
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

def interrupt_soon():
    time.sleep(0.5)
    interrupt()

async def work():
    threading.Thread(target=interrupt_soon).start()
    try:
        await asyncio.sleep(1000)
    finally:
        print("closed", flush=True)

async def inside():
    event_loop.run_sync(work())

try:
    if sys.argv[1] == "notebook":
        asyncio.new_event_loop().run_until_complete(inside())
    else:
        event_loop.run_sync(work())
except KeyboardInterrupt:
    print("interrupted")
print(signal.set_wakeup_fd(-1))
"""


@pytest.mark.parametrize("where", ["script", "notebook"])
def test_one_that_comes_just_before_falling_asleep_is_seen(run: Run, where: str) -> None:
    process = run(UNSEEN, where)
    rest, _ = process.communicate(timeout=60)
    assert rest.splitlines() == ["closed", "interrupted", "-1"]
    assert process.returncode == 0


def test_a_first_one_leaves_the_second_as_it_was() -> None:
    """After the work, Ctrl-C does what it did before."""

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(1000)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            run_sync(work())
        assert raised.value.__context__ is None
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_a_notebook_the_cell_ends_and_the_kernel_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan.stores.event_loop.END_S", 0.1)
    closing, go = threading.Event(), threading.Event()
    told: list[float] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(1000)
        finally:
            closing.set()
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
            go.wait()

    async def cell() -> None:
        with at_second_interrupt(told.append):
            run_sync(work())

    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        go.set()
        loop.close()
    assert closing.is_set()
    assert len(told) == 1


RUNNERS = """
import asyncio, sys
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.stores.event_loop import run_sync

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
@pytest.mark.parametrize("kind", ["sleeps", "keeps Python's lock", "runs a program"])
def test_no_process_is_left_whatever_an_app_does(run: Run, tmp_path: Path, kind: str) -> None:
    url, note = f"sqlite:///{tmp_path}/run.db", tmp_path / "note"
    asyncio.run(_enqueue(url, {"kind": kind, "note": str(note)}))
    process = run(RUNNERS, url, "misbehaving_apps:never_ends", HERE)
    said(process, "working")
    asyncio.run(until(note.exists))
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == (3 if kind == "runs a program" else 2)  # with multiprocessing's tracker
    process.send_signal(signal.SIGINT)
    said(process, "closing")
    ended(process)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)  # nobody has asked how it ended
    except psutil.NoSuchProcess:
        return True


async def test_who_is_cancelled_while_it_stops_has_told_its_processes(tmp_path: Path) -> None:
    """A closing that was cancelled closed the gateway and left the runners at work, which lost one
    rollout after another."""
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
            await until(lambda: all(map(_has_ended, processes)))
        finally:
            await runners.stop()
        assert await store.count() == dict[RolloutStatus, int]()

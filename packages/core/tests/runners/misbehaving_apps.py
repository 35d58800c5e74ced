"""Apps that harm their process, if their task says so."""

from __future__ import annotations

import asyncio
import ctypes
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightspan_testing.wait import until


async def blocks(task: dict[str, Any]) -> float:
    """Block the event loop after the two other attempts have started."""
    if task["kind"] == "neighbour":
        return await waits_once(task)
    await wait_for_files(*task["when"])
    if task["kind"] == "in a callback":
        asyncio.get_running_loop().call_soon(calls_back)
        await asyncio.sleep(600)
    if task["kind"] == "in a loop":
        spins()
    time.sleep(601)
    return 0.0


async def leaves_a_block(task: dict[str, Any]) -> float:
    """Leave a task that blocks the event loop after the attempt has ended."""
    marker = Path(task["marker"])
    if task["kind"] == "leaves":
        marker.touch()
        LEFT.append(asyncio.create_task(blocks_when_alone(Path(f"{marker}-reported"))))
    return 1.0


LEFT: list[asyncio.Task[None]] = []


async def blocks_when_alone(reported: Path) -> None:
    await until(reported.exists)
    reported.rename(f"{reported}-seen")
    time.sleep(605)


def calls_back() -> None:
    time.sleep(603)


def spins() -> None:
    number = 0
    while True:
        number += 1


async def keeps_the_lock(task: dict[str, Any]) -> float:
    """Run C code that never releases the GIL, after the two other attempts have started."""
    if task["kind"] == "neighbour":
        return await waits_once(task)
    await wait_for_files(*task["when"])
    deque(itertools.count(), maxlen=0)
    return 0.0


def never_ends(task: dict[str, Any]) -> float:
    """Create the file `task["note"]`, and never return."""
    if task["kind"] == "runs a program":
        program = subprocess.Popen(["sleep", "1000"])
        Path(task["note"]).touch()
        program.wait()
    Path(task["note"]).touch()
    if task["kind"] == "keeps Python's lock":
        ctypes.PyDLL(None).usleep(1_000_000_000)
    time.sleep(1000)
    return 0.0


async def waits_once(task: dict[str, Any]) -> float:
    """Wait until the process is killed; the next attempt of the same task returns at once."""
    marker = Path(task["marker"])
    if marker.exists():
        return 1.0
    marker.touch()
    await asyncio.sleep(600)
    return 0.0


async def wait_for_files(*paths: str) -> None:
    await until(lambda: all(map(os.path.exists, paths)))


async def goes_on(task: dict[str, Any]) -> float:
    """Ignore every cancellation, or wait for files and return the process id, as `kind` says."""
    while task["kind"] == "swallows":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            Path(task["marker"]).touch()
    await wait_for_files(*task["when"])
    return float(os.getpid())


async def blocks_for_a_while(task: dict[str, Any]) -> float:
    Path(task["marker"]).touch()
    while not all(map(os.path.exists, task["when"])):
        time.sleep(0.01)
    return 1.0


async def blocks_in_turn(task: dict[str, Any]) -> float:
    """Block the event loop until a file exists; the second attempt begins when the first ends."""
    if task["kind"] == "second":
        event = asyncio.Event()
        WAITING.append(event)
        await event.wait()
    else:
        await until(lambda: bool(WAITING))
        WAITING.pop().set()  # the loop goes on with the second attempt before anything else
    return await blocks_for_a_while({**task, "when": [f"{task['marker']}-done"]})


WAITING: list[asyncio.Event] = []


async def freezes_time(task: dict[str, Any]) -> float:
    """Replace the clocks of `time` by a constant in every loaded module, as freezegun does."""
    if task["kind"] == "freezes":
        for name in ("monotonic", "time", "time_ns", "perf_counter"):
            real, frozen = getattr(time, name), partial(float, task["at"])
            for module in [time, *sys.modules.values()]:
                for own in [own for own, value in vars(module).items() if value is real]:
                    setattr(module, own, frozen)
        Path(task["marker"]).touch()
    if task["kind"] == "too long":
        await asyncio.sleep(3602)
    await wait_for_files(*task["when"])
    return 1.0


async def crashes(task: dict[str, Any]) -> float:
    """Kill the process after the two other attempts have started."""
    if task["kind"] == "neighbour":
        return await waits_once(task)
    await wait_for_files(*task["when"])
    if task["kind"] == "crashes":
        ctypes.string_at(0)
    if task["kind"] in ENDS:
        ENDS[task["kind"]]()
    await asyncio.sleep(600)
    return 0.0


ENDS: dict[str, Callable[[], Any]] = {
    "exits as if stuck": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def harms(task: dict[str, Any]) -> float:
    """Do something that looks harmful but is not, while the other attempts run."""
    if task["kind"] in HARMLESS:
        HARMLESS[task["kind"]](task)
        Path(task["done"]).touch()
    while not os.path.exists(task["done"]):
        time.sleep(0.02)
    return float(os.getpid())


def exits_in_a_thread(task: dict[str, Any]) -> None:
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()


def closes_its_streams(task: dict[str, Any]) -> None:
    sys.stdout.close()
    sys.stderr.close()
    sys.stdout = sys.stderr = io.StringIO()


HARMLESS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "exits in a thread": exits_in_a_thread,
    "closes its streams": closes_its_streams,
    "closes 0, 1 and 2": lambda task: os.closerange(0, 3),
    "changes its folder": lambda task: os.chdir("/"),
    "has no environment": lambda task: os.environ.clear(),
}

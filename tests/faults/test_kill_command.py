"""Test `kill -9` of runners whose attempts are programs: no process and no task file is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightspan import Command
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerPlan
from lightspan.schema.records import Mode, Rollout, RolloutStatus
from lightspan.stores import open_store
from lightspan_testing.wait import until
from packages.programs.tests.test_command import alive

# Neither it nor its child hears SIGTERM; the child waits until it is killed, or told to end.
PROGRAM = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sh", "-c", "trap '' TERM; while [ ! -e go ]; do sleep 0.1; done"])
note = {"pids": [os.getpid(), child.pid], "task": os.environ["LIGHTSPAN_TASK_FILE"]}
with open(f"{os.getpid()}.tmp", "w") as file:
    json.dump(note, file)
os.rename(f"{os.getpid()}.tmp", f"{os.getpid()}.json")
child.wait()
print(1)
"""
SLOTS = 4
KILLS = 3


def notes(folder: Path) -> Iterator[tuple[list[int], Path]]:
    """Yield (process ids of a program and its child, path of its task file) for each program."""
    for path in folder.glob("*.json"):
        note = json.loads(path.read_text())
        yield note["pids"], Path(note["task"])


async def until_begun(folder: Path, number: int) -> None:
    async with asyncio.timeout(60):
        await until(lambda: len(list(notes(folder))) >= number)


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks processes up in /proc")
async def test_programs_end_with_their_runner(tmp_path: Path) -> None:
    """Check that every rollout succeeds, and that processes of killed runners have ended."""
    folder = tmp_path / "programs"
    folder.mkdir()
    command = Command([sys.executable, "-S", "-c", PROGRAM], cwd=folder)
    names = [f"ro-{number}" for number in range(SLOTS)]
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        await store.enqueue(
            [
                Rollout(
                    rollout_id=name,
                    task={"q": name},
                    task_id=name,
                    mode=Mode.VAL,
                    max_infrastructure_tries=50,
                )
                for name in names
            ]
        )
        runners = LocalRunners(SLOTS)
        plan = RunnerPlan(store_url=store.url, app=command.reference, lease_s=5)
        await runners.start(plan)
        try:
            for kill in range(1, KILLS + 1):
                # after the first, those that it hit run again one by one
                await until_begun(folder, SLOTS + kill - 1)
                begun = list(notes(folder))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(runners.pids[0], signal.SIGKILL)
                await until_gone(begun)
            await until_begun(folder, SLOTS + KILLS)
            (folder / "go").touch()
            async with asyncio.timeout(60):
                while (await store.count()) != {RolloutStatus.SUCCEEDED: len(names)}:
                    runners.check()
                    await asyncio.sleep(0.05)
        finally:
            (folder / "go").touch()
            await runners.stop()
    await until_gone(list(notes(folder)))


async def until_gone(begun: list[tuple[list[int], Path]]) -> None:
    """Wait until the processes, their task files and the files' folders are gone."""
    async with asyncio.timeout(20):
        await until(lambda: not any(alive(pid) for pids, _ in begun for pid in pids))
        await until(lambda: not any(task.parent.exists() for _, task in begun))

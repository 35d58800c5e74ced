"""Test `kill -9` of trainer and runner in two environments: nothing is lost, no process is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightspan.runners.discovery import Presence, make_peer
from lightspan.schema.records import AttemptStatus, Mode, PeerRole, Rollout, RolloutStatus
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan.training.folder import RunFolder
from lightspan_testing.stored_episodes import stored_episodes
from lightspan_testing.tiny import tiny_model

APPS = Path(__file__).parents[1] / "apps"
APART = APPS / "apart"

pytestmark = [pytest.mark.faults, pytest.mark.timeout(570)]


class Processes:
    """Start programs, and end them with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def start(self, *command: object) -> subprocess.Popen[bytes]:
        log = self._folder / f"log-{len(self._started)}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [str(part) for part in command], stdout=file, stderr=file, env=self.env
            )
        self._started.append(process)
        return process

    def text(self, process: subprocess.Popen[bytes]) -> str:
        return (self._folder / f"log-{self._started.index(process)}").read_text()

    def runner(self, python: Path, url: str, app: str, *more: str) -> subprocess.Popen[bytes]:
        command = [python, "-m", "lightspan.cli", "runner", "--store", url]
        return self.start(*command, "--app-dir", APART, *more, app)

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.end()


def children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    return found


def gone(found: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(found, timeout=30)
    assert not alive, "runner processes outlive who started them"


async def running(store: Store, count: int) -> None:
    """Wait until `count` attempts are running."""
    deadline = time.monotonic() + 60
    while len(await store.rollouts(status=[RolloutStatus.RUNNING])) < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("whole", [False, True])
async def test_kill_a_runner(
    tmp_path: Path, app_python: Path, processes: Processes, whole: bool
) -> None:
    """Check that another runner takes over the attempts.

    Worker processes requeue their attempts. If they are killed too, the attempts are lost with
    their leases.
    """
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        peer = make_peer("run-1", PeerRole.TRAINER, "apart_app:naps", run_id="run-1")
        rollouts = [
            Rollout(
                rollout_id=f"ro-{number}",
                task={"seconds": 4.0 if number < 4 else 0.0},
                task_id=f"t{number}",
                mode=Mode.VAL,
                run_id="run-1",
                app="apart_app:naps",
            )
            for number in range(8)
        ]
        names = [rollout.rollout_id for rollout in rollouts]
        async with Presence(store, peer):
            await store.enqueue(rollouts)
            more = ("--slots", "4", "--processes", "2", "--lease", "5")
            first = processes.runner(app_python, store.url, "apart_app:naps", *more)
            await running(store, 4)
            workers = children(first)
            assert len(workers) >= 2
            if whole:
                first.send_signal(signal.SIGSTOP)  # so that it does not see them die
                for worker in workers:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        worker.kill()
            first.kill()
            await asyncio.to_thread(gone, workers)
            second = processes.runner(app_python, store.url, "apart_app:naps", *more)
            deadline = time.monotonic() + 90
            while await store.count() != {RolloutStatus.SUCCEEDED: 8}:
                assert second.poll() is None, processes.text(second)
                assert time.monotonic() < deadline, processes.text(second)
                await asyncio.sleep(0.1)
                await store.expire()
        attempts = await store.attempts(names)
    lost = [attempt for attempt in attempts if attempt.status is AttemptStatus.LOST]
    assert len(lost) == 4
    assert len(attempts) == 12
    why = "the lease of runner" if whole else "stopped"
    assert all(attempt.message.startswith(why) for attempt in lost)


def _train(processes: Processes, folder: Path, model: Path, *more: str) -> subprocess.Popen[bytes]:
    return processes.start(sys.executable, APPS / "train_apart.py", folder, model, 6, *more)


def _stepped(folder: Path, process: subprocess.Popen[bytes], processes: Processes) -> None:
    """Wait until the trainer has made two steps."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, processes.text(process)
        assert time.monotonic() < deadline, processes.text(process)
        time.sleep(0.02)


def _check(folder: Path) -> None:
    """Check six steps, each made once, with every attempt in the app's environment."""
    run = RunFolder(folder)
    assert [line["step"] for line in run.metrics() if line["kind"] == "train"] == [*range(1, 7)]
    ended: list[Any] = [e for e in stored_episodes(run.store_url) if e.reward is not None]
    assert len(ended) >= 6 * 8
    assert {episode.dimensions["apart"] for episode in ended} == {1.0}


def test_kill_the_trainer(tmp_path: Path, app_python: Path, processes: Processes) -> None:
    """Check that a runner that was started by hand waits, and continues with the resumed run."""
    folder, model = tmp_path / "run", tiny_model(tmp_path / "model", seed=0)
    runner = processes.runner(app_python, f"sqlite:///{folder}/store.db", "apart_app:answer")
    first = _train(processes, folder, model)
    _stepped(folder, first, processes)
    first.kill()
    second = _train(processes, folder, model, "--resume")
    assert second.wait(180) == 0, processes.text(second)
    assert "resuming" in processes.text(second)
    _check(folder)
    assert runner.wait(60) == 0
    assert "is complete" in processes.text(runner)

"""Test `kill -9` of a real trainer at random moments, and every other way to stop it.

No process is left. The resumed run trains each step and rollout once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightspan.algorithms.task_sampler import Epochs
from lightspan.schema.records import AttemptStatus, Mode, RolloutState, RolloutStatus
from lightspan.stores import open_store
from lightspan.training.checkpoints import TrainerState, latest, load_state
from lightspan.training.folder import RunFolder
from lightspan_testing.tiny import tiny_model
from lightspan_tools.rollout_view import training_steps

SCRIPT = Path(__file__).parents[1] / "apps" / "train_toy.py"
LONG = bool(os.environ.get("LIGHTSPAN_SEED"))
"""Whether LIGHTSPAN_SEED is set, so that many other moments are tried."""
STEPS, KILLS = (30, 12) if LONG else (10, 2)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(570)]


End = Callable[[subprocess.Popen[bytes], random.Random], None]


def kill(process: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Kill the trainer with SIGKILL."""
    process.kill()


def stop(process: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Stop the trainer, or its process group, by Ctrl-C twice or by SIGTERM or SIGHUP.

    A terminal sends signals to the whole group.
    """
    send = rng.choice([os.kill, os.killpg])
    kind = rng.choice([signal.SIGINT, signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    send(process.pid, kind)
    if kind is signal.SIGINT:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.choice([0.0, 0.01, 0.1, rng.uniform(0, 1), rng.uniform(0, 5)]))
        if process.poll() is None:
            send(process.pid, kind)
    process.wait()
    # 0: it had just ended; 1: Python was still starting
    assert process.returncode in (0, 1, -kind)


class Trainer:
    """A trainer process that is resumed whenever it was ended."""

    def __init__(
        self, folder: Path, model: Path, log: Path, ends: list[End], *options: str
    ) -> None:
        self._ends = ends
        given = (str(folder), str(model), str(STEPS), *options)
        self._command = [sys.executable, str(SCRIPT), *given]
        self._metrics = folder / "metrics.jsonl"
        self._log = log
        self.kills = 0
        self.slowest_s = 0.0

    def live(self, rng: random.Random) -> bool:
        """Start the trainer and end it at a random moment; return whether it completed by
        itself.
        """
        with self._log.open("ab") as log:
            command = [*self._command, "--resume"]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            if self.kills < len(self._ends):
                self._wait_for_a_moment(process, rng)
            else:
                process.wait(240)
        finally:
            children = self._kill(process, rng)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, "runner processes outlive their trainer"
        return process.returncode == 0

    def _wait_for_a_moment(self, process: subprocess.Popen[bytes], rng: random.Random) -> None:
        if rng.random() < 0.3:  # while it starts
            moment = time.monotonic() + rng.uniform(0.2, 4.0)
        else:  # while it works: after the first line of metrics that it writes
            lines = self._lines()
            limit = time.monotonic() + 60
            while self._lines() == lines and process.poll() is None:
                assert time.monotonic() < limit, "the trainer makes no progress"
                time.sleep(0.01)
            moment = time.monotonic() + rng.uniform(0.0, 0.6)
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.005)

    def _lines(self) -> int:
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0

    def _kill(self, process: subprocess.Popen[bytes], rng: random.Random) -> list[psutil.Process]:
        try:
            children: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        if process.poll() is None:
            started = time.monotonic()
            self._ends[self.kills](process, rng)
            self.kills += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        process.wait()
        return children


def test_groups_in_flight_are_trained_once(
    tmp_path: Path, moments: Callable[[Any], random.Random]
) -> None:
    """Check `kill -9` while rollouts of the next step are running.

    They are started anew with the same tasks, and nothing is trained twice.
    """
    model, folder = tiny_model(tmp_path / "model", seed=0), tmp_path / "run"
    trainer = Trainer(folder, model, tmp_path / "log", [kill] * KILLS, "1")
    rng = moments("overlap")
    while not trainer.live(rng):
        assert trainer.kills <= KILLS, (tmp_path / "log").read_text()
    assert trainer.kills == KILLS, "the run ended before it was killed often enough"
    run = RunFolder(folder)
    _check_folder(run)
    found = latest(run.checkpoints)
    assert found is not None
    state = load_state(found)
    assert (state.in_flight, state.returned) == ({}, [])
    states = asyncio.run(_check_store(run, state))
    rollouts = [s.rollout for s in states if s.rollout.mode is Mode.TRAIN]
    groups = training_steps(run)
    trained = [each for each in rollouts if each.group_id in groups]
    assert Counter(each.group_id for each in trained) == dict.fromkeys(
        {each.group_id for each in trained}, 4
    )
    questions = Counter(each.task["q"] for each in trained)
    tasks = [{"q": f"question {number}"} for number in range(7)]
    assert questions == Counter(task["q"] for task in Epochs(tasks, 0).take(0, 3 * STEPS) * 4)
    for step, ids in _trained_by_step(run).items():
        assert ids <= {each.rollout_id for each in trained}, step
    behind = [line["overlap/behind_max"] for line in run.metrics() if line["kind"] == "train"]
    assert max(behind) <= 1


@pytest.mark.parametrize("ends", [[kill] * KILLS, [stop] * KILLS] if LONG else [[kill, stop]])
def test_killed_trainer_goes_on(
    tmp_path: Path, moments: Callable[[Any], random.Random], ends: list[End]
) -> None:
    model = tiny_model(tmp_path / "model", seed=0)
    folder, log = tmp_path / "run", tmp_path / "log"
    names = ", ".join(dict.fromkeys(end.__name__ for end in ends))
    trainer, rng = Trainer(folder, model, log, ends), moments(f"20 {names}")
    lives = 1
    while not trainer.live(rng):
        lives += 1
        assert lives <= KILLS + 1, log.read_text()
    assert trainer.kills == KILLS, "the run ended before it was killed often enough"
    run = RunFolder(folder)
    _check_folder(run)
    found = latest(run.checkpoints)
    assert found is not None
    state = load_state(found)
    states = asyncio.run(_check_store(run, state))
    _check_trained_once(run, state, states)
    print(
        f"{names}: {trainer.kills} times, the slowest took {trainer.slowest_s:.1f} s; no "
        f"process left, no rollout lost, of {len(states)}"
    )


def _check_folder(run: RunFolder) -> None:
    lines = Counter((line["kind"], line["step"]) for line in run.metrics())
    trained = {("train", step): 1 for step in range(1, STEPS + 1)}
    evaluated = {("eval", step): 1 for step in range(0, STEPS + 1, 5)}
    assert lines == trained | evaluated
    assert [evaluation.step for evaluation in run.evaluations()] == list(range(0, STEPS + 1, 5))
    assert all(len(evaluation.rewards) == 4 for evaluation in run.evaluations())
    assert (run.model / "model.safetensors").exists()
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]


async def _check_store(run: RunFolder, state: TrainerState) -> list[RolloutState]:
    async with open_store(run.store_url) as store:
        states = await store.rollouts(run_id=state.run_id)
        attempts = await store.attempts([s.rollout.rollout_id for s in states])
    ended = Counter(a.rollout_id for a in attempts if a.status is AttemptStatus.SUCCEEDED)
    assert max(ended.values()) == 1
    for rollout in states:
        assert rollout.status in (RolloutStatus.SUCCEEDED, RolloutStatus.CANCELLED)
        succeeded = rollout.status is RolloutStatus.SUCCEEDED
        assert ended[rollout.rollout.rollout_id] == succeeded
    with sqlite3.connect(run.path / "store.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()
    return states


def _check_trained_once(run: RunFolder, state: TrainerState, states: list[RolloutState]) -> None:
    """Check that the trained rollouts of each step belong to one start of the run."""
    rollouts = [s.rollout for s in states if s.rollout.mode is Mode.TRAIN]
    for step, ids in _trained_by_step(run).items():
        segments = {_segment(rollout_id, state) for rollout_id in ids}
        assert len(segments) <= 1
        trained = {
            rollout.rollout_id
            for rollout in rollouts
            if rollout.step == step and _segment(rollout.rollout_id, state) in segments
        }
        assert ids <= trained
        assert len(trained) == 12 * len(segments)


def _trained_by_step(run: RunFolder) -> dict[int, set[str]]:
    """Return step → trained rollouts; check that no call was trained twice.

    Each step has twelve rollouts.
    """
    counts = {line["step"]: line["rollouts"] for line in run.metrics() if line["kind"] == "train"}
    assert counts == dict.fromkeys(range(1, STEPS + 1), 12)
    explained = {step: run.explanations(step) for step in counts}
    calls = Counter(call for whys in explained.values() for call in whys)
    assert max(calls.values()) == 1
    return {step: {why.rollout_id for why in whys.values()} for step, whys in explained.items()}


def _segment(rollout_id: str, state: TrainerState) -> str:
    return rollout_id.removeprefix(f"{state.run_id}-").partition("-")[0]

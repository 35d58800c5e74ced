"""Test `lightspan runner`, which is started by hand and joins the trainings of its app in a
store.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightspan import ExternalRunners, Trainer, __version__
from lightspan.runners.app import App
from lightspan.runners.discovery import Presence, make_peer
from lightspan.runners.local import LocalRunners
from lightspan.runners.protocol import RunnerConfig, RunnerPlan
from lightspan.runners.runner import Runner
from lightspan.schema.records import (
    AttemptStatus,
    Mode,
    Outcome,
    Peer,
    PeerRole,
    Rollout,
    RolloutStatus,
)
from lightspan.schema.semconv import PROTOCOL_VERSION
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_cluster import external_runners
from lightspan_cluster.external_runners import RunnerWatch
from lightspan_cluster.standalone import Trainings, trainings
from packages.gateway.tests.remote_store.served import serving

pytestmark = pytest.mark.slow

APART = Path(__file__).parents[1] / "apps" / "apart"
SOON_S = 60.0
TALKATIVE = """
import sys
import lightspan_cluster.standalone as joiner
joiner.PRINT_INTERVAL_S = 0.0
from lightspan.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""A runner program that prints its attempts at once, so that tests can time their signals."""


class Started:
    """A runner process as a user starts it, with its output."""

    def __init__(
        self,
        python: Path,
        log: Path,
        *arguments: str,
        env: dict[str, str],
        talkative: bool = False,
    ) -> None:
        self._log = log
        program = ["-c", TALKATIVE] if talkative else ["-m", "lightspan.cli"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [python, *program, "runner", *arguments],
                stdout=file,
                stderr=file,
                env=env,
                cwd=APART,
                process_group=0,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    async def says(self, text: str) -> None:
        """Wait until the runner has printed `text`."""
        deadline = time.monotonic() + SOON_S
        while text not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            await asyncio.sleep(0.05)

    async def ends(self) -> int:
        """Wait until the runner has ended, and return its exit status."""
        return await asyncio.to_thread(self.process.wait, SOON_S)


Start = Callable[..., Started]


@pytest.fixture
def start(app_python: Path, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts runners in the app's environment, without the tests'
    settings.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    started: list[Started] = []

    def begin(*arguments: str, talkative: bool = False, python: Path = app_python) -> Started:
        log = tmp_path / f"runner-{len(started)}.log"
        started.append(Started(python, log, *arguments, env=env, talkative=talkative))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        yield store


def trainer_of(app: str, run_id: str = "run-1", **fields: Any) -> Peer:
    return make_peer(run_id, PeerRole.TRAINER, app, **{"run_id": run_id, **fields})


async def enqueue(store: Store, app: str, *tasks: Any, run_id: str = "run-1") -> list[str]:
    """Enqueue a rollout per task, and return their ids."""
    count = len(await store.rollouts())
    rollouts = [
        Rollout(
            rollout_id=f"ro-{count + number}",
            task=task,
            task_id=f"t{number}",
            mode=Mode.VAL,
            run_id=run_id,
            app=app,
        )
        for number, task in enumerate(tasks)
    ]
    await store.enqueue(rollouts)
    return [rollout.rollout_id for rollout in rollouts]


async def succeeded(store: Store, names: list[str]) -> None:
    """Wait until the rollouts have succeeded."""
    deadline = time.monotonic() + SOON_S
    while {state.status for state in await store.rollouts(names)} != {RolloutStatus.SUCCEEDED}:
        assert time.monotonic() < deadline, await store.rollouts(names)
        await asyncio.sleep(0.05)


async def claimed(store: Store, names: list[str], runner: Started) -> None:
    """Wait until each rollout has an attempt."""
    while len(await store.attempts(names)) < len(names):
        assert runner.process.poll() is None, runner.text
        await asyncio.sleep(0.05)


# --- it joins -----------------------------------------------------------------------------------
def test_a_training_and_a_runner_meet(
    start: Start,
    rl: Callable[..., Any],
    tmp_path: Path,
    ask: Callable[..., Any],
    lines: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the runner joins a training that starts later, and ends with it."""
    monkeypatch.setattr("lightspan_cluster.external_runners.POLL_INTERVAL_S", 0.05)
    folder = tmp_path / "a run"
    url = f"sqlite:///{folder}/store.db"
    runner = start("--store", url, "--slots", "4", "apart_app:answer")
    asyncio.run(runner.says(f"waiting for the store {folder}/store.db to exist (Ctrl-C ends)"))
    trainer = Trainer(
        rl(),
        runners=ExternalRunners(4, timeout_s=SOON_S),
        steps=2,
        folder=folder,
        reporter=lines,
    )
    result = trainer.fit("apart_app:answer", ask(4), ask(2, held=1))
    assert result.steps == 2
    assert runner.process.wait(SOON_S) == 0
    run_id = trainer.folder.read_config()["run_id"]
    assert f"joined training {run_id} (lightspan {__version__} of {sys.executable})" in runner.text
    assert f"training {run_id} is complete" in runner.text
    assert runner.text.endswith("ended; attempts claimed: 20, finished: 20\n")
    assert any(" joined: 4 attempts at once, lightspan " in text for text in lines.texts)


async def test_it_serves_its_app_alone(start: Start, store: Store) -> None:
    """Check that rollouts of another app, and of a training that has ended, are not claimed."""
    mine, other = trainer_of("apart_app:naps"), trainer_of("apart_app:other", "run-2")
    await store.announce(other)
    theirs = await enqueue(store, "apart_app:other", {}, {}, run_id="run-2")
    nobodys = await enqueue(store, "apart_app:naps", {}, run_id="run-3")
    runner = start("--store", store.url, "apart_app:naps")
    await runner.says(f"waiting for a training of apart_app:naps in {store.url}")
    assert "(live trainings have the apps apart_app:other)" in runner.text
    await store.announce(mine)
    names = await enqueue(store, "apart_app:naps", {}, {}, {})
    await succeeded(store, names)
    await store.announce(msgspec.structs.replace(mine, complete=True))
    assert await runner.ends() == 0
    assert await store.attempts([*theirs, *nobodys]) == []
    assert [peer.role for peer in await store.peers()] == [PeerRole.TRAINER] * 2


async def test_it_can_be_told_which_run_to_serve(start: Start, store: Store) -> None:
    for number in (1, 2):
        await store.announce(trainer_of("apart_app:naps", f"run-{number}"))
    theirs = await enqueue(store, "apart_app:naps", {}, run_id="run-1")
    mine = await enqueue(store, "apart_app:naps", {}, run_id="run-2")
    runner = start("--store", store.url, "--run", "run-2", "--until-idle", "1", "apart_app:naps")
    await succeeded(store, mine)
    assert await runner.ends() == 0
    assert await store.attempts(theirs) == []
    assert "ended; attempts claimed: 1, finished: 1" in runner.text


async def test_a_training_that_stops_can_be_resumed(start: Start, store: Store) -> None:
    """Check that the runner waits, and claims nothing if the run is resumed with another app."""
    peer = trainer_of("apart_app:naps")
    await store.announce(peer)
    runner = start("--store", store.url, "apart_app:naps")
    await runner.says("joined training run-1")
    await store.withdraw(peer.peer_id)
    await runner.says("training run-1 has stopped or cannot be reached; this runner waits, ")
    later = await enqueue(store, "apart_app:naps", {})
    await store.announce(trainer_of("apart_app:other"))
    await runner.says("(live trainings have the apps apart_app:other)")
    await asyncio.sleep(0.5)
    assert await store.attempts(later) == []
    await store.announce(peer)
    await succeeded(store, later)
    await store.announce(msgspec.structs.replace(peer, complete=True))
    assert await runner.ends() == 0


async def test_every_attempt_its_process(start: Start, store: Store, tmp_path: Path) -> None:
    await store.announce(trainer_of("apart_app:naps"))
    arguments = ("--slots", "2", "--isolation", "process", "--until-idle", "2", "--stay")
    runner = start("--store", store.url, *arguments, "apart_app:naps")
    names = await enqueue(store, "apart_app:naps", *[{"until": str(tmp_path / "go")}] * 2)
    await claimed(store, names, runner)
    (tmp_path / "go").touch()
    names += await enqueue(store, "apart_app:naps", {}, {})
    await succeeded(store, names)
    assert await runner.ends() == 0
    assert len({attempt.runner_id for attempt in await store.attempts(names)}) == 2


# --- it ends ------------------------------------------------------------------------------------
async def _at_work(
    start: Start, store: Store, *tasks: Any, app: str = "apart_app:naps"
) -> tuple[Started, list[str]]:
    """Start a runner, and wait until it reports exactly the waiting tasks as running.

    Returns the runner and the rollout ids of all tasks. An empty task does not wait.
    """
    await store.announce(trainer_of(app))
    names = await enqueue(store, app, *tasks)
    runner = start(*("--store", store.url, "--slots", str(len(tasks)), app), talkative=True)
    waiting = sum(bool(task) for task in tasks)
    finished = len(tasks) - waiting
    await runner.says(
        f"attempts claimed: {len(tasks)}, finished: {finished}, under way: {waiting}\n"
    )
    return runner, names


async def test_ctrl_c_lets_attempts_end(start: Start, store: Store, tmp_path: Path) -> None:
    waits = {"until": str(tmp_path / "go")}
    runner, names = await _at_work(start, store, waits, waits)
    [peer] = [peer for peer in await store.peers() if peer.role is PeerRole.RUNNER]
    for attempt in await store.attempts(names):  # `lightspan status` counts them by this name
        assert attempt.runner_id.startswith(f"{peer.peer_id}-")
    runner.process.send_signal(signal.SIGINT)
    await runner.says("finishing 2 attempts; Ctrl-C again gives them back")
    later = await enqueue(store, "apart_app:naps", {})
    (tmp_path / "go").touch()
    assert await runner.ends() == 0
    await succeeded(store, names)
    assert await store.attempts(later) == []
    assert runner.text.endswith("ended; attempts claimed: 2, finished: 2\n")


async def test_an_attempt_whose_result_is_not_accepted_is_not_finished(
    start: Start, store: Store, tmp_path: Path
) -> None:
    """Check the counts after one attempt was lost and another was cancelled, in the store."""
    waits = {"until": str(tmp_path / "go")}
    runner, names = await _at_work(start, store, waits, waits, waits)
    lost, *_ = await store.attempts(names)
    await store.report([lost.report(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, "as by a cut")])
    await store.cancel(names[1:2])
    (tmp_path / "go").touch()
    await succeeded(store, [names[0], names[2]])
    await store.announce(msgspec.structs.replace(trainer_of("apart_app:naps"), complete=True))
    assert await runner.ends() == 0
    assert runner.text.endswith("ended; attempts claimed: 4, finished: 2, lost or cancelled: 2\n")


@pytest.mark.parametrize("signals", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM]])
async def test_a_runner_in_a_hurry_gives_attempts_back(
    start: Start, store: Store, signals: list[signal.Signals]
) -> None:
    """Check that the attempts are requeued at once and use up no try."""
    runner, names = await _at_work(start, store, {}, {"seconds": 100.0})
    runner.process.send_signal(signals[0])
    for number in signals[1:]:
        await runner.says("finishing 1 attempts; Ctrl-C again gives them back")
        runner.process.send_signal(number)
    assert await runner.ends() == 0
    done, waiting_one = await store.rollouts(names)
    assert (done.status, waiting_one.status) == (RolloutStatus.SUCCEEDED, RolloutStatus.QUEUED)
    assert waiting_one.infrastructure_tries == 0
    assert [(a.status, a.outcome) for a in await store.attempts(names[1:])] == [
        (AttemptStatus.LOST, Outcome.CANCELLED)
    ]
    assert "Traceback" not in runner.text
    assert runner.text.endswith("ended; attempts claimed: 2, finished: 1, given back: 1\n")


async def test_an_attempt_that_ends_during_the_shutdown_is_finished(
    start: Start, store: Store
) -> None:
    """Check the totals against the store: one of two attempts reports after the signal."""
    tasks: list[Any] = [{"reward": 1.0}, {"seconds": 100.0}]
    runner, names = await _at_work(start, store, *tasks, app="apart_app:goes_on")
    runner.process.send_signal(signal.SIGTERM)
    assert await runner.ends() == 0
    done, waiting_one = await store.rollouts(names)
    assert (done.status, waiting_one.status) == (RolloutStatus.SUCCEEDED, RolloutStatus.QUEUED)
    assert runner.text.endswith("ended; attempts claimed: 2, finished: 1, given back: 1\n")


async def test_a_signal_to_the_process_group_replaces_no_process(
    start: Start, store: Store
) -> None:
    runner, names = await _at_work(start, store, {}, {"seconds": 100.0})
    os.killpg(runner.process.pid, signal.SIGTERM)
    assert await runner.ends() == 0
    assert "is replaced" not in runner.text
    assert runner.text.endswith("ended; attempts claimed: 2, finished: 1, given back: 1\n")
    [waiting_one] = await store.rollouts(names[1:])
    assert waiting_one.status is RolloutStatus.QUEUED
    assert waiting_one.infrastructure_tries == 0


async def test_a_server_that_is_away_is_waited_for(start: Start, tmp_path: Path) -> None:
    """Check a runner that starts before the server, as after a reboot."""
    waiting = "waiting for the store's server: store http://127.0.0.1:"
    (tmp_path / "plain_app.py").write_text("def answer(task):\n    return 1.0\n")
    options = ("--app-dir", str(tmp_path), "plain_app:answer")
    with serving(lambda: SQLiteStore(tmp_path / "run.db")) as served:
        url, port = served.url, await asyncio.to_thread(served.stop)
        runner = start("--store", url, *options, python=Path(sys.executable))
        await runner.says(waiting)
        await asyncio.to_thread(served.start, port)
        async with open_store(url) as store, Presence(store, trainer_of("plain_app:answer")):
            await runner.says("joined training run-1")
            await succeeded(store, await enqueue(store, "plain_app:answer", {}))
        runner.process.send_signal(signal.SIGINT)
        assert await runner.ends() == 0
    assert runner.text.count(waiting) == 1
    assert runner.text.endswith("ended; attempts claimed: 1, finished: 1\n")


async def test_a_server_that_is_away_does_not_keep_a_runner(start: Start, tmp_path: Path) -> None:
    """Check that an idle runner ends at SIGTERM although nobody answers its requests."""
    (tmp_path / "plain_app.py").write_text("def answer(task):\n    return 1.0\n")
    options = ("--app-dir", str(tmp_path), "plain_app:answer")
    with serving(lambda: SQLiteStore(tmp_path / "run.db")) as served:
        runner = start("--store", served.url, *options, python=Path(sys.executable))
        async with open_store(served.url) as store:
            await store.announce(trainer_of("plain_app:answer"))
            await runner.says("joined training run-1")
            await succeeded(store, await enqueue(store, "plain_app:answer", {}))
        port = await asyncio.to_thread(served.stop)
        try:
            await asyncio.sleep(1.5)  # until both processes ask again
            runner.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(runner.process.wait, 12.0) == 0
        finally:
            await asyncio.to_thread(served.start, port)
    assert runner.text.endswith("ended; attempts claimed: 1, finished: 1\n")


async def test_a_gateway_out_of_reach_is_told_on_both_sides(
    start: Start, store: Store, lines: Any
) -> None:
    """Check that nothing is claimed until the training has a gateway that the runner reaches."""
    trainer = trainer_of("apart_app:naps", gateway="http://127.0.0.1:9", remote=True)
    await store.announce(trainer)
    names = await enqueue(store, "apart_app:naps", {})
    runner = start("--store", store.url, "apart_app:naps")
    await runner.says("training run-1 cannot be joined: the gateway http://127.0.0.1:9 does not")
    assert 'Trainer(gateway="HOST")' in runner.text
    plan = RunnerPlan(store_url=store.url, app="apart_app:naps", run_id="run-1")
    watch = RunnerWatch(plan, ExternalRunners(), lines.line)
    while not any("cannot join: the gateway http://127.0.0.1:9" in line for line in lines.texts):
        watch.update(await store.peers(), 0.0)
        await asyncio.sleep(0.05)
    assert await store.attempts(names) == []
    assert not any("joined" in line for line in lines.texts)
    await store.announce(msgspec.structs.replace(trainer, gateway=""))
    await succeeded(store, names)
    runner.process.send_signal(signal.SIGTERM)
    assert await runner.ends() == 0


# --- it cannot ----------------------------------------------------------------------------------
CHECKOUT = "./packages/core`, from a checkout of lightspan"


async def test_a_trainer_of_another_protocol(start: Start, store: Store, lines: Any) -> None:
    """Check that nothing is claimed, and that both sides print the versions and a hint."""
    newer: dict[str, Any] = {"lightspan": "9.9.9", "protocol": PROTOCOL_VERSION + 1}
    theirs = trainer_of("apart_app:naps")
    theirs = msgspec.structs.replace(theirs, python="/trainer/python", **newer)
    await store.announce(theirs)
    rollouts = await enqueue(store, "apart_app:naps", {})
    runner = start("--store", store.url, "apart_app:naps")
    assert await runner.ends() == 1
    assert await store.attempts(rollouts) == []
    assert "Traceback" not in runner.text
    for word in (
        f"lightspan: /trainer/python has lightspan 9.9.9 (protocol {PROTOCOL_VERSION + 1})",
        f"has {__version__} (protocol {PROTOCOL_VERSION})",
        f"/trainer/python -m pip install {CHECKOUT} {__version__}",
        f"-m pip install {CHECKOUT} 9.9.9",
    ):
        assert word in runner.text
    # the trainer's side, with a runner of another protocol version
    [peer] = [peer for peer in await store.peers() if peer.role is PeerRole.RUNNER]
    foreign = msgspec.structs.replace(peer, **newer)
    plan = RunnerPlan(store_url=store.url, app="apart_app:naps", run_id="run-1")
    watch = RunnerWatch(plan, ExternalRunners(), lines.line)
    watch.update([foreign], 0.0)
    watch.update([foreign], 1.0)
    line, _ = lines.texts  # the other one waits for runners
    for word in (peer.peer_id, peer.python, "cannot join", "9.9.9", __version__, "pip install"):
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--store", "sqlite:x.db", "no_such_app:answer"], ["No module named", "--app-dir"]),
        (["--store", "memory:", "apart_app:naps"], ["lives in one process", "store.db"]),
        (["--store", "x.db", "--slots", "0", "apart_app:naps"], ["slots=0 must be at least 1"]),
        (["--store", "x.db", "--lease", "0", "apart_app:naps"], ["lease_s=0.0 must be", "above 0"]),
        (["--store", "x.db", "--until-idle", "nan", "apart_app:naps"], ["until_idle_s=nan must"]),
        (["--store", "x.db", "--app-dir", "/no/such", "apart_app:naps"], ["no folder /no/such"]),
    ],
)
async def test_what_cannot_be_done(start: Start, arguments: list[str], words: list[str]) -> None:
    runner = start(*arguments)
    assert await runner.ends() == 1
    assert runner.text.startswith("lightspan: ")
    for word in words:
        assert word in runner.text
    assert "Traceback" not in runner.text
    assert not (APART / "x.db").exists()


# --- no rollout goes to the wrong app -----------------------------------------------------------
async def test_a_rollout_of_another_app_is_given_back(store: Store) -> None:
    """Check that the runner compares the app of each rollout, whatever its run."""

    def app(task: Any) -> float:
        return 1.0

    [name] = await enqueue(store, "my_app:other", {})
    runner = Runner(store, App(app), RunnerConfig(run_id="run-1", app="my_app:answer"))
    running = asyncio.create_task(runner.run())
    deadline = time.monotonic() + SOON_S
    while not await store.attempts([name]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    runner.stop()
    await running
    [attempt] = await store.attempts([name])
    assert (attempt.status, attempt.outcome) == (AttemptStatus.LOST, Outcome.CANCELLED)
    assert attempt.message == "for the app my_app:other, not my_app:answer"
    [state] = await store.rollouts([name])
    assert (state.status, state.infrastructure_tries) == (RolloutStatus.QUEUED, 0)


# --- who sees whom ------------------------------------------------------------------------------
def test_what_the_peers_of_a_store_mean_for_a_runner() -> None:
    live, silent = trainer_of("a:b", "1"), trainer_of("a:b", "2", silent_s=20.0)
    complete, other = trainer_of("a:b", "3", complete=True), trainer_of("c:d", "4")
    gone, foreign = trainer_of("e:f", "5", silent_s=99.0), trainer_of("a:b", "6")
    foreign = msgspec.structs.replace(foreign, protocol=PROTOCOL_VERSION - 1)
    runner = make_peer("r", PeerRole.RUNNER, "a:b")
    peers = [live, silent, complete, other, gone, foreign, runner]
    assert trainings(peers, "a:b") == Trainings((live,), (complete,), (foreign,), ("c:d",))
    assert trainings(peers, "a:b", "3") == Trainings((), (complete,), (), ())
    assert trainings(peers, "c:d") == Trainings((other,), (), (), ("a:b",))


def test_runners_that_join_a_training_with_own_runners_are_printed(lines: Any) -> None:
    """Check that nobody is asked to start one."""
    plan = RunnerPlan(store_url="sqlite:////x.db", app="a:b", run_id="run-1")
    runners = ExternalRunners.beside(plan)
    watch = RunnerWatch(plan, runners, lines.line)
    watch.update([trainer_of("a:b")], 0.0)
    watch.update([trainer_of("a:b"), make_peer("r1", PeerRole.RUNNER, "a:b", slots=8)], 1.0)
    watch.update([trainer_of("a:b")], 99.0)
    assert lines.texts == [
        f"runner r1 joined: 8 more attempts at once, lightspan {__version__}, {sys.executable}",
        "runner r1 is gone",
    ]


async def test_a_runner_joins_a_training_with_runners_of_its_own(
    start: Start,
    rl: Callable[..., Any],
    tmp_path: Path,
    app_python: Path,
    ask: Callable[..., Any],
    lines: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightspan_cluster.external_runners.POLL_INTERVAL_S", 0.05)
    runner = start("--store", f"sqlite:///{tmp_path}/run/store.db", "apart_app:answer")
    await runner.says("to exist (Ctrl-C ends)")
    own = LocalRunners(1, python=app_python, app_dirs=APART)
    trainer = Trainer(rl(), runners=own, steps=4, folder=tmp_path / "run", reporter=lines)
    await asyncio.to_thread(trainer.fit, "apart_app:answer", ask(4))
    assert await runner.ends() == 0
    assert any(" joined: 8 more attempts at once, lightspan " in text for text in lines.texts)
    assert not any("waiting for runners" in text for text in lines.texts)


def test_what_a_trainer_is_told_of_runners(lines: Any) -> None:
    plan = RunnerPlan(store_url="sqlite:////a b/x.db", app="a:b", run_id="run-1")
    runners = ExternalRunners(timeout_s=100)
    asyncio.run(runners.start(plan))
    watch = RunnerWatch(plan, runners, lines.line)
    waiting = (
        "waiting for runners: in the app's environment, `lightspan runner --store "
        "'sqlite:////a b/x.db' a:b`"
    )

    def printed(now: float, *peers: Peer) -> list[str]:
        lines.texts.clear()
        watch.update(peers, now)
        return list(lines.texts)

    one = make_peer("r1", PeerRole.RUNNER, "a:b", slots=8)
    elsewhere = make_peer("r2", PeerRole.RUNNER, "c:d", slots=8)
    bound = make_peer("r3", PeerRole.RUNNER, "a:b", slots=8, run_id="run-2")
    trainer = trainer_of("a:b")
    assert printed(0, trainer) == [waiting]
    assert printed(1, trainer, elsewhere, bound) == []
    health = make_peer("health-1", PeerRole.RUNNER, "")  # a server's check of its store
    assert printed(60, trainer, elsewhere, bound, health) == [
        waiting.replace("runners:", "runners (those that are there run a:b, c:d):")
    ]
    joined = f"runner r1 joined: 8 attempts at once, lightspan {__version__}, {sys.executable}"
    assert printed(61, trainer, one) == [joined]
    assert printed(62, trainer, one) == []
    other = msgspec.structs.replace(one, peer_id="r4", runs=["run-2"])  # it may not reach us
    assert printed(62, trainer, one, other) == []
    other = msgspec.structs.replace(other, runs=["run-2", "run-1"])
    assert printed(62, trainer, one, other) == [joined.replace("r1", "r4")]
    assert printed(62, trainer, one) == ["runner r4 is gone"]
    silent = msgspec.structs.replace(one, silent_s=20.0)
    assert printed(63, trainer, silent) == ["runner r1 is gone", waiting]
    runners.check()
    assert printed(150, trainer, one) == [joined]
    assert printed(151) == ["runner r1 is gone", waiting]
    runners.check()
    runners.check()
    cut = msgspec.structs.replace(one, runs=[], problem="no way to the gateway")
    assert printed(152, cut) == ["runner r1 cannot join: no way to the gateway"]
    assert printed(211, cut) == [
        waiting.replace("runners:", "runners (runner r1 cannot join: no way to the gateway):")
    ]
    watch.update([], 251.5)
    with pytest.raises(Exception, match="no runner for 100 s"):
        runners.check()


def test_another_version_of_the_app_is_told_once(lines: Any) -> None:
    plan = RunnerPlan(store_url="sqlite:////x.db", app="a:b", run_id="run-1")
    runners = ExternalRunners()
    watch = RunnerWatch(plan, runners, lines.line)
    one = make_peer("r1", PeerRole.RUNNER, "a:b", sources={"a": "1", "a_rewards": "1"})
    same = msgspec.structs.replace(one, peer_id="r2")
    older = make_peer("r3", PeerRole.RUNNER, "a:b", sources={"a": "1", "a_rewards": "0"})
    unknown = make_peer("r4", PeerRole.RUNNER, "a:b")

    def printed(*peers: Peer) -> list[str]:
        lines.texts.clear()
        watch.update(peers, 0.0)
        return [text for text in lines.texts if "version" in text]

    assert printed(one, same, unknown) == []
    [line] = printed(one, same, unknown, older)
    assert line.startswith(
        "runner r3 has another version of the app than runner r1 (a_rewards): its rewards and"
    )
    assert printed(one, same, unknown, older) == []
    assert printed() == []
    runners.sources = {"a": "1", "a_rewards": "2"}
    assert "runner r1 has another version of the app than this machine (a_rew" in printed(one)[0]


@pytest.mark.parametrize(
    ("ahead", "late", "line"),
    [
        (100.5, (0, 0, 0), "the clock of runner r1 is 100 s ahead of this machine's: times of"),
        (-40.5, (9, 0, 60), "the clock of runner r1 is 40 s behind this machine's: times of"),
        (0.0, (30, 0, 30), ""),  # announcements that were sent again
        (4.0, (0, 0, 0), ""),
    ],
)
def test_a_clock_that_differs_is_told_once(
    lines: Any, monkeypatch: pytest.MonkeyPatch, ahead: float, late: tuple[int, ...], line: str
) -> None:
    """Check five announcements, each of which is read twice."""
    own = 1e9
    monkeypatch.setattr(external_runners.clock, "now", lambda: own)
    plan = RunnerPlan(store_url="sqlite:////x.db", app="a:b", run_id="run-1")
    watch = RunnerWatch(plan, ExternalRunners(), lines.line)
    peer = make_peer("r1", PeerRole.RUNNER, "a:b", slots=8)
    watch.update([peer], 0.0)  # of an older version, without its clock
    for delay in (*late, 0, 0):
        sent = own + ahead
        for silent_s in (0.0, 1.0):
            own += silent_s + delay * (silent_s == 0.0)
            watch.update([msgspec.structs.replace(peer, clock=sent, silent_s=silent_s)], 0.0)
    told = [text for text in lines.texts if "joined" not in text]
    assert [text[: len(line)] for text in told] == [line] * bool(line)


async def test_a_peer_announces_its_clock(store: Store) -> None:
    async with Presence(store, make_peer("r1", PeerRole.RUNNER, "a:b")) as presence:
        [first] = await store.peers()
        await presence.update(slots=2)
        [second] = await store.peers()
    assert 0 < first.clock < second.clock

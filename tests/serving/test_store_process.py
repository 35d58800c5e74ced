"""Tests of the process `lightspan serve --store URL` with remote runners."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from serve_process import serving_store  # type: ignore[import-not-found]

from lightspan import LocalRunners, Trainer
from lightspan.cli import main
from lightspan.schema.records import AttemptStatus, PeerRole, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.stores import open_store
from lightspan_testing.store_suite import make_peer, make_production, make_report, make_rollout
from packages.gateway.tests.remote_store.served import RUNNER, TRAINER
from tests.conftest import questions

KEYS = ("--trainer-key-env", "TRAINER_KEY", "--runner-key-env", "RUNNER_KEY")
IN_ENVIRONMENT = {"TRAINER_KEY": TRAINER, "RUNNER_KEY": RUNNER}

LOOKS = """
import os, subprocess, sys
from lightspan import rollout

@rollout
def looks(task):
    if "dies" in task and not os.path.exists(task["dies"]):
        open(task["dies"], "w").close()
        os._exit(3)
    code = "import os; print(any(%r in value for value in os.environ.values()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = any(%r in value for value in os.environ.values())
    return {"reward": 0.0, "in a child": float(done.stdout == "True\\n"), "here": float(here)}
"""


BLIND = """
import os
import toy_apps
from lightspan import agent, rollout

@rollout
def spell(task):
    key = %r
    assert not any(key in value for value in os.environ.values())
    if os.path.exists("/proc/self/environ"):  # what this process was started with, for good
        with open("/proc/self/environ") as given:
            assert key not in given.read()
    with agent("writer"):
        return toy_apps.letters(toy_apps.say(task["q"]))
"""


def runner(url: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a runner until the training is complete; its app searches for the key."""
    (folder / "looks.py").write_text(LOOKS % (RUNNER, RUNNER))
    command = [sys.executable, "-m", "lightspan.cli", "runner", "--store", url, "looks:looks"]
    environment = {**os.environ, "LIGHTSPAN_STORE_KEY": RUNNER}
    return subprocess.run(
        [*command, "--app-dir", str(folder), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
async def test_runners_of_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a key that the app cannot find, also after a crash of a process."""
    monkeypatch.setenv("MINE", TRAINER)
    trainer = make_peer("run-1", role=PeerRole.TRAINER, app="looks:looks", run_id="run-1")
    task = {"dies": str(tmp_path / "died")}
    rollouts = [
        make_rollout(f"ro-{i}", run_id="run-1", app="looks:looks", task=task if i == 0 else {})
        for i in range(4)
    ]
    with serving_store(str(tmp_path / "store.db"), *KEYS, **IN_ENVIRONMENT) as (url, lines):
        async with open_store(f"{url}?api_key_env=MINE") as store:
            await store.announce(trainer)
            await store.enqueue(rollouts)
            options = ("--isolation", "process", "--lease", "90")
            run = asyncio.create_task(asyncio.to_thread(runner, url, tmp_path, *options))
            cursor = 0
            while (await store.count()).get(RolloutStatus.SUCCEEDED, 0) < 4 and not run.done():
                cursor = (await store.watch(cursor, timeout_s=1.0)).cursor
            await store.announce(msgspec.structs.replace(trainer, complete=True))
            done = await run
            attempts = await store.attempts([rollout.rollout_id for rollout in rollouts])
    assert done.returncode == 0, done.stdout + done.stderr
    ended = [attempt for attempt in attempts if attempt.status is AttemptStatus.SUCCEEDED]
    assert [attempt.rollout_id for attempt in ended] == [f"ro-{i}" for i in range(4)]
    assert ended[0].number == 2
    for attempt in ended:
        assert attempt.reward == Reward(0.0, {"reward": 0.0, "in a child": 0.0, "here": 0.0}), (
            attempt.message
        )
    output = "\n".join([*lines, done.stdout, done.stderr])
    assert TRAINER not in output
    assert RUNNER not in output


async def test_what_it_says(tmp_path: Path) -> None:
    database = tmp_path / "store.db"
    with serving_store(str(database), *KEYS, **IN_ENVIRONMENT) as (url, lines):
        pass
    assert lines == [
        "trainer key: $TRAINER_KEY",
        "runner key: $RUNNER_KEY",
        "clients need a key in LIGHTSPAN_STORE_KEY, or in the variable of ?api_key_env=NAME",
        f'a trainer:  Trainer(…, store="{url}")',
        f"a runner:   lightspan runner --store {url} MODULE:APP",
        f"serving the store sqlite://{database} at {url} (Ctrl-C stops)",
        "stopping",
    ]


async def test_without_a_key(tmp_path: Path) -> None:
    """Check that local programs and commands can use the store like a file."""
    with serving_store(str(tmp_path / "store.db"), "--without-key") as (url, lines):
        async with open_store(url) as store:
            await store.enqueue([make_rollout()])
    assert "no key: every program of this machine has full access" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--store URL: here neither is given"),
        (["--store", "x.db"], "needs keys: name the variables"),
        (["--store", "x.db", "--without-key", "--host", "0.0.0.0"], "is reachable from others"),
        (["--store", "x.db", "--without-key", *KEYS], "contradicts"),
        (["--store", "memory:", "--without-key"], "serve a file"),
        (["--store", "x.db", "--without-key", "--device", "cuda"], "--device applies to a run"),
    ],
)
def test_what_cannot_be_served(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments]) == 1
    assert said in capsys.readouterr().err


async def test_commands_read_a_served_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", TRAINER)
    with serving_store(str(tmp_path / "store.db"), *KEYS, **IN_ENVIRONMENT) as (url, _):
        production = make_production()
        async with open_store(url) as store:
            await store.start([production])
            await store.report([make_report(production.attempt, reward=Reward(0.25))])

        def inspected() -> int:
            return main(["inspect", url])

        assert await asyncio.to_thread(inspected) == 0
        assert " 0.25 " in capsys.readouterr().out
        monkeypatch.setenv("LIGHTSPAN_STORE_KEY", RUNNER)
        assert await asyncio.to_thread(inspected) == 1
        assert "a runner's key may not call" in capsys.readouterr().err
        monkeypatch.setenv("LIGHTSPAN_STORE_KEY", "another-key-0123456789")
        assert await asyncio.to_thread(inspected) == 1
        assert "$LIGHTSPAN_STORE_KEY" in capsys.readouterr().err


@pytest.mark.slow
def test_a_training_and_its_runner_processes(
    rl: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the key is passed by a pipe, never by the environment or the folder."""
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", TRAINER)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "blind.py").write_text(BLIND % TRAINER)
    folder = tmp_path / "run"
    with serving_store(str(tmp_path / "store.db"), *KEYS, **IN_ENVIRONMENT) as (url, _):
        runners = LocalRunners(4, processes=2)
        trainer = Trainer(rl(), steps=2, folder=folder, runners=runners, store=url)
        assert trainer.fit("blind:spell", questions(4)).steps == 2

        async def attempts() -> list[Any]:
            async with open_store(url) as store:
                states = await store.rollouts(run_id=trainer.folder.read_config()["run_id"])
                return await store.attempts([state.rollout.rollout_id for state in states])

        found = asyncio.run(attempts())
    assert {attempt.number for attempt in found} == {1}
    assert {attempt.status for attempt in found} == {AttemptStatus.SUCCEEDED}
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert TRAINER.encode() not in written
    assert url.encode() in written

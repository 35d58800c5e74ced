"""Uses of a PostgreSQL store: trainings, runners, production, the commands."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest

from lightspan import ExternalRunners, LocalRunners, Trainer, record
from lightspan.cli import main
from lightspan.schema.records import AttemptStatus
from lightspan.stores import open_store
from lightspan_testing.attempts import read_recorded
from lightspan_testing.scripted import Request, ScriptedServer
from lightspan_tools.inspect import inspect_run
from packages.core.tests.production.imports import imports_of_threads
from tests.conftest import APPS, apps, questions, rl  # noqa: F401 - fixtures
from tests.postgres.cluster import PASSWORD

SECRET = quote(PASSWORD, safe="")


@pytest.fixture
def urls(make_url: Callable[..., str]) -> tuple[str, str]:
    """Return the URLs of a store with a password: with it and without it."""
    url = make_url(user="locked")
    return url.replace("locked@", f"locked:{SECRET}@"), url


def written(folder: Path) -> bytes:
    """Return the content of all files in a folder."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_training_and_its_runner_processes(
    apps: Any,  # noqa: F811
    rl: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    urls: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two runner processes get the password; the run's folder does not contain it."""
    with_password, url = urls
    folder = tmp_path / "run"
    trainer = Trainer(
        rl(frozen="base"),
        steps=2,
        folder=folder,
        runners=LocalRunners(4, processes=2),
        store=with_password,
    )
    result = trainer.fit(apps.two, questions(4), questions(2, held=1))
    assert result.steps == 2
    assert not (folder / "store.db").exists()
    assert json.loads((folder / "config.json").read_text())["store"] == url
    assert "20 rollouts; calls by agent" in inspect_run(folder)
    for secret in (PASSWORD, SECRET):
        assert secret.encode() not in written(folder)
        assert secret not in caplog.text + repr(trainer) + repr(trainer.settings)

    async def attempts() -> list[Any]:
        async with open_store(url) as store:
            states = await store.rollouts(run_id=trainer.folder.read_config()["run_id"])
            return await store.attempts([state.rollout.rollout_id for state in states])

    attempts_of_run = asyncio.run(attempts())
    assert {attempt.status for attempt in attempts_of_run} == {AttemptStatus.SUCCEEDED}
    assert len({attempt.runner_id for attempt in attempts_of_run}) == 2
    again = Trainer(rl(frozen="base"), steps=3, folder=folder, store=with_password)
    assert again.fit(apps.two, questions(4), questions(2, held=1), resume=True).steps == 3


@pytest.mark.slow
def test_a_runner_that_is_started_by_hand(
    rl: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    urls: tuple[str, str],
) -> None:
    """It starts before the training, and creates the tables."""
    _, url = urls
    environment = {**os.environ, "PGPASSWORD": PASSWORD}
    command = [sys.executable, "-m", "lightspan.cli", "runner", "--store", url, "toy_apps:spell"]
    command += ["--app-dir", str(APPS)]
    with (tmp_path / "log").open("w+b") as log:
        runner = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        trainer = Trainer(
            rl(),
            runners=ExternalRunners(4, timeout_s=60),
            steps=1,
            folder=tmp_path / "run",
            store=urls[0],
        )
        assert trainer.fit("toy_apps:spell", questions(2)).steps == 1
        assert runner.wait(60) == 0
    output = (tmp_path / "log").read_text()
    assert output.endswith("ended; attempts claimed: 8, finished: 8\n")
    assert PASSWORD not in output


def test_production_and_its_commands(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def echo(request: Request) -> str:
        return f"echo {request.last_text}"

    with ScriptedServer(echo) as server:
        client = openai.OpenAI(base_url=server.url, api_key="key", max_retries=0)
        with client, record(url, service="support"):
            completion = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}]
            )
    assert main(["inspect", url]) == 0
    assert f"{url}: recorded in production\n1 attempts by service" in capsys.readouterr().out
    assert main(["feedback", "--store", url, completion.id, "0.5"]) == 0
    assert main(["export", url, "messages", "-o", str(tmp_path / "out.jsonl")]) == 0
    [line] = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"][-1]["content"] == "echo hello"
    [recorded] = read_recorded(url)
    assert main(["feedback", "--store", url, recorded.attempt.attempt_id, "0.25"]) == 0
    assert main(["inspect", url]) == 0
    assert " 0.25 " in capsys.readouterr().out
    missing = url.replace("schema=", "schema=no_")
    assert main(["inspect", missing]) == 1
    assert "nothing was recorded there" in capsys.readouterr().err
    assert main(["export", url, "model"]) == 1
    assert "is a store of production" in capsys.readouterr().err


def test_threads_that_write_to_a_database_import_nothing(url: str) -> None:
    """As with other stores (packages/gateway/tests/test_forks.py)."""
    with ScriptedServer("Here.") as server:
        threads, *modules = imports_of_threads(server.url, LIGHTSPAN_STORE=url)
    assert int(threads) >= 2
    assert modules == []

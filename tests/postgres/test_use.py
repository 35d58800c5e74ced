"""Uses of a PostgreSQL store: trainings, runners, production, the commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lightspan import LocalRunners, Trainer
from lightspan.schema.records import AttemptStatus
from lightspan.stores import open_store
from lightspan_testing.scripted import ScriptedServer
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


def test_threads_that_write_to_a_database_import_nothing(url: str) -> None:
    """As with other stores (packages/gateway/tests/test_forks.py)."""
    with ScriptedServer("Here.") as server:
        threads, *modules = imports_of_threads(server.url, LIGHTSPAN_STORE=url)
    assert int(threads) >= 2
    assert modules == []

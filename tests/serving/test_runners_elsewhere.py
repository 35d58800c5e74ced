"""Tests of `lightspan runner --store http://…` with an app in another folder."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serve_process import serving_store  # type: ignore[import-not-found]

from lightspan import ExternalRunners, Trainer
from lightspan.errors import StoreError
from lightspan.progress import SilentReporter
from lightspan.schema.records import Attempt, AttemptStatus
from lightspan.schema.token_records import TokenRecord
from lightspan.stores import open_store
from lightspan.stores.sqlite import SQLiteStore
from lightspan_gateway import Gateway
from packages.gateway.tests.remote_store.served import RUNNER, TRAINER, serving
from tests.conftest import questions

pytestmark = pytest.mark.slow

KEYS = ("--trainer-key-env", "TRAINER_KEY", "--runner-key-env", "RUNNER_KEY")
IN_ENVIRONMENT = {"TRAINER_KEY": TRAINER, "RUNNER_KEY": RUNNER}

APP = """
import os, socket, sys
import openai
from lightspan import agent, rollout

ALLOWED = %r
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0)
reached = set()
connect = socket.socket.connect

def note(self, address):
    reached.add(address[1] if isinstance(address, tuple) else address)
    return connect(self, address)

socket.socket.connect = note

@rollout
def spell(task, llm):
    messages = [{"role": "user", "content": task["q"]}]
    with agent("writer"):
        reply = client.chat.completions.create(model="any", max_tokens=4, messages=messages)
        stream = client.chat.completions.create(
            model="any", max_tokens=4, messages=messages, stream=True
        )
        parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
    text = reply.choices[0].message.content or ""
    return {
        "reward": float(len(text)),
        "strangers": float(len(reached - {ALLOWED})),
        "reached": float(ALLOWED in reached),
        "relayed": float(llm.base_url == f"http://127.0.0.1:{ALLOWED}/gateway/v1"),
        "foreign paths": float(sum(%r in path for path in sys.path)),
        "folder": float(os.path.realpath(os.getcwd()) == os.path.realpath(%r)),
        "streamed": float(bool("".join(parts)) or bool(parts)),
    }
"""


def test_a_trainer_that_the_server_does_not_reach_spends_no_rollout(
    rl: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the error before the first rollout, with what to write."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(Gateway, "url", property(lambda self: gone))
    with serving(lambda: SQLiteStore(tmp_path / "store.db")) as served:
        trainer = Trainer(
            rl(),
            folder=tmp_path / "far",
            runners=ExternalRunners(2, timeout_s=240),
            store=served.url,
            reporter=SilentReporter(),
        )
        with pytest.raises(StoreError, match="cannot be reached from the store's server") as error:
            trainer.evaluate("far_app:spell", questions(4))
        assert gone in str(error.value)
        assert 'Trainer(gateway="HOST")' in str(error.value)
        assert served.run(served.store.rollouts()) == []


@pytest.mark.timeout(300)
def test_the_store_s_server_is_all_that_a_runner_reaches(
    rl: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers_path = str(tmp_path / "of-the-trainer")
    monkeypatch.syspath_prepend(trainers_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with serving_store(str(tmp_path / "store.db"), *KEYS, **IN_ENVIRONMENT) as (url, _):
        port = int(url.rpartition(":")[2])
        (elsewhere / "far_app.py").write_text(APP % (port, trainers_path, str(elsewhere)))
        # a trainer removes its key from the environment and keeps it
        monkeypatch.setenv("LIGHTSPAN_STORE_KEY", TRAINER)
        trainer = Trainer(
            rl(),
            folder=tmp_path / "far",
            runners=ExternalRunners(2, timeout_s=240),
            store=url,
            gateway="127.0.0.2",  # an address that only the server has
            reporter=SilentReporter(),
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment["LIGHTSPAN_STORE_KEY"] = RUNNER
        command = [sys.executable, "-m", "lightspan.cli", "runner", "--store", url]
        with subprocess.Popen(
            [*command, "--slots", "1", "far_app:spell"], cwd=elsewhere, env=environment
        ) as runner:
            try:
                trainer.evaluate("far_app:spell", questions(4))
            finally:
                runner.terminate()
        run_id = trainer.folder.read_config()["run_id"]

        async def read() -> tuple[list[Attempt], dict[str, list[TokenRecord]]]:
            async with open_store(url) as store:
                states = await store.rollouts(run_id=run_id)
                attempts = await store.attempts([state.rollout.rollout_id for state in states])
                ids = [attempt.attempt_id for attempt in attempts]
                return list(attempts), await store.token_records(ids)

        attempts, records = asyncio.run(read())
    assert [attempt.status for attempt in attempts] == [AttemptStatus.SUCCEEDED] * 4
    assert [len(calls) for calls in records.values()] == [2] * 4
    for attempt in attempts:
        dimensions = dict(attempt.reward.dimensions)
        del dimensions["reward"]
        assert dimensions == {
            "strangers": 0.0,
            "reached": 1.0,
            "relayed": 1.0,
            "foreign paths": 0.0,
            "folder": 1.0,
            "streamed": 1.0,
        }

"""Test `kill -9` of the gateway's process at random moments, while a runner makes calls."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checks import check_all  # type: ignore[import-not-found]
from fault_apps import answers  # type: ignore[import-not-found]
from fault_gateway import rollouts  # type: ignore[import-not-found]
from places import free_port  # type: ignore[import-not-found]

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.runners.app import App
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import Runner
from lightspan.schema.records import RolloutStatus
from lightspan.stores import open_store

HERE = Path(__file__).parent
KILLS = 10 if os.environ.get("LIGHTSPAN_SEED") else 5


def start(url: str, port: int) -> subprocess.Popen[str]:
    """Start a gateway process, and wait until it listens."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "fault_gateway.py"), url, str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shorten the pauses between the SDK's own retries."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.05)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.2)
    monkeypatch.setenv("OPENAI_API_KEY", "placeholder")
    yield
    context_propagation.stop_carrying()
    sdk_instrumentation.uninstall()


@pytest.mark.faults
@pytest.mark.timeout(570)
@pytest.mark.usefixtures("quick_retries")
async def test_kill_gateway(tmp_path: Path, moments: Callable[[Any], random.Random]) -> None:
    randomly, port = moments("gateway"), free_port()
    async with open_store(f"sqlite:///{tmp_path}/run.db") as store:
        asked = await rollouts(store, f"http://127.0.0.1:{port}")
        names = [rollout.rollout_id for rollout in asked]
        process = await asyncio.to_thread(start, store.url, port)
        runner = Runner(store, App(answers), RunnerConfig(slots=6))
        task = asyncio.create_task(runner.run())
        try:
            share = len(names) // KILLS
            for number in range(KILLS):
                await store.enqueue(asked[number * share : (number + 1) * share])
                await asyncio.sleep(randomly.uniform(0.05, 0.5))
                await asyncio.to_thread(end, process)
                process = await asyncio.to_thread(start, store.url, port)
            while (counts := await store.count()) != {RolloutStatus.SUCCEEDED: len(names)}:
                assert not task.done()
                assert RolloutStatus.FAILED not in counts, await store.attempts(names)
                await asyncio.sleep(0.05)
        finally:
            runner.stop()
            await task
            await asyncio.to_thread(end, process)
        await check_all(store, names)

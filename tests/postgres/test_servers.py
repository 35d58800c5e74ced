"""Several `lightspan serve` of one PostgreSQL share its state."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from serve_process import serving_store  # type: ignore[import-not-found]

from lightspan import ExternalRunners, Trainer
from lightspan.progress import SilentReporter
from lightspan.schema.records import Attempt, AttemptStatus, Outcome, RolloutStatus
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite import LEASE_S, make_report, make_rollout, ref
from packages.core.tests.stores.lives import check_once, live
from packages.gateway.tests.remote_store.served import RUNNER, TRAINER
from tests.conftest import APPS, questions, rl  # noqa: F401 - fixtures

KEYS = ("--trainer-key-env", "TRAINER_KEY", "--runner-key-env", "RUNNER_KEY")
IN_ENVIRONMENT = {"TRAINER_KEY": TRAINER, "RUNNER_KEY": RUNNER}


@pytest.fixture
def servers(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Two servers that start together: the first creates the tables."""
    monkeypatch.setenv("LIGHTSPAN_STORE_KEY", TRAINER)
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(serving_store(url, *KEYS, **IN_ENVIRONMENT))[0] for _ in range(2)
        )
        yield one, other


async def test_a_life_at_two_servers(servers: tuple[str, str]) -> None:
    """A write to one server is visible at the other, once."""
    one, other = servers
    await live(one)
    await check_once(other)


async def test_who_waits_at_one_hears_of_what_comes_to_the_other(
    servers: tuple[str, str],
) -> None:
    one, other = servers
    async with open_store(one) as here, open_store(other) as there:
        waiting = asyncio.create_task(there.await_work(timeout_s=60.0))
        watching = asyncio.create_task(there.watch(timeout_s=60.0))
        await here.enqueue([make_rollout("ro-1")])
        assert await waiting
        changes = await watching
        assert [state.rollout.rollout_id for state in changes.rollouts] == ["ro-1"]
        [claim] = await there.claim("runner-1", 1, LEASE_S)
        assert await here.claim("runner-2", 1, LEASE_S) == []
        assert await here.heartbeat([ref(claim.attempt)], LEASE_S) == []
        assert await here.report([make_report(claim.attempt)]) == [True]
        assert await there.report([make_report(claim.attempt)]) == [True]
        assert await there.count() == {RolloutStatus.SUCCEEDED: 1}


async def test_no_rollout_is_claimed_twice(servers: tuple[str, str]) -> None:
    """Runners claim at both servers at the same time, and leases run by one clock."""
    names = [f"ro-{number}" for number in range(60)]

    async def work(store: Store, runner: str) -> list[str]:
        done = []
        while claims := await store.claim(runner, 2, LEASE_S):
            for claim in claims:
                assert await store.report([make_report(claim.attempt)]) == [True]
                done.append(claim.rollout.rollout_id)
        return done

    async with open_store(servers[0]) as here, open_store(servers[1]) as there:
        await here.enqueue([make_rollout(name) for name in names])
        both = [work(store, f"{n}") for n in range(4) for store in (here, there)]
        done = Counter(name for some in await asyncio.gather(*both) for name in some)
        assert done == dict.fromkeys(names, 1)


@pytest.mark.slow
def test_a_training_whose_runners_come_to_both(
    servers: tuple[str, str],
    rl: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer uses one server; each server has a runner, and relays its app's model calls."""
    runners = []
    with (tmp_path / "log").open("w+b") as log:
        for url in servers:
            command = [sys.executable, "-m", "lightspan.cli", "runner", "--store", url]
            command += ["toy_apps:spell", "--slots", "2", "--app-dir", str(APPS)]
            environment = {**os.environ, "LIGHTSPAN_STORE_KEY": RUNNER}
            runners.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        while (tmp_path / "log").read_text().count("waiting for a training") < 2:
            assert [runner.poll() for runner in runners] == [None, None]
            time.sleep(0.1)
        trainer = Trainer(
            rl(),
            runners=ExternalRunners(4, timeout_s=120),
            steps=3,
            folder=tmp_path / "run",
            store=servers[0],
            reporter=SilentReporter(),
        )
        try:
            assert trainer.fit("toy_apps:spell", questions(4)).steps == 3
        finally:
            for runner in runners:
                runner.send_signal(signal.SIGTERM)
            statuses = [runner.wait(60) for runner in runners]
    assert statuses == [0, 0], (tmp_path / "log").read_text()
    monkeypatch.setenv(
        "LIGHTSPAN_STORE_KEY", TRAINER
    )  # the trainer has removed it from the environment
    run_id = trainer.folder.read_config()["run_id"]

    async def read() -> tuple[list[Any], list[Attempt]]:
        async with open_store(servers[1]) as store:
            states = await store.rollouts(run_id=run_id)
            return states, await store.attempts([s.rollout.rollout_id for s in states])

    states, attempts = asyncio.run(read())
    assert {state.status for state in states} == {RolloutStatus.SUCCEEDED}
    ended = [each for each in attempts if each.status is AttemptStatus.SUCCEEDED]
    assert len(ended) == len(states)
    assert {each.outcome for each in ended} == {Outcome.OK}
    assert len({each.runner_id for each in ended}) == 2

"""What is said of runners in a Ray cluster before there is one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from lightspan.errors import AppError, ConfigError, UnsupportedError
from lightspan.runners.actor import RunnerActor, Station
from lightspan.runners.cluster import RayRunners
from lightspan.runners.protocol import RunnerPlan, Runners
from lightspan.schema.records import RolloutStatus
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan.testing.store_suite import make_rollout


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here comes to use it."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    vars(sys.modules["ray"])["is_initialized"] = lambda: False
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray .*`pip install './packages/core\[ray\]'`"):
        RayRunners(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots"),
        ({"actors": 0}, "actors"),
        ({"slots": 2, "actors": 3}, "actors=3 for slots=2: each needs one at least"),
        ({"cpus": -1}, "cpus"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"isolation": "none"}, 'isolation must be "thread" or "process"'),
        ({"address": ""}, "address must be 'local'"),
        ({"address": "ray://head:10001"}, "not by Ray Client; make the trainer's machine a node"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayRunners(**options)


def plan(url: str = "sqlite:///x.db", app: str = "app:answer") -> RunnerPlan:
    return RunnerPlan(store_url=url, app=app)


async def test_a_store_that_other_machines_cannot_open() -> None:
    runners: Runners = RayRunners(8, address="10.0.0.1:6379")
    with pytest.raises(UnsupportedError, match=r"'sqlite:///x.db' is of this machine.* serve it"):
        await runners.start(plan())
    await runners.stop()


async def test_the_variable_names_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(UnsupportedError, match="is of this machine"):
        await RayRunners(8).start(plan())


async def test_a_folder_of_nowhere() -> None:
    runners = RayRunners(8, address="10.0.0.1:6379", app_dirs="apps")
    with pytest.raises(ConfigError, match="'apps' is no absolute path"):
        await runners.start(plan("https://agents.example"))


async def test_an_interpreter_of_nowhere() -> None:
    runners = RayRunners(8, address="10.0.0.1:6379", python=".venv/bin/python")
    with pytest.raises(ConfigError, match=r"python: '.venv/bin/python' is no absolute path"):
        await runners.start(plan("https://agents.example"))


async def test_an_app_of_the_running_script() -> None:
    with pytest.raises(AppError, match="put it into a module"):
        await RayRunners(8, address="local").start(plan(app="__main__:answer"))


async def test_a_cluster_without_a_token_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match=r"10.0.0.1:6379 asks for no token.* RAY_AUTH_MODE=token"):
        await RayRunners(8, address="10.0.0.1:6379").start(plan("https://agents.example"))


async def test_what_one_actor_gives_back_no_other_one_takes(tmp_path: Path) -> None:
    """Each claims nothing more once it is told to, though it has one process only; what is under
    way there goes on."""
    url = f"sqlite:///{tmp_path}/run.db"
    told = RunnerPlan(store_url=url, app="lightspan.testing.errands:waits", run_id="run-1")
    stations = [RunnerActor(msgspec.json.encode(Station(slots=2))) for _ in range(2)]
    first = stations[0]
    tasks = [{"begun": f"{tmp_path}/begun-{n}", "go": f"{tmp_path}/go"} for n in range(3)]
    async with open_store(url) as store:
        await store.enqueue(
            [make_rollout(f"ro-{n}", task=task, run_id="run-1") for n, task in enumerate(tasks)]
        )
        try:
            for number, actor in enumerate(stations):
                plan = msgspec.structs.replace(told, prefix=f"actor-{number}")
                said = msgspec.json.decode(await actor.start(msgspec.json.encode(plan)), type=dict)
                assert said["failure"] is None
            names = ["ro-0", "ro-1", "ro-2"]
            while len(await store.attempts(names)) < 3:  # noqa: ASYNC110 - processes of others
                await asyncio.sleep(0.02)
            await asyncio.gather(*(actor.close() for actor in stations))
            await first.stop()
            states = await store.rollouts()
            given_back = [each for each in states if each.status is RolloutStatus.QUEUED]
            assert 1 <= len(given_back) <= 2  # as many as it had
            await asyncio.sleep(0.3)
            assert len(await store.attempts(names)) == 3
            (tmp_path / "go").touch()
            while not await _is_over(store, 3 - len(given_back)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        finally:
            for actor in stations:
                await actor.stop()
        assert len(await store.attempts(names)) == 3


async def _is_over(store: Store, number: int) -> bool:
    counts = await store.count()
    return counts.get(RolloutStatus.SUCCEEDED, 0) == number

"""Options and errors of `RayRunners` that need no cluster."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest

from lightspan.errors import AppError, ConfigError, UnsupportedError, how_to_install
from lightspan.runners.protocol import RunnerPlan, Runners
from lightspan_cluster.ray_runners import RayRunners


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace Ray by an empty module."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    vars(sys.modules["ray"])["is_initialized"] = lambda: False
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    remedy = re.escape(how_to_install("ray"))
    with pytest.raises(ConfigError, match=f"needs Ray .*{remedy}"):
        RayRunners(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots"),
        ({"actors": 0}, "actors"),
        ({"slots": 2, "actors": 3}, "actors=3 for slots=2: each needs one at least"),
        ({"cpus": -1}, "cpus"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"isolation": "none"}, "isolation='none': use one of 'thread', 'process'"),
        ({"address": ""}, "address must be 'local'"),
        (
            {"address": "ray://head:10001"},
            "Ray Client is not supported; make the trainer's machine a node",
        ),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayRunners(**options)


def plan(url: str = "sqlite:///x.db", app: str = "app:answer") -> RunnerPlan:
    return RunnerPlan(store_url=url, app=app)


async def test_a_store_that_other_machines_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    runners: Runners = RayRunners(8)
    with pytest.raises(UnsupportedError, match=r"'sqlite:///x.db' is of this machine.* serve it"):
        await runners.start(plan())
    await runners.stop()


@pytest.mark.parametrize(
    ("options", "told", "message"),
    [
        ({"app_dirs": "apps"}, plan("https://agents.example"), "'apps' is no absolute path"),
        ({"python": "bin/python"}, plan("https://agents.example"), "'bin/python' is no absolute"),
        ({}, plan(app="__main__:answer"), "put it into a module"),
    ],
)
async def test_plans_that_cannot_be_followed(
    options: dict[str, Any], told: RunnerPlan, message: str
) -> None:
    with pytest.raises((ConfigError, AppError), match=message):
        await RayRunners(8, address="10.0.0.1:6379", **options).start(told)


@pytest.mark.parametrize(("free", "is_starting"), [(1.0, True), (0.25, False)])
def test_a_cluster_with_room_is_not_said_to_have_none(free: float, is_starting: bool) -> None:
    ray = vars(sys.modules["ray"])
    ray["cluster_resources"] = lambda: {"CPU": 2.0}
    ray["available_resources"] = lambda: {"CPU": free}
    text = RayRunners(1, cpus=0.5)._room()
    assert text.startswith(f"each asks for 0.5 CPU; free are {free:g} of 2 CPU")
    assert ("still starting the actor's process, or no single node" in text) is is_starting


@pytest.mark.parametrize("mode", ["", "disabled"])
async def test_a_cluster_is_not_joined_without_a_token(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Check that nothing is claimed about a cluster that was not asked."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    setting = f"RAY_AUTH_MODE={mode}" if mode else "RAY_AUTH_MODE is not set"
    message = (
        rf"^this process would join Ray cluster 10.0.0.1:6379 without a token \({setting}\); a "
        r"cluster that accepts this requires no token.* RAY_AUTH_MODE=token"
    )
    with pytest.raises(ConfigError, match=message):
        await RayRunners(8, address="10.0.0.1:6379").start(plan("https://agents.example"))

"""The interface of a set of runners (`Runners`), and the configuration of its runners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec

from lightspan.errors import AppError
from lightspan.runners.timings import RunnerTimings
from lightspan.schema.records import new_id
from lightspan.stores.protocol import Store


class RunnerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of runner processes; it is sent to them as plain data."""

    store_url: str
    store_secrets: dict[str, str] = msgspec.field(default_factory=dict)
    """Credentials of the store that are not in its URL. They are sent to child processes through
    their pipes only, and are never printed."""
    app: str
    """`module:name`."""
    run_id: str | None = None
    slots: int = 8
    lease_s: float = 30.0
    grace_s: float = 5.0
    """Seconds that an app may take to end when it is cancelled."""
    sys_path: list[str] = msgspec.field(default_factory=list)
    environment: bool = False
    """Put the call token into the environment too (`RunnerConfig.environment`)."""
    prefix: str = "runner"
    """Prefix of the names of the processes' runners."""
    elsewhere: bool = False
    """The runners are not on the trainer's machine, where the gateway's address is valid: a served
    store relays their model calls to the gateway."""
    joins: bool = False
    """Claim nothing before a `WorkerCommand` names the runs, and report the number of claimed
    attempts."""
    timings: RunnerTimings = RunnerTimings()

    def __repr__(self) -> str:
        return f"RunnerPlan(store_url={self.store_url!r}, app={self.app!r}, run_id={self.run_id!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """The configuration of one runner."""

    slots: int = 8
    """Maximum number of open attempts."""
    run_id: str | None = None
    """Claim only this run's rollouts."""
    app: str = ""
    """`module:name` of the app; rollouts of other apps are given back."""
    lease_s: float = 30.0
    """Seconds without a heartbeat after which the runner's attempts are lost."""
    name: str = field(default_factory=lambda: new_id("runner"))
    grace_s: float = 5.0
    """Seconds that an app may take to end when it is cancelled."""
    has_watchdog: bool = False
    """A `LoopWatchdog` extends the leases. Otherwise the runner's event loop does, and an app that
    blocks the loop may lose them: a runner inside another program must not start a thread that
    ends the process."""
    environment: bool = False
    """With one slot: put the call token and the gateway's address into the environment
    (`TOKEN_VARIABLE`, `GATEWAY_VARIABLE`), for programs that the app starts."""
    relay: str = ""
    """Base URL of model calls, in place of the gateway's own address, which is valid on another
    machine only (`lightspan.stores.relay_url`)."""
    timings: RunnerTimings = field(default_factory=RunnerTimings)


@runtime_checkable
class Runners(Protocol):
    """A set of runners that work for one training run."""

    async def start(self, plan: RunnerPlan) -> None:
        """Start the runners. Raises `AppError` if the app cannot be imported where they run."""

    async def stop(self) -> None:
        """End the runners; attempts under way are lost and requeued. Idempotent."""

    def check(self) -> None:
        """Raise `LightspanError` if the runners cannot go on."""


@runtime_checkable
class WatchedRunners(Runners, Protocol):
    """Runners that the trainer does not start, so that it watches the store for them."""

    async def watch(self, store: Store, print_line: Callable[[str], None]) -> None:
        """Print which runners come and go, until cancelled."""


def check_importable(app: str) -> None:
    """Raise `AppError` if the app is defined in the running script, which other programs cannot
    import."""
    module, _, name = app.partition(":")
    if module in ("__main__", "__mp_main__"):
        raise AppError(
            f"the app {name!r} is defined in the training script, which runners of another "
            "environment cannot import: put it into a module, such as my_app.py, and name it: "
            f'fit("my_app:{name}", …)'
        )

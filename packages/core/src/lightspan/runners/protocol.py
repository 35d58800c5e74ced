"""The interface of a set of runners (`Runners`), and the configuration of runners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

import msgspec

from lightspan.errors import AppError
from lightspan.runners.timings import RunnerTimings
from lightspan.schema.records import new_id
from lightspan.stores.protocol import Store

TOKEN_VARIABLE: Final = "LIGHTSPAN_CALL_TOKEN"
"""Variable with the call token of an attempt."""
GATEWAY_VARIABLE: Final = "LIGHTSPAN_GATEWAY_URL"
"""Variable with the base URL of the gateway; calls of the agent NAME go to
`$LIGHTSPAN_GATEWAY_URL/agents/NAME/v1`."""
FOLDER_VARIABLE: Final = "LIGHTSPAN_RUN_FOLDER"
"""Variable of a runner on the trainer's machine with the absolute path of the run's folder."""


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a runner that its process and its parent know."""

    run_id: str | None = None
    """Id of the run whose rollouts are claimed; None to claim rollouts of all runs."""
    slots: int = 8
    """Maximum number of concurrent attempts."""
    lease_s: float = 30.0
    """Seconds without a heartbeat after which the runner's attempts are lost."""
    grace_s: float = 5.0
    """Seconds that an app may take to end when it is cancelled."""
    environment: bool = False
    """Whether to put the call token and the gateway's address into the environment variables
    `TOKEN_VARIABLE` and `GATEWAY_VARIABLE`, for programs that the app starts. It needs `slots=1`,
    because attempts share the environment."""
    timings: RunnerTimings = RunnerTimings()


class RunnerPlan(RunnerSettings, frozen=True, kw_only=True):
    """The configuration of runner processes, which they get as JSON."""

    store_url: str
    store_secrets: dict[str, str] = msgspec.field(default_factory=dict)
    """Credentials of the store that are not in its URL. They are sent to child processes through
    pipes only, and are never printed."""
    app: str
    """Reference of the app: `module:name`, or the reference of a program."""
    sys_path: list[str] = msgspec.field(default_factory=list)
    """Folders to insert at the beginning of `sys.path`."""
    prefix: str = "runner"
    """Prefix of the runners' names."""
    elsewhere: bool = False
    """Whether the runners are on another machine than the trainer. Then they cannot reach the
    gateway's address, and the store's server forwards their model calls to the gateway."""
    folder: str = ""
    """Absolute path of the run's folder on the trainer's machine; empty if there is none."""
    joins: bool = False
    """Whether a process waits for a `WorkerCommand` that names the runs before it claims attempts,
    and reports the number of claimed attempts."""

    def __repr__(self) -> str:
        return f"RunnerPlan(store_url={self.store_url!r}, app={self.app!r}, run_id={self.run_id!r})"


class RunnerConfig(RunnerSettings, frozen=True, kw_only=True):
    """The configuration of one runner."""

    app: str = ""
    """Reference of the app; rollouts of other apps are requeued. Empty to run the rollouts of any
    app."""
    name: str = msgspec.field(default_factory=lambda: new_id("runner"))
    has_watchdog: bool = False
    """Whether a `LoopWatchdog` extends the leases. Without a watchdog, the runner's event loop
    extends them, so an app that blocks the loop may lose its lease. A runner inside another program
    has no watchdog, because a watchdog may end the process."""
    relay: str = ""
    """Base URL for model calls, if the gateway's own address cannot be reached from this machine
    (`lightspan.stores.relay_url`); else empty."""


@runtime_checkable
class Runners(Protocol):
    """A set of runners that work for one training run."""

    async def start(self, plan: RunnerPlan) -> None:
        """Start the runners.

        Raises:
            AppError: the runners cannot import the app.
        """

    async def stop(self) -> None:
        """End the runners. Attempts under way are lost and their rollouts requeued. Idempotent."""

    def check(self) -> None:
        """Raise `LightspanError` if the runners cannot go on."""


@runtime_checkable
class WatchedRunners(Runners, Protocol):
    """Runners that the user starts by hand.

    The trainer finds them by their announcements in the store.
    """

    async def watch(self, store: Store, print_line: Callable[[str], None]) -> None:
        """Print a line when a runner appears or disappears, until this coroutine is cancelled."""


def check_importable(app: str) -> None:
    """Raise `AppError` if the app is defined in the running script.

    Other programs cannot import it from there.

    Args:
        app: reference of the app.
    """
    module, _, name = app.partition(":")
    if module in ("__main__", "__mp_main__"):
        raise AppError(
            f"the app {name!r} is defined in the training script, which runners of another "
            "environment cannot import: put it into a module, such as my_app.py, and name it: "
            f'fit("my_app:{name}", …)'
        )

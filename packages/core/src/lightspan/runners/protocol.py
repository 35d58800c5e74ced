"""What a set of runners is (`Runners`), and what each of its processes is told (`RunnerPlan`).

Another place for runners to run is another module here, beside `local`, `cluster` and `external`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from lightspan.errors import AppError


class RunnerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a runner process has to know; it travels as plain data."""

    store_url: str
    store_secrets: dict[str, str] = msgspec.field(default_factory=dict)
    """What opens the store besides its URL: it goes to processes that this one starts, by their
    pipe, and is shown to nobody."""
    app: str
    """`module:name`."""
    run_id: str | None = None
    slots: int = 8
    lease_s: float = 30.0
    grace_s: float = 5.0
    """How long an app may take to end when it is cancelled."""
    sys_path: list[str] = msgspec.field(default_factory=list)
    environment: bool = False
    """Put the call token into the environment too (`RunnerConfig.environment`)."""
    prefix: str = "runner"
    """What the names of its processes' runners begin with."""
    elsewhere: bool = False
    """Not on the trainer's machine: a store that is served has model calls handed on to the
    trainer's gateway, which has an address of its own machine."""
    joins: bool = False
    """Work for no run before being told which, and say how many attempts were claimed."""

    def __repr__(self) -> str:
        return f"RunnerPlan(store_url={self.store_url!r}, app={self.app!r}, run_id={self.run_id!r})"


@runtime_checkable
class Runners(Protocol):
    """A set of runners that work for one training run."""

    async def start(self, plan: RunnerPlan) -> None:
        """Raises `AppError` if the app cannot be imported where the runners are."""
        ...

    async def stop(self) -> None:
        """End them; attempts under way are lost and queued again. Idempotent."""
        ...

    def check(self) -> None:
        """Raises `LightspanError` if the runners cannot go on."""
        ...


def check_leaves_home(app: str) -> None:
    """Raise `AppError` if the app is defined in the running script: no other program can import it
    from there."""
    module, _, name = app.partition(":")
    if module in ("__main__", "__mp_main__"):
        raise AppError(
            f"the app {name!r} is defined in the script that trains, which runners of another "
            "environment cannot import: put it into a module, such as my_app.py, and name it: "
            f'fit("my_app:{name}", …)'
        )

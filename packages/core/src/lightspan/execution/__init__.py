"""Where runners run. `local`: processes on this machine."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec


class RunnerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner process has to know; it travels as plain data."""

    store_url: str
    app: str
    """`module:name`."""
    run_id: str | None = None
    slots: int = 8
    lease_s: float = 30.0
    sys_path: list[str] = msgspec.field(default_factory=list)
    environment: bool = False
    """Put the call token into the environment too (`RunnerConfig.environment`)."""


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

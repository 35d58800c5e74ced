"""Runners that somebody else starts: `lightspan runner --store … my_app:answer`."""

from __future__ import annotations

import shlex

from lightspan.checks import check_number, check_whole
from lightspan.errors import LightspanError
from lightspan.execution import RunnerPlan, check_leaves_home


class ExternalRunners:
    """No runners of the trainer's own: those that are started by hand, or by a service manager, in
    the app's environment. The trainer says how, and waits for the first one; they may come and go.

    Args:
        slots: attempts at once that are expected of them all, for the forecasts of `dev`.
        timeout_s: seconds without any runner after which training stops; None waits for ever.
    """

    def __init__(self, slots: int = 8, *, timeout_s: float | None = None) -> None:
        check_whole("slots", slots, 1)
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, above=0)
        self.slots = slots
        self.timeout_s = timeout_s
        self._plan: RunnerPlan | None = None
        self._missing_s = 0.0

    async def start(self, plan: RunnerPlan) -> None:
        """Raises `AppError` if no other program could import the app."""
        check_leaves_home(plan.app)
        self._plan = plan
        self._missing_s = 0.0

    async def stop(self) -> None:
        """They end themselves."""

    def missing(self, seconds: float) -> None:
        """For how long there has been no runner; 0 if there is one."""
        self._missing_s = seconds

    def check(self) -> None:
        """Raises `LightspanError` if nobody came in time."""
        if self.timeout_s is not None and self._missing_s > self.timeout_s:
            assert self._plan is not None
            raise LightspanError(
                f"no runner for {self._missing_s:.0f} s: start one in the app's environment, "
                f"`{command(self._plan)}`, and go on with resume=True"
            )


def command(plan: RunnerPlan) -> str:
    """What to type in the app's environment."""
    return shlex.join(["lightspan", "runner", "--store", plan.store_url, plan.app])

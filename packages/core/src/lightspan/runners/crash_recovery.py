"""What becomes of the attempts of a runner process that died.

One that ran alone is to blame. Of several any may be: they are queued again to be run alone, each
in a process of its own, and use up no try.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightspan.runners.outcome import STOPPED
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Outcome,
    Report,
    Rollout,
    RolloutStatus,
)
from lightspan.stores.protocol import Store

QUICK_S: Final = 10.0
"""A process that dies sooner, before it has claimed anything, has an app that cannot run."""
_READ_AT_ONCE: Final = 1_000
"""Rollouts whose attempts are asked for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How a runner process ended.

    Args:
        runner: its name.
        how: what it did, such as "died by signal 9 (SIGKILL)".
        is_blameless: no attempt that is left is to blame.
        is_group: several were lost, whose names begin with that of `runner` and a hyphen.
    """

    runner: str
    how: str
    is_blameless: bool = False
    is_group: bool = False

    def is_of(self, runner_id: str) -> bool:
        """Return whether it is the death of this runner."""
        if self.is_group:
            return runner_id.startswith(f"{self.runner}-")
        return runner_id == self.runner

    def reports(self, running: Sequence[tuple[Rollout, Attempt]]) -> list[Report]:
        """Return what becomes of the attempts that it had under way."""
        if self.is_blameless:
            return [attempt.report(**STOPPED._asdict()) for _, attempt in running]
        others = len(running) - 1
        return [
            attempt.report(
                AttemptStatus.LOST,
                Outcome.INFRASTRUCTURE,
                f"it is run again, alone, because it ran beside {others} others when the runner's "
                f"process {self.how}"
                if others
                else f"only this attempt ran (rollout {rollout.rollout_id}, task "
                f"{rollout.task_id}) when the runner's process {self.how}",
                counts=not others,
                alone=True,
            )
            for rollout, attempt in running
        ]


def describe_exit(exit_code: int | None) -> str:
    """Return what a process did that ended so.

    Args:
        exit_code: its own, or a signal's number, negative.
    """
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        return f"died by signal {-exit_code}"
    return f"died by signal {-exit_code} ({name})"


async def bury(death: ProcessExit, store: Store, run_id: str | None) -> list[Report]:
    """End the attempts that the process had under way; returns how. Of a group that is lost
    (`ProcessExit.is_group`) those of all its processes."""
    running = await store.rollouts(run_id=run_id, status=[RolloutStatus.RUNNING])
    rollouts = {state.rollout.rollout_id: state.rollout for state in running}
    ids = list(rollouts)
    mine = [
        (rollouts[attempt.rollout_id], attempt)
        for start in range(0, len(ids), _READ_AT_ONCE)
        for attempt in await store.attempts(ids[start : start + _READ_AT_ONCE])
        if death.is_of(attempt.runner_id) and attempt.status is AttemptStatus.RUNNING
    ]
    reports = death.reports(mine)
    await store.report(reports)
    return reports

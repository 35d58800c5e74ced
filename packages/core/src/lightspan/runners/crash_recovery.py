"""Requeue the attempts of a runner process that died.

If one attempt was running, it has caused the death. If several were running, any of them may have
caused it. Then each is requeued to run alone in a process, and the attempt that died does not count
as a try of its rollout.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightspan.runners.outcome import STOPPED
from lightspan.schema import records
from lightspan.stores.protocol import Store

_ROLLOUTS_PER_QUERY: Final = 1_000
"""Maximum number of rollouts whose attempts are read in one query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How a runner process ended. For a Ray actor, how the actor and its runner processes ended.

    Args:
        runner: name of the runner. For an actor, the prefix of the names of its runners.
        how: what happened, such as "died by signal 9 (SIGKILL)".
        is_blameless: whether no attempt can have caused the end.
    """

    runner: str
    how: str
    is_blameless: bool = False

    def reports(
        self, running: Sequence[tuple[records.Rollout, records.Attempt]]
    ) -> list[records.Report]:
        """Return the reports that end the attempts under way, so that their rollouts are requeued.

        Args:
            running: the attempts under way, with their rollouts.
        """
        if self.is_blameless:
            return [attempt.report(**STOPPED._asdict()) for _, attempt in running]
        others = len(running) - 1
        return [
            attempt.report(
                records.AttemptStatus.LOST,
                records.Outcome.INFRASTRUCTURE,
                f"it is run again, alone, because it ran with {others} others when the runner's "
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
    """Describe an exit code, such as "died by signal 9 (SIGKILL)".

    A negative exit code is the negative number of a signal. None stands for an unknown exit code.
    """
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal_name(-exit_code)
    return f"died by signal {-exit_code}" + (f" ({name})" if name else "")


def signal_name(number: int) -> str:
    """Return the name of a signal; empty if it has no name, such as a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


async def requeue_attempts(
    death: ProcessExit, store: Store, run_id: str | None
) -> list[records.Report]:
    """End the attempts that a dead process had under way, so that their rollouts are requeued.

    Args:
        death: how the process ended.
        store: an open store.
        run_id: id of the run whose attempts to search; None for all runs.

    Returns:
        The reports with which the attempts were ended.
    """
    running = await store.rollouts(run_id=run_id, status=[records.RolloutStatus.RUNNING])
    rollouts = {state.rollout.rollout_id: state.rollout for state in running}
    ids = list(rollouts)
    attempts = [
        (rollouts[attempt.rollout_id], attempt)
        for start in range(0, len(ids), _ROLLOUTS_PER_QUERY)
        for attempt in await store.attempts(ids[start : start + _ROLLOUTS_PER_QUERY])
        if f"{attempt.runner_id}-".startswith(f"{death.runner}-")
        and attempt.status is records.AttemptStatus.RUNNING
    ]
    reports = death.reports(attempts)
    await store.report(reports)
    return reports

"""Why a runner process died, who is to blame, and what becomes of its attempts.

Of several attempts that were under way any may be guilty, or one that has ended: they are queued
again to be run alone, each in a process of its own, and use up no try. One that was alone is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightspan.runners.outcome import STOPPED
from lightspan.runners.whereabouts import in_words, of_faults
from lightspan.schema import clock
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Outcome,
    Report,
    Rollout,
    RolloutStatus,
)
from lightspan.stores.protocol import Store

SHOW: Final = signal.SIGUSR2
"""Has a process note where it is, even one in which something keeps Python's lock."""
QUICK_S: Final = 10.0
"""A process that dies sooner, before it has claimed anything, has an app that cannot run."""
_READ_AT_ONCE: Final = 1_000
"""Rollouts whose attempts are asked for at once."""
_HIGHEST: Final = 1000
_SUSPECTED: Final = 4
"""Attempts of a rollout after which one that was alone is to blame, whatever ran there before."""
_BECAUSE: Final = "lightspan: "


def note_faults(path: str) -> None:
    """Have the process write there where it is when it crashes, and when it gets `SHOW`.

    Raises:
        OSError: it cannot write there.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # A high number, which nobody else gets: if the app closes it, and a database takes its place,
    # the note of a crash would be written into that.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = limit - 1 if 0 < limit <= _HIGHEST else _HIGHEST
    note = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, high)
    os.close(file)
    faulthandler.enable(note)
    faulthandler.register(SHOW, note)


def note_reason(path: str, reason: str) -> None:
    """Write there why the process ends itself: the lifeline may be closed."""
    with contextlib.suppress(OSError), open(path, "a") as file:
        file.write(f"{_BECAUSE}{' '.join(reason.split())}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a runner process ended.

    Args:
        runner: its name.
        exit_code: its own, or a signal's number, negative.
        faults: where it was to write why and where it ended.
        alone: the attempt that it ran alone, if it did.
        claimed: attempts that it had begun in its life.
        is_single: it runs one attempt at a time.
        silent_s: how long it had said nothing when it was ended for that.
        leaves: it gave itself up, for this reason, and no attempt that is left is to blame.
        is_group: several were lost, whose names begin with that of `runner` and a hyphen.
    """

    runner: str
    exit_code: int | None
    faults: Path
    alone: str
    claimed: int
    is_single: bool
    silent_s: float | None
    leaves: str
    is_group: bool = False

    def is_of(self, runner_id: str) -> bool:
        """Whether it is the death of this runner."""
        if self.is_group:
            return runner_id.startswith(f"{self.runner}-")
        return runner_id == self.runner

    def __str__(self) -> str:
        if self.leaves:
            return self.leaves
        try:
            noted = self.faults.read_text(errors="replace").splitlines()
        except OSError:
            noted = []
        places = of_faults(noted)
        where = f": {in_words(places)}" if places else ""
        return f"{self._how(noted)}{where}"

    def _how(self, noted: Sequence[str]) -> str:
        for line in noted:
            if line.startswith(_BECAUSE):
                return f"ended itself, because {line.removeprefix(_BECAUSE)}"
        if self.silent_s is not None:
            silence = f"said nothing for {self.silent_s:.0f} s"
            return f"{silence}, as if something kept Python's lock, and was ended"
        if self.exit_code is None or self.exit_code >= 0:
            return f"ended with exit code {self.exit_code}"
        try:
            name = signal.Signals(-self.exit_code).name
        except ValueError:  # a real-time signal
            return f"died by signal {-self.exit_code}"
        return f"died by signal {-self.exit_code} ({name})"

    def _blames(self, attempt: Attempt) -> bool:
        """Whether nobody else can have done it: what ran there before may have left an alarm."""
        is_alone = self.is_single or attempt.attempt_id == self.alone
        return is_alone and (self.claimed == 1 or attempt.number > _SUSPECTED)

    def reports(self, running: Sequence[tuple[Rollout, Attempt]]) -> list[Report]:
        """What becomes of the attempts that it had under way."""
        if self.leaves:
            return [attempt.report(**STOPPED._asdict()) for _, attempt in running]
        others = len(running) - 1
        before = f"after {self.claimed - 1} others in one process"
        company = f"beside {others} others" if others else before
        return [
            self._blamed(rollout, attempt)
            if self._blames(attempt)
            else attempt.report(
                AttemptStatus.LOST,
                Outcome.INFRASTRUCTURE,
                f"it is run again, alone, because it ran {company} when the runner's "
                f"process {self}",
                counts=False,
                alone=True,
            )
            for rollout, attempt in running
        ]

    def _blamed(self, rollout: Rollout, attempt: Attempt) -> Report:
        # the clock of a store that processes of this machine share
        lasted_s = clock.now() - attempt.started_at
        if self.silent_s is not None and lasted_s > (rollout.timeout_s or float("inf")):
            text = f"the app ran longer than {rollout.timeout_s:g} s; its process {self}"
            return attempt.report(AttemptStatus.TIMEOUT, Outcome.TIMEOUT, text)
        text = (
            f"only this attempt ran (rollout {rollout.rollout_id}, task {rollout.task_id}) when "
            f"the runner's process {self}"
        )
        return attempt.report(AttemptStatus.LOST, Outcome.INFRASTRUCTURE, text, alone=True)


async def bury(death: Death, store: Store, run_id: str | None) -> list[Report]:
    """End the attempts that the process had under way; returns how. Of a group that is lost
    (`Death.is_group`) those of all its processes."""
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

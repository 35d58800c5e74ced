"""Runner processes that work for training runs which their parent names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from lightspan.runners.local import LocalRunners
from lightspan.runners.process_main import WorkerCommand

log = logging.getLogger(__name__)


class JoinedRunners(LocalRunners):
    """Runners as processes on this machine, which wait for the ids of their runs.

    Their plan has `RunnerPlan.joins`. The arguments are those of `LocalRunners`.
    """

    _runs: list[str] | None = None
    """Ids of the runs; None before `work_for`."""

    def work_for(self, run_ids: Sequence[str]) -> None:
        """Let the processes claim only attempts of the runs `run_ids` from now on.

        Args:
            run_ids: ids of the runs; empty to claim nothing.
        """
        self._runs = list(run_ids)
        for worker in self._workers:
            worker.send(WorkerCommand(runs=self._runs))

    async def drain(self) -> None:
        """Stop claiming attempts, and wait until the attempts under way have ended."""
        assert self._plan is not None
        await self._end_supervision()
        for worker in self._workers:
            worker.send(WorkerCommand(stop=True))
        leaving = list(self._workers)
        while leaving:
            for worker in list(leaving):
                if (death := await self._death(worker)) is not None:
                    leaving.remove(worker)
                    if worker.latest.running:
                        log.warning("runner %s %s", worker.name, death.how)
                        await self._requeue(worker, death)
            await asyncio.sleep(self._plan.timings.poll_interval_s)

    @property
    def running(self) -> int:
        """Number of attempts under way."""
        return sum(each.latest.running for each in self._workers if each.process.is_alive())

    async def stop(self) -> None:
        self._runs = None
        await super().stop()

    def _wait_ready(self, worker: Any) -> None:
        super()._wait_ready(worker)
        if self._runs is not None:
            worker.send(WorkerCommand(runs=self._runs))

"""An algorithm of one's own at work: it, and runners beside it, over one store."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

from lightspan.agl._agents import LitAgent
from lightspan.agl._algorithms import Algorithm
from lightspan.agl._events import ThreadingEvent
from lightspan.agl._rollouts import Dataset, Hook
from lightspan.agl._runners import LitAgentRunner
from lightspan.agl._store import LightningStore
from lightspan.agl._tracers import Tracer
from lightspan.agl._travel import maker
from lightspan.progress import say

POLL_S = 0.05


async def run_algorithm(
    algorithm: Algorithm,
    agent: LitAgent[Any],
    store: LightningStore,
    train: Dataset[Any] | None,
    val: Dataset[Any] | None,
    *,
    runners: int,
    tracer: Tracer,
    hooks: Sequence[Hook] = (),
    max_rollouts: int | None = None,
) -> None:
    """Run the algorithm to its end, with runners in this process.

    Args:
        algorithm: with everything set that it may ask for.
        agent: what runs; each runner makes one of its own, where it can be made again.
        store: the algorithm's.
        train: tasks.
        val: held-out tasks.
        runners: how many; one, if the agent cannot be made again.
        tracer: records what agents do; of several runners each has a copy.
        hooks: are told of attempts.
        max_rollouts: of each runner.

    Raises:
        What the algorithm raises.
    """
    make, stop = maker(agent), ThreadingEvent()
    agents = [agent] if make is None else [make() for _ in range(runners)]
    if len(agents) < runners:
        say(
            f"one runner, not {runners}: {type(agent).__qualname__} cannot be made again, and "
            "works on one rollout at a time; make it in __init__ from arguments"
        )
    try:
        async with asyncio.TaskGroup() as group:
            for number, own in enumerate(agents):
                its = tracer if len(agents) == 1 else copy.copy(tracer)
                runner = LitAgentRunner[Any](its, max_rollouts, poll_interval=POLL_S)
                group.create_task(_work(runner, own, number, store, hooks, stop))
            try:
                await _run(algorithm, train, val)
            finally:
                stop.set()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _run(algorithm: Algorithm, train: Dataset[Any] | None, val: Dataset[Any] | None) -> None:
    if algorithm.is_async():
        work = algorithm.run(train_dataset=train, val_dataset=val)
        assert work is not None
        await work
    else:  # in a thread: while it works or waits, the runners go on
        await asyncio.to_thread(algorithm.run, train_dataset=train, val_dataset=val)


async def _work(
    runner: LitAgentRunner[Any],
    agent: LitAgent[Any],
    number: int,
    store: LightningStore,
    hooks: Sequence[Hook],
    stop: ThreadingEvent,
) -> None:
    with runner.run_context(agent=agent, store=store, hooks=hooks, worker_id=number):
        await runner.iter(event=stop)

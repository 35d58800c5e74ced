"""Ten thousand concurrent rollouts on a virtual clock, with a real store (for `scale.py`).

Each has some model calls, one after the other, whose latencies are drawn from a log-normal
distribution, and writes each call to the store as the gateway does. Runners of 64 slots claim,
extend their leases every five seconds, and report, as runners do. Waiting for a model takes no real
time; the work of the store is really done.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from _virtual_time import VirtualTime
from store import make_call, make_rollouts

from lightspan.schema.records import AttemptRef, AttemptStatus, Claim, Report, RolloutStatus, new_id
from lightspan.schema.reward import Reward
from lightspan.stores.protocol import Store
from lightspan.stores.sqlite.store import SQLiteStore

CALLS: Final = 8
SLOTS: Final = 64
LEASE_S: Final = 30.0
MEDIAN_S: Final = 6.0
"""Median seconds of a model call."""
SPREAD: Final = 0.8
"""Standard deviation of the logarithm of a call's seconds: one in twenty takes more than 22 s, and
the mean is 8.3 s."""


@dataclass
class Simulated:
    """The result of a simulation."""

    rollouts: int
    wall_s: float = 0.0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    most_at_once: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    calls: int = 0
    lost_leases: int = 0

    def check(self) -> None:
        """Raise `SystemExit` if a rollout or call is missing or was done twice."""
        whole = (
            self.statuses == Counter({"succeeded": self.rollouts})
            and self.attempts == self.rollouts
            and self.calls == CALLS * self.rollouts
            and self.lost_leases == 0
            and self.most_at_once == self.rollouts
        )
        if not whole:
            raise SystemExit(f"the simulation lost something, or was not whole: {self}")


def simulate(number: int, seed: int, path: Path) -> Simulated:
    """Run `number` concurrent rollouts over a new SQLite file at `path`."""
    return asyncio.run(_simulate(number, seed, path))


async def _simulate(number: int, seed: int, path: Path) -> Simulated:
    found, clock = Simulated(number), VirtualTime()
    async with SQLiteStore(path, clock=clock) as store:
        cpu_s, begun, started = time.process_time(), time.perf_counter(), clock()
        rollouts = make_rollouts(number)
        await store.enqueue(rollouts)
        for index in range(math.ceil(number / SLOTS)):
            clock.start(_Runner(store, clock, found, random.Random(f"{seed}/{index}")).run())
        await clock.over()
        found.wall_s, found.cpu_s = time.perf_counter() - begun, time.process_time() - cpu_s
        found.virtual_s = clock() - started
        ids = [rollout.rollout_id for rollout in rollouts]
        found.statuses = Counter(str(state.status) for state in await store.rollouts(ids))
        attempts = [attempt.attempt_id for attempt in await store.attempts(ids)]
        found.attempts = len(attempts)
        for start in range(0, len(attempts), 500):
            records = await store.token_records(attempts[start : start + 500])
            found.calls += sum(not one.late for kept in records.values() for one in kept)
        assert set(await store.count()) == {RolloutStatus.SUCCEEDED}
    return found


class _Runner:
    """Claims rollouts until none are left, and extends leases until its last attempt has ended."""

    def __init__(
        self, store: Store, clock: VirtualTime, found: Simulated, chance: random.Random
    ) -> None:
        self._store = store
        self._clock = clock
        self._found = found
        self._chance = chance
        self._name = new_id("runner")
        self._running: dict[str, AttemptRef] = {}

    async def run(self) -> None:
        for claim in await self._store.claim(self._name, SLOTS, LEASE_S):
            attempt = claim.attempt
            self._running[attempt.attempt_id] = AttemptRef(attempt.attempt_id, attempt.epoch)
            self._clock.start(self._attempt(claim))
        self._found.most_at_once = max(
            self._found.most_at_once, (await self._store.count()).get(RolloutStatus.RUNNING, 0)
        )
        while self._running:
            await self._clock.sleep(LEASE_S / 6)
            refs = list(self._running.values())
            self._found.lost_leases += len(await self._store.heartbeat(refs, LEASE_S))

    async def _attempt(self, claim: Claim) -> None:
        for number in range(CALLS):
            await self._clock.sleep(self._chance.lognormvariate(math.log(MEDIAN_S), SPREAD))
            await self._store.add_calls([make_call(claim.attempt, number)])
        attempt = claim.attempt
        report = Report(
            attempt_id=attempt.attempt_id,
            epoch=attempt.epoch,
            status=AttemptStatus.SUCCEEDED,
            reward=Reward(1.0),
        )
        # before it is reported: what is sealed cannot be extended, and is not lost
        del self._running[attempt.attempt_id]
        [is_in_force] = await self._store.report([report])
        assert is_in_force

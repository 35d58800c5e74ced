"""Enqueue rollouts, wait until they have ended, and read their episodes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from lightspan.errors import RewardError
from lightspan.lightning.episode import Episode, build_episode
from lightspan.lightning.rollout_checks import check_evaluable
from lightspan.progress import Reporter
from lightspan.protocols.engine import TokenEngine
from lightspan.runners.protocol import Runners
from lightspan.schema.images import with_data
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Mode,
    Outcome,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.schema.token_records import TokenRecord
from lightspan.stores.protocol import Store
from lightspan.training.in_flight import InFlight

EXPIRE_INTERVAL_S: Final = 2.0
"""Seconds between two checks for expired leases while waiting."""
WATCH_TIMEOUT_S: Final = 0.5
"""Timeout of one long poll of the store, in seconds."""


@dataclass(eq=False)
class Collector:
    """Enqueue batches of rollouts of one run in the store, and return their episodes.

    Args:
        store: store from which the runners claim attempts.
        runners: the runners. While waiting, the collector checks that they can continue.
        engine: engine whose tokens per second are shown; None for no engine.
        reporter: reporter that shows progress and rewards.
    """

    store: Store
    runners: Runners
    engine: TokenEngine | None
    reporter: Reporter
    in_flight: InFlight = field(default_factory=InFlight, init=False)
    _cursor: int = 0
    _since: float = 0.0
    """Time (monotonic clock) at which groups began to be in flight, in the current period."""
    _expired: float = field(default_factory=time.monotonic)
    """Time (monotonic clock) of the last check for expired leases."""
    _seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of wall time during which groups of rollouts ran or waited for a runner."""
        return self._seconds + (time.monotonic() - self._since if self.in_flight else 0.0)

    async def run(self, rollouts: Sequence[Rollout], title: str) -> list[Episode]:
        """Run rollouts to their end and return their episodes in the same order.

        Args:
            rollouts: rollouts of whole groups.
            title: title of the progress display.

        Raises:
            RewardError: an app returned an invalid reward; the remaining rollouts are not awaited.
            LightspanError: the runners cannot continue.
        """
        await self.submit(rollouts)
        groups = list(dict.fromkeys(str(rollout.group_id) for rollout in rollouts))
        _, episodes = await self.take(len(groups), groups, title)
        return episodes

    async def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Enqueue whole groups of rollouts without waiting for them; `take` waits for them."""
        if not rollouts:
            return
        if not self.in_flight:
            self._since = time.monotonic()
            # Skip earlier changes, which cannot concern these rollouts.
            changes = await self.store.watch(self._cursor, run_id=rollouts[0].run_id)
            self._cursor = max(self._cursor, changes.cursor)
        await self.store.enqueue(rollouts)
        self.in_flight.add(rollouts)

    async def take(
        self, count: int, first: Sequence[str], title: str
    ) -> tuple[list[Rollout], list[Episode]]:
        """Wait until `count` submitted groups have ended; return their rollouts and episodes.

        Args:
            count: number of groups.
            first: ids of groups that must be among them. The other groups are those that ended
                first.
            title: title of the progress display.

        Raises:
            ConfigError: fewer than `count` groups are in flight, a group of `first` is not in
                flight, or `first` has more than `count` groups.
            RewardError: an app returned an invalid reward.
            UnsupportedError: in an evaluation, the app asked a model for something unsupported
                there.
            LightspanError: the runners cannot continue.
        """
        self.in_flight.check(count, first)
        if not count:
            return [], []
        progress = _Progress(self.engine)
        total, shown = self.in_flight.size(count, first)
        self.reporter.start(title, total)
        self.reporter.advance(shown)
        while (groups := self.in_flight.ready(count, first)) is None:
            ended = self.in_flight.update(await self._poll_ended())
            for state, attempts in zip(ended, await _attempts(self.store, ended), strict=True):
                progress.add(state, attempts[-1])
                if state.rollout.mode is Mode.VAL and attempts[-1].status is AttemptStatus.FAILED:
                    check_evaluable(await read_episodes(self.store, [state]))
            _, done = self.in_flight.size(count, first)
            self.reporter.advance(done - shown, **progress.values())
            shown = done
        states = self.in_flight.pop(groups)
        if not self.in_flight:
            self._seconds += time.monotonic() - self._since
        return [s.rollout for s in states], await read_episodes(self.store, states)

    async def _poll_ended(self) -> list[RolloutState]:
        """Return the rollouts that have ended since the last poll; wait briefly if there are none.

        The method also ends the attempts of runners that stopped sending heartbeats, and checks
        that the other runners can continue.

        Raises:
            LightspanError: the runners cannot continue.
        """
        changes = await self.store.watch(
            self._cursor, run_id=self.in_flight.run_id, timeout_s=WATCH_TIMEOUT_S
        )
        self._cursor = changes.cursor
        self.runners.check()
        if time.monotonic() - self._expired > EXPIRE_INTERVAL_S:
            await self.store.expire()
            self._expired = time.monotonic()
        return [state for state in changes.rollouts if state.status.final]


class _Progress:
    """The numbers that the progress display shows while rollouts run.

    Args:
        engine: engine whose tokens per second are shown; None for no engine.
    """

    def __init__(self, engine: TokenEngine | None) -> None:
        self._engine = engine
        self._rewards: list[float] = []
        self._failed = 0
        self._started = time.monotonic()
        self._tokens = self._generated()

    def add(self, state: RolloutState, attempt: Attempt) -> None:
        """Add a rollout that has ended.

        Raises:
            RewardError: the app returned an invalid reward.
        """
        if state.rollout.fork is not None and attempt.capture_errors:
            return  # it did not repeat the attempt that it was forked from
        if attempt.outcome is Outcome.BAD_REWARD:
            raise RewardError(f"task {state.rollout.task_id}: {attempt.message}")
        self._failed += attempt.status is not AttemptStatus.SUCCEEDED
        if attempt.reward is not None and attempt.reward.value is not None:
            self._rewards.append(attempt.reward.value)

    def values(self) -> dict[str, float]:
        """Return the mean reward, the engine's tokens per second, and the number of failures.

        The mean is missing if there is no reward. The tokens per second are missing without an
        engine. The number of failures is missing if it is 0.
        """
        values = {}
        if self._rewards:
            values["reward"] = math.fsum(self._rewards) / len(self._rewards)
        if self._engine is not None:
            seconds = max(1e-3, time.monotonic() - self._started)
            values["tokens_per_s"] = (self._generated() - self._tokens) / seconds
        if self._failed:
            values["failed"] = float(self._failed)
        return values

    def _generated(self) -> float:
        """Return the number of tokens that the engine has generated; 0 without an engine."""
        return self._engine.usage().get("tokens", 0.0) if self._engine is not None else 0.0


async def read_episodes(store: Store, states: Sequence[RolloutState]) -> list[Episode]:
    """Return the episode of each rollout's last attempt, with those of its `earlier` attempts.

    The algorithm's `failure_reward` is not applied to them yet.

    Args:
        store: open store.
        states: rollouts, ended or not.
    """
    tries = await _attempts(store, states)
    ids = [attempt.attempt_id for attempts in tries for attempt in attempts if attempt.number]
    spans, records = await store.spans(ids), await load_records(store, ids)

    def build(state: RolloutState, attempt: Attempt) -> Episode:
        key = attempt.attempt_id
        return build_episode(attempt, state.rollout, spans.get(key, []), records.get(key, []))

    pairs = zip(states, tries, strict=True)
    built = [[build(state, one) for one in attempts] for state, attempts in pairs]
    return [replace(last, earlier=tuple(earlier)) for *earlier, last in built]


async def load_records(store: Store, attempt_ids: Sequence[str]) -> dict[str, list[TokenRecord]]:
    """Return the token records of each attempt, with the bytes of the prompts' images.

    A record keeps images without bytes if the store lacks one of them.
    """
    records = await store.token_records(attempt_ids)
    digests = {i.digest for each in records.values() for record in each for i in record.images}
    if not digests:
        return records
    files = await store.images(sorted(digests))
    return {
        k: [msgspec.structs.replace(r, images=with_data(r.images, files) or r.images) for r in each]
        for k, each in records.items()
    }


async def _attempts(store: Store, states: Sequence[RolloutState]) -> list[list[Attempt]]:
    """Return the attempts of each rollout, the last one last.

    A rollout that no runner claimed gets a placeholder attempt with number 0.
    """
    ids = [state.rollout.rollout_id for state in states]
    tries: dict[str, list[Attempt]] = {}
    for attempt in await store.attempts(ids) if ids else []:
        tries.setdefault(attempt.rollout_id, []).append(attempt)
    return [tries.get(key) or [_unclaimed(state)] for key, state in zip(ids, states, strict=True)]


def _unclaimed(state: RolloutState) -> Attempt:
    cancelled = state.status is RolloutStatus.CANCELLED
    return Attempt(
        attempt_id=f"{state.rollout.rollout_id}-unclaimed",
        rollout_id=state.rollout.rollout_id,
        number=0,
        epoch=0,
        status=AttemptStatus.CANCELLED if cancelled else AttemptStatus.RUNNING,
        outcome=Outcome.CANCELLED if cancelled else None,
        message="cancelled before a runner claimed it" if cancelled else "",
    )

"""Rollouts: enqueue them, wait until they have ended, read what they did."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightspan.engines.protocol import TokenEngine
from lightspan.errors import ConfigError, RewardError
from lightspan.lightning.episode import Episode, build_episode
from lightspan.progress import Reporter
from lightspan.runners.protocol import Runners
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Mode,
    Outcome,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.stores import open_existing
from lightspan.stores.event_loop import run_sync
from lightspan.stores.protocol import Store
from lightspan.training.flights import Flights
from lightspan.training.folder import RunFolder
from lightspan.training.rewards import with_reward

EXPIRE_S: Final = 2.0
"""How often leases are looked at while waiting."""
WATCH_S: Final = 0.5
"""How long one look at the store waits for news."""


class Collector:
    """Runs batches of rollouts of one training run.

    Args:
        store: where the runners find them.
        runners: asked while waiting whether they can go on.
        engine: whose tokens are counted; None where none of ours answers.
        reporter: sees the rewards come in.
        failure_reward: of an app that failed; None leaves it unscored.
    """

    def __init__(
        self,
        store: Store,
        runners: Runners,
        engine: TokenEngine | None,
        reporter: Reporter,
        failure_reward: float | None = None,
    ) -> None:
        self._store = store
        self._runners = runners
        self._engine = engine
        self._reporter = reporter
        self._failure_reward = failure_reward
        self._cursor = 0
        self._flights = Flights()
        self._flight_cursor = 0
        self._since = 0.0
        """Since when groups have been in flight without a pause."""
        self._expired = time.monotonic()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Wall time in which rollouts were under way, until now: with groups in flight, whatever
        else is done meanwhile."""
        return self._seconds + (time.monotonic() - self._since if self._flights else 0.0)

    async def run(self, rollouts: Sequence[Rollout], title: str) -> list[Episode]:
        """Their episodes, in the order given.

        Raises:
            RewardError: an app returned something that is no reward; nothing waits for the others.
            LightspanError: the runners cannot go on.
        """
        if not rollouts:
            return []
        started = time.monotonic()
        cursor = await self._begin(rollouts)
        self._reporter.start(title, len(rollouts))
        states = await self._wait(rollouts, cursor)
        if not self._flights:  # else this time is theirs too, and is not counted twice
            self._seconds += time.monotonic() - started
        ordered = [states[rollout.rollout_id] for rollout in rollouts]
        return await self._read(ordered)

    async def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Begin them, whole groups, for `take` to wait for."""
        if not rollouts:
            return
        if not self._flights:
            self._since = time.monotonic()
        cursor = await self._begin(rollouts)
        if not self._flights:
            self._flight_cursor = cursor
        self._flights.add(rollouts)

    async def take(
        self, count: int, first: Sequence[str], title: str
    ) -> tuple[list[Rollout], list[Episode]]:
        """The rollouts of so many groups that were submitted, and their episodes, once they have
        ended; see `World.take`.

        Raises:
            ConfigError, RewardError, LightspanError: as there and in `run`.
        """
        self._flights.check(count, first)
        if not count:
            return [], []
        progress = _Progress(self._engine)
        total = self._flights.rollouts(count)
        shown = max(0, total - self._flights.left(count, first))
        self._reporter.start(title, total)
        self._reporter.advance(shown)
        while (groups := self._flights.ready(count, first)) is None:
            self._flight_cursor, ended = await self._news(self._flights.run_id, self._flight_cursor)
            await self._look(self._flights.see(ended), progress)
            more = max(0, total - self._flights.left(count, first) - shown)
            shown += more
            self._reporter.advance(more, **progress.values())
        states = self._flights.pop(groups)
        if not self._flights:
            self._seconds += time.monotonic() - self._since
        return [state.rollout for state in states], await self._read(states)

    def news(self) -> list[Rollout]:
        """The rollouts in flight that have ended since this was asked last, taken or not."""
        return self._flights.news()

    def forget(self) -> list[str]:
        """Wait for nothing that is in flight any more; its rollouts that have not ended."""
        return self._flights.forget()

    async def _begin(self, rollouts: Sequence[Rollout]) -> int:
        """Where to watch from: what changed before these rollouts exist is no news of them."""
        seen = await self._store.watch(self._cursor, run_id=rollouts[0].run_id)
        self._cursor = max(self._cursor, seen.cursor)
        await self._store.enqueue(rollouts)
        return seen.cursor

    async def _wait(self, rollouts: Sequence[Rollout], cursor: int) -> dict[str, RolloutState]:
        run_id = rollouts[0].run_id
        open_ids = {rollout.rollout_id for rollout in rollouts}
        done: dict[str, RolloutState] = {}
        progress = _Progress(self._engine)
        while open_ids:
            cursor, ended = await self._news(run_id, cursor)
            fresh = [state for state in ended if state.rollout.rollout_id in open_ids]
            done |= {state.rollout.rollout_id: state for state in fresh}
            open_ids -= done.keys()
            await self._look(fresh, progress)
            self._reporter.advance(len(fresh), **progress.values())
        return done

    async def _news(self, run_id: str, cursor: int) -> tuple[int, list[RolloutState]]:
        """What has ended since; waits a moment if nothing has. The runners can go on, and leases
        have been looked at.

        Raises:
            LightspanError: the runners cannot.
        """
        changes = await self._store.watch(cursor, run_id=run_id, timeout_s=WATCH_S)
        self._runners.check()
        if time.monotonic() - self._expired > EXPIRE_S:
            await self._store.expire()
            self._expired = time.monotonic()
        return changes.cursor, [state for state in changes.rollouts if state.status.final]

    async def _look(self, fresh: Sequence[RolloutState], progress: _Progress) -> None:
        """Raises `RewardError`: what an app returned is no reward."""
        attempts = await last_attempts(self._store, fresh)
        for state, attempt in zip(fresh, attempts, strict=True):
            progress.add(state, attempt)

    async def _read(self, states: Sequence[RolloutState]) -> list[Episode]:
        return await read_episodes(self._store, states, failure_reward=self._failure_reward)


class _Progress:
    """What is worth seeing while rollouts end."""

    def __init__(self, engine: TokenEngine | None) -> None:
        self._engine = engine
        self._rewards: list[float] = []
        self._failed = 0
        self._started = time.monotonic()
        self._tokens = self._made()

    def add(self, state: RolloutState, attempt: Attempt) -> None:
        """A rollout ended. Raises `RewardError` if what its app returned is no reward."""
        if attempt.outcome is Outcome.BAD_REWARD:
            raise RewardError(f"task {state.rollout.task_id}: {attempt.message}")
        self._failed += attempt.status is not AttemptStatus.SUCCEEDED
        value = attempt.reward.value if attempt.reward is not None else None
        if value is not None:
            self._rewards.append(value)

    def values(self) -> dict[str, float]:
        """Mean of the returned rewards so far, the engine's speed, failures if there are any."""
        seconds = max(1e-3, time.monotonic() - self._started)
        values = {"tokens_per_s": (self._made() - self._tokens) / seconds} if self._engine else {}
        if self._rewards:
            values = {"reward": math.fsum(self._rewards) / len(self._rewards), **values}
        return {**values, "failed": float(self._failed)} if self._failed else values

    def _made(self) -> float:
        return self._engine.usage().get("tokens", 0.0) if self._engine is not None else 0.0


async def read_episodes(
    store: Store, states: Sequence[RolloutState], *, failure_reward: float | None = None
) -> list[Episode]:
    """The episode of each rollout's last attempt.

    Args:
        store: an open store.
        states: of `Store.rollouts`, whether they have ended or not.
        failure_reward: see `build_episode`.
    """
    attempts = await last_attempts(store, states)
    ids = [attempt.attempt_id for attempt in attempts if attempt.number]
    spans = await store.spans(ids)
    records = await store.token_records(ids)
    return [
        build_episode(
            attempt,
            state.rollout,
            spans.get(attempt.attempt_id, []),
            records.get(attempt.attempt_id, []),
            failure_reward=failure_reward,
        )
        for state, attempt in zip(states, attempts, strict=True)
    ]


def stored_episodes(
    url: str | os.PathLike[str],
    *,
    run_id: str | None = None,
    mode: Mode | None = None,
    failure_reward: float | None = None,
) -> list[Episode]:
    """The episodes of a store, such as those of a run (`runs/<name>/store.db`).

    Args:
        url: of the store.
        run_id: those of one training run.
        mode: those made for training, or for evaluation.
        failure_reward: see `build_episode`.

    Raises:
        StoreError: it cannot be read.
    """

    async def read() -> list[Episode]:
        async with open_existing(url) as store:
            states = await store.rollouts(run_id=run_id, mode=mode)
            return await read_episodes(store, states, failure_reward=failure_reward)

    return run_sync(read())


def rewarded_episodes(
    folder: str | os.PathLike[str], name: str, *, mode: Mode | None = None
) -> list[Episode]:
    """The episodes of a run that were scored under one of its rewards (`Trainer(reward=)`,
    `lightspan rescore --write`), with that reward; to imitate the best of them, say.

    Args:
        folder: of the run.
        name: of the reward.
        mode: as for `stored_episodes`.

    Raises:
        ConfigError: the folder is no run, or has no such reward.
        StoreError: its store cannot be read.
    """
    run = RunFolder(Path(folder))
    config, rewards = run.read_config(), run.rewards(name)
    if not rewards:
        has = ", ".join(run.reward_names()) or "none beside the app's own"
        raise ConfigError(f"the run in {folder} has no reward {name!r}; it has {has}")
    url = config.get("store") or run.store_url
    found = stored_episodes(url, run_id=config.get("run_id"), mode=mode)
    return [with_reward(e, rewards[e.rollout_id]) for e in found if e.rollout_id in rewards]


async def last_attempts(store: Store, states: Sequence[RolloutState]) -> list[Attempt]:
    """The last attempt of each rollout; of one that nobody claimed, an attempt number 0."""
    ids = [state.rollout.rollout_id for state in states]
    last = {a.rollout_id: a for a in await store.attempts(ids)} if ids else {}
    return [last.get(state.rollout.rollout_id) or _unclaimed(state) for state in states]


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

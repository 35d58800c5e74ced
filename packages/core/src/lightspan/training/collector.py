"""Rollouts: enqueue them, wait until they have ended, read what they did."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightspan.errors import ConfigError, RewardError
from lightspan.lightning.episode import Episode, build_episode
from lightspan.progress import Reporter
from lightspan.protocols.engine import TokenEngine
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
from lightspan.stores.aio import run_sync
from lightspan.stores.protocol import Store
from lightspan.training.folder import RunFolder
from lightspan.training.in_flight import InFlight
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
        self._in_flight = InFlight()
        self._cursor = 0
        self._since = 0.0
        """Since when groups have been in flight without a pause."""
        self._expired = time.monotonic()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Return the wall time in which groups were in flight, whatever else was done meanwhile."""
        return self._seconds + (time.monotonic() - self._since if self._in_flight else 0.0)

    async def run(self, rollouts: Sequence[Rollout], title: str) -> list[Episode]:
        """Return the episodes of rollouts, whole groups, in the order given.

        Raises:
            RewardError: an app returned something that is no reward; nothing waits for the others.
            LightspanError: the runners cannot go on.
        """
        await self.submit(rollouts)
        groups = list(dict.fromkeys(str(rollout.group_id) for rollout in rollouts))
        _, episodes = await self.take(len(groups), groups, title)
        return episodes

    async def submit(self, rollouts: Sequence[Rollout]) -> None:
        """Enqueue rollouts, whole groups, for `take` to wait for."""
        if not rollouts:
            return
        if not self._in_flight:
            self._since = time.monotonic()
            # what changed before these rollouts exist is no news of them
            seen = await self._store.watch(self._cursor, run_id=rollouts[0].run_id)
            self._cursor = max(self._cursor, seen.cursor)
        await self._store.enqueue(rollouts)
        self._in_flight.add(rollouts)

    async def take(
        self, count: int, first: Sequence[str], title: str
    ) -> tuple[list[Rollout], list[Episode]]:
        """Return the rollouts of so many groups that were submitted, and their episodes, once they
        have ended; see `World.take`.

        Raises:
            ConfigError, RewardError, LightspanError: as there and in `run`.
        """
        self._in_flight.check(count, first)
        if not count:
            return [], []
        progress = _Progress(self._engine)
        total, shown = self._in_flight.size(count, first)
        self._reporter.start(title, total)
        self._reporter.advance(shown)
        while (groups := self._in_flight.ready(count, first)) is None:
            ended = await self._news(self._in_flight.run_id)
            await self._look(self._in_flight.update(ended), progress)
            _, now = self._in_flight.size(count, first)
            self._reporter.advance(now - shown, **progress.values())
            shown = now
        states = self._in_flight.pop(groups)
        if not self._in_flight:
            self._seconds += time.monotonic() - self._since
        return [state.rollout for state in states], await self._read(states)

    def news(self) -> list[Rollout]:
        """Return the rollouts that have ended since the last call, taken or not."""
        return self._in_flight.news()

    def clear(self) -> list[str]:
        """Forget what is in flight, and return its rollouts that have not ended."""
        return self._in_flight.clear()

    async def _news(self, run_id: str) -> list[RolloutState]:
        """Return the rollouts that have ended since the last call; wait a moment if none has.

        Raises:
            LightspanError: the runners cannot.
        """
        changes = await self._store.watch(self._cursor, run_id=run_id, timeout_s=WATCH_S)
        self._cursor = changes.cursor
        self._runners.check()
        if time.monotonic() - self._expired > EXPIRE_S:
            await self._store.expire()
            self._expired = time.monotonic()
        return [state for state in changes.rollouts if state.status.final]

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

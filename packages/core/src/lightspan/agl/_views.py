"""What lightspan's store holds, as the original shows it; and attempts whose time is over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from lightspan.agl._liveness import Liveness
from lightspan.agl._records import asked_of, attempt_status, lost_report, may_be, rollout_status
from lightspan.agl._resources import ResourcesUpdate
from lightspan.agl._rewards import find_final_reward
from lightspan.agl._rollouts import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)
from lightspan.agl._spans import Span
from lightspan.agl._translation import from_span
from lightspan.errors import DataError, NotFoundError
from lightspan.schema import clock, records as r
from lightspan.schema.reward import Reward
from lightspan.stores.protocol import Store

_LOOK_S: Final = 0.005
"""Between two looks whether another thread has opened the store."""


class StoreViews:
    """A store of lightspan that is read in the original's words.

    Args:
        store: of lightspan; opened at the first use.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        """The store of lightspan that keeps everything."""
        self._is_open = False
        self._opening = threading.Lock()
        self._began = time.time()
        self._numbers: dict[str, int] = {}
        """Rollout → the latest number of a span."""
        self._liveness = Liveness(store)
        self._updates: dict[str, ResourcesUpdate] = {}
        """Version of the resources → what it is, which never changes; copies are handed out."""
        self._workers: dict[str, dict[str, Any]] = {}
        """Worker → what it last said of itself, and when."""

    async def _opened(self) -> Store:
        while not self._is_open:  # several event loops may be the first
            if not self._opening.acquire(blocking=False):
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                if not self._is_open:
                    await self.store.open()
                    self._is_open = True
            finally:
                self._opening.release()
        return self.store

    async def _watched(self) -> Store:
        """The store, after every attempt whose time is over has ended."""
        store = await self._opened()
        states = await store.rollouts(status=[r.RolloutStatus.RUNNING])
        for state in states:
            limits = asked_of(state.rollout).limits
            if limits.timeout_seconds is None and limits.unresponsive_seconds is None:
                continue
            attempt = await self._latest(state.rollout.rollout_id)
            assert attempt is not None
            end = await self._overdue(attempt, limits)
            if end is not None and not attempt.sealed:
                await self._end(attempt, end, limits)
        return store

    async def _overdue(self, attempt: r.Attempt, limits: RolloutConfig) -> AttemptStatus | None:
        timeout, silence = limits.timeout_seconds, limits.unresponsive_seconds
        age_s = await self._liveness.age_s(attempt)
        if timeout is not None and age_s > timeout:
            return "timeout"
        silent_s = await self._liveness.silent_s(attempt)
        silent_s = age_s if silent_s is None else silent_s
        return "unresponsive" if silence is not None and silent_s > silence else None

    async def _end(
        self, attempt: r.Attempt, status: RolloutStatus | AttemptStatus, limits: RolloutConfig
    ) -> None:
        """End an attempt; another follows if the limits say so."""
        again = status in limits.retry_condition and attempt.number < limits.max_attempts
        if again:
            report = lost_report(attempt, str(status))
        elif status == "succeeded":
            # What came late pays nobody: whoever may send traces may have sent it.
            said = (await self.store.spans([attempt.attempt_id]))[attempt.attempt_id]
            late = {span.span_id for span in said if span.late}
            spans = await self._spans_of([attempt])
            reward = find_final_reward([span for span in spans if span.span_id not in late])
            scored = None if reward is None else Reward(reward)
            report = attempt.report(r.AttemptStatus.SUCCEEDED, r.Outcome.OK, reward=scored)
        elif status == "timeout":
            report = attempt.report(r.AttemptStatus.TIMEOUT, r.Outcome.TIMEOUT, str(status))
        else:
            report = attempt.report(r.AttemptStatus.FAILED, r.Outcome.APP_ERROR, str(status))
        await self.store.report([report])

    async def _every_span(self, rollout_id: str) -> list[Span]:
        store = await self._opened()
        try:
            return await self._spans_of(await store.attempts([rollout_id]))
        except NotFoundError:
            return []

    async def _spans_of(self, attempts: Sequence[r.Attempt]) -> list[Span]:
        ids = [attempt.attempt_id for attempt in attempts]
        kept = await self.store.spans(ids)
        tokens = await self.store.token_records(ids)
        of_call = {
            record.span_id: record
            for records in tokens.values()
            for record in records
            if record.choice == 0
        }
        spans = [span for attempt_id in ids for span in kept[attempt_id]]
        return [from_span(s, number, of_call.get(s.span_id)) for number, s in enumerate(spans, 1)]

    async def _seen(self, rollout_ids: Sequence[str] | None = None) -> list[Rollout]:
        """The rollouts, those that are unknown left out."""
        store = await self._opened()
        return await self._views(
            await (store.rollouts() if rollout_ids is None else self._states(rollout_ids))
        )

    async def _filtered(
        self, wanted: Sequence[RolloutStatus] | None, rollout_ids: Sequence[str] | None
    ) -> list[r.RolloutState]:
        """At least those of both filters, in the order in which they were enqueued."""
        store = await self._opened()
        kept = (
            None if wanted is None else [ours for ours in r.RolloutStatus if may_be(ours, wanted)]
        )
        if rollout_ids is None:
            return await store.rollouts(status=kept)
        try:
            return await store.rollouts(rollout_ids, status=kept)
        except NotFoundError:
            every, asked = await store.rollouts(status=kept), set(rollout_ids)
            return [state for state in every if state.rollout.rollout_id in asked]

    async def _states(self, rollout_ids: Sequence[str]) -> list[r.RolloutState]:
        """Those of the rollouts that are known, as asked."""
        states = await self._filtered(None, rollout_ids)
        known = {state.rollout.rollout_id: state for state in states}
        return [known[rollout_id] for rollout_id in rollout_ids if rollout_id in known]

    async def _views(self, states: Sequence[r.RolloutState]) -> list[Rollout]:
        store = await self._opened()
        attempts = await store.attempts([state.rollout.rollout_id for state in states])
        latest = {attempt.rollout_id: attempt for attempt in attempts}
        return [await self._view(state, latest.get(state.rollout.rollout_id)) for state in states]

    async def _view(self, state: r.RolloutState, latest: r.Attempt | None) -> Rollout:
        asked = asked_of(state.rollout)
        attempt = None if latest is None else await self._attempt(latest)
        fields: dict[str, Any] = {
            "rollout_id": state.rollout.rollout_id,
            "input": asked.input,
            "start_time": state.created_at,
            "end_time": state.finished_at,
            "mode": asked.mode,
            "resources_id": asked.resources_id,
            "status": rollout_status(state.status, attempt),
            "config": asked.limits,
            "metadata": asked.metadata,
        }
        return Rollout(**fields) if attempt is None else AttemptedRollout(**fields, attempt=attempt)

    async def _attempt(self, attempt: r.Attempt) -> Attempt:
        silent_s = await self._liveness.silent_s(attempt)
        heard = None if silent_s is None else clock.now() - silent_s
        return Attempt(
            rollout_id=attempt.rollout_id,
            attempt_id=attempt.attempt_id,
            sequence_id=attempt.number,
            start_time=attempt.started_at,
            end_time=attempt.ended_at,
            status=attempt_status(attempt, has_spans=heard is not None),
            worker_id=attempt.runner_id or None,
            last_heartbeat_time=heard,
        )

    async def _attempted(self, rollout_id: str) -> AttemptedRollout:
        [found] = await self._seen([rollout_id])
        assert isinstance(found, AttemptedRollout)
        return found

    async def _state(self, rollout_id: str) -> r.RolloutState:
        try:
            [state] = await self.store.rollouts([rollout_id])
        except NotFoundError as error:
            raise DataError(f"Rollout {rollout_id} not found") from error
        return state

    async def _known(self, rollout_id: str) -> Rollout:
        [found] = await self._views([await self._state(rollout_id)])
        return found

    async def _latest(self, rollout_id: str) -> r.Attempt | None:
        store = await self._opened()
        try:
            return next(reversed(await store.attempts([rollout_id])), None)
        except NotFoundError:
            return None

    async def _attempt_of(self, rollout_id: str, attempt_id: str) -> r.Attempt:
        await self._opened()
        await self._state(rollout_id)
        attempts = await self.store.attempts([rollout_id])
        wanted = attempts[-1:] if attempt_id == "latest" else attempts
        for attempt in wanted:
            if attempt_id in ("latest", attempt.attempt_id):
                return attempt
        raise DataError(f"Attempt {attempt_id} not found for rollout {rollout_id}")

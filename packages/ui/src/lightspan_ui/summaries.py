"""Stop-gap for `Store.summaries`."""

from __future__ import annotations

from typing import Any

import msgspec

from lightspan.schema.records import Mode, Outcome, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.stores.protocol import Store


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str
    run_id: str
    group_id: str
    task_id: str
    mode: Mode
    step: int
    status: RolloutStatus
    created_at: float
    position: int
    change: int
    attempt_id: str | None = None
    runner_id: str = ""
    outcome: Outcome | None = None
    message: str = ""
    reward: Reward | None = None
    feedback: Reward | None = None
    started_at: float | None = None
    ended_at: float | None = None
    capture_errors: int = 0


class Summaries(msgspec.Struct, frozen=True, kw_only=True):
    cursor: int
    rows: list[RolloutSummary]


async def summaries(store: Store, run_id: str | None, after: int) -> Any:
    if hasattr(store, "summaries"):
        return await store.summaries(run_id, after=after)
    changes = await store.watch(after, run_id=run_id)
    states = sorted(changes.rollouts, key=lambda s: s.created_at)
    rows = []
    for start in range(0, len(states), 1000):
        part = states[start : start + 1000]
        attempts = {a.rollout_id: a for a in await store.attempts([s.rollout.rollout_id for s in part])}
        for s in part:
            r, a = s.rollout, attempts.get(s.rollout.rollout_id)
            fields: dict[str, Any] = {}
            if a is not None:
                fields = dict(
                    attempt_id=a.attempt_id,
                    runner_id=a.runner_id,
                    outcome=a.outcome,
                    message=a.message,
                    reward=a.reward,
                    started_at=a.started_at,
                    ended_at=a.ended_at,
                    capture_errors=len(a.capture_errors),
                )
            rows.append(
                RolloutSummary(
                    rollout_id=r.rollout_id, run_id=r.run_id, group_id=r.group_id, task_id=r.task_id,
                    mode=r.mode, step=r.step, status=s.status, created_at=s.created_at,
                    position=int(s.created_at * 1e6), change=s.change, **fields,
                )
            )
    return Summaries(cursor=changes.cursor, rows=rows)

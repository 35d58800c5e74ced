"""How long ago attempts began, and somebody last heard of them.

Whether a worker has died is said by its rollout's configuration, so the lease of an attempt lasts
for years; it tells other processes when somebody heard of the attempt. Leases run by the store's
own time (`Store.lease_time`), and what passed here is elapsed time: no clock that is set ends an
attempt, or keeps a dead one.
"""

from __future__ import annotations

from typing import Final

from lightspan.schema import clock, records as r
from lightspan.stores.protocol import Store

LEASE_S: Final = 3.2e8
"""Of a claim: ten years. A sign of life makes it twice that, and is told from a claim by this."""
_SAME_S: Final = 1.0
"""For so long the store's time is not asked for again, but counted on."""


class Liveness:
    """What is known of attempts of a store.

    Args:
        store: of lightspan; open when it is asked.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._told = (0.0, -1e9)
        """The store's time, and when that was, by `clock.monotonic`."""
        self._heard: dict[str, float] = {}
        """Attempt → when somebody here last heard of it, by `clock.monotonic`."""
        self._began: dict[str, float] = {}
        """Attempt → when it began, likewise."""

    def heard_now(self, attempt_id: str) -> None:
        """Note a sign of life here; other processes see it by what it left."""
        self._heard[attempt_id] = clock.monotonic()

    async def hear(self, attempt: r.Attempt, heard: float) -> None:
        """Note a sign of life; the attempt's lease tells the other processes.

        Args:
            heard: when, as seconds since the epoch.
        """
        ago_s = clock.now() - heard
        self._heard[attempt.attempt_id] = clock.monotonic() - ago_s
        if heard > attempt.started_at:
            ref = r.AttemptRef(attempt.attempt_id, attempt.epoch)
            await self._store.heartbeat([ref], max(0.0, 2 * LEASE_S - ago_s))

    async def silent_s(self, attempt: r.Attempt) -> float | None:
        """For how long nobody has heard of it; None if nobody ever has."""
        now = clock.monotonic()
        told_s = 2 * LEASE_S - await self._left_s(attempt)
        heard = self._heard.get(attempt.attempt_id)
        known = [] if heard is None else [now - heard]
        if told_s < LEASE_S / 2:  # else the lease is that of the claim
            known.append(told_s)
        if known:
            return min(known)
        spans = (await self._store.spans([attempt.attempt_id]))[attempt.attempt_id]
        if not spans:
            return None
        ago_s = clock.now() - max(span.end_ns for span in spans) / 1e9
        if attempt.sealed:
            self._heard[attempt.attempt_id] = now - ago_s
        return ago_s

    async def age_s(self, attempt: r.Attempt) -> float:
        """How long ago it began."""
        now, name = clock.monotonic(), attempt.attempt_id
        if name not in self._began:
            since_s = LEASE_S - await self._left_s(attempt)
            is_claims = since_s > -LEASE_S / 2
            self._began[name] = now - (since_s if is_claims else clock.now() - attempt.started_at)
        return now - self._began[name]

    async def _left_s(self, attempt: r.Attempt) -> float:
        """Of its lease."""
        time, at = self._told
        if clock.monotonic() - at >= _SAME_S:
            time, at = self._told = await self._store.lease_time(), clock.monotonic()
        return attempt.lease_until - (time + clock.monotonic() - at)

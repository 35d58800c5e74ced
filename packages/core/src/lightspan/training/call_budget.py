"""Limit the number of calls that frozen agents send to endpoints, because such calls cost money."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightspan.errors import BudgetError
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode, Rollout
from lightspan.schema.routing import Route
from lightspan.schema.spans import SpanKind
from lightspan.stores.protocol import Store

READ_AT_ONCE: Final = 500
"""Number of rollouts whose spans are read in one request."""
_ELSEWHERE: Final = (Route.APP.value, Route.ENDPOINT.value)


class CallBudget:
    """Counter of the calls that a run's frozen agents send to endpoints, which cost money.

    Calls before a restart of the run count too.

    Args:
        limit: maximum number of calls (`max_frozen_calls`); None to count no call.
        folder: folder of the run, for the error message.
    """

    def __init__(self, limit: int | None, folder: Path) -> None:
        self._limit = limit
        self._folder = folder
        self._calls = 0

    async def count_earlier(self, store: Store, run_id: str) -> None:
        """Add the calls to endpoints that the run made before its last restart."""
        if self._limit is not None:
            states = await store.rollouts(run_id=run_id)
            await self.count(store, [state.rollout for state in states])

    async def count(self, store: Store, rollouts: Sequence[Rollout]) -> None:
        """Add the calls to endpoints that `rollouts` made; rollouts of a dry run are ignored."""
        if self._limit is not None:
            ids = [rollout.rollout_id for rollout in rollouts if rollout.mode is not Mode.DEV]
            self._calls += await endpoint_calls(store, ids)

    @property
    def is_overspent(self) -> bool:
        return self._limit is not None and self._calls > self._limit

    def check(self, step: int) -> None:
        """Raise `BudgetError` if more calls than the limit were counted.

        Args:
            step: the last step, for the message.
        """
        if self.is_overspent:
            raise BudgetError(
                f"after step {step} the run's frozen agents have made {self._calls} calls to "
                f"endpoints, and max_frozen_calls is {self._limit}; {self._folder} keeps what was "
                "learned: go on with resume=True (--resume) and a larger max_frozen_calls, or with "
                'None for no limit. Calls to our own engine (frozen="base", "shared") are free'
            )


async def endpoint_calls(store: Store, rollout_ids: Sequence[str]) -> int:
    """Return the number of calls that rollouts made to the app's own endpoint or to an `LLM`.

    The calls of all attempts of a rollout count, also those of lost attempts and those that arrived
    after an attempt's end. Replayed calls and answers of the app's caches do not, because no model
    was called.
    """
    count = 0
    for start in range(0, len(rollout_ids), READ_AT_ONCE):
        attempts = await store.attempts(rollout_ids[start : start + READ_AT_ONCE])
        spans = await store.spans([attempt.attempt_id for attempt in attempts])
        for attempt_spans in spans.values():
            calls = [span.attributes for span in attempt_spans if span.kind is SpanKind.LLM]
            made = (each for each in calls if not {c.REPLAYED_FROM, c.CACHED} & each.keys())
            count += sum(str(attributes.get(c.ROUTE)) in _ELSEWHERE for attributes in made)
    return count

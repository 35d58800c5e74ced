"""Forks: find the calls at which a recorded attempt can be forked.

A fork repeats an attempt up to a call and samples from there on. The *prefix* of a call, which is
repeated, are the calls that ended before it began, by the gateway's sequence numbers. They are
answered as recorded, so each of them needs an answer that reached the app and that the gateway
gave.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from lightspan.lightning.episode import Call, Episode
from lightspan.schema.records import Fork, Mode
from lightspan.schema.routing import Route
from lightspan.schema.token_records import CallOutcome

_ANSWERED: Final = (CallOutcome.OK, CallOutcome.RESAMPLED, CallOutcome.REPLAYED)
_SERVE: Final = 'serve its agent there (frozen="base" or frozen=LLM(…)) and run the task again'
_NOT_AT_GATEWAY: Final = f"not a call of the gateway, so its answer cannot be given again; {_SERVE}"
_PASSED_BY: Final = f"it did not pass the gateway, which has to sample the call anew; {_SERVE}"


class ForkPoint(msgspec.Struct, frozen=True):
    """A call of a recorded attempt at which it can be forked, or the end of the attempt."""

    rollout_id: str
    attempt_id: str
    call: Call | None
    """The first call that a fork samples anew (of its choices the first); None for the end of the
    attempt, up to which a fork repeats all calls and samples none."""
    number: int
    """Number of the call in causal order, from 1 on; for the end, one more than the last call's."""
    prefix: tuple[str, ...]
    """Ids of the calls that a fork repeats, in the order in which they ended."""
    refusal: str = ""
    """Why the attempt cannot be forked here; empty if it can."""

    @property
    def fork(self) -> Fork:
        """The value of `Rollout.fork` for a fork at this point."""
        return Fork(self.attempt_id, self.call.call_id if self.call else "", self.rollout_id)


def fork_points(episode: Episode) -> list[ForkPoint]:
    """Return a point for each call of an episode in causal order, and one for its end.

    Calls that were recorded after the end of the attempt are left out.
    """
    calls = list({call.call_id: call for call in reversed(episode.calls)}.values())[::-1]
    whole, points = _episode_refusal(episode), []
    for nth, call in enumerate([*calls, None], start=1):
        start = math.inf if call is None else call.sequence_start
        limit = -1 if start is None else start
        prior = [c for c in calls[: nth - 1] if c.sequence_end is None or c.sequence_end < limit]
        refusal = whole or next(filter(None, (_refusal(c, 1 + calls.index(c)) for c in prior)), "")
        if start is None:
            refusal = whole or _PASSED_BY
        ended = sorted((c.sequence_end, c.call_id) for c in prior if c.sequence_end is not None)
        prefix = tuple(call_id for _, call_id in ended)
        points.append(ForkPoint(episode.rollout_id, episode.attempt_id, call, nth, prefix, refusal))
    return points


def _episode_refusal(episode: Episode) -> str:
    if episode.mode is Mode.PRODUCTION:
        return "the app was recorded in production, where no runner can repeat it"
    if episode.departed or episode.capture_errors:
        return f"the attempt is damaged: {episode.departed or episode.capture_errors[0]}"
    return "" if episode.finished else "the attempt is not finished: fork one that is"


def _refusal(call: Call, number: int) -> str:
    """Return why a call of a prefix cannot be answered as recorded; empty if it can be."""
    name = f"call {number}, of {call.agent_path!r}, "
    if call.sequence_end is None:
        return f"{name}is {_NOT_AT_GATEWAY}"
    if call.outcome not in _ANSWERED:
        return f"{name}has no answer that reached the app ({call.outcome})"
    has_tokens = call.record is not None or call.route is Route.ENDPOINT
    is_gone = not has_tokens and call.outcome is not CallOutcome.REPLAYED
    return f"{name}has no recorded tokens" if is_gone else ""

"""Forks: find the calls at which a recorded attempt can be forked.

A fork repeats an attempt up to a call and samples from there on. The *prefix* of a call, which is
repeated, are the calls that ended before it began, by the gateway's sequence numbers. They are
answered as recorded, so each of them needs an answer that reached the app and that the gateway
gave.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from lightspan.lightning.episode import Call, Episode
from lightspan.schema.records import Fork, Mode
from lightspan.schema.routing import Route
from lightspan.schema.token_records import CallOutcome

_ANSWERED: Final = (CallOutcome.OK, CallOutcome.RESAMPLED, CallOutcome.REPLAYED)


class ForkPoint(msgspec.Struct, frozen=True, kw_only=True):
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
    """Why the attempt cannot be forked here, and what to do; empty if it can."""

    @property
    def fork(self) -> Fork:
        """The value of `Rollout.fork` for a fork at this point."""
        call_id = "" if self.call is None else self.call.call_id
        return Fork(attempt_id=self.attempt_id, call_id=call_id)


def fork_points(episode: Episode) -> list[ForkPoint]:
    """Return a point for each call of an episode in causal order, and one for its end.

    Calls that were recorded after the end of the attempt are left out.
    """
    calls = list({call.call_id: call for call in reversed(episode.calls)}.values())[::-1]
    refusal = _episode_refusal(episode)
    points = []
    for place, call in enumerate([*calls, None]):
        before = calls[:place]
        if call is not None and call.sequence_start is not None:
            start = call.sequence_start
            before = [c for c in before if c.sequence_end is None or c.sequence_end < start]
        ended = sorted((c.sequence_end, c.call_id) for c in before if c.sequence_end is not None)
        points.append(
            ForkPoint(
                rollout_id=episode.rollout_id,
                attempt_id=episode.attempt_id,
                call=call,
                number=place + 1,
                prefix=tuple(call_id for _, call_id in ended),
                refusal=refusal or _own_refusal(call) or _prefix_refusal(before, calls),
            )
        )
    return points


def _episode_refusal(episode: Episode) -> str:
    if episode.mode is Mode.PRODUCTION:
        return "the app was recorded in production, where no runner can repeat it"
    if episode.departed:
        return (
            f"the attempt itself departed from the one that it was forked from: {episode.departed}"
        )
    if not episode.finished:
        return "the attempt is still running, was lost or was cancelled: fork one that ended"
    if episode.capture_errors:
        return f"the attempt is damaged: {episode.capture_errors[0]}"
    return ""


def _own_refusal(call: Call | None) -> str:
    if call is not None and call.sequence_start is None:
        return f"it is {_PAST.format(call.agent_path)}"
    return ""


_PAST: Final = (
    "a call of {!r} that did not go through the gateway, so its answer cannot be given again: "
    'serve the agent there, with frozen="base" or frozen=LLM(…), and record the rollout again'
)


def _prefix_refusal(before: Iterable[Call], calls: list[Call]) -> str:
    """Return why the calls of a prefix cannot be answered as recorded; empty if they can.

    Args:
        before: the calls of the prefix, and those without a sequence number that may be part of it.
        calls: all calls of the attempt in causal order, from which calls are numbered.
    """
    for call in before:
        name = f"call {calls.index(call) + 1} before it"
        if call.sequence_end is None:
            return f"{name} is {_PAST.format(call.agent_path)}"
        if call.outcome not in _ANSWERED:
            return (
                f"{name}, of {call.agent_path!r}, has no answer that reached the app "
                f"({call.outcome}): fork at that call, at an earlier one, or another attempt"
            )
        is_sampled = call.outcome is not CallOutcome.REPLAYED and call.route is not Route.ENDPOINT
        if is_sampled and call.record is None:
            return f"{name}, of {call.agent_path!r}, has no recorded tokens: fork another attempt"
    return ""

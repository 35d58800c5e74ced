"""Feedback that comes after the fact: `lightspan.feedback(attempt_or_call, 0.8)`.

It is kept beside what was recorded, late as it is: a run's policy gradients never see it. Of
several on one attempt or call the last to arrive counts, and it counts before what the app emitted
itself. Saying the same again changes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from lightspan.capture.emit import RESPONSE_ID_PREFIXES
from lightspan.errors import ConfigError, NotFoundError, RewardError
from lightspan.production import record
from lightspan.production.options import STORE_VARIABLE
from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, AttemptRef
from lightspan.schema.reward import Reward, parse_reward, usable
from lightspan.schema.spans import (
    Attributes,
    Span,
    SpanKind,
    clean_attributes,
    new_span_id,
    new_trace_id,
    now_ns,
)
from lightspan.stores import open_existing
from lightspan.stores.aio import run_sync
from lightspan.stores.protocol import Store

_OWN_CALL: Final = re.compile(r"call-([0-9a-f]{32})-\d+")
"""A call id that production made: it holds the attempt's."""
_PORTION: Final = 128


class Rated(NamedTuple):
    """What feedback is on."""

    attempt_id: str
    call_id: str | None
    """None for the attempt as a whole."""


def feedback(
    id: str,
    reward: float | bool | Mapping[str, float],
    *,
    store: str | os.PathLike[str] | None = None,
    comment: str | None = None,
) -> Rated:
    """Say how good an attempt or a call was, in any process, at any time after it has ended.

    Args:
        id: of an attempt (`lightspan.current_attempt_id()`), of a call, or the `id` of an OpenAI
            response. The last is looked for among all attempts, the newest first.
        reward: a number, a bool (True is 1.0) or named dimensions; never NaN or infinite.
        store: its URL; None for `LIGHTSPAN_STORE`.
        comment: for people; kept as it is.

    Returns:
        What it was put on.

    Raises:
        ConfigError: no store is named, or the id is no text.
        NotFoundError: the store knows no such id.
        RewardError: the reward is none.
    """
    given = _checked(reward)
    if not isinstance(id, str):
        raise ConfigError(
            f"feedback is put on the id of an attempt, call or response, not on {id!r}; "
            "current_attempt_id() is None where nothing is recorded (not sampled, say)"
        )
    url = os.fspath(store) if store is not None else os.environ.get(STORE_VARIABLE)
    if not url:
        raise ConfigError(f"feedback needs a store: give store=, or set {STORE_VARIABLE}")
    record.flush()  # what this very process has recorded
    return run_sync(_rate(url, id, given, comment))


def _checked(reward: float | bool | Mapping[str, float]) -> Reward:
    parsed = parse_reward(reward)
    given = reward.values() if isinstance(reward, Mapping) else [reward]
    if parsed is None or parsed.value is None or None in map(usable, given):
        raise RewardError(f"feedback must be a finite number (or such dimensions), not {reward!r}")
    return parsed


async def _rate(url: str, id: str, reward: Reward, comment: str | None) -> Rated:
    async with open_existing(url) as store:
        attempt, call_id = await _find(store, id)
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        attributes = _attributes(reward, call_id, comment)
        if _last(spans, call_id) != attributes:
            ref = AttemptRef(attempt.attempt_id, attempt.epoch)
            await store.add_spans(ref, [_span(attempt, spans, attributes)])
        return Rated(attempt.attempt_id, call_id)


def _attributes(reward: Reward, call_id: str | None, comment: str | None) -> Attributes:
    return clean_attributes(
        {
            c.FEEDBACK: True,
            c.REWARD_VALUE: reward.value,
            **{c.REWARD_DIMENSION + name: value for name, value in reward.dimensions.items()},
            c.REWARD_CALL_ID: call_id,
            c.FEEDBACK_COMMENT: comment,
        }
    )


def _last(spans: Sequence[Span], call_id: str | None) -> Attributes | None:
    """The feedback in force."""
    said = [s.attributes for s in spans if s.attributes.get(c.FEEDBACK)]
    on_it = [attributes for attributes in said if attributes.get(c.REWARD_CALL_ID) == call_id]
    return on_it[-1] if on_it else None


def _span(attempt: Attempt, spans: Sequence[Span], attributes: Attributes) -> Span:
    now = now_ns()
    return Span(
        span_id=new_span_id(),
        trace_id=spans[0].trace_id if spans else new_trace_id(),
        name="lightspan.feedback",
        kind=SpanKind.REWARD,
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        start_ns=now,
        end_ns=now,
        attributes=attributes,
        late=True,  # on an attempt of a run that is still under way too
    )


# --- whose id it is -------------------------------------------------------------------------
async def _find(store: Store, id: str) -> tuple[Attempt, str | None]:
    """The attempt, and the call if the id is a call's.

    Raises:
        NotFoundError: nobody's.
    """
    known = await _attempt(store, id)
    if known is not None:
        return known, None
    names = {id, *(id.removeprefix(prefix) for prefix in RESPONSE_ID_PREFIXES)}
    for name in names:
        own = _OWN_CALL.fullmatch(name)
        attempt = await _attempt(store, f"at-{own[1]}") if own else None
        call_id = await _call_in(store, attempt, names) if attempt else None
        if attempt is not None and call_id is not None:
            return attempt, call_id
    found = await _look_for(store, names)
    if found is None:
        raise NotFoundError(
            f"store {store.url} knows no attempt, call or response {id!r}. An attempt is stored "
            f"when it has ended; while it runs, use emit_reward()"
        )
    return found


async def _attempt(store: Store, attempt_id: str) -> Attempt | None:
    try:
        return await store.attempt(attempt_id)
    except NotFoundError:
        return None


async def _call_in(store: Store, attempt: Attempt, names: set[str]) -> str | None:
    spans = await store.spans([attempt.attempt_id])
    return _call_of(spans[attempt.attempt_id], names)


def _call_of(spans: Sequence[Span], names: set[str]) -> str | None:
    """The call id of the span with one of these call or response ids."""
    for span in spans:
        if span.kind is not SpanKind.LLM or c.CALL_ID not in span.attributes:
            continue
        if names & {span.attributes[c.CALL_ID], span.attributes.get(c.RESPONSE_ID)}:
            return str(span.attributes[c.CALL_ID])
    return None


async def _look_for(store: Store, names: set[str]) -> tuple[Attempt, str] | None:
    """The call with one of these ids, the newest attempts first."""
    rollouts = [state.rollout.rollout_id for state in await store.rollouts()][::-1]
    for start in range(0, len(rollouts), _PORTION):
        attempts = await store.attempts(rollouts[start : start + _PORTION])
        spans = await store.spans([attempt.attempt_id for attempt in attempts])
        for attempt in attempts:
            call_id = _call_of(spans[attempt.attempt_id], names)
            if call_id is not None:
                return attempt, call_id
    return None


__all__ = ["Rated", "feedback"]

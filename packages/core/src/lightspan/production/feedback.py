"""Rate an attempt after it has ended: `lightspan.feedback(attempt_or_call, 0.8)`.

Feedback is stored as a span of the attempt. The span is marked as recorded after the attempt's end,
so no policy gradient uses it. If an attempt or call gets several feedbacks, the last to arrive
counts. Feedback overrides a reward that the app emitted. Repeating a feedback changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from lightspan.capture.emit import RESPONSE_ID_PREFIXES
from lightspan.errors import ConfigError, NotFoundError, RewardError
from lightspan.production import record
from lightspan.production.options import STORE_VARIABLE
from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, AttemptRef
from lightspan.schema.reward import Reward, parse_reward, reward_attributes, usable
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
from lightspan.stores.protocol import SEARCH_LIMIT, Store

MIN_ID_LENGTH: Final = 6
"""Minimum number of characters of the start or end of an attempt's id that stands for it."""


class Rated(NamedTuple):
    """The attempt or call that got the feedback."""

    attempt_id: str
    call_id: str | None
    """Id of the call; None if the whole attempt was rated."""


def feedback(
    id: str,
    reward: float | bool | Mapping[str, float],
    *,
    store: str | os.PathLike[str] | None = None,
    comment: str | None = None,
    correction: str | None = None,
) -> Rated:
    """Rate an attempt or a call, in any process, at any time after it has ended.

    Args:
        id: id of an attempt (`lightspan.current_attempt_id()`), the beginning or the end of such an
            id, the id of a call, or the `id` of an OpenAI response. To find a response, all
            spans are searched, those of the newest attempt first.
        reward: a number, a bool (True is 1.0), or a mapping from names to numbers, of which
            `"reward"` counts, such as `{"reward": 1.0, "style": 0.5}`. NaN, infinity and a mapping
            without `"reward"` are errors.
        store: URL of the store; None for the store to which this process records
            (`lightspan.record`), or for the value of `LIGHTSPAN_STORE` if it does not record.
        comment: a text that is stored with the feedback; None for no comment.
        correction: a better answer than the call's, or than that of the attempt's only call, from
            which `Preferences` learns; None for none.

    Returns:
        The attempt or call that was rated.

    Raises:
        ConfigError: no store is given, or the id is not a string.
        NotFoundError: the store has no such id.
        RewardError: the reward is invalid.
    """
    parsed = _parse_reward(reward)
    if not isinstance(id, str):
        raise ConfigError(
            f"feedback needs the id of an attempt, call or response, not {id!r}; "
            "current_attempt_id() is None where nothing is recorded, such as in an attempt that is "
            "not sampled"
        )
    url = os.fspath(store) if store is not None else record.store_url()
    if not url:
        raise ConfigError(f"feedback needs a store: give store=, or set {STORE_VARIABLE}")
    record.flush()  # the attempt may be this process's
    texts = {c.FEEDBACK_COMMENT: comment, c.FEEDBACK_CORRECTION: correction}
    return run_sync(_rate(url, id, parsed, texts))


def _parse_reward(reward: float | bool | Mapping[str, float]) -> Reward:
    if isinstance(reward, Mapping) and "reward" not in reward:
        raise RewardError(f"feedback {reward!r} has no 'reward', the number that counts: add it")
    parsed = parse_reward(reward)
    values = reward.values() if isinstance(reward, Mapping) else [reward]
    if parsed is None or parsed.value is None or None in map(usable, values):
        raise RewardError(f"feedback must be a finite number (or such dimensions), not {reward!r}")
    return parsed


async def _rate(url: str, id: str, reward: Reward, texts: Mapping[str, str | None]) -> Rated:
    async with open_existing(url) as store:
        attempt, call_id = await _find(store, id)
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        rating = {c.FEEDBACK: True, **reward_attributes(reward), c.REWARD_CALL_ID: call_id}
        attributes = clean_attributes({**rating, **texts})
        earlier = (each.attributes for each in spans if each.attributes.get(c.FEEDBACK))
        last = [each for each in earlier if each.get(c.REWARD_CALL_ID) == call_id][-1:]
        if last != [attributes]:
            ref = AttemptRef(attempt.attempt_id, attempt.epoch)
            await store.add_spans(ref, [_span(attempt, spans, attributes)])
        return Rated(attempt.attempt_id, call_id)


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
        late=True,  # even if the attempt's run is still under way
    )


# --- search ---------------------------------------------------------------------------------
async def _find(store: Store, id: str) -> tuple[Attempt, str | None]:
    """Return the attempt that `id` names, and the id of the call.

    The call id is None if `id` is the id of an attempt.

    Raises:
        NotFoundError: the store has no such attempt, call or response.
    """
    with contextlib.suppress(NotFoundError):
        return await store.attempt(id), None
    names = {id, *(id.removeprefix(prefix) for prefix in RESPONSE_ID_PREFIXES)} - {""}
    if names and (call := await _find_call(store, names)) is not None:
        return call
    size = len(id)
    if size < MIN_ID_LENGTH:
        raise NotFoundError(f"{id!r} is too short: give {MIN_ID_LENGTH} characters of the id")
    rows = (await store.summaries(newest=True)).rows
    latest = {row.attempt_id: row.rollout_id for row in rows}
    similar = [a for a, r in latest.items() if a and id in (a[:size], a[-size:], r)]
    if len(similar) == 1:
        return await store.attempt(similar[0]), None
    if similar:
        ids = ", ".join(similar[:5])
        raise NotFoundError(f"{id!r} stands for {len(similar)} attempts: {ids}")
    raise NotFoundError(
        f"store {store.url} has no attempt, call or response {id!r}. An attempt is stored when it "
        "has ended; while it runs, use emit_reward()"
    )


async def _find_call(store: Store, names: set[str]) -> tuple[Attempt, str] | None:
    """Return the newest call with an id in `names`: its attempt and its call id.

    The call's own id and its response id are searched for. None if no call has an id in `names`.
    """
    before = None
    while True:
        # The shortest name is a part of the others.
        ids = await store.search(min(names, key=len), before=before)
        for attempt_id, spans in (await store.spans(ids)).items():
            for span in spans:
                call_id = span.attributes.get(c.CALL_ID) if span.kind is SpanKind.LLM else None
                if call_id is not None and names & {call_id, span.attributes.get(c.RESPONSE_ID)}:
                    return await store.attempt(attempt_id), str(call_id)
        if len(ids) < SEARCH_LIMIT:
            return None
        before = ids[-1]

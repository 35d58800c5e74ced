"""Traces: what production recorded (`lightspan.record`), read as attempts with their scores.

Feedback counts here, though it is late: `settle_feedback` puts it in force. The score of a call is
its own feedback or reward, else that of its attempt; an attempt's own score is its feedback, else
what the app emitted. What has no score is never chosen by one.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from lightspan.errors import ConfigError
from lightspan.lightning.episode import Call, Episode, build_episode
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, Mode, RolloutState
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.validation import check_number, is_number
from lightspan.stores.protocol import Store

WITHOUT_TOKENS: Final = "its spans were sent by OpenTelemetry: no tokens are known of its calls"
PORTION: Final = 128
"""Attempts that are in memory at once."""

Time = datetime | float | str
"""A moment: a datetime, seconds since the epoch, ISO 8601, or how long ago (`2h`, `7d`)."""


class RecordedAttempt(NamedTuple):
    """One attempt of production, with its feedback in force."""

    state: RolloutState
    attempt: Attempt
    episode: Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Chooses attempts."""

    service: str | None = None
    """Only this service's; None for all."""
    since: float | None = None
    """Only those that began then or later, in seconds since the epoch."""
    until: float | None = None

    @classmethod
    def of(cls, service: str | None, since: Time | None, until: Time | None) -> Query:
        """The query for what a person gave. Raises `ConfigError` for a time that is none."""
        return cls(
            service=service,
            since=None if since is None else parse_time(since, "since"),
            until=None if until is None else parse_time(until, "until"),
        )

    def takes(self, attempt: Attempt) -> bool:
        """Whether the attempt began in the time that is meant."""
        in_time = self.since is None or attempt.started_at >= self.since
        return in_time and (self.until is None or attempt.started_at < self.until)


_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_ago(text: str) -> float | None:
    """The seconds of an age (`2h`, `7d`); None for a text that is none."""
    ago = _AGO.fullmatch(text)
    return None if ago is None else float(ago[1]) * _SECONDS[ago[2]]


def parse_time(value: Time, name: str) -> float:
    """Seconds since the epoch.

    Raises:
        ConfigError: it is no time.
    """
    if isinstance(value, datetime):
        return value.timestamp()
    if is_number(value):
        return float(value)
    ago_s = seconds_ago(str(value))
    if ago_s is not None:
        return datetime.now(UTC).timestamp() - ago_s
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        raise ConfigError(
            f"{name}={value!r}: give a time such as 2026-11-20T09:00, or how long ago, such as 2h "
            "or 7d"
        ) from None


async def read_attempts(store: Store, query: Query) -> AsyncIterator[RecordedAttempt]:
    """The attempts that the query takes, oldest first; read in portions, so that memory does not
    bound how many there are."""
    states = await store.rollouts(run_id=query.service, mode=Mode.PRODUCTION)
    for start in range(0, len(states), PORTION):
        portion = {s.rollout.rollout_id: s for s in states[start : start + PORTION]}
        attempts = [a for a in await store.attempts(list(portion)) if query.takes(a)]
        spans = await store.spans([attempt.attempt_id for attempt in attempts])
        for attempt in attempts:
            state = portion[attempt.rollout_id]
            rollout, known = state.rollout, list(spans[attempt.attempt_id])
            received = attempt.runner_id in installed_plugins("readers")
            if received:
                read = load_plugin("readers", attempt.runner_id)
                rollout, known = read(rollout, attempt, known)
            episode = build_episode(attempt, rollout, settle_feedback(known), [])
            if received:
                episode = replace(episode, notes=(*episode.notes, WITHOUT_TOKENS))
            state = msgspec.structs.replace(state, rollout=rollout)
            yield RecordedAttempt(state, attempt, episode)


def settle_feedback(spans: Sequence[Span]) -> list[Span]:
    """The spans with the feedback in force: per attempt and call the last that arrived, in time and
    after every other reward, whatever the clocks said.

    Args:
        spans: one attempt's, in the order in which they arrived (`Store.spans`).
    """
    last = {span.attributes.get(c.REWARD_CALL_ID): span for span in spans if is_feedback(span)}
    if not last:
        return list(spans)
    rewarded = max(span.start_ns for span in spans if span.kind is SpanKind.REWARD)
    others = [span for span in spans if not is_feedback(span)]
    in_force = [span.replace(late=False, start_ns=rewarded + 1) for span in last.values()]
    return [*others, *in_force]


def is_feedback(span: Span) -> bool:
    """Whether the span is feedback, which comes after the fact and is therefore late."""
    return span.kind is SpanKind.REWARD and bool(span.attributes.get(c.FEEDBACK))


def score_of(episode: Episode, call: Call) -> float | None:
    """The call's own last reward, else the episode's; None: unscored."""
    return call.reward if call.rewards else episode.reward


def reward_bound(name: str, value: float | None) -> float | None:
    """The least or the largest reward to choose by; None for none.

    Raises:
        ConfigError: it is NaN, infinite or no number.
    """
    if value is None:
        return None
    check_number(name, value)
    return float(value)

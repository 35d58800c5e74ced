"""The difference of two sides, computed from the attempts in a store.

The unit is the attempt. Its reward is the feedback on it, or else what the app emitted, whenever
either arrived. Attempts that began after the decision are not part of a comparison, because no
attempts of the other side began at the same time. Attempts that both sides answered are counted and
left out.

Only answers name the weights. The side of an attempt without one, such as one whose calls all
failed, is known to the server alone (`ServerRecord`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from lightspan.algorithms.recorded_attempts import (
    CHUNK_SIZE,
    Query,
    RecordedAttempt,
    read_attempts,
)
from lightspan.progress import plural
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode, Outcome
from lightspan.schema.spans import SpanKind
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan.training.statistics import Interval, clustered_interval
from lightspan_gateway.serving.candidate.sides import (
    Mark,
    Side,
    key_of_attempt,
    key_of_trace,
    read_mark,
)

USER_KEYS: Final = ("user.id", "enduser.id", "langfuse.user.id", f"{c.ANNOTATION}user")
"""Attributes by which programs that record spans name users."""
CHAT_KEYS: Final = ("session.id", "gen_ai.conversation.id", "langfuse.session.id")
"""Attributes by which programs that record spans name chats."""
MAX_FORECAST: Final = 1_000_000
"""Maximum number of verdicts that a forecast names."""
EARLIER_S: Final = 86_400.0
"""Seconds before the start of a comparison from which attempts may be part of it: they may have
begun before their first call, and by another machine's clock."""


class Conclusion(StrEnum):
    """What the intervals say about the candidate."""

    BETTER = "better"
    WORSE = "worse"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True)
class ComparedAttempt:
    """An attempt as a comparison counts it."""

    attempt_id: str
    side: Side
    reward: float | None = None
    """None without a verdict or reward."""
    is_failed: bool = False
    is_damaged: bool = False
    """Whether a part of it may not be recorded."""
    user: str = ""
    """The user, or without one the chat; empty if the record names neither."""
    is_unnamed: bool = False
    """Whether no answer names the weights, so that the server named its side."""


@dataclass(frozen=True, kw_only=True)
class ServerRecord:
    """What the server of a comparison knows about attempts."""

    digests: Mapping[Side, str]
    """Digest of the weights of each side."""
    started_at: float
    """Start of the comparison, in seconds since the epoch."""
    assigned: Callable[[Sequence[str]], Mapping[str, str]]
    """Function: keys of attempts (`sides.attempt_key`) → key → digest of the weights, for those of
    the comparison."""


class SideResult(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts of one side."""

    digest: str
    attempts: int
    failed: int
    damaged: int
    rated: int
    """Number of attempts with a verdict or reward."""
    unnamed: int
    """Number of attempts of which no answer names the weights."""
    reward: Interval | None
    """Mean with its 95 % interval; None without any."""

    @property
    def coverage(self) -> float:
        """Share of attempts with a verdict or reward."""
        return self.rated / self.attempts if self.attempts else 0.0


class ComparisonResult(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of the candidate and the current weights."""

    comparison_id: str
    sides: dict[Side, SideResult]
    both_sides: int
    """Number of attempts that both sides answered; they are left out."""
    difference: Interval | None
    """Mean reward of the candidate minus that of the current weights; None if a side has none."""
    failure_difference: Interval | None
    """The same for the share of attempts that failed."""
    conclusion: Conclusion
    sentence: str

    @property
    def is_worse(self) -> bool:
        return self.conclusion is Conclusion.WORSE


# --- statistics -----------------------------------------------------------------------------
def difference(candidate: Interval, current: Interval) -> Interval:
    """Return the difference of two means with its 95 % interval.

    It is computed from the intervals of both means (MOVER: Zou and Donner 2008, Statistics in
    Medicine 27(10)), so shares and few users are treated as in each of them. Users on both sides
    make the true interval narrower.
    """
    mean = candidate.mean - current.mean
    n = candidate.n + current.n
    clusters = None
    if candidate.clusters is not None or current.clusters is not None:
        clusters = sum(
            each.n if each.clusters is None else each.clusters for each in (candidate, current)
        )
    if not (candidate.is_known and current.is_known):
        return Interval(mean, math.nan, math.nan, n, clusters)
    below = math.hypot(candidate.mean - candidate.low, current.high - current.mean)
    above = math.hypot(candidate.high - candidate.mean, current.mean - current.low)
    return Interval(mean, mean - below, mean + above, n, clusters)


def more_needed(interval: Interval) -> int | None:
    """Return how many more values would exclude 0, if the mean and the spread stay as they are.

    The width of an interval shrinks with the root of the number of values. The result is 0 if 0 is
    excluded, and None if no number is known or if it is above `MAX_FORECAST`.
    """
    if not interval.is_known or not interval.mean:
        return None
    is_above = interval.mean > 0
    width = interval.mean - interval.low if is_above else interval.high - interval.mean
    needed = interval.n * ((width / interval.mean) ** 2 - 1)
    return None if needed > MAX_FORECAST else max(0, math.ceil(needed))


def compare(
    comparison_id: str,
    attempts: Iterable[ComparedAttempt],
    digests: Mapping[Side, str],
    both_sides: int = 0,
) -> ComparisonResult:
    """Return the result of a comparison.

    Args:
        comparison_id: the comparison.
        attempts: its attempts.
        digests: digest of the weights of each side.
        both_sides: number of attempts that both sides answered.
    """
    members: dict[Side, list[ComparedAttempt]] = {side: [] for side in Side}
    for attempt in attempts:
        members[attempt.side].append(attempt)
    rewards = [a.reward for group in members.values() for a in group if a.reward is not None]
    # the rewards of either side show the range of both: a side of ones may be one of five stars
    lowest, highest = min([0.0, *rewards]), max([1.0, *rewards])
    extreme = highest if highest > 1 else lowest
    sides = {side: _side(group, digests[side], extreme) for side, group in members.items()}
    means = [sides[side].reward for side in (Side.CANDIDATE, Side.CURRENT)]
    failures = [_failures(members[side]) for side in (Side.CANDIDATE, Side.CURRENT)]
    reward_difference = None if None in means else difference(*filter(None, means))
    failure_difference = None if None in failures else difference(*filter(None, failures))
    conclusion, sentence = _conclude(reward_difference, failure_difference, sides)
    return ComparisonResult(
        comparison_id=comparison_id,
        sides=sides,
        both_sides=both_sides,
        difference=reward_difference,
        failure_difference=failure_difference,
        conclusion=conclusion,
        sentence=sentence,
    )


def _interval(
    values: Mapping[str, float], group: Iterable[ComparedAttempt], extreme: float
) -> Interval | None:
    """Return the mean of values with its interval, clustered by users; None without values.

    Args:
        values: attempt id → value.
        group: attempts of a side.
        extreme: a value of either side that is above 1, or else the lowest, at most 0. It shows
            which values are possible.
    """
    users = {a.attempt_id: a.user for a in group if a.user and a.attempt_id in values}
    is_clustered = len(set(users.values())) < len(users)
    return clustered_interval(values, users if is_clustered else {}, extreme) if values else None


def _side(group: list[ComparedAttempt], digest: str, extreme: float) -> SideResult:
    values = {a.attempt_id: a.reward for a in group if a.reward is not None}
    return SideResult(
        digest=digest,
        attempts=len(group),
        failed=sum(a.is_failed for a in group),
        damaged=sum(a.is_damaged for a in group),
        rated=len(values),
        unnamed=sum(a.is_unnamed for a in group),
        reward=_interval(values, group, extreme),
    )


def _failures(group: list[ComparedAttempt]) -> Interval | None:
    return _interval({a.attempt_id: float(a.is_failed) for a in group}, group, 0.0)


def _conclude(
    reward: Interval | None, failures: Interval | None, sides: Mapping[Side, SideResult]
) -> tuple[Conclusion, str]:
    """Return what the intervals say about the candidate, also as a sentence.

    Args:
        reward: mean reward of the candidate minus that of the current weights; None if a side has
            none.
        failures: the same for the share of failed attempts.
        sides: the attempts of each side.
    """
    if failures is not None and failures.is_known and failures.low > 0:
        return Conclusion.WORSE, (
            "the candidate is worse: the share of its attempts that fail is "
            f"{failures.mean:.3f} higher"
        )
    if reward is not None and reward.is_known and (reward.low > 0 or reward.high < 0):
        conclusion = Conclusion.BETTER if reward.low > 0 else Conclusion.WORSE
        return conclusion, f"the candidate is {conclusion} by {abs(reward.mean):.3f}"
    return Conclusion.OPEN, f"it cannot be decided yet: {_obstacle(reward, sides)}"


def _obstacle(reward: Interval | None, sides: Mapping[Side, SideResult]) -> str:
    """Return why rewards decide nothing yet, or how many more would (`_conclude`)."""
    unrated = [str(side) for side, result in sides.items() if not result.rated]
    if unrated:
        return f"no verdict on the {' and the '.join(unrated)} side"
    if reward is None or not reward.is_known:
        return "a side has too few verdicts for an interval, or equal ones of an unknown scale"
    more = more_needed(reward)
    if more is None:
        return "the sides hardly differ so far, so no number of verdicts is in sight"
    return f"about {plural(more, 'more verdict')} would decide it, if the difference stays as it is"


# --- the store ------------------------------------------------------------------------------
async def read_comparison(
    store: Store, comparison_id: str, server: ServerRecord
) -> ComparisonResult | None:
    """Return the result of a comparison; None if the store has no attempt of it.

    Args:
        store: open store to which the apps record.
        comparison_id: the comparison.
        server: what the server knows about the comparison.

    Raises:
        ConfigError: the server does not answer.
    """
    earliest = server.started_at - EARLIER_S
    rollout_ids = [
        row.rollout_id
        for row in (await store.summaries(mode=Mode.PRODUCTION)).rows
        if row.started_at is None or row.started_at >= earliest
    ]
    compared: list[ComparedAttempt] = []
    unnamed: list[RecordedAttempt] = []
    both_sides = 0
    async for recorded in read_attempts(store, Query(), rollout_ids):
        marks = _marks(recorded)
        if not marks and recorded.attempt.outcome is not None:
            unnamed.append(recorded)
            if len(unnamed) == CHUNK_SIZE:
                compared += await _unnamed(unnamed, server)
                unnamed.clear()
        elif comparison_id in {mark.comparison_id for mark in marks}:
            sides = {mark.side for mark in marks if mark.side is not None}
            if len(sides) > 1 or len({mark.digest for mark in marks}) > 1:
                both_sides += 1
            else:
                [side] = sides
                compared.append(_compared(recorded, side))
    compared += await _unnamed(unnamed, server)
    if not compared and not both_sides:
        return None
    return compare(comparison_id, compared, server.digests, both_sides)


async def _unnamed(
    attempts: Sequence[RecordedAttempt], server: ServerRecord
) -> list[ComparedAttempt]:
    """Return those attempts, of which no answer names the weights, that the server knows.

    Such an attempt failed if it or one of its calls did. Others have calls to other models only.
    """
    keys = [
        [
            key_of_attempt(recorded.attempt.attempt_id),
            *dict.fromkeys(key_of_trace(span.trace_id) for span in recorded.episode.spans),
        ]
        for recorded in attempts
    ]
    unique = list(dict.fromkeys(key for each in keys for key in each))
    digests = await asyncio.to_thread(server.assigned, unique)
    sides = {digest: side for side, digest in server.digests.items()}
    compared: list[ComparedAttempt] = []
    for recorded, own in zip(attempts, keys, strict=True):
        digest = next((digests[key] for key in own if key in digests), "")
        if digest in sides:
            compared.append(_compared(recorded, sides[digest], is_unnamed=True))
    return compared


def _marks(recorded: RecordedAttempt) -> list[Mark]:
    models = (
        span.attributes.get(c.RESPONSE_MODEL)
        for span in recorded.episode.spans
        if span.kind is SpanKind.LLM
    )
    return [mark for mark in map(read_mark, models) if mark is not None]


def _compared(
    recorded: RecordedAttempt, side: Side, *, is_unnamed: bool = False
) -> ComparedAttempt:
    attempt = recorded.attempt
    has_failed_call = any(call.outcome is not CallOutcome.OK for call in recorded.episode.calls)
    return ComparedAttempt(
        attempt_id=attempt.attempt_id,
        side=side,
        reward=recorded.score,
        is_failed=attempt.outcome not in (None, Outcome.OK) or (is_unnamed and has_failed_call),
        is_damaged=bool(attempt.capture_errors),
        user=next(_users(recorded), ""),
        is_unnamed=is_unnamed,
    )


def _users(recorded: RecordedAttempt) -> Iterator[str]:
    """Yield the users of an attempt, and then its chats."""
    for keys, kind in ((USER_KEYS, ""), (CHAT_KEYS, "chat ")):
        for span in recorded.episode.spans:
            yield from (kind + str(span.attributes[k]) for k in keys if span.attributes.get(k))


# --- output ---------------------------------------------------------------------------------
def report_lines(result: ComparisonResult) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"{'':9}  attempts  failed  damaged  with verdict  mean reward"
    for side in (Side.CANDIDATE, Side.CURRENT):
        each = result.sides[side]
        verdicts = f"{each.rated} ({each.coverage:.0%})"
        mean = "-" if each.reward is None else str(each.reward)
        yield (
            f"{side:9}  {each.attempts:>8}  {each.failed:>6}  {each.damaged:>7}  {verdicts:>12}  "
            f"{mean}"
        )
    for side in (Side.CANDIDATE, Side.CURRENT):
        if unnamed := result.sides[side].unnamed:
            yield (
                f"{side}: {plural(unnamed, 'attempt')} without an answer that names the weights; "
                "the side is that of the server's state"
            )
    if result.both_sides:
        yield (
            f"left out: {plural(result.both_sides, 'attempt')} that both sides answered. Connect "
            "the app (lightspan.connect), or send x-lightspan-attempt"
        )
    if result.difference is not None:
        yield f"candidate minus current, reward: {_signed(result.difference)}"
    if result.failure_difference is not None:
        yield f"candidate minus current, share failed: {_signed(result.failure_difference)}"
    yield result.sentence


def missing_lines(result: ComparisonResult, begun: Mapping[Side, int]) -> Iterator[str]:
    """Yield a line for each side with attempts that began and are not in the result.

    The side of an attempt is known by an answer, or by its id or trace id in the server's state. A
    side whose calls fail without any of these loses the attempts that would show it.

    Args:
        result: the comparison, read from the store.
        begun: number of attempts that the server counted, by side.
    """
    for side, count in begun.items():
        missing = count - result.sides[side].attempts - result.both_sides
        if missing > 0:
            yield (
                f"{side}: {missing:,} of {count:,} attempts that began are not compared: they are "
                "not recorded, have not ended, or all of their calls failed, and these have no id "
                "(x-lightspan-attempt, traceparent) by which the server knows them"
            )


def _signed(interval: Interval) -> str:
    bounds = "no CI"
    if interval.is_known:
        bounds = f"95% CI {interval.low:+.3f}..{interval.high:+.3f}"
    return f"{interval.mean:+.3f} ({bounds})"

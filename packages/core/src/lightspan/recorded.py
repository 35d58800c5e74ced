"""What production recorded (`lightspan.record`), to be read: attempts, chats, tasks.

Feedback counts here, though it is late: `settle_feedback` puts it in force. The score of a call is
its own feedback or reward, else that of its attempt; an attempt's own score is its feedback, else
what the app emitted. What has no score is never chosen by one.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from lightspan import conventions as c
from lightspan import messages
from lightspan.errors import ConfigError, DataError
from lightspan.lightning.episode import Call, Episode, build_episode
from lightspan.loops import run_sync
from lightspan.records import Attempt, CallOutcome, Json, Mode, RolloutState, fingerprint
from lightspan.routing import matches
from lightspan.spans import Span, SpanKind
from lightspan.store import Store
from lightspan.stores import open_existing

PORTION: Final = 128
"""Attempts that are in memory at once."""

Time = datetime | float | str
"""A moment: a datetime, seconds since the epoch, ISO 8601, or how long ago (`2h`, `7d`)."""


class Seen(NamedTuple):
    """One attempt of production, with its feedback in force."""

    state: RolloutState
    attempt: Attempt
    episode: Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which attempts are meant."""

    service: str | None = None
    """None for all."""
    since: float | None = None
    """Seconds since the epoch; by the attempt's beginning."""
    until: float | None = None

    @classmethod
    def of(cls, service: str | None, since: Time | None, until: Time | None) -> Query:
        """Raises `ConfigError`: a time is none."""
        return cls(
            service=service,
            since=None if since is None else parse_time(since, "since"),
            until=None if until is None else parse_time(until, "until"),
        )

    def takes(self, attempt: Attempt) -> bool:
        """Whether the attempt began in time."""
        after = self.since is None or attempt.started_at >= self.since
        return after and (self.until is None or attempt.started_at < self.until)


_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_time(value: Time, name: str) -> float:
    """Seconds since the epoch.

    Raises:
        ConfigError: it is no time.
    """
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    ago = _AGO.fullmatch(str(value))
    if ago:
        return datetime.now(UTC).timestamp() - float(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        raise ConfigError(
            f"{name}={value!r}: give a time such as 2026-11-20T09:00, or how long ago, such as 2h "
            "or 7d"
        ) from None


# --- attempts -------------------------------------------------------------------------------
async def read_seen(store: Store, query: Query) -> AsyncIterator[Seen]:
    """The attempts that are meant, oldest first, in portions."""
    states = await store.rollouts(run_id=query.service, mode=Mode.PRODUCTION)
    for start in range(0, len(states), PORTION):
        known = {s.rollout.rollout_id: s for s in states[start : start + PORTION]}
        attempts = [one for one in await store.attempts(list(known)) if query.takes(one)]
        spans = await store.spans([attempt.attempt_id for attempt in attempts])
        for attempt in attempts:
            state = known[attempt.rollout_id]
            told = settle_feedback(spans[attempt.attempt_id])
            yield Seen(state, attempt, build_episode(attempt, state.rollout, told, []))


def settle_feedback(spans: Sequence[Span]) -> list[Span]:
    """The spans with the feedback in force: per attempt and call the last that arrived, in time and
    after every other reward, whatever the clocks said.

    Args:
        spans: of one attempt, in the order in which they arrived (`Store.spans`).
    """
    last = {span.attributes.get(c.REWARD_CALL_ID): span for span in spans if is_feedback(span)}
    if not last:
        return list(spans)
    rewarded = max(span.start_ns for span in spans if span.kind is SpanKind.REWARD)
    others = [span for span in spans if not is_feedback(span)]
    in_force = [span.replace(late=False, start_ns=rewarded + 1) for span in last.values()]
    return [*others, *in_force]


def is_feedback(span: Span) -> bool:
    """Whether the span is feedback that came after the fact."""
    return span.kind is SpanKind.REWARD and bool(span.attributes.get(c.FEEDBACK))


def score_of(episode: Episode, call: Call) -> float | None:
    """The call's own last reward, else the episode's; None: unscored."""
    return call.reward if call.rewards else episode.reward


# --- chats ----------------------------------------------------------------------------------
@dataclass(slots=True)
class Chats:
    """Chats to imitate, and why the other calls are none."""

    chats: list[dict[str, Json]] = field(default_factory=list)
    """`{"messages": […], "tools": […]}`, the answer last."""
    left_out: Counter[str] = field(default_factory=Counter)


def check_min_reward(value: float | None) -> float | None:
    """The least reward, if it is one.

    Raises:
        ConfigError: it is NaN, infinite or no number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"min_reward={value!r}: give a finite number")
    return float(value)


async def read_chats(
    store: Store, query: Query, min_reward: float | None, agents: Sequence[str]
) -> Chats:
    """The chats of calls whose score is at least `min_reward`; see `chat_of` for what else counts.

    Args:
        store: opened.
        query: which attempts.
        min_reward: None takes unscored calls too.
        agents: names or globs on agent paths; none for all.
    """
    found = Chats()
    async for seen in read_seen(store, query):
        for call in seen.episode.calls:
            reason = _not_chosen(seen.episode, call, min_reward, agents)
            chat = None if reason else chat_of(call)
            if isinstance(chat, dict):
                found.chats.append(chat)
            else:
                found.left_out[reason or str(chat)] += 1
        found.left_out.update({"late": len(seen.episode.late_calls)})
    found.left_out += Counter()  # what is zero goes
    return found


def _not_chosen(
    episode: Episode, call: Call, min_reward: float | None, agents: Sequence[str]
) -> str:
    """Why a call is not taken; empty if it is."""
    if agents and not any(matches(pattern, call.agent_path) for pattern in agents):
        return "of other agents"
    if episode.damage:
        return "of damaged attempts"
    score = score_of(episode, call)
    if min_reward is None or (score is not None and score >= min_reward):
        return ""
    return "unscored" if score is None else "scored too low"


_WHOLE: Final = ("stop", "tool_calls", "function_call", "None")


def chat_of(call: Call) -> dict[str, Json] | str:
    """The call as a chat that ends with its answer; else why it is none.

    It has to have ended well, with one answer (feedback does not say which of several is meant)
    that was not cut off.
    """
    attributes: Mapping[str, Any] = {} if call.span is None else call.span.attributes
    if call.outcome is not CallOutcome.OK:
        return f"ended with {call.outcome}"
    try:
        asked, answers = messages.asked_of(attributes), messages.answers_of(attributes)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "unreadable"
    if not asked or not answers:
        return "without messages"
    if len(answers) > 1:
        return "with several answers"
    if str(call.finish) not in _WHOLE:
        return "cut off"
    tools = attributes.get(c.TOOL_DEFINITIONS)
    given = {} if tools is None else {"tools": json.loads(str(tools))}
    return {"messages": [*asked, answers[0]], **given}


def load_chats(
    store: str | os.PathLike[str],
    *,
    min_reward: float | None = None,
    service: str | None = None,
    agents: str | Sequence[str] = (),
    since: Time | None = None,
    until: Time | None = None,
) -> Chats:
    """`read_chats` of a store's URL.

    Raises:
        ConfigError: an argument is none of its kind.
    """
    query, least = Query.of(service, since, until), check_min_reward(min_reward)
    patterns = [agents] if isinstance(agents, str) else list(agents)

    async def read() -> Chats:
        async with open_existing(store) as opened:
            return await read_chats(opened, query, least, patterns)

    return run_sync(read())


# --- tasks ----------------------------------------------------------------------------------
def tasks_from_store(
    store: str | os.PathLike[str],
    *,
    service: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    since: Time | None = None,
    until: Time | None = None,
    distinct: bool = True,
) -> list[Json]:
    """What production was asked, as tasks: the input of each attempt, oldest first.

    The input is what its root was given, else the messages of its first call (`{"messages": […]}`).

    Args:
        store: its URL.
        service: of this one only.
        min_reward: only attempts that scored at least so much.
        max_reward: only attempts that scored at most so much: what went wrong, say.
        since: only attempts that began then or later.
        until: only attempts that began before.
        distinct: equal tasks once.

    Raises:
        ConfigError: an argument is none of its kind.
        DataError: there is no such task.
    """
    query = Query.of(service, since, until)
    bounds = check_min_reward(min_reward), check_min_reward(max_reward)

    async def read() -> list[Json]:
        async with open_existing(store) as opened:
            seen = [one async for one in read_seen(opened, query) if _is_within(one, *bounds)]
        return [one.state.rollout.task for one in seen]

    tasks = [task for task in run_sync(read()) if task is not None]
    if not tasks:
        raise DataError(f"store {os.fspath(store)} has no such attempt with a known input")
    return list({fingerprint(task): task for task in tasks}.values()) if distinct else tasks


def _is_within(seen: Seen, least: float | None, most: float | None) -> bool:
    reward = seen.episode.reward
    if least is None and most is None:
        return True
    if reward is None:
        return False
    return (least is None or reward >= least) and (most is None or reward <= most)


__all__ = [
    "Chats",
    "Query",
    "Seen",
    "Time",
    "chat_of",
    "check_min_reward",
    "load_chats",
    "parse_time",
    "read_chats",
    "read_seen",
    "score_of",
    "settle_feedback",
    "tasks_from_store",
]

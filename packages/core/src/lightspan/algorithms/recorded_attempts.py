"""Read attempts recorded in production (`lightspan.record`), with their scores.

Feedback is a reward that arrives after the attempt. Other modules ignore it; here `apply_feedback`
makes it count. The score of a call is its feedback or reward, else the score of its attempt. The
score of an attempt is its feedback, else the reward that the app emitted. A filter by score never
selects calls or attempts without a score.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from lightspan.errors import ConfigError, DataError
from lightspan.lightning.episode import Call, Episode, build_episode
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.images import Image
from lightspan.schema.media import is_reference, with_image
from lightspan.schema.records import Attempt, Json, Mode, RolloutState, RolloutSummary
from lightspan.schema.reward import usable
from lightspan.schema.routing import matches
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.token_records import CallOutcome
from lightspan.schema.validation import check_number, is_number
from lightspan.stores.protocol import Store

NO_ANSWER: Final = "without an answer"
"""Reason to leave out an answer for which `has_answer` is False."""
_SENT: Final = ("text", "image_url", None)
"""Types of parts that a model reads. Items of a tool's result may have none."""
_COMPLETE: Final = ("stop", "tool_calls", "function_call", "None")
"""Finish reasons of complete answers. "None" is for servers that send no finish reason."""
WITHOUT_TOKENS: Final = "its spans were sent by OpenTelemetry: the tokens of its calls are unknown"
CHUNK_SIZE: Final = 128
"""Rollouts per read, which bounds memory."""

Time = datetime | float | str
"""A time: a datetime, seconds since the epoch, ISO 8601 text, or an age (`2h`, `7d`)."""


class RecordedAttempt(NamedTuple):
    """An attempt recorded in production. Feedback on it that arrived later counts as a reward."""

    state: RolloutState
    attempt: Attempt
    episode: Episode

    @property
    def score(self) -> float | None:
        """The score of the attempt; None if it is unscored."""
        return score_of_attempt(self.episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filter that selects recorded attempts by service and start time."""

    service: str | None = None
    """Name of the service; None for all."""
    since: float | None = None
    """Earliest start in seconds since the epoch, inclusive; None for no limit."""
    until: float | None = None
    """Latest start in seconds since the epoch, exclusive; None for no limit."""

    @classmethod
    def of(cls, service: str | None, since: Time | None, until: Time | None) -> Query:
        """Return the query for a user's options.

        Args:
            service: name of the service; None for all.
            since: earliest start, inclusive; None for no limit.
            until: latest start, exclusive; None for no limit.

        Raises:
            ConfigError: `since` or `until` is not a time.
        """
        return cls(
            service=service,
            since=None if since is None else parse_time(since, "since"),
            until=None if until is None else parse_time(until, "until"),
        )

    def matches(self, attempt: Attempt | RolloutSummary) -> bool:
        """Return whether the attempt started between `since` and `until`; `service` is ignored."""
        until = math.inf if self.until is None else self.until
        return (self.since or 0.0) <= (attempt.started_at or 0.0) < until


_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_ago(text: str) -> float | None:
    """Return an age (`2h`, `7d`) in seconds; None if `text` is not an age."""
    ago = _AGO.fullmatch(text)
    return None if ago is None else float(ago[1]) * _SECONDS[ago[2]]


def parse_time(value: Time, name: str) -> float:
    """Convert a time into seconds since the epoch.

    Args:
        value: time in any form of `Time`.
        name: name of the option, for the error message.

    Raises:
        ConfigError: `value` is not a time.
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
            f"{name}={value!r}: give a time such as 2026-11-20T09:00, or an age such as 2h or 7d"
        ) from None


async def read_attempts(
    store: Store, query: Query, rollout_ids: Sequence[str] | None = None
) -> AsyncIterator[RecordedAttempt]:
    """Yield the attempts recorded in production that match `query`, oldest first.

    They are read in chunks of `CHUNK_SIZE` rollouts to bound memory.

    Args:
        store: open store.
        query: which attempts to read.
        rollout_ids: ids of the rollouts to read, of mode production; None for all.

    Raises:
        DataError: no attempt is of the service.
    """
    if rollout_ids is None:
        page = await store.summaries(query.service, mode=Mode.PRODUCTION, newest=True)
        rollout_ids = [row.rollout_id for row in reversed(page.rows) if query.matches(row)]
        if query.service is not None and not page.rows:
            text = f"no attempt is of the service {query.service!r}"
            raise DataError(f"{text}: `lightspan inspect {store.url}` shows the services")
    for start in range(0, len(rollout_ids), CHUNK_SIZE):
        states = await store.rollouts(rollout_ids[start : start + CHUNK_SIZE])
        chunk = {state.rollout.rollout_id: state for state in states}
        attempts = [a for a in await store.attempts(list(chunk)) if query.matches(a)]
        spans = await store.spans([attempt.attempt_id for attempt in attempts])
        for attempt in attempts:
            state = chunk[attempt.rollout_id]
            rollout, recorded = state.rollout, list(spans[attempt.attempt_id])
            is_received = attempt.runner_id in installed_plugins("readers")
            if is_received:
                read = load_plugin("readers", attempt.runner_id)
                rollout, recorded = read(rollout, attempt, recorded)
            episode = build_episode(attempt, rollout, apply_feedback(recorded), [])
            if is_received:
                episode = replace(episode, notes=(*episode.notes, WITHOUT_TOKENS))
            state = msgspec.structs.replace(state, rollout=rollout)
            yield RecordedAttempt(state, attempt, episode)


def is_of(call: Call, agents: Sequence[str]) -> bool:
    """Return whether a call is of an agent that `agents` names; empty names every agent."""
    return not agents or any(matches(pattern, call.agent_path) for pattern in agents)


def apply_feedback(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of an attempt, with the feedback changed so that it counts as a reward.

    Feedback is a reward that arrives after the attempt. For the attempt and for each call, only the
    feedback that arrived last is kept. It is no longer marked as late, and its start is set after
    all rewards, because clocks may differ.

    Args:
        spans: spans of one attempt, in order of arrival (`Store.spans`).
    """
    rated = ((n, span) for n, span in enumerate(spans) if c.is_feedback(span))
    places = {span.attributes.get(c.REWARD_CALL_ID): n for n, span in rated}
    last = [spans[place] for place in sorted(places.values())]
    if not last:
        return list(spans)
    rewarded = max(span.start_ns for span in spans if span.kind is SpanKind.REWARD)
    others = [span for span in spans if not c.is_feedback(span)]
    return [*others, *(s.replace(late=False, start_ns=rewarded + 1) for s in last)]


def score_of(episode: Episode, call: Call) -> float | None:
    """Return the score of a call: its last reward, else the reward of its episode.

    None if there is neither.
    """
    return call.reward if call.rewards else episode.reward


def score_of_attempt(episode: Episode) -> float | None:
    """Return the score of an attempt; None if it has none.

    It is the feedback on the attempt. If there is feedback only on its calls, it is the last of
    these. Without feedback, it is the reward that the app emitted.
    """
    feedback = [span.attributes for span in episode.spans if c.is_feedback(span)]
    if not feedback or any(c.REWARD_CALL_ID not in attributes for attributes in feedback):
        return episode.reward
    return usable(feedback[-1].get(c.REWARD_VALUE))


class RecordedChat(NamedTuple):
    """The messages of a recorded call."""

    messages: list[dict[str, Any]]
    """The prompt, and last the answer; empty if there is no answer."""
    tools: Json
    rejection: str
    """Why fine-tuning must not imitate the call; empty if it may."""


def chat_of(episode: Episode, call: Call, images: Mapping[str, Image] = {}) -> RecordedChat:
    """Return the chat of a call, and whether fine-tuning may imitate it, whatever its score.

    A call with several answers is rejected, because feedback does not say which it is for.

    Args:
        episode: the episode of the call.
        call: the call.
        images: digest → image to put into the messages, in place of the reference to it.
    """
    attributes: Mapping[str, Any] = {} if call.span is None else call.span.attributes
    try:
        prompt, is_whole = _prompt_of(episode, call.span)
        answers = genai_messages.output_messages_of(attributes)
        tools = json.loads(str(attributes.get(c.TOOL_DEFINITIONS, "null")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return RecordedChat([], None, "unreadable")
    contents = [m["content"] for m in (*prompt, *answers) if isinstance(m.get("content"), list)]
    for parts in contents:
        parts[:] = [with_image(part, images) for part in parts]
    # neither texts nor images with their bytes: references, and calls of the provider's own tools
    odd = [p for x in contents for p in genai_messages.mappings_in(x) if p.get("type") not in _SENT]
    answer = answers[call.choice :][:1]
    checks = {
        "of damaged attempts": bool(episode.capture_errors),
        "in failed tries": call.key in episode.retried,
        f"ended with {call.outcome}": call.outcome is not CallOutcome.OK,
        "with keys in them, which are not kept": c.KEYS_REPLACED in attributes,
        "whose prompt the provider keeps": not is_whole,
        "without messages": not prompt or not answer,
        "with images, sounds or files, of which references are kept": any(map(is_reference, odd)),
        "with calls of tools that the provider runs": bool(odd),
        "with arguments of tools that are no JSON object": not all(map(_has_whole_calls, answer)),
        "with several answers": len(answers) > 1 and call.record is None,
        "cut off": call.record is None and str(call.finish) not in _COMPLETE,
        "whose prompt begins the answer": [m["role"] for m in prompt[-1:]] == ["assistant"],
        NO_ANSWER: not any(map(has_answer, answer)),
    }
    rejection = next((reason for reason, holds in checks.items() if holds), "")
    return RecordedChat([*prompt, *answer] if answer else [], tools, rejection)


def _prompt_of(episode: Episode, span: Span | None) -> tuple[list[dict[str, Any]], bool]:
    """Return the prompt of a call, and whether it is whole.

    If the call continues a response (`semconv.CALL_CONTEXT`) of the same attempt, the prompt has
    the messages up to that response too, but not its instructions, which are not continued.
    """
    attributes: Mapping[str, Any] = {} if span is None else span.attributes
    prompt = genai_messages.input_messages_of(attributes)
    if span is None or (context := attributes.get(c.CALL_CONTEXT)) is None:
        return prompt, True
    for earlier in (call.span for call in episode.calls if call.span is not None):
        values = earlier.attributes
        if values.get(c.RESPONSE_ID) == context and earlier.start_ns < span.start_ns:
            before, is_whole = _prompt_of(episode, earlier)
            answer = genai_messages.output_messages_of(values)
            own, skipped = (int(c.INSTRUCTIONS in each) for each in (attributes, values))
            is_whole &= len(answer) == 1 and c.KEYS_REPLACED not in values
            return [*prompt[:own], *before[skipped:], *answer, *prompt[own:]], is_whole
    return prompt, False


def has_answer(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a text or a tool call."""
    return bool(genai_messages.joined_text(message.get("content")) or message.get("tool_calls"))


def _has_whole_calls(message: Mapping[str, Any]) -> bool:
    """Return whether the arguments of all tool calls of a message are JSON objects, or empty."""
    texts = [call["function"]["arguments"] or "{}" for call in message.get("tool_calls") or ()]
    try:
        return all(isinstance(json.loads(text), dict) for text in texts)
    except ValueError:
        return False


def reward_bound(name: str, value: float | None) -> float | None:
    """Check a limit of rewards and return it as float; None for no limit.

    Args:
        name: name of the option, for the error message.
        value: the limit; None for no limit.

    Raises:
        ConfigError: `value` is not a finite number.
    """
    check_number(name, value, optional=True)
    return None if value is None else float(value)

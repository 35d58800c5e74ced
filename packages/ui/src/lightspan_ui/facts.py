"""Compute the facts about an attempt that only its spans tell: agents, tokens, texts, feedback."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from lightspan.algorithms.recorded_attempts import apply_feedback, score_of_attempt
from lightspan.lightning.episode import Episode, RewardSource, build_episode
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.media import is_reference
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Json,
    Mode,
    Outcome,
    Rollout,
    RolloutStatus,
    RolloutSummary,
)
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.token_records import CallOutcome, TokenRecord

MAX_BEGINNING: Final = 300
"""Maximum characters of the beginning of a text in a table."""
USER_KEYS: Final = ("user.id", "enduser.id", "langfuse.user.id", f"{c.ANNOTATION}user")
SESSION_KEYS: Final = (
    *("session.id", "gen_ai.conversation.id", "langfuse.session.id"),
    f"{c.ANNOTATION}session",
)
TAG_KEYS: Final = ("tag.tags", "langfuse.trace.tags", f"{c.ANNOTATION}tags", f"{c.ANNOTATION}tag")
COST_KEYS: Final = ("gen_ai.usage.cost", "llm.cost.total", "lightspan.cost")
"""Attributes by which programs that record spans name users, sessions, tags and costs."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the spans of an attempt tell, in little memory: one object per attempt is kept."""

    change: int
    """Cursor of the rollout when the spans were read; a later change makes the facts old."""
    agents: tuple[tuple[str, int], ...]
    tokens: int | None
    cost: float | None
    user: str
    session: str
    tags: tuple[str, ...]
    is_rated: bool
    reward: float | None
    dimensions: dict[str, float] | None
    """None if there are none."""
    source: RewardSource | None
    unscored: str
    departed: str
    seconds: float | None


class Texts(msgspec.Struct, frozen=True, kw_only=True):
    """The beginnings of an attempt's texts, which are read for the rows of a page."""

    question: str
    answer: str
    task: Json = None
    """The task, if only the spans have it."""


def needs_records(spans: Sequence[Span]) -> bool:
    """Return whether token records change the reward: if an answer may not have reached the app."""
    return any(
        span.kind is SpanKind.LLM and span.attributes.get(c.CALL_OUTCOME) == CallOutcome.UNDELIVERED
        for span in spans
    )


def facts_of(
    summary: RolloutSummary, spans: Sequence[Span], records: Sequence[TokenRecord]
) -> Facts:
    """Return the facts about an attempt.

    Args:
        summary: the rollout with its latest attempt.
        spans: spans of the attempt.
        records: token records of the attempt; they are needed only if `needs_records`.
    """
    is_production = summary.mode is Mode.PRODUCTION
    spans = recorded_spans(summary, spans)
    episode = build_episode(attempt_of(summary), rollout_of(summary), spans, records)
    attributes = [span.attributes for span in spans]
    agents = Counter(call.agent_path for call in episode.calls)
    sampled = [usage for span in _calls(spans) if (usage := c.usage_of(span.attributes)[1])]
    costs = _costs(spans)
    return Facts(
        change=summary.change,
        agents=tuple((sys.intern(path), count) for path, count in agents.items()),
        tokens=sum(sampled) if sampled else None,
        cost=sum(costs) if costs else None,
        user=_first_text(attributes, USER_KEYS),
        session=_first_text(attributes, SESSION_KEYS),
        tags=tuple(map(sys.intern, tags_of(attributes))),
        is_rated=any(map(c.is_feedback, spans)),
        reward=score_of_attempt(episode) if is_production else episode.reward,
        dimensions=dict(episode.dimensions) or None,
        source=episode.reward_source,
        unscored=episode.unscored,
        departed=episode.departed,
        seconds=seconds_of(spans) if is_production else None,
    )


def recorded_spans(summary: RolloutSummary, spans: Sequence[Span]) -> Sequence[Span]:
    """Return the spans of an attempt as `read_attempts` returns them.

    For an attempt of production, feedback counts as a reward, and spans that another program sent
    are completed by their reader.
    """
    if summary.mode is not Mode.PRODUCTION:
        return spans
    _, spans = completed(summary, spans)
    return apply_feedback(spans)


def completed(summary: RolloutSummary, spans: Sequence[Span]) -> tuple[Json, Sequence[Span]]:
    """Return the task and the spans of an attempt, completed by the reader of its spans.

    The task is None, and the spans are unchanged, unless another program sent the spans.
    """
    if summary.runner_id not in installed_plugins("readers"):
        return None, spans
    read = load_plugin("readers", summary.runner_id)
    rollout, complete = read(rollout_of(summary), attempt_of(summary), list(spans))
    return rollout.task, complete


def texts_of(summary: RolloutSummary, spans: Sequence[Span]) -> Texts:
    """Return the beginnings of the first question and of the last answer of an attempt."""
    task, spans = completed(summary, spans)
    calls = sorted(_calls(spans), key=lambda span: (span.sequence_start or 0, span.start_ns))
    question = next(filter(None, (_question(span) for span in calls)), "")
    answer = next(filter(None, (_answer(span) for span in reversed(calls))), "")
    return Texts(question=beginning(question), answer=beginning(answer), task=task)


def attempt_of(summary: RolloutSummary) -> Attempt:
    """Return a rollout's latest attempt, as far as its episode depends on it."""
    return Attempt(
        attempt_id=summary.attempt_id or "",
        rollout_id=summary.rollout_id,
        number=1,
        epoch=1,
        status=_attempt_status(summary),
        runner_id=summary.runner_id,
        outcome=summary.outcome,
        reward=summary.reward,
        message=summary.message,
        capture_errors=[""] * summary.capture_errors,
    )


def rollout_of(summary: RolloutSummary) -> Rollout:
    """Return a rollout without its task."""
    return Rollout(
        rollout_id=summary.rollout_id,
        task=None,
        task_id=summary.task_id,
        run_id=summary.run_id,
        group_id=summary.group_id,
        mode=summary.mode,
        step=summary.step,
        fork=summary.fork,
    )


def episode_of(summary: RolloutSummary, facts: Facts | None) -> Episode:
    """Return an episode with the reward of an attempt, but without its calls."""
    episode = build_episode(attempt_of(summary), rollout_of(summary), (), ())
    if facts is None:
        return episode
    return replace(
        episode,
        reward=facts.reward,
        dimensions=facts.dimensions or {},
        reward_source=facts.source,
        unscored=facts.unscored,
        departed=facts.departed,
    )


def seconds_of(spans: Sequence[Span]) -> float | None:
    """Return the seconds from the start of the first span to the end of the last.

    Rewards are left out, because feedback may arrive days later. None without other spans.
    """
    timed = [span for span in spans if span.kind is not SpanKind.REWARD]
    if not timed:
        return None
    return (max(span.end_ns for span in timed) - min(span.start_ns for span in timed)) / 1e9


def tags_of(attributes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tags in attributes, each once. Several may be a list, or JSON or comma-separated
    text."""
    tags: dict[str, None] = {}
    for each in attributes:
        for key in TAG_KEYS:
            tags |= dict.fromkeys(_items(each.get(key)))
    return list(tags)


def beginning(text: str) -> str:
    """Return the beginning of a text."""
    return text if len(text) <= MAX_BEGINNING else f"{text[: MAX_BEGINNING - 1]}…"


def text_of_content(content: Any) -> str:
    """Return the content of a message as one text; parts without text are shown as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_text_of_part(part) for part in content)
    return genai_messages.dump_json(content)


def _text_of_part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return "[image]" if is_image(part) else genai_messages.dump_json(part)


def images_of(content: Any) -> list[dict[str, Any]]:
    """Return the references to images in the content of a message, in order."""
    return [part for part in content if is_image(part)] if isinstance(content, list) else []


def is_image(part: Any) -> bool:
    """Return whether a part of a message refers to the bytes of an image."""
    return is_reference(part) and part["modality"] == "image" and "sha256" in part


def messages_of(attributes: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return recorded messages; if another program wrote them in another form, as one text."""
    value = attributes.get(key)
    if value is None:
        return []
    try:
        return genai_messages.load(str(value))
    except (ValueError, KeyError, TypeError, AttributeError):
        return [{"role": "unknown", "content": str(value)}]


def tool_text(call: Any) -> str:
    """Return a call of a tool as text, such as `search({"query": "x"})`."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return str(call)
    return f"{function.get('name') or ''}({function.get('arguments') or ''})"


def _attempt_status(summary: RolloutSummary) -> AttemptStatus:
    if summary.outcome is Outcome.TIMEOUT:
        return AttemptStatus.TIMEOUT
    if summary.status is RolloutStatus.QUEUED:  # its latest attempt was lost
        return AttemptStatus.LOST if summary.attempt_id else AttemptStatus.RUNNING
    return AttemptStatus(summary.status)


def _calls(spans: Sequence[Span]) -> Iterator[Span]:
    return (span for span in spans if span.kind is SpanKind.LLM)


def _costs(spans: Sequence[Span]) -> list[float]:
    """Return the costs of the spans that have one, without those that enclose another cost.

    A call may be described by two libraries, and an agent's span may repeat the sum of its calls.
    """
    own = {span.span_id: _first_number(span.attributes, COST_KEYS) for span in spans}
    parents = {span.span_id: span.parent_id for span in spans}
    outer = set[str]()
    for span_id, cost in own.items():
        above = parents[span_id] if cost is not None else None
        while above is not None and above not in outer:
            outer.add(above)
            above = parents.get(above)
    return [cost for span_id, cost in own.items() if cost is not None and span_id not in outer]


def _question(span: Span) -> str:
    messages = messages_of(span.attributes, c.INPUT_MESSAGES)
    users = (text_of_content(m.get("content")) for m in messages if m.get("role") == "user")
    return next(filter(None, users), "")


def _answer(span: Span) -> str:
    messages = messages_of(span.attributes, c.OUTPUT_MESSAGES)
    return " ".join(
        text
        for message in messages
        for text in (
            text_of_content(message.get("content")),
            *map(tool_text, message.get("tool_calls") or ()),
        )
        if text
    )


def _items(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        return [str(item) for item in value]
    text = str(value)
    if text.startswith("["):
        try:
            items = json.loads(text)
        except ValueError:
            items = None
        if isinstance(items, list):
            return [str(item) for item in items]
    return [item.strip() for item in text.split(",") if item.strip()]


def _first_text(attributes: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    values = (str(each[key]) for each in attributes for key in keys if each.get(key))
    return sys.intern(next(values, ""))


def _first_number(attributes: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    for key in keys:
        value = attributes.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None

"""Description of a rollout, as shown to a reflection model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.rollout_checks import app_failed
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import Json, Outcome
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome
from lightspan_prompts.search.prompt_discovery import Text, texts_of
from lightspan_prompts.transcript import shortened, without_keys

MAX_TEXT_LENGTH: Final = 1_500
"""Maximum characters of a message; the middle of a longer one is left out, but not its images."""
MAX_CALLS: Final = 8
"""Maximum number of model calls that are shown; earlier calls are left out."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reward, tokens and description of one rollout of a candidate."""

    rollout_id: str
    task_id: str
    reward: float | None
    """Reward of the rollout; None if it is unscored."""
    failed: bool = False
    """Whether the app failed."""
    is_failure: bool = False
    """Whether the failure reward is its reward in comparisons: the app failed without giving a
    reward, or ended without one. False for a rollout that is unscored for another reason."""
    unscored: str = ""
    """Why a scorer, such as a `Judge`, gave no reward; empty if it did, or if there is none."""
    tokens: int = 0
    """Tokens of its model calls, as far as endpoints count them."""
    estimated: int = 0
    """Number of its model calls whose endpoint counts no tokens, which are estimated."""
    unanswered: int = 0
    """Number of its model calls that were cancelled or timed out, which are estimated too."""
    repeated: int = 0
    """Number of earlier attempts of the rollout, which were lost. `tokens`, `estimated`,
    `unanswered` and `usage` include theirs."""
    usage: dict[str, tuple[int, int]] | None = None
    """Model → (tokens sent, tokens received), without the calls of policies. None in older logs."""
    calls: int = 0
    text: str = ""
    """Description of the rollout: task, messages, outcome."""
    asked: list[str] = msgspec.field(default_factory=list)
    """Called agents and requested prompts that have a discovered text."""
    applied: int = 0
    """Number of discovered texts that were sent in the candidate's version."""
    sent: list[str] | None = None
    """Names of these texts: of prompts, and paths of agents. None in older logs."""
    kept: dict[str, int] = msgspec.field(default_factory=dict)
    """`TEXT: REASON` of a discovered text that was sent in the app's version → count."""


def _none(text: Text) -> bool:
    return False


def evidence_of(episode: Episode, task: Json, concerns: Callable[[Text], bool] = _none) -> Evidence:
    """Describe a rollout by its episode.

    Args:
        episode: the rollout's episode.
        task: the rollout's task.
        concerns: function that returns whether a text of the app is one of those to learn.
    """
    texts = [text for text in texts_of(episode) if concerns(text)]
    kept = Counter(f"{t.name or t.agent}: {t.reason}" for t in texts if t.reason)
    # choices of one call share its span
    spans = {
        (one.attempt_id, call.span_id): call.span
        for one in (*episode.earlier, episode)
        for call in one.calls
        if call.span is not None
    }
    usage, estimated, unanswered = _usage(spans.values())
    return Evidence(
        rollout_id=episode.rollout_id,
        task_id=episode.task_id,
        reward=episode.reward,
        failed=app_failed(episode),
        is_failure=_is_failure(episode),
        unscored=episode.unscored,
        tokens=sum(map(sum, usage.values())),
        estimated=estimated,
        unanswered=unanswered,
        repeated=len(episode.earlier),
        usage={model: used for (model, policy), used in usage.items() if not policy},
        calls=len(episode.calls),
        text="\n".join(_lines(episode, task)),
        asked=sorted({text.name or text.agent for text in texts}),
        applied=sum(text.applied for text in texts),
        sent=sorted({text.name or text.agent for text in texts if text.applied}),
        kept=dict(kept),
    )


def interrupted_evidence(episode: Episode) -> Evidence:
    """Return the tokens of an interrupted rollout, by the calls that the store has."""
    calls = (*episode.calls, *episode.late_calls)
    found = evidence_of(replace(episode, calls=calls), None)
    return Evidence(
        rollout_id=found.rollout_id,
        task_id=found.task_id,
        reward=None,
        tokens=found.tokens,
        estimated=found.estimated,
        unanswered=found.unanswered,
        repeated=found.repeated,
        usage=found.usage,
        calls=found.calls,
    )


def _is_failure(episode: Episode) -> bool:
    if episode.reward is not None:
        return episode.reward_source == "failure"
    is_own = episode.finished and episode.outcome is Outcome.OK and not episode.unscored
    return is_own or app_failed(episode)


def _usage(spans: Iterable[Span]) -> tuple[dict[tuple[str, bool], tuple[int, int]], int, int]:
    """Add up the tokens of calls by model, and count the calls whose tokens are estimated.

    Return (model, whether it is a trained policy) → (tokens sent, tokens received), the number of
    calls that are estimated because their endpoint counted no tokens, and of those that are
    estimated because the app did not wait for their answer (`_is_unanswered`).

    Many endpoints do not count the tokens of a stream unless the app asks for it
    (`stream_options`). An answer that the app did not wait for is taken to have as many tokens as
    the request allows (`max_tokens`), or none if it names no number.
    """
    totals: dict[tuple[str, bool], tuple[int, int]] = {}
    estimated = unanswered = 0
    for span in (each for each in spans if c.CACHED not in each.attributes):
        counts = [count or 0 for count in c.usage_of(span.attributes)]
        is_policy = c.POLICY in span.attributes
        if not any(counts) and not is_policy:
            received = _texts(genai_messages.output_messages_of(span.attributes))
            is_unanswered = not received and _is_unanswered(span)
            if span.status is not SpanStatus.ERROR or received or is_unanswered:
                tools = str(span.attributes.get(c.TOOL_DEFINITIONS, ""))
                sent = _texts(genai_messages.input_messages_of(span.attributes))
                counts = [estimated_tokens(tools + sent), estimated_tokens(received)]
                if is_unanswered:
                    most = span.attributes.get(c.REQUEST_MAX_TOKENS)
                    counts[1] = most if isinstance(most, int) else 0
                    unanswered += 1
                else:
                    estimated += any(counts)
        if any(counts):
            key = c.model_of(span.attributes) or "", is_policy
            before = totals.get(key, (0, 0))
            totals[key] = (before[0] + counts[0], before[1] + counts[1])
    return totals, estimated, unanswered


def _is_unanswered(span: Span) -> bool:
    """Return whether the app cancelled a call or stopped waiting for it, which may cost money."""
    names = ("Timeout", "CancelledError")
    error = str(span.attributes.get(c.ERROR_TYPE, ""))
    is_cancelled = span.attributes.get(c.CALL_OUTCOME) == CallOutcome.CANCELLED
    return is_cancelled or any(name in error for name in names)


def estimated_tokens(text: str) -> int:
    """Return an estimate of the number of tokens in a text.

    A token is taken to have four bytes. In most languages it has more, so the estimate is rather
    too high.
    """
    return -(-len(text.encode("utf-8", "replace")) // 4)


def _texts(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the texts of messages: content, thoughts, and names and arguments of tool calls.

    Roles, ids and JSON around the texts are left out, and references to images, sounds and files.
    """
    parts = []
    for message in messages:
        parts += [genai_messages.joined_text(message.get("content"))]
        parts += [message.get("reasoning_content") or ""]
        for call in message.get("tool_calls", ()):
            function = call.get("function", {})
            parts += [str(function.get(key) or "") for key in ("name", "arguments")]
    return "".join(parts)


def _lines(episode: Episode, task: Json) -> Iterator[str]:
    yield f"Task: {_shortened(without_keys(json.dumps(task, ensure_ascii=False)))}"
    left_out = len(episode.calls) - MAX_CALLS
    if left_out > 0:
        yield f"({left_out} earlier model calls are left out)"
    for call in episode.calls[-MAX_CALLS:]:
        yield from _call_lines(call)
    for span in episode.spans:
        yield from _span_lines(span)
    if episode.message:
        yield f"The run ended with: {_shortened(episode.message)}"
    reward = "none" if episode.reward is None else f"{episode.reward:g}"
    yield f"Reward: {reward}"
    for name, value in episode.dimensions.items():
        if name != "reward":  # shown already
            yield f"  {name}: {value:g}"
    if episode.reasons:
        yield f"Reasons of the reward: {_shortened(episode.reasons)}"


def _call_lines(call: Call) -> Iterator[str]:
    attributes: Mapping[str, Any] = {} if call.span is None else call.span.attributes
    yield f"Model call of the agent {call.agent_path!r}:"
    for message in genai_messages.input_messages_of(attributes):
        yield f"  {message.get('role')}: {_message_text(message)}"
    answers = genai_messages.output_messages_of(attributes)
    for answer in answers[call.choice : call.choice + 1]:
        yield f"  answer: {_message_text(answer)}"
    if call.span is not None and call.span.status is SpanStatus.ERROR:
        yield f"  the call failed: {_shortened(call.span.status_message)}"
    for reward in call.rewards:
        yield f"  reward of this call: {'none' if reward.value is None else f'{reward.value:g}'}"


def _message_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message with its tool calls."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _json(content)
    calls = [call.get("function", {}) for call in message.get("tool_calls", ())]
    tools = [f"calls {call.get('name')}({call.get('arguments')})" for call in calls]
    return _shortened(" ".join(part for part in (text, *tools) if part))


def _span_lines(span: Span) -> Iterator[str]:
    if span.kind is SpanKind.MESSAGE:
        yield f"The app says: {_shortened(str(span.attributes.get(c.MESSAGE_BODY, '')))}"
    elif span.kind is SpanKind.EXCEPTION:
        what = span.attributes.get(c.EXCEPTION_TYPE, "an error")
        why = _shortened(str(span.attributes.get(c.EXCEPTION_MESSAGE, span.status_message)))
        yield f"The app raised {what}: {why}"
    elif span.kind is SpanKind.TOOL and span.status is SpanStatus.ERROR:
        name = span.attributes.get(c.TOOL_NAME, span.name)
        yield f"The tool {name} failed: {_shortened(span.status_message)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _shortened(text: str) -> str:
    return shortened(text, MAX_TEXT_LENGTH)


def examples(evidence: Sequence[Evidence]) -> str:
    """Join the descriptions of rollouts, each with a numbered heading."""
    return "\n\n".join(f"### Run {number}\n{one.text}" for number, one in enumerate(evidence, 1))

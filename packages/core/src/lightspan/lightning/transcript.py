"""Transcript: an episode as a judge reads it, and the answer that it came to.

It has the task, what the agents were asked and answered, what tools gave, and what the app said of
it (`emit_message`). It has no reward, neither the app's own nor of a call: whoever scores it is to
look at the work. Keys are taken out as in what is recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightspan.lightning.episode import Call, Episode
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import Json
from lightspan.schema.redaction import values_without_keys
from lightspan.schema.spans import Span, SpanKind, SpanStatus
from lightspan.schema.token_records import CallOutcome

MAX_TEXT_LENGTH: Final = 4_000
"""Characters of one message; the middle of a longer one is left out."""
MAX_CALLS: Final = 24
"""Calls that are shown: the last ones."""


def transcript(episode: Episode, *, whole: bool = True) -> str:
    """What was said, call by call; a message that an earlier call of the same agent had is not
    repeated.

    Args:
        whole: False: the last answer alone, and what the app said.
    """
    alone = [f"answer: {_shortened(answer_of(episode))}"]
    lines = list(_conversation(episode)) if whole else alone
    said = (line for span in episode.spans for line in _app_lines(span, whole))
    return without_keys("\n".join([*lines, *said]))


def task_text(task: Json) -> str:
    """The task as JSON, as the app was given it."""
    return without_keys(_shortened(_json(task)))


def answer_of(episode: Episode) -> str:
    """The text of the last answer that an agent got; empty if there was none."""
    for call in reversed(episode.calls):
        message = _answer(call)
        if call.outcome is CallOutcome.OK and message is not None:
            content = message.get("content")
            return content if isinstance(content, str) else _said(message)
    return ""


def without_keys(text: str) -> str:
    """The text without keys, as a conversation is recorded."""
    return str(values_without_keys({"text": text})["text"])


def _conversation(episode: Episode) -> Iterator[str]:
    left_out = len(episode.calls) - MAX_CALLS
    if left_out > 0:
        yield f"({left_out} earlier model calls are left out)"
    told: dict[str, set[str]] = {}
    for call in episode.calls[-MAX_CALLS:]:
        yield from _call_lines(call, told.setdefault(call.agent_path, set()))


def _call_lines(call: Call, told: set[str]) -> Iterator[str]:
    """The lines of a call; what they tell is added to what is told."""
    yield f"Model call of the agent {call.agent_path!r}:"
    attributes: Mapping[str, Any] = {} if call.span is None else call.span.attributes
    for message in genai_messages.input_messages_of(attributes):
        line = f"  {message.get('role')}: {_shortened(_said(message))}"
        if line not in told:
            told.add(line)
            yield line
    answer = _answer(call)
    if answer is not None:
        text = _shortened(_said(answer))
        told.add(f"  assistant: {text}")
        yield f"  answer: {text}"
    if call.span is not None and call.span.status is SpanStatus.ERROR:
        yield f"  the call failed: {_shortened(call.span.status_message)}"


def _answer(call: Call) -> dict[str, Any] | None:
    attributes: Mapping[str, Any] = {} if call.span is None else call.span.attributes
    answers = genai_messages.output_messages_of(attributes)
    return answers[call.choice] if call.choice < len(answers) else None


def _said(message: Mapping[str, Any]) -> str:
    """The content of a message, and the tools that it calls."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _json(content)
    calls = [each.get("function", {}) for each in message.get("tool_calls", ())]
    tools = [f"calls {each.get('name')}({each.get('arguments')})" for each in calls]
    return " ".join(part for part in (text, *tools) if part)


def _app_lines(span: Span, whole: bool) -> Iterator[str]:
    if span.kind is SpanKind.MESSAGE:
        yield f"The app says: {_shortened(str(span.attributes.get(c.MESSAGE_BODY, '')))}"
    elif span.kind is SpanKind.TOOL and whole:
        name = span.attributes.get(c.TOOL_NAME, span.name)
        if span.status is SpanStatus.ERROR:
            yield f"The tool {name} failed: {_shortened(span.status_message)}"
        elif c.TOOL_CALL_RESULT in span.attributes:
            asked = _shortened(str(span.attributes.get(c.TOOL_CALL_ARGUMENTS, "")))
            yield f"The tool {name}({asked}) gave: " + _shortened(
                str(span.attributes[c.TOOL_CALL_RESULT])
            )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT_LENGTH:
        return text
    half = MAX_TEXT_LENGTH // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters left out…] {text[-half:]}"

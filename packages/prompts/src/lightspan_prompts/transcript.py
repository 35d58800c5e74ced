"""Transcript: an episode as text for a judge, and its final answer.

It contains the task, prompts and answers of the agents, results of tools, and the app's messages
(`emit_message`). It contains no reward, so that a judge scores the work itself. API keys are
redacted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightspan.lightning.answers import answer_message, answer_of, json_text, message_text
from lightspan.lightning.episode import Call, Episode
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import Json
from lightspan.schema.redaction import values_without_keys
from lightspan.schema.spans import Span, SpanKind, SpanStatus

MAX_TEXT_LENGTH: Final = 4_000
"""Maximum characters of a message; the middle of a longer one is left out, but not its images."""
MAX_CALLS: Final = 24
"""Maximum number of calls in a transcript; earlier calls are left out."""
IMAGE_REFERENCE: Final = re.compile(r'(\{[^{}]{0,300}"modality": "image"[^{}]{0,300}\})')
"""Reference to an image (`schema.media`). It is short, so that no other text passes for one."""


def transcript(episode: Episode, *, whole: bool = True) -> str:
    """Return the messages of an episode, call by call.

    A message that an agent receives or sends repeatedly appears once.

    Args:
        episode: the episode.
        whole: whether to include all calls and tools; False for the last answer and the app's
            messages only.
    """
    answer = [f"answer: {shortened(answer_of(episode))}"]
    lines = list(_conversation(episode)) if whole else answer
    lines += [line for span in episode.spans for line in _app_lines(span, whole)]
    return without_keys("\n".join(lines))


def task_text(task: Json) -> str:
    """Return the task as JSON."""
    return without_keys(shortened(json_text(task)))


def without_keys(text: str) -> str:
    """Return the text with API keys redacted."""
    return str(values_without_keys({"text": text})["text"])


def _conversation(episode: Episode) -> Iterator[str]:
    excess = len(episode.calls) - MAX_CALLS
    if excess > 0:
        yield f"({excess} earlier model calls are left out)"
    written: dict[str, set[str]] = {}
    for call in episode.calls[-MAX_CALLS:]:
        yield from _call_lines(call, written.setdefault(call.agent_path, set()))


def _call_lines(call: Call, written: set[str]) -> Iterator[str]:
    """Yield the lines that describe a model call, without messages that are in `written`.

    `written` has the lines of earlier calls. New lines are added to it.
    """
    yield f"Model call of the agent {call.agent_path!r}:"
    attributes: Mapping[str, Any] = {} if call.span is None else call.span.attributes
    for message in genai_messages.input_messages_of(attributes):
        line = f"  {message.get('role')}: {shortened(message_text(message))}"
        if line not in written:
            written.add(line)
            yield line
    answer = answer_message(call)
    if answer is not None:
        text = shortened(message_text(answer))
        written.add(f"  assistant: {text}")
        yield f"  answer: {text}"
    if call.span is not None and call.span.status is SpanStatus.ERROR:
        yield f"  the call failed: {shortened(call.span.status_message)}"


def _app_lines(span: Span, whole: bool) -> Iterator[str]:
    if span.kind is SpanKind.MESSAGE:
        yield f"The app says: {shortened(str(span.attributes.get(c.MESSAGE_BODY, '')))}"
    elif span.kind is SpanKind.TOOL and whole:
        name = span.attributes.get(c.TOOL_NAME, span.name)
        if span.status is SpanStatus.ERROR:
            yield f"The tool {name} failed: {shortened(span.status_message)}"
        elif c.TOOL_CALL_RESULT in span.attributes:
            arguments = shortened(str(span.attributes.get(c.TOOL_CALL_ARGUMENTS, "")))
            result = shortened(str(span.attributes[c.TOOL_CALL_RESULT]))
            yield f"The tool {name}({arguments}) returned: {result}"


def shortened(text: str, max_length: int = MAX_TEXT_LENGTH) -> str:
    """Return the text, without its middle if it is longer than `max_length`.

    References to images do not count, and all of them stay: they decide which images a model that
    sees is shown.
    """
    pieces = IMAGE_REFERENCE.split(text)  # texts and references by turns
    size, half = sum(map(len, pieces[::2])), max_length // 2
    if size <= max_length:
        return text
    place, head, middle, tail = 0, "", "", ""
    for index, piece in enumerate(pieces):
        if index % 2 == 0:
            head += piece[: max(0, half - place)]
            tail += piece[max(0, size - half - place) :]
            place += len(piece)
        elif place <= half:
            head += piece
        elif place < size - half:
            middle += f"{piece} "
        else:
            tail += piece
    return f"{head} […{size - 2 * half} characters left out…] {middle}{tail}"

"""Read the answers of calls as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lightspan.lightning.episode import Call, Episode
from lightspan.schema import genai_messages
from lightspan.schema.token_records import CallOutcome


def answer_of(episode: Episode) -> str:
    """Return the text of the last successful model answer in an episode; empty if there is none."""
    for call in reversed(episode.calls):
        message = answer_message(call)
        if call.outcome is CallOutcome.OK and message is not None:
            content = message.get("content")
            return content if isinstance(content, str) else message_text(message)
    return ""


def answer_message(call: Call) -> dict[str, Any] | None:
    """Return the answer of a call as an OpenAI message; None if no answer was recorded."""
    attributes: Mapping[str, Any] = {} if call.span is None else call.span.attributes
    answers = genai_messages.output_messages_of(attributes)
    return answers[call.choice] if call.choice < len(answers) else None


def message_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message and its tool calls as one text."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json_text(content)
    functions = [call.get("function", {}) for call in message.get("tool_calls", ())]
    tools = [f"calls {f.get('name')}({f.get('arguments')})" for f in functions]
    return " ".join(part for part in (text, *tools) if part)


def json_text(value: Any) -> str:
    """Return `value` as JSON; objects that JSON lacks are converted by `str`."""
    return json.dumps(value, ensure_ascii=False, default=str)

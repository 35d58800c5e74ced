"""Answers of the scripted server in the format of Anthropic's Messages API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

Json = Any

_REASONS: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def message(body: Mapping[str, Json], answer: Mapping[str, Json], finish: str) -> dict[str, Json]:
    """Return a message that is not streamed.

    Args:
        body: body of the request.
        answer: the answer as a message of OpenAI's chat API.
        finish: finish reason of the answer, in terms of OpenAI's chat API.
    """
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in answer.get("tool_calls", ())
    ]
    text = [{"type": "text", "text": answer["content"]}] if answer["content"] else []
    return {
        "id": f"msg_{time.monotonic_ns():x}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", ""),
        "content": [*text, *calls],
        "stop_reason": _REASONS.get(finish, finish),
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(str(body.get("messages")).split()),
            "output_tokens": len((answer["content"] or "").split()),
        },
    }


def events(
    body: Mapping[str, Json], answer: Mapping[str, Json], finish: str
) -> Iterator[dict[str, Json]]:
    """Yield the events of a streamed message."""
    whole = message(body, answer, finish)
    usage = {**whole["usage"], "output_tokens": 1}
    yield {
        "type": "message_start",
        "message": {**whole, "content": [], "stop_reason": None, "usage": usage},
    }
    yield {"type": "ping"}
    for index, block in enumerate(whole["content"]):
        empty: dict[str, Json] = {"text": ""} if block["type"] == "text" else {"input": {}}
        where = {"index": index}
        yield {"type": "content_block_start", **where, "content_block": {**block, **empty}}
        for delta in _deltas(block):
            yield {"type": "content_block_delta", **where, "delta": delta}
        yield {"type": "content_block_stop", **where}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    usage = {"output_tokens": whole["usage"]["output_tokens"]}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def _deltas(block: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    if block["type"] == "tool_use":
        yield {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return
    for number, word in enumerate(block["text"].split(" ")):
        yield {"type": "text_delta", "text": word if number == 0 else f" {word}"}


def error(text: str, status: int) -> dict[str, Json]:
    """Return the body of an error response."""
    kind = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": None}

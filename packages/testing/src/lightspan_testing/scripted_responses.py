"""Answers of the scripted server in the format of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = Any


def response(body: Mapping[str, Json], message: Mapping[str, Json], finish: str) -> dict[str, Json]:
    """Return a response that is not streamed.

    Args:
        body: body of the request.
        message: the answer as a message of OpenAI's chat API.
        finish: finish reason of the answer, in terms of OpenAI's chat API.
    """
    is_cut = finish == "length"
    return {
        **_head(body, f"resp_{time.monotonic_ns():x}"),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(message),
        "usage": _usage(body, message),
    }


def events(
    body: Mapping[str, Json], message: Mapping[str, Json], finish: str
) -> Iterator[dict[str, Json]]:
    """Yield the events of a streamed response."""
    for number, event in enumerate(_events(body, message, finish)):
        yield {**event, "sequence_number": number}


def _events(
    body: Mapping[str, Json], message: Mapping[str, Json], finish: str
) -> Iterator[dict[str, Json]]:
    whole = response(body, message, finish)
    in_progress = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": in_progress}
    yield {"type": "response.in_progress", "response": in_progress}
    for index, item in enumerate(whole["output"]):
        words = _text_events if item["type"] == "message" else _call_events
        yield from words(index, item)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _text_events(index: int, item: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    in_progress = {**item, "status": "in_progress", "content": []}
    part = item["content"][0]
    where = {"item_id": item["id"], "output_index": index, "content_index": 0}
    yield {"type": "response.output_item.added", "output_index": index, "item": in_progress}
    yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
    for number, word in enumerate(part["text"].split(" ")):
        delta = word if number == 0 else f" {word}"
        yield {"type": "response.output_text.delta", **where, "delta": delta, "logprobs": []}
    text = {"text": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **where, **text}
    yield {"type": "response.content_part.done", **where, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(index: int, item: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    in_progress = {**item, "status": "in_progress", "arguments": ""}
    where = {"item_id": item["id"], "output_index": index}
    fields = {"name": item["name"], "arguments": item["arguments"]}
    kind = "response.function_call_arguments"
    yield {"type": "response.output_item.added", "output_index": index, "item": in_progress}
    yield {"type": f"{kind}.delta", **where, "delta": item["arguments"]}
    yield {"type": f"{kind}.done", **where, **fields}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _head(body: Mapping[str, Json], identity: str) -> dict[str, Json]:
    return {
        "id": identity,
        "object": "response",
        "created_at": 0,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": body.get("model", ""),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
    }


def _items(message: Mapping[str, Json]) -> list[dict[str, Json]]:
    items: list[dict[str, Json]] = []
    calls: Sequence[Mapping[str, Json]] = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        text = message.get("content") or ""
        part: Json = {"type": "output_text", "text": text, "annotations": []}
        fields = {"role": "assistant", "status": "completed", "content": [part]}
        items.append({"id": f"msg_{time.monotonic_ns():x}", "type": "message", **fields})
    for call in calls:
        function = call["function"]
        fields = {"call_id": call["id"], "status": "completed", **function}
        items.append({"id": f"fc_{call['id']}", "type": "function_call", **fields})
    return items


def _usage(body: Mapping[str, Json], message: Mapping[str, Json]) -> dict[str, Json]:
    words_in, words_out = str(body.get("input")).split(), str(message.get("content") or "").split()
    return {
        "input_tokens": len(words_in),
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": len(words_out),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(words_in) + len(words_out),
    }

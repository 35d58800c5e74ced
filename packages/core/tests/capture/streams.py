"""Streams of three OpenAI APIs, and an endpoint that stops in the middle of its answer."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai

from lightspan.schema import semconv as c
from lightspan.schema.spans import Span
from lightspan_testing.scripted import Reply, ScriptedServer
from packages.core.tests.capture.clients import MESSAGES

APIS = ("chat", "completions", "responses")
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": MESSAGES},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
}
_THIRD_WORD = {"chat": 3, "completions": 3, "responses": 6}
"""API → index of the stream's chunk with the third word."""
REQUEST = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]


def api_of(client: openai.OpenAI | openai.AsyncOpenAI, api: str) -> Any:
    resources = {"chat": client.chat.completions, "completions": client.completions}
    return resources.get(api, client.responses)


def word_of(chunk: Any) -> str:
    """Return the text of a chunk or event, given as an object of the SDK or as JSON."""
    data = chunk if isinstance(chunk, dict) else chunk.model_dump()
    if "choices" in data:
        [choice] = data["choices"]
        return str((choice.get("delta") or choice).get("content") or choice.get("text") or "")
    return str(data["delta"]) if data["type"] == "response.output_text.delta" else ""


def word_of_line(line: str) -> str:
    is_data = line.startswith("data: {")
    return word_of(json.loads(line.removeprefix("data: "))) if is_data else ""


@contextmanager
def stopping(api: str, before: Callable[[], None] | None = None) -> Iterator[ScriptedServer]:
    """Run an endpoint that streams "one two three" and pauses before the third word.

    It continues when the block ends.

    Args:
        api: name of the API, a key of `_THIRD_WORD`.
        before: function to call instead of pausing; None to pause.
    """
    ended = threading.Event()

    def before_chunk(number: int) -> None:
        if number == _THIRD_WORD[api]:
            (before or ended.wait)()

    with ScriptedServer(lambda _: Reply(text="one two three", before_chunk=before_chunk)) as server:
        try:
            yield server
        finally:
            ended.set()


def client_that_gets(content: bytes | Iterator[bytes]) -> openai.OpenAI:
    """Return a client whose transport answers every request with `content`, without a
    connection.
    """
    kind = next(base for base in openai.DefaultHttpxClient.__mro__ if base.__name__ == "Client")
    httpx: Any = importlib.import_module(kind.__module__.partition(".")[0])  # or httpx2
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    return openai.OpenAI(
        base_url="http://127.0.0.1:9/v1",
        api_key="app-key",
        http_client=openai.DefaultHttpxClient(transport=transport),
    )


def chunk_of(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """Return an event of a streamed chat completion."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "chatcmpl-1", "model": "m", "choices": [choice]}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def said_of(span: Span) -> dict[str, Any]:
    """Return the span's attributes of the answer and its end; check the other attributes."""
    known = dict(span.attributes)
    for name in (c.CALL_ID, c.SERVER_ADDRESS, c.SERVER_PORT):
        known.pop(name, None)
    fixed = {
        c.AGENT_PATH: "checker",
        c.ROUTE: "app",
        c.OPENINFERENCE_KIND: "LLM",
        c.REQUEST_MODEL: "m",
    }
    assert {name: known.pop(name) for name in fixed} == fixed
    assert json.loads(str(known.pop(c.INPUT_MESSAGES))) == REQUEST
    assert known.pop(c.OPERATION_NAME) in ("chat", "text_completion")
    known.pop(c.REQUEST_STREAM, None)
    if c.RESPONSE_ID in known:
        known[c.RESPONSE_ID] = str(known[c.RESPONSE_ID]).partition("_")[0].partition("-")[0]
    if c.OUTPUT_MESSAGES in known:
        known[c.OUTPUT_MESSAGES] = json.loads(str(known[c.OUTPUT_MESSAGES]))
    return known


def saying(api: str, text: str, outcome: str, **more: Any) -> dict[str, Any]:
    """Return the expected result of `said_of`."""
    finished = {"finish_reason": "stop"} if c.FINISH_REASONS in more else {}
    parts = [{"type": "text", "content": text}] if text else []
    return {
        c.CALL_OUTCOME: outcome,
        c.RESPONSE_ID: "resp" if api == "responses" else "chatcmpl",
        c.RESPONSE_MODEL: "m",
        c.OUTPUT_MESSAGES: [{"role": "assistant", "parts": parts, **finished}],
        **more,
    }


def without_error(said: dict[str, Any]) -> dict[str, Any]:
    """Remove the attributes of the error from `said`, and return it."""
    assert said.pop(c.ERROR_TYPE) == said.pop(c.EXCEPTION_TYPE)
    assert said.pop(c.EXCEPTION_STACKTRACE)
    said.pop(c.EXCEPTION_MESSAGE)
    return said

"""An HTTP server with scripted answers in the formats of OpenAI and Anthropic.

It replaces language models in tests. It uses the standard library only, so that an app's own
environment can run it.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from lightspan_testing import scripted_messages, scripted_responses

Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call that the model makes.

    `arguments` is text, which may be malformed JSON.
    """

    name: str
    arguments: str = "{}"
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer of the scripted model, or a failure of the server."""

    text: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    finish_reason: str | None = None
    """Finish reason; None for `tool_calls` if there are tool calls, else `stop`."""
    status: int = 200
    """HTTP status. With any other than 200, the answer is an error in the API's format with `text`
    as its message.
    """
    delay_s: float = 0.0
    """Seconds to wait before answering."""
    drop: bool = False
    """Whether to close the socket instead of answering; a stream is closed after its first
    chunk.
    """
    headers: Mapping[str, str] = field(default_factory=dict)
    counts_tokens: bool = True
    """Whether the answer of a chat completion that is not streamed has `usage`."""
    compressed: bool = False
    """Whether to compress the answer by gzip."""
    chunks: Sequence[Json] | None = None
    """Chunks of a streamed chat completion, which may be malformed; None for those of `text` and
    `tool_calls`."""
    before_chunk: Callable[[int], None] | None = None
    """Function that is called with the index of each streamed chunk before the chunk is sent.

    It may wait. If it raises, the connection is closed. None to call nothing.
    """


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the server has received."""

    path: str
    headers: Mapping[str, str]
    """Headers with lower-case names."""
    body: Mapping[str, Json]

    @property
    def messages(self) -> list[Mapping[str, Json]]:
        return list(self.body.get("messages", ()))

    @property
    def last_text(self) -> str:
        """Return the content of the last message."""
        return str(self.messages[-1].get("content", "")) if self.messages else ""


Answer = str | Reply | Sequence["str | Reply"]
"""The answer to one request: a text or a reply, or a sequence with one of them for each choice."""
Script = Callable[[Request], Answer] | Iterable[Answer] | str


class ScriptedServer:
    """An OpenAI-compatible server on a loopback port, used as a context manager.

    Args:
        script: what to answer: a function of the request, one text for every call, or a sequence
            with one answer per call. Calls after the end of the sequence get status 500.
    """

    def __init__(self, script: Script = "ok", *, model: str = "scripted") -> None:
        self.model = model
        self.requests: list[Request] = []
        self.script = _as_function(script)
        """Function that answers a request; tests may replace it between calls."""
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def origin(self) -> str:
        """Return `http://127.0.0.1:<port>`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def url(self) -> str:
        """Return the base URL of the API."""
        return f"{self.origin}/v1"

    def answer(self, request: Request) -> list[Reply]:
        """Store the request, and return what the script answers, as one reply per choice."""
        with self._lock:
            self.requests.append(request)
            number = len(self.requests)
        try:
            answer = self.script(request)
        except StopIteration:
            answer = Reply(status=500, text=f"the script has no answer for call {number}")
        replies = [answer] if isinstance(answer, str | Reply) else list(answer)
        return [Reply(text=reply) if isinstance(reply, str) else reply for reply in replies]


def _as_function(script: Script) -> Callable[[Request], Answer]:
    if isinstance(script, str):
        return lambda request: script
    if callable(script):
        return script
    answers, lock = iter(script), threading.Lock()

    def following(request: Request) -> Answer:
        with lock:
            return next(answers)

    return following


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    owner: ScriptedServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        if self.path.endswith("/models"):
            model = {"id": self.server.owner.model, "object": "model", "owned_by": "test"}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._send(404, _error("not found", 404))

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or b"{}")
        headers = {key.lower(): value for key, value in self.headers.items()}
        replies = self.server.owner.answer(Request(self.path, headers, body))
        first = replies[0]
        if first.delay_s:
            time.sleep(first.delay_s)
        if first.drop and not body.get("stream"):
            self.close_connection = True
            self.connection.shutdown(2)
        elif first.status != 200:
            make_error = scripted_messages.error if self._format == "messages" else _error
            text = first.text or "scripted error"
            self._send(first.status, make_error(text, first.status), first)
        elif body.get("stream"):
            self._stream(body, replies)
        else:
            self._send(200, self._whole(body, replies), first)

    @property
    def _format(self) -> str:
        path = self.path.partition("?")[0]  # paths of Anthropic's own API and Google's
        if path.endswith(("/messages", ":rawPredict", ":streamRawPredict")):
            return "messages"
        if path.endswith("/responses"):
            return "responses"
        is_text = path.endswith("/completions") and not path.endswith("/chat/completions")
        return "text" if is_text else "chat"

    def _whole(self, body: Mapping[str, Json], replies: Sequence[Reply]) -> dict[str, Json]:
        first = _message(replies[0]), _finish(replies[0])
        match self._format:
            case "messages":
                return scripted_messages.message(body, *first)
            case "responses":
                return scripted_responses.response(body, *first)
            case "text":
                return _as_text(completion(body, replies))
            case _:
                return completion(body, replies)

    def _chunks(
        self, body: Mapping[str, Json], replies: Sequence[Reply]
    ) -> Iterator[dict[str, Json]]:
        first = (_message(replies[0]), _finish(replies[0]))
        match self._format:
            case "messages":
                return scripted_messages.events(body, *first)
            case "responses":
                return scripted_responses.events(body, *first)
            case "text":
                return map(_as_text, chunks(body, replies))
            case _:
                own = replies[0].chunks
                return chunks(body, replies) if own is None else iter(own)

    def _send(self, status: int, body: Json, reply: Reply | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if reply is not None and reply.compressed:
            data = gzip.compress(data)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(data)))
        for key, value in (reply.headers if reply else {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: Mapping[str, Json], replies: Sequence[Reply]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        pack = None
        if replies[0].compressed:
            self.send_header("Content-Encoding", "gzip")
            pack = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
        self.end_headers()
        for number, chunk in enumerate(self._chunks(body, replies)):
            if replies[0].drop and number == 1:
                self.close_connection = True
                self.connection.shutdown(2)
                return
            if replies[0].before_chunk is not None:
                replies[0].before_chunk(number)
            self._event(json.dumps(chunk), pack)
        if self._format in ("chat", "text"):
            self._event("[DONE]", pack)
        if pack is not None:
            self._piece(pack.flush())
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str, pack: Any = None) -> None:
        name = f"event: {json.loads(data)['type']}\n" if self._format == "messages" else ""
        payload = f"{name}data: {data}\n\n".encode()
        if pack is not None:
            payload = pack.compress(payload) + pack.flush(zlib.Z_SYNC_FLUSH)
        self._piece(payload)

    def _piece(self, payload: bytes) -> None:
        self.wfile.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")
        self.wfile.flush()


def completion(body: Mapping[str, Json], replies: Sequence[Reply]) -> dict[str, Json]:
    """Return a chat completion that is not streamed."""
    choices = [
        {"index": index, "message": _message(reply), "finish_reason": _finish(reply)}
        for index, reply in enumerate(replies)
    ]
    counts = {"usage": _usage(body, replies)} if replies[0].counts_tokens else {}
    return {**_head(body, "chat.completion"), "choices": choices, **counts}


def chunks(body: Mapping[str, Json], replies: Sequence[Reply]) -> Iterator[dict[str, Json]]:
    """Yield the chunks of a streamed chat completion.

    For each choice there is a chunk with the role, a chunk per word or tool call, and a chunk with
    the finish reason. If the usage was requested, it is in one more chunk at the end.
    """
    head = _head(body, "chat.completion.chunk")
    for index, reply in enumerate(replies):
        yield {**head, "choices": [_delta(index, {"role": "assistant", "content": ""})]}
        for delta in _deltas(reply):
            yield {**head, "choices": [_delta(index, delta)]}
        yield {**head, "choices": [_delta(index, {}, _finish(reply))]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(body, replies)}


def _as_text(chat: dict[str, Json]) -> dict[str, Json]:
    """Convert a chat completion, or a chunk of one, to a text completion."""
    choices = [
        {
            "index": choice["index"],
            "text": (choice.get("message") or choice["delta"]).get("content") or "",
            "finish_reason": choice["finish_reason"],
            "logprobs": None,
        }
        for choice in chat["choices"]
    ]
    return {**chat, "object": "text_completion", "choices": choices}


def _head(body: Mapping[str, Json], kind: str) -> dict[str, Json]:
    identity = f"chatcmpl-{time.monotonic_ns():x}"
    return {"id": identity, "object": kind, "created": 0, "model": body.get("model", "")}


def _delta(index: int, delta: Json, finish: str | None = None) -> dict[str, Json]:
    return {"index": index, "delta": delta, "finish_reason": finish}


def _deltas(reply: Reply) -> Iterator[dict[str, Json]]:
    if reply.text:
        words = reply.text.split(" ")
        for number, word in enumerate(words):
            yield {"content": word if number == 0 else f" {word}"}
    for number, call in enumerate(_tool_calls(reply)):
        yield {"tool_calls": [{"index": number, **call}]}


def _message(reply: Reply) -> dict[str, Json]:
    calls = _tool_calls(reply)
    message: dict[str, Json] = {"role": "assistant", "content": reply.text}
    return {**message, "tool_calls": calls} if calls else message


def _tool_calls(reply: Reply) -> list[dict[str, Json]]:
    return [
        {
            "id": call.call_id or f"call_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(reply.tool_calls)
    ]


def _finish(reply: Reply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")


def _usage(body: Mapping[str, Json], replies: Sequence[Reply]) -> dict[str, int]:
    prompt = sum(len(str(message.get("content")).split()) for message in body.get("messages", ()))
    answer = sum(len((reply.text or "").split()) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _error(message: str, status: int) -> dict[str, Json]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}

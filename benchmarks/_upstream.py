"""A model server that answers instantly, in a process of its own, for gateways and apps to call.

    with Upstream() as url: ...        # base URL of an OpenAI-compatible endpoint

Its answers are made beforehand, in vLLM's form: with token ids, and log-probabilities if the body
names them. A body that says `"max_tokens": N` gets N tokens; streams have one event a token.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final

PROMPT_TOKENS: Final = 96
RESPONSE_TOKENS: Final = 16
WORD: Final = "word "
_LIMIT: Final = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_STREAM: Final = re.compile(rb'"stream": ?true')


class Upstream:
    """The server's process. `with` starts it and returns its URL."""

    def __enter__(self) -> str:
        command = [sys.executable, "-I", str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()


@cache
def completion(tokens: int, *, logprobs: bool) -> bytes:
    """Return the body of an answer with so many tokens, not streamed."""
    content = [
        {"token": WORD, "logprob": -0.5, "bytes": [*WORD.encode()], "top_logprobs": []}
    ] * tokens
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": (WORD * tokens).strip()},
        "logprobs": {"content": content} if logprobs else None,
        "finish_reason": "stop",
        "token_ids": [*range(tokens)],
    }
    return json.dumps(
        {
            **_top("chat.completion"),
            "choices": [choice],
            "usage": {
                "prompt_tokens": PROMPT_TOKENS,
                "completion_tokens": tokens,
                "total_tokens": PROMPT_TOKENS + tokens,
            },
            "prompt_token_ids": [*range(PROMPT_TOKENS)],
        }
    ).encode()


@cache
def events(tokens: int) -> tuple[bytes, ...]:
    """Return the events of a streamed answer: one per token, the finish reason and `[DONE]`."""
    deltas: list[Any] = [{"content": WORD}] * tokens
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    chunks = [{**_top("chat.completion.chunk"), "choices": [choice]} for choice in choices]
    return (*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks), b"data: [DONE]\n\n")


def _top(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "model"}


async def serve() -> None:
    """Print the base URL and serve until the standard input is closed."""
    from aiohttp import web

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        limit = _LIMIT.search(body)
        tokens = int(limit[1]) if limit else RESPONSE_TOKENS
        if not _STREAM.search(body):
            answer = completion(tokens, logprobs=b'"logprobs"' in body)
            return web.Response(body=answer, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events(tokens):
            await response.write(event)
        await response.write_eof()
        return response

    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())

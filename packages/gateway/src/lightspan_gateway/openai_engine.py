"""The client of OpenAI-compatible endpoints, which answer calls of frozen (untrained) agents."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import aiohttp
import msgspec

from lightspan.errors import EngineClosedError, EngineError
from lightspan.schema.genai_attributes import END
from lightspan.schema.llm import LLM
from lightspan_gateway.chat_engine import ChatAnswer, ChatEngine, EndpointRefused

TIMEOUT_S: Final = 600.0
RETRY_BACKOFF_S: Final = (0.5, 1.0)


class OpenAIEngine(ChatEngine):
    """Send model calls to one endpoint, with the endpoint's key.

    Args:
        llm: the endpoint. Its `model` (unless empty) and `sampling` replace the fields of a
            request body.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Check the endpoint's key, and open the connection pool.

        Raises:
            ConfigError: the key is not in the environment.
        """
        key = self.llm.api_key
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),  # runners' slots are the limit
        )

    async def close(self) -> None:
        """Close the connection pool. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def chat(self, body: Mapping[str, Any]) -> ChatAnswer:
        """Send an unstreamed call, with two retries after a connection error, 429 or 5xx.

        The last answer is returned, whatever its status.

        Args:
            body: fields of a chat completions request.

        Raises:
            EngineError: the endpoint cannot be reached.
        """
        # An app without a retrying client would lose rollouts to one second of an overloaded
        # endpoint. Streams are not retried, because part of the answer may be delivered.
        for backoff_s in (*RETRY_BACKOFF_S, None):
            try:
                async with self._post(body) as response:
                    status, data = response.status, await response.read()
                    headers = dict(response.headers)
            except (aiohttp.ClientError, TimeoutError) as error:
                if backoff_s is None:
                    raise self._unreachable(error) from error
            else:
                if backoff_s is None or not (status == 429 or status >= 500):
                    data = data if status == 200 else self._without_key(data)
                    return ChatAnswer(status=status, headers=headers, body=data)
            await asyncio.sleep(backoff_s)
        raise AssertionError("the last backoff is None")

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """Send a streamed call, and yield the payloads of the events in the answer.

        Args:
            body: fields of a chat completions request.

        Raises:
            EndpointRefused: the endpoint answered with an error.
            EngineError: the endpoint cannot be reached, or the connection was lost.
        """
        try:
            async with self._post(body) as response:
                if response.status != 200:
                    refusal = self._without_key(await response.read())
                    raise EndpointRefused(response.status, refusal.decode(errors="replace")[:2000])
                async for payload in server_events(response.content):
                    yield payload
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def _post(self, body: Mapping[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            raise EngineClosedError(f"the engine for {self.llm.base_url} is not started")
        model = self.llm.model or body.get("model")
        data = msgspec.json.encode({**body, **self.llm.sampling, "model": model})
        url = f"{self.llm.base_url.rstrip('/')}/chat/completions"
        return self._session.post(url, data=io.BytesIO(data))  # aiohttp warns of large plain bytes

    def _without_key(self, refusal: bytes) -> bytes:
        """Return an endpoint's error without the key, which some endpoints quote in errors."""
        key = self.llm.api_key.encode() if self.llm.api_key_env is not None else b""
        return refusal.replace(key, b"***") if key else refusal

    def _unreachable(self, error: BaseException) -> EngineError:
        reason = str(error) or type(error).__name__  # a timeout's message is empty
        return EngineError(f"{self.llm.base_url} cannot be reached: {reason}")


_KEEPALIVES: Final = (b"", b"null")
"""Payloads that some servers send to keep a stream open."""


async def server_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the payloads of the server-sent events in `content`, the end mark `[DONE]` too.

    Empty payloads (`_KEEPALIVES`) are left out. The stream is split into lines here,
    because aiohttp's line reader fails at lines that are longer than its buffer.
    """
    rest, end = b"", END.encode()
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload not in _KEEPALIVES:
                yield payload
    if rest.startswith(b"data:") and rest.removeprefix(b"data:").strip() == end:
        yield end  # some servers send no line end after it

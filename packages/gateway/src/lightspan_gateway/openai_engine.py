"""OpenAIEngine: any OpenAI-compatible endpoint as an engine, for frozen agents and dry runs."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp
import msgspec

from lightspan.errors import EngineClosedError, EngineError
from lightspan.protocols.engine import ChatAnswer, ChatEngine, EndpointRefused
from lightspan.schema.llm import LLM


class OpenAIEngine(ChatEngine):
    """Calls one endpoint with its own key; nothing of the caller's request but the body travels.

    Args:
        llm: the endpoint. Its `model` (unless it is empty) and `sampling` replace the body's.
        retries: further tries after a connection error, 429 or 5xx (unstreamed calls).
        timeout_s: per call.
    """

    def __init__(self, llm: LLM, *, retries: int = 2, timeout_s: float = 600.0) -> None:
        self.llm = llm
        self._retries = retries
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Check that there is a key, and open the connection pool.

        Raises:
            ConfigError: the endpoint's key is not in the environment.
        """
        key = self.llm.api_key
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connector = aiohttp.TCPConnector(limit=0)  # runners' slots are the limit, not a pool of 100
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=self._timeout, connector=connector
        )

    async def close(self) -> None:
        """Close the connection pool; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def chat(self, body: Mapping[str, Any]) -> ChatAnswer:
        """One unstreamed call.

        Raises:
            EngineError: the endpoint cannot be reached.
        """
        # An app's own client tries again too, but a program without one does not, and a run of
        # hours must not lose rollouts to one busy second. Streams are not repeated: part of the
        # answer may have gone out already.
        for attempt in range(self._retries + 1):
            try:
                answer = await self._post(body)
            except (aiohttp.ClientError, TimeoutError) as error:
                if attempt == self._retries:
                    raise self._unreachable(error) from error
            else:
                if attempt == self._retries or not _retriable(answer.status):
                    return answer
            await asyncio.sleep(min(8.0, 0.5 * 2**attempt))
        raise AssertionError("unreachable")

    async def _post(self, body: Mapping[str, Any]) -> ChatAnswer:
        async with self._open().post(self._url, data=self._body(body)) as response:
            data = await response.read()
            if response.status != 200:
                data = self._without_key(data)
            return ChatAnswer(status=response.status, headers=dict(response.headers), body=data)

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """One streamed call: the payloads of its events.

        Raises:
            EndpointRefused: it answered with an error.
            EngineError: it cannot be reached, or broke off.
        """
        try:
            async with self._open().post(self._url, data=self._body(body)) as response:
                if response.status != 200:
                    refusal = self._without_key(await response.read())
                    raise EndpointRefused(response.status, refusal.decode(errors="replace")[:2000])
                async for payload in server_events(response.content):
                    yield payload
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    @property
    def _url(self) -> str:
        return f"{self.llm.base_url.rstrip('/')}/chat/completions"

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineClosedError(f"the engine for {self.llm.base_url} is not started")
        return self._session

    def _body(self, body: Mapping[str, Any]) -> io.BytesIO:
        model = self.llm.model or body.get("model")
        full = {**body, **self.llm.sampling, "model": model}
        return io.BytesIO(msgspec.json.encode(full))  # aiohttp warns of large plain bytes

    def _without_key(self, refusal: bytes) -> bytes:
        """A refusal reaches the app and the store: some endpoints quote the key in it."""
        key = self.llm.api_key.encode() if self.llm.api_key_env is not None else b""
        return refusal.replace(key, b"***") if key else refusal

    def _unreachable(self, error: BaseException) -> EngineError:
        why = str(error) or type(error).__name__  # a timeout's message is empty
        return EngineError(f"{self.llm.base_url} cannot be reached: {why}")


_DONE: Final = b"[DONE]"


async def server_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The payloads of server-sent events. Lines are put together here: aiohttp's own reader refuses
    one that is longer than its buffer."""
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != _DONE:
                yield payload


def _retriable(status: int) -> bool:
    return status == 429 or status >= 500

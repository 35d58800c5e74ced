"""Protocol of engines with chat messages as input and output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from lightspan.errors import EngineError


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response of an OpenAI-compatible server."""

    status: int
    headers: dict[str, str]
    body: bytes


class EndpointRefused(EngineError):
    """The endpoint refused the call."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@runtime_checkable
class ChatEngine(Protocol):
    """Engine with chat messages as input and output: an OpenAI-compatible server.

    Implementation: `openai_engine`.
    """

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Cancel all requests. Idempotent."""

    async def chat(self, body: Mapping[str, Any]) -> ChatAnswer:
        """Make a call without streaming, and return the answer, which may be an HTTP error.

        Raises:
            EngineError: the server cannot be reached, or the connection broke.
            EngineClosedError: the engine is not started, or closed.
        """

    def stream(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """Make a streamed call; yield the payloads of server-sent events, without `data: `.

        The end mark `[DONE]` is a payload too. Without it, an answer is complete if every choice
        has a finish reason.

        Raises (while iterating):
            EndpointRefused: the server answered with an error.
            EngineError: the server cannot be reached, or the connection broke.
            EngineClosedError: the engine is not started, or closed.
        """

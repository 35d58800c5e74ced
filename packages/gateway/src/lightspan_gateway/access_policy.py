"""Who may call a gateway, and where calls go.

Implemented by `training_access.TrainingAccess` and
`lightspan_gateway.serving.public_access.PublicAccess`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from aiohttp import web

from lightspan.schema.routing import Target
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.calls import CallerSession, CallLog


class AccessPolicy(ABC):
    """Authenticate callers, route their calls, and keep their sessions.

    Args:
        log: records the calls.
    """

    max_tokens: int | None = None
    """Default limit of an answer; None: what the context leaves."""
    shutdown_s = 0.5
    """How long running calls may go on when the gateway closes."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    @abstractmethod
    async def authenticate(self, request: web.Request) -> CallerSession:
        """Return the session of the request's sender.

        Raises:
            ApiError: the sender may not call.
        """

    @abstractmethod
    def sessions(self) -> Iterable[CallerSession]:
        """Return the sessions in memory."""

    def target(self, session: CallerSession, path: str) -> Target:
        """Return where the calls of the agent at this path go."""
        return session.routing.target(path)

    @abstractmethod
    def by_model(
        self, session: CallerSession, model: str, policies: Collection[str]
    ) -> tuple[str, Target]:
        """Return the agent that calls by this model name, and where its call goes.

        Args:
            session: of the request.
            model: of the request; empty if it names none.
            policies: those that the engine serves.

        Raises:
            ApiError: 404, there is no such model.
        """

    @abstractmethod
    def not_ours(self, path: str) -> ApiError:
        """Return the refusal of an agent whose calls stay where the app points them."""

    def models(self, policies: Collection[str]) -> list[str]:
        """Return the names that a request may give as its model."""
        return sorted(policies)

    def documents(self) -> Mapping[str, Callable[[], Any]]:
        """Return further paths that a caller may read: path → function that returns its JSON."""
        return {}

    async def close(self) -> None:
        """Wait for the running calls, and until they are recorded."""
        calls = [call for session in self.sessions() for call in session.calls.values()]
        await asyncio.gather(*(call.wait_done() for call in calls))
        await self.log.drain()


def token_of(request: web.Request) -> str:
    """Return the token of `Authorization: Bearer …`, or of Anthropic's `x-api-key`, or ""."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or request.headers.get("x-api-key", "").strip()

"""The interface of access policies: authentication of callers, and routing of their calls.

Implemented by `training_access.TrainingAccess` and
`lightspan_gateway.serving.public_access.PublicAccess`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from aiohttp import web

from lightspan.schema.images import Image
from lightspan.schema.routing import Target
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.calls import CallerSession, CallLog
from lightspan_gateway.request_body import Body


class AccessPolicy(ABC):
    """Authenticate callers, keep their sessions and route their calls.

    Args:
        log: the log that records the calls.
    """

    max_tokens: int | None = None
    """Default maximum tokens of an answer; None for the rest of the model's context."""
    shutdown_s = 0.5
    """Seconds for which running calls may continue when the gateway closes."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    @abstractmethod
    async def authenticate(self, request: web.Request) -> CallerSession:
        """Return the session of the request's sender, which holds the calls of one attempt.

        Raises:
            ApiError: the sender has no access.
        """

    @abstractmethod
    def sessions(self) -> Iterable[CallerSession]:
        """Return the caller sessions that are held in memory."""

    async def images(self, digests: Collection[str]) -> Mapping[str, Image]:
        """Return the stored images among `digests`."""
        return {}

    async def assign(
        self, session: CallerSession, request: web.Request, body: Body
    ) -> CallerSession:
        """Return the session that answers a request; by default, that of the request's sender.

        Args:
            session: session of the request's sender.
            request: the request.
            body: body of the request.
        """
        return session

    def target(self, session: CallerSession, path: str) -> Target:
        """Return the policy or endpoint that answers the calls of the agent with path `path`."""
        return session.routing.target(path)

    @abstractmethod
    def target_of_model(
        self, session: CallerSession, model: str, policies: Collection[str]
    ) -> tuple[str, Target]:
        """Find the agent that a request identifies by its model name; return its path and target.

        The target is the policy or endpoint that answers the agent's calls.

        Args:
            session: session of the request's sender.
            model: model name in the request; empty if the request has none.
            policies: policies that the engine serves.

        Raises:
            ApiError: 404 for an unknown model.
        """

    @abstractmethod
    def unserved_agent(self, path: str) -> ApiError:
        """Return the error for a call of an agent that the gateway does not serve."""

    def models(self, policies: Collection[str]) -> list[str]:
        """Return the model names that requests may use."""
        return sorted(policies)

    def documents(self) -> Mapping[str, Callable[[], Any]]:
        """Return further URL paths for GET, each with a function that returns the JSON body."""
        return {}

    def answer_limit(
        self, limit: int | None, room: int, context: int, cache: int | None
    ) -> int | None:
        """Return the maximum tokens of an answer; None for the rest of the context.

        Args:
            limit: the request's limit; None if it has none.
            room: tokens that the prompt leaves in the context.
            context: length of the model's context in tokens.
            cache: size of the engine's key-value cache in tokens; None if it is unknown.
        """
        return limit or self.max_tokens

    async def close(self) -> None:
        """Wait until the running calls are finished and recorded."""
        calls = [call for session in self.sessions() for call in session.calls.values()]
        await asyncio.gather(*(call.wait_done() for call in calls))
        await self.log.drain()


def token_of(request: web.Request) -> str:
    """Return the token of the header `Authorization: Bearer …`, or else of `x-api-key`.

    The result is empty if the request has neither header.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or request.headers.get("x-api-key", "").strip()

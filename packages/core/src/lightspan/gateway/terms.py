"""The terms on which a gateway answers.

`lightspan.gateway.attempts` has those of training, `lightspan.serving.visitors` those of serving.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from aiohttp import web

from lightspan.gateway.calls import Account, CallLog
from lightspan.gateway.refusal import ApiError
from lightspan.schema.routing import Target


class Terms(ABC):
    """Who may call, where a call goes, how long an answer may be, what is kept of it.

    Args:
        log: is told what became of every call.
    """

    max_tokens: int | None = None
    """Of an answer, where a request does not say; None for what the context leaves."""
    shutdown_s = 0.5
    """How long calls under way may go on when the gateway closes."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    @abstractmethod
    async def admit(self, request: web.Request) -> Account:
        """The account that a request opens.

        Raises:
            ApiError: it opens none.
        """

    @abstractmethod
    def accounts(self) -> Iterable[Account]:
        """Those that are remembered."""

    def target(self, account: Account, path: str) -> Target:
        """Where the call of the agent at this path goes."""
        return account.routing.target(path)

    @abstractmethod
    def by_model(
        self, account: Account, model: str, policies: Collection[str]
    ) -> tuple[str, Target]:
        """Which agent calls by this model's name, and where that goes.

        Args:
            account: that of the request.
            model: of the request; empty if it names none.
            policies: those that the engine serves.

        Raises:
            ApiError: 404, there is no such model.
        """

    @abstractmethod
    def not_ours(self, path: str) -> ApiError:
        """The refusal of an agent whose calls stay where the app points them."""

    def models(self, policies: Collection[str]) -> list[str]:
        """What a request may give as its model."""
        return sorted(policies)

    def documents(self) -> Mapping[str, Callable[[], Any]]:
        """Further paths that an account may read: path → what it says, as JSON."""
        return {}

    async def close(self) -> None:
        """Wait for the calls under way, and for what is being written of them."""
        calls = [call for account in self.accounts() for call in account.calls.values()]
        await asyncio.gather(*(call.settled() for call in calls))
        await self.log.drain()


def token_of(request: web.Request) -> str:
    """The token of an `Authorization: Bearer …` header, or else of Anthropic's `x-api-key`; empty
    if there is none."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or request.headers.get("x-api-key", "").strip()

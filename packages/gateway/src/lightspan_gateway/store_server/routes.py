"""The protocol of a route that a plugin adds to a served store."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.remote_store.roles import Role


class StoreRoute(Protocol):
    """A path of a served store (entry point of `lightspan.store_routes`, called with the store)."""

    PATH: str
    """Such as `/v1/traces`; requests are POSTs."""

    async def answer(self, request: web.Request, role: Role | ApiError) -> web.StreamResponse:
        """Answer a request.

        Args:
            request: its body is not read yet.
            role: the sender's, or why it has none.
        """
        ...

"""The protocol of routes that plugins add to a served store."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.remote_store.roles import Role


class StoreRoute(Protocol):
    """A route that a plugin adds to a store's server.

    A plugin registers it by an entry point in the group `lightspan.store_routes`. The entry point
    names a function that takes the store and returns the route.
    """

    PATH: str
    """Path of POST requests, such as `/v1/traces`."""

    async def answer(self, request: web.Request, role: Role | ApiError) -> web.StreamResponse:
        """Answer a request.

        Args:
            request: the request; its body is not read yet.
            role: the sender's role, or the error to answer if the sender has no valid key.
        """

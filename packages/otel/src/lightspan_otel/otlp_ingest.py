"""`POST /v1/traces`: OTLP over HTTP, protobuf or JSON, into the store."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from aiohttp import web

from lightspan.errors import DataError, LightspanError, StoreError
from lightspan.stores.protocol import Store
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.request_body import unpacked
from lightspan_gateway.store_server.responses import read_body
from lightspan_otel.ingest import keep
from lightspan_otel.normalize import translated
from lightspan_otel.otlp import (
    CONTENT_TYPES,
    PROTOBUF,
    Decoded,
    decode_request,
    encode_answer,
    encode_failure,
)

log = logging.getLogger(__name__)

MAX_BYTES: Final = 16 * 2**20
"""Of a request, compressed or not."""
SENDERS: Final = frozenset({Role.ADMIN, Role.TRAINER, Role.TRACER})
"""Who may send traces. A runner may not: it reports what its attempts did by itself."""
_AGAIN: Final = {"Retry-After": "1"}
MAX_CONCURRENT: Final = 32
"""Requests that are worked on at once, apart from those of the store."""


class Telemetry:
    """Takes traces.

    Args:
        store: an open one, where they are kept.
    """

    PATH = "/v1/traces"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places = asyncio.Semaphore(MAX_CONCURRENT)

    async def answer(self, request: web.Request, role: Role | ApiError) -> web.Response:
        """What OTLP says that a request is answered with.

        Args:
            request: its body is read when it is known that its sender may send.
            role: the sender's, or why it has none.
        """
        kind = request.content_type
        answered_as = kind if kind in CONTENT_TYPES else PROTOBUF
        status, text, again, body = 200, "", False, b""
        try:
            if isinstance(role, ApiError):
                raise role
            refused = await self._taken(request, role)
            body = encode_answer(answered_as, refused)
        except ApiError as error:
            status, text = error.status, error.message
        except DataError as error:
            status, text = 400, str(error)
        except StoreError as error:
            status, text, again = 503, str(error), True
        except LightspanError as error:
            status, text = 400, str(error)
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            log.exception("traces could not be taken")
            status, text = 500, f"the server failed: {type(error).__name__}; its log says more"
        if status != 200:
            body = encode_failure(answered_as, text)
        return web.Response(
            body=body, status=status, content_type=answered_as, headers=_AGAIN if again else None
        )

    async def _taken(self, request: web.Request, role: Role) -> list[str]:
        if role not in SENDERS:
            allowed = ", ".join(sorted(SENDERS))
            raise ApiError(403, f"the key is a {role}'s, who may not send traces: only {allowed}")
        kind = request.content_type
        if kind not in CONTENT_TYPES:
            raise ApiError(415, f"traces come as {' or '.join(CONTENT_TYPES)}, not as {kind!r:.80}")
        packing = request.headers.get("Content-Encoding", "").strip().lower()
        async with self._places:
            body = await read_body(request, MAX_BYTES)
            decoded = await asyncio.to_thread(_decoded, body, packing, kind)
            may_reward = role is not Role.TRACER
            refused = await keep(self._store, decoded.arrivals, may_reward=may_reward)
        return [*decoded.refused, *(each.reason for each in refused)]


def _decoded(data: bytes, packing: str, kind: str) -> Decoded:
    if packing not in ("", "identity"):
        data = unpacked(data, packing, MAX_BYTES)
    decoded = decode_request(data, kind)
    # here, beside the event loop: of a large batch it takes a second
    whole = [each._replace(span=translated(each.span)) for each in decoded.arrivals]
    return decoded._replace(arrivals=whole)

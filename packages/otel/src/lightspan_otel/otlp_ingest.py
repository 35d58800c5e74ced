"""`POST /v1/traces`: store OTLP over HTTP, as protobuf or JSON."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from aiohttp import web

from lightspan.errors import LightspanError, StoreError
from lightspan.stores.protocol import Store
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.request_body import unpacked
from lightspan_gateway.store_server.responses import read_body
from lightspan_otel.ingest import store_spans
from lightspan_otel.normalize import normalized_arrival
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
"""Maximum size of a request body in bytes, compressed or not."""
SENDERS: Final = frozenset({Role.ADMIN, Role.TRAINER, Role.TRACER})
"""Roles that may send traces. Runners are excluded: they report their attempts themselves."""
_RETRY: Final = {"Retry-After": "1"}
MAX_CONCURRENT: Final = 32
"""Maximum number of concurrent requests."""


class Telemetry:
    """Handler of `POST /v1/traces` in a store's server.

    Args:
        store: an open store for the spans.
    """

    PATH = "/v1/traces"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places = asyncio.Semaphore(MAX_CONCURRENT)

    async def answer(self, request: web.Request, role: Role | ApiError) -> web.Response:
        """Store the spans of a request and return OTLP's response.

        Args:
            request: the request; its body is read only if `role` may send traces.
            role: the sender's role, or the authentication error.
        """
        kind = request.content_type
        answer_type = kind if kind in CONTENT_TYPES else PROTOBUF
        status, text, retry, body = 200, "", False, b""
        try:
            if isinstance(role, ApiError):
                raise role
            rejected = await self._store_spans(request, role)
            body = encode_answer(answer_type, rejected)
        except ApiError as error:
            status, text = error.status, error.message
        except StoreError as error:
            status, text, retry = 503, str(error), True
        except LightspanError as error:
            status, text = 400, str(error)
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            log.exception("traces could not be stored")
            status, text = 500, f"the server failed: {type(error).__name__}; see its log"
        if status != 200:
            body = encode_failure(answer_type, text)
        return web.Response(
            body=body, status=status, content_type=answer_type, headers=_RETRY if retry else None
        )

    async def _store_spans(self, request: web.Request, role: Role) -> list[str]:
        if role not in SENDERS:
            allowed = ", ".join(sorted(SENDERS))
            raise ApiError(403, f"the key's role is {role}; only {allowed} may send traces")
        kind = request.content_type
        if kind not in CONTENT_TYPES:
            raise ApiError(415, f"traces must be {' or '.join(CONTENT_TYPES)}, not {kind!r:.80}")
        encoding = request.headers.get("Content-Encoding", "").strip().lower()
        async with self._places:
            body = await read_body(request, MAX_BYTES)
            decoded = await asyncio.to_thread(_decoded, body, encoding, kind)
            may_reward = role is not Role.TRACER
            rejected = await store_spans(self._store, decoded.arrivals, may_reward=may_reward)
        return [*decoded.refused, *(one.reason for one in rejected)]


def _decoded(data: bytes, encoding: str, kind: str) -> Decoded:
    if encoding not in ("", "identity"):
        data = unpacked(data, encoding, MAX_BYTES)
    decoded = decode_request(data, kind)
    # in this thread, not the event loop: a large batch takes a second
    arrivals = [normalized_arrival(one) for one in decoded.arrivals]
    return decoded._replace(arrivals=arrivals)

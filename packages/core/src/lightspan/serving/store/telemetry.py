"""`POST /v1/traces`: OTLP over HTTP, protobuf or JSON, into the store."""

from __future__ import annotations

import logging
import threading
from typing import Final

from aiohttp import web

from lightspan.errors import DataError, LightspanError, StoreError
from lightspan.gateway.bodies import received, unpacked
from lightspan.gateway.refusal import ApiError
from lightspan.gateway.workers import Workers
from lightspan.otel.arrivals import keep
from lightspan.otel.otlp import (
    CONTENT_TYPES,
    PROTOBUF,
    Decoded,
    decode_request,
    encode_answer,
    encode_failure,
)
from lightspan.otel.vocabulary import translated
from lightspan.serving.store.gate import COME_AGAIN_S, Full, Gate, Place
from lightspan.stores.protocol import Store
from lightspan.stores.remote.roles import Role

log = logging.getLogger(__name__)

PATH: Final = "/v1/traces"
MOST_BYTES: Final = 16 * 2**20
"""Of a request, packed and unpacked: to decode it holds all of Python."""
SENDERS: Final = frozenset({Role.ADMIN, Role.TRAINER, Role.TRACER})
"""Who may send traces. A runner may not: it reports what its attempts did by itself."""
_AGAIN: Final = {"Retry-After": str(COME_AGAIN_S)}


MOST_SENDERS: Final = 32
"""At once, and what they may hold together: places of their own, so that senders of traces, who may
be many and slow, keep nobody from extending its leases."""


class Telemetry:
    """Takes traces.

    Args:
        store: an open one, where they are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._gate = Gate(MOST_SENDERS, 4 * MOST_BYTES)
        # no body of the store's own is to wait for one of theirs
        self._reading = Workers("store-traces", turn=threading.Lock())

    def close(self) -> None:
        """Decode nothing more. Idempotent."""
        self._reading.close()

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
        except Full as full:
            status, text, again = 429, f"the server is busy: {full}", True
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
        if (request.content_length or 0) > MOST_BYTES:
            raise _too_large()
        with self._gate.arriving_by_task() as place:
            parts = await received(request, place.add)
            with place.entered():
                decoded = await self._unpacked(request, parts, place)
                may_reward = role is not Role.TRACER
                refused = await keep(self._store, decoded.arrivals, may_reward=may_reward)
        return [*decoded.refused, *(each.reason for each in refused)]

    async def _unpacked(self, request: web.Request, parts: list[bytes], place: Place) -> Decoded:
        packing = request.headers.get("Content-Encoding", "").strip().lower()
        size = sum(map(len, parts))
        unpacked_size = 0
        if packing not in ("", "identity"):  # it may be large, however small it is
            size = unpacked_size = MOST_BYTES
            place.add(unpacked_size)
        kind = request.content_type
        decoded = await self._reading.run(_decoded, parts, packing, kind, size=size)
        place.add(-unpacked_size)
        return decoded


def _too_large() -> ApiError:
    return ApiError(413, f"a request with traces has at most {MOST_BYTES:,} bytes, unpacked too")


def _decoded(parts: list[bytes], packing: str, kind: str) -> Decoded:
    data = b"".join(parts)
    if packing not in ("", "identity"):
        data = unpacked(data, packing, MOST_BYTES)
    if len(data) > MOST_BYTES:
        raise _too_large()
    decoded = decode_request(data, kind)
    # here, beside the event loop: of a large batch it takes a second
    whole = [each._replace(span=translated(each.span)) for each in decoded.arrivals]
    return decoded._replace(arrivals=whole)

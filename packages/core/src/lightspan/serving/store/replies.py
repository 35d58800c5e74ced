"""What came of a request, as it is told: a status, by which the client knows whether to come again,
and what was asked for, or why it is not there."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from lightspan import __version__
from lightspan.errors import (
    DataError,
    LightspanError,
    StoreClosedError,
    StoreError,
    StoreUnreachableError,
)
from lightspan.gateway.api_errors import ApiError
from lightspan.schema.conventions import HEADER_PROTOCOL, HEADER_VERSION, PROTOCOL_VERSION
from lightspan.serving.store.gate import COME_AGAIN_S, Full
from lightspan.stores.remote.errors import Failure
from lightspan.stores.remote.operations import CONTENT_TYPE

log = logging.getLogger(__name__)

_NOTHING: Final[Mapping[str, str]] = {}
_encoder = msgspec.msgpack.Encoder()


class Reply(NamedTuple):
    """A status and what goes with it."""

    status: int
    body: bytes
    headers: Mapping[str, str] = _NOTHING

    def response(self) -> web.Response:
        ours = {HEADER_PROTOCOL: str(PROTOCOL_VERSION), HEADER_VERSION: __version__}
        headers = {**ours, **self.headers}
        return web.Response(
            body=self.body, status=self.status, content_type=CONTENT_TYPE, headers=headers
        )


async def replied(work: Awaitable[bytes]) -> Reply:
    """What the work returns, or what it raises."""
    try:
        return Reply(200, await work)
    except ApiError as error:
        return _failed(error.status, Failure(kind="StoreError", message=error.message))
    except Full as full:
        failure = Failure(kind="StoreError", message=f"the server is busy: {full}")
        return _failed(429, failure, {"Retry-After": str(COME_AGAIN_S)})
    except LightspanError as error:
        return _failed(_status_of(error), Failure.of(error))
    except (ConnectionError, web.HTTPException):
        raise
    except Exception as error:
        log.exception("the store server failed")
        message = f"the server failed: {type(error).__name__}; its log says more"
        return _failed(500, Failure(kind="StoreError", message=message))


def _status_of(error: LightspanError) -> int:
    """400: what was asked cannot be read. 409: it cannot be done. 503: perhaps it can, later."""
    if isinstance(error, DataError):
        return 400
    later = (StoreError, StoreClosedError, StoreUnreachableError)  # and no kind of them
    return 503 if type(error) in later else 409


def _failed(status: int, failure: Failure, headers: Mapping[str, str] = _NOTHING) -> Reply:
    return Reply(status, _encoder.encode(failure), headers)

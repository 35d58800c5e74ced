"""Reading of bounded request bodies, and encoding of answers and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Final, NamedTuple

from aiohttp import web

from lightspan import __version__, errors
from lightspan.schema.semconv import HEADER_PROTOCOL, HEADER_VERSION, PROTOCOL_VERSION
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.remote_store.errors import Failure
from lightspan_gateway.remote_store.rpc import CONTENT_TYPE, encode

log = logging.getLogger(__name__)

BODY_TIMEOUT_S: Final = 60.0
"""Maximum seconds for the arrival of a body."""


class Reply(NamedTuple):
    """The status and body of an answer."""

    status: int
    body: bytes

    def response(self) -> web.Response:
        headers = {HEADER_PROTOCOL: str(PROTOCOL_VERSION), HEADER_VERSION: __version__}
        return web.Response(
            body=self.body, status=self.status, content_type=CONTENT_TYPE, headers=headers
        )


async def reply_with(work: Awaitable[bytes]) -> Reply:
    """Await `work`; return its result with status 200, or its error with the error's status."""
    try:
        return Reply(200, await work)
    except ApiError as error:
        status, failure = error.status, Failure(kind="StoreError", message=error.message)
    except errors.LightspanError as error:
        status, failure = _status_of(error), Failure.of(error)
    except (ConnectionError, web.HTTPException):
        raise
    except Exception as error:
        log.exception("the store server failed")
        message = f"the server failed: {type(error).__name__}; see its log"
        status, failure = 500, Failure(kind="StoreError", message=message)
    return Reply(status, encode(failure))


def _status_of(error: errors.LightspanError) -> int:
    """Return the HTTP status for an error.

    The status is 400 for an invalid operation, 503 if a retry may help, and 409 otherwise.
    """
    if isinstance(error, errors.DataError):
        return 400
    retriable = (
        errors.StoreError,
        errors.StoreClosedError,
        errors.StoreUnreachableError,
    )  # without their subclasses
    return 503 if type(error) in retriable else 409


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: 4xx if it is too large, too slow or malformed.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while len(body) <= max_bytes >= (request.content_length or 0):
                if not (chunk := await request.content.readany()):
                    return bytes(body)
                body += chunk
    except TimeoutError as error:
        text = f"the request body took more than {BODY_TIMEOUT_S:g} s to arrive"
        raise ApiError(408, text) from error
    except web.RequestPayloadError as error:  # such as a malformed chunk
        raise ApiError(400, f"the request body cannot be read: {error}") from error
    raise ApiError(413, f"the request body is too large: at most {max_bytes:,} bytes are read")

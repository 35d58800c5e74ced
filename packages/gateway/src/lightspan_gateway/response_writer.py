"""Writes the answer of a call to its client, and notes whether it was delivered."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final

from aiohttp import web

from lightspan.errors import LightspanError
from lightspan.schema import semconv as c
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError, refusal_of
from lightspan_gateway.calls import ServedCall
from lightspan_gateway.dialects import Dialect

_EVENT_STREAM: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


async def deliver(request: web.Request, call: ServedCall, dialect: Dialect) -> web.StreamResponse:
    """Write the answer to the client, and note whether it was delivered.

    Raises:
        ApiError: the call failed before anything was written.
    """
    call.subscribe()
    try:
        send = _send_events(request, call, dialect) if call.streamed else _send_body(request, call)
        response = await send
    except ConnectionError:  # the client disconnected
        call.mark_undelivered()
        return web.Response(status=CLIENT_LEFT)
    except asyncio.CancelledError:
        call.mark_undelivered()
        raise
    except LightspanError as error:
        raise refusal_of(error) from error
    finally:
        call.unsubscribe()
    if call.answered:
        await call.mark_delivered()
    return response


async def _send_body(request: web.Request, call: ServedCall) -> web.StreamResponse:
    response = web.Response(body=await call.body(), content_type="application/json")
    await response.prepare(request)
    await response.write_eof()
    return response


async def _send_events(
    request: web.Request, call: ServedCall, dialect: Dialect
) -> web.StreamResponse:
    """Write a stream; an error before its first event becomes an HTTP status."""
    response = web.StreamResponse(headers=_EVENT_STREAM)
    try:
        async with aclosing(call.events()) as events:
            async for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(event)
    except (LightspanError, ApiError) as error:
        if not response.prepared:
            raise
        refused = error if isinstance(error, ApiError) else refusal_of(error)
        told = dialect.refusal(refused, request.headers.get(c.HEADER_CALL_ID))
        await response.write(dialect.error_event(told))
    await response.write_eof()
    return response

"""Delivery of a call's answer to its client."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final

from aiohttp import web

from lightspan.errors import LightspanError
from lightspan.schema import semconv as c
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError, to_api_error
from lightspan_gateway.calls import ServedCall
from lightspan_gateway.dialects import Dialect

_EVENT_STREAM: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


async def deliver(request: web.Request, call: ServedCall, dialect: Dialect) -> web.StreamResponse:
    """Write the answer of a call to its client, and record whether the client received it.

    Raises:
        ApiError: the call failed before anything was written.
    """
    call.subscribe()
    try:
        if call.streamed:
            response = await _send_events(request, call, dialect)
        else:
            response = web.Response(body=await call.body(), content_type="application/json")
            await response.prepare(request)
            await response.write_eof()
    except ConnectionError:  # the client disconnected
        call.mark_undelivered()
        return web.Response(status=CLIENT_LEFT)
    except asyncio.CancelledError:
        call.mark_undelivered()
        raise
    except LightspanError as error:
        raise to_api_error(error) from error
    finally:
        call.unsubscribe()
    if call.answered:
        await call.mark_delivered()
    return response


async def _send_events(
    request: web.Request, call: ServedCall, dialect: Dialect
) -> web.StreamResponse:
    """Send the events of a streamed call; an error after the first event is sent as an event.

    Raises:
        ApiError, LightspanError: the call failed before its first event.
    """
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
        api_error = error if isinstance(error, ApiError) else to_api_error(error)
        body = dialect.format_error(api_error, request.headers.get(c.HEADER_CALL_ID))
        await response.write(dialect.error_event(body))
    await response.write_eof()
    return response

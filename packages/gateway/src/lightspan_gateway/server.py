"""The routes of the gateway."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from lightspan.errors import EngineError
from lightspan.protocols.engine import TokenEngine
from lightspan.schema import semconv as c
from lightspan.schema.redaction import clean_text
from lightspan_gateway.access_policy import AccessPolicy
from lightspan_gateway.api_errors import ApiError, bad_request, no_model, openai_error
from lightspan_gateway.dialects import COUNTS, DIALECTS, Dialect
from lightspan_gateway.http_server import Handler, HttpServer
from lightspan_gateway.limits import GatewayLimits
from lightspan_gateway.request_handler import RequestHandler
from lightspan_gateway.response_writer import deliver

log = logging.getLogger(__name__)


class Server(HttpServer):
    """Serve trained and frozen policies.

    Args:
        access: authenticates callers, and routes and records their calls.
        engine: serves the policies; None if an endpoint serves every agent.
        host: address of the interface to listen on.
        port: port; 0 for any free port.
        limits: limits and times; None for the defaults.
    """

    def __init__(
        self,
        access: AccessPolicy,
        engine: TokenEngine | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: GatewayLimits | None = None,
    ) -> None:
        limits = limits or GatewayLimits()
        super().__init__(host, port, limits, shutdown_s=access.shutdown_s)
        self.access = access
        self._handler = RequestHandler(access, engine, limits)

    async def close(self) -> None:
        """Stop listening, cancel the running calls and record them. Idempotent."""
        await super().close()
        for session in self.access.sessions():
            for call in session.calls.values():
                call.cancel_if_abandoned()
        await self.access.close()
        await self._handler.close()

    # --- routes ---------------------------------------------------------------------------
    def _routes(self) -> list[web.AbstractRouteDef]:
        get, post = web.get, web.post
        routes: list[web.AbstractRouteDef] = [
            get("/health", self._health),
            *(
                get(path, guarded(partial(self._document, make_document)))
                for path, make_document in self.access.documents().items()
            ),
        ]
        for prefix in ("/v1", "/agents/{agent:.+}/v1"):
            routes += [
                get(f"{prefix}/models", guarded(self._models)),
                get(f"{prefix}/models/{{model:.+}}", guarded(self._one_model)),
                *(
                    post(f"{prefix}/{path}", guarded(partial(self._call, dialect), dialect))
                    for path, dialect in DIALECTS.items()
                ),
                *(
                    post(f"{prefix}/{path}/{name}", guarded(partial(self._count, path), dialect))
                    for path, name in COUNTS.items()
                    for dialect in [DIALECTS[path]]
                ),
            ]
        return [*routes, web.route("*", "/{path:.*}", guarded(self._not_found))]

    async def _call(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        return await deliver(request, await self._handler.call(dialect.parse, request), dialect)

    async def _count(self, api: str, request: web.Request) -> web.StreamResponse:
        counted = {"input_tokens": await self._handler.count(api, DIALECTS[api].parse, request)}
        named = {"object": "response.input_tokens"} if api == "responses" else {}
        return _json({**named, **counted})

    async def _health(self, request: web.Request) -> web.Response:
        state = {"protocol": c.PROTOCOL_VERSION, "policies": self._handler.policies()}
        try:
            self._handler.check_engine()
        except EngineError as error:
            return _json({"status": "failed", "reason": str(error), **state}, status=503)
        return _json({"status": "ok", **state})

    async def _document(
        self, make_document: Callable[[], Any], request: web.Request
    ) -> web.StreamResponse:
        await self.access.authenticate(request)
        return _json(make_document())

    async def _models(self, request: web.Request) -> web.StreamResponse:
        await self.access.authenticate(request)
        models = self.access.models(self._handler.policies())
        return _json({"object": "list", "data": [_model(name) for name in models]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        await self.access.authenticate(request)
        name = request.match_info["model"]
        models = self.access.models(self._handler.policies())
        if name not in models:
            raise no_model(f"unknown model {name!r}; this endpoint has {', '.join(models)}")
        return _json(_model(name))

    async def _not_found(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(404, f"no such endpoint: {request.method} {request.path}")


def guarded(handler: Handler, dialect: Dialect | None = None) -> Handler:
    """Wrap a handler of requests, so that headers are checked first and errors are answered.

    Args:
        handler: the handler.
        dialect: the API in whose format errors are answered; None for OpenAI's.
    """

    async def guarded(request: web.Request) -> web.StreamResponse:
        try:
            _check_headers(request)
            return await handler(request)
        except ApiError as error:
            api_error = error
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            log.exception("the gateway failed")
            api_error = ApiError(500, f"the gateway failed: {type(error).__name__}")
        return error_response(request, api_error, dialect)

    return guarded


def error_response(
    request: web.Request, error: ApiError, dialect: Dialect | None = None
) -> web.Response:
    """Return the HTTP response for an error, in the dialect's format (None for OpenAI's)."""
    format_error = openai_error if dialect is None else dialect.format_error
    call_id = request.headers.get(c.HEADER_CALL_ID)
    body = format_error(error, None if call_id is None else clean_text(call_id))
    return web.Response(body=body, status=error.status, content_type="application/json")


def _check_headers(request: web.Request) -> None:
    """Check that headers are UTF-8, and that the app's lightspan has this protocol version.

    aiohttp decodes invalid UTF-8 to surrogates, which neither the store nor JSON can contain.

    Raises:
        ApiError: 400 if a check fails.
    """
    for name, value in request.headers.items():
        if not value.isascii() and value != clean_text(value):
            raise bad_request(f"the header {clean_text(name)} is not UTF-8")
    version = request.headers.get(c.HEADER_PROTOCOL, str(c.PROTOCOL_VERSION))
    if version != str(c.PROTOCOL_VERSION):
        raise bad_request(
            f"the app's lightspan speaks protocol {version}, this gateway speaks "
            f"{c.PROTOCOL_VERSION}; install the same version of lightspan on both sides"
        )


def _json(body: Any, *, status: int = 200) -> web.Response:
    encoded = msgspec.json.encode(body)
    return web.Response(body=encoded, status=status, content_type="application/json")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lightspan"}

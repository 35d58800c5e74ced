"""The routes of the gateway."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from lightspan.errors import EngineError
from lightspan.protocols.engine import TokenEngine
from lightspan.schema import semconv as c
from lightspan.schema.redaction import clean_text
from lightspan_gateway.access_policy import AccessPolicy
from lightspan_gateway.api_errors import ApiError, bad_request, no_model, openai_refusal
from lightspan_gateway.dialects import DIALECTS, Dialect
from lightspan_gateway.http_server import Handler, HttpServer, go_on
from lightspan_gateway.request_handler import RequestHandler
from lightspan_gateway.response_writer import deliver

log = logging.getLogger(__name__)


MAX_BODY: Final = 16 * 2**20


class Server(HttpServer):
    """Serve trained and frozen policies.

    Args:
        access: authenticates callers, routes and records their calls.
        engine: serves the policies; None if every agent is served by an endpoint.
        host: interface; loopback unless told otherwise.
        port: 0 takes a free one.
        max_body: bytes of a request at most.
    """

    def __init__(
        self,
        access: AccessPolicy,
        engine: TokenEngine | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = MAX_BODY,
    ) -> None:
        super().__init__(host, port, max_body=max_body, shutdown_s=access.shutdown_s)
        self.access = access
        self._handler = RequestHandler(access, engine)

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
        get = partial(web.get, expect_handler=go_on)
        post = partial(web.post, expect_handler=go_on)
        routes: list[web.AbstractRouteDef] = [
            get("/health", self._health),
            *(
                get(path, _guarded(partial(self._tell, say)))
                for path, say in self.access.documents().items()
            ),
        ]
        refusal = DIALECTS["messages"].refusal
        for prefix in ("/v1", "/agents/{agent:.+}/v1"):
            routes += [
                get(f"{prefix}/models", _guarded(self._models)),
                get(f"{prefix}/models/{{model:.+}}", _guarded(self._one_model)),
                *(
                    post(f"{prefix}/{name}", _guarded(partial(self._ask, spoken), spoken.refusal))
                    for name, spoken in DIALECTS.items()
                ),
                post(f"{prefix}/messages/count_tokens", _guarded(self._count, refusal)),
            ]
        anything = web.route("*", "/{path:.*}", _guarded(self._not_found), expect_handler=go_on)
        return [*routes, anything]

    async def _ask(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        return await deliver(request, await self._handler.call(dialect.parse, request), dialect)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        parse = DIALECTS["messages"].parse
        return _json({"input_tokens": await self._handler.count(parse, request)})

    async def _health(self, request: web.Request) -> web.Response:
        known = {"protocol": c.PROTOCOL_VERSION, "policies": self._handler.policies()}
        try:
            self._handler.check_engine()
        except EngineError as error:
            return _json({"status": "failed", "reason": str(error), **known}, status=503)
        return _json({"status": "ok", **known})

    async def _tell(self, say: Callable[[], Any], request: web.Request) -> web.StreamResponse:
        await self.access.authenticate(request)
        return _json(say())

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


def _guarded(
    handler: Handler, refusal: Callable[[ApiError, str | None], bytes] = openai_refusal
) -> Handler:
    """Format errors as the client's dialect does; never show a traceback."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        try:
            _check_headers(request)
            return await handler(request)
        except ApiError as error:
            refused = error
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            log.exception("the gateway failed")
            refused = ApiError(500, f"the gateway failed: {type(error).__name__}")
        call_id = request.headers.get(c.HEADER_CALL_ID)
        told = refusal(refused, None if call_id is None else clean_text(call_id))
        return web.Response(body=told, status=refused.status, content_type="application/json")

    return guarded


def _check_headers(request: web.Request) -> None:
    """Refuse headers that are not UTF-8: aiohttp decodes them to surrogates, which neither the
    store nor a JSON answer can hold."""
    for name, value in request.headers.items():
        if not value.isascii() and value != clean_text(value):
            raise bad_request(f"the header {clean_text(name)} is not UTF-8")


def _json(body: Any, *, status: int = 200) -> web.Response:
    encoded = msgspec.json.encode(body)
    return web.Response(body=encoded, status=status, content_type="application/json")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lightspan"}

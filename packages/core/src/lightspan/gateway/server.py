"""HTTP: an endpoint like OpenAI's and Anthropic's: requests come in, their answers go out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from lightspan.engines.protocol import TokenEngine
from lightspan.errors import EngineError
from lightspan.gateway.delivery import deliver
from lightspan.gateway.dialects import DIALECTS, Dialect
from lightspan.gateway.http_server import Handler, HttpServer, go_on
from lightspan.gateway.intake import Intake
from lightspan.gateway.refusal import ApiError, bad_request, no_model, openai_refusal
from lightspan.gateway.terms import Terms
from lightspan.schema import conventions as c
from lightspan.schema.texts import clean_text

log = logging.getLogger(__name__)


MAX_BODY: Final = 16 * 2**20


class Server(HttpServer):
    """Serves trained and frozen policies to those whom its terms admit.

    Args:
        terms: who may call, where a call goes, what is kept of it.
        engine: serves the policies; None if every agent is served by an endpoint.
        host: interface; loopback unless told otherwise.
        port: 0 takes a free one.
        max_body: bytes of a request at most.
    """

    def __init__(
        self,
        terms: Terms,
        engine: TokenEngine | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = MAX_BODY,
    ) -> None:
        super().__init__(host, port, max_body=max_body, shutdown_s=terms.shutdown_s)
        self.terms = terms
        self._intake = Intake(terms, engine)

    async def close(self) -> None:
        """Stop listening, cancel generations, write what is left. Idempotent."""
        await super().close()
        for account in self.terms.accounts():
            for call in account.calls.values():
                call.give_up()
        await self.terms.close()
        await self._intake.close()

    # --- routes ---------------------------------------------------------------------------
    def _routes(self) -> list[web.AbstractRouteDef]:
        get = partial(web.get, expect_handler=go_on)
        post = partial(web.post, expect_handler=go_on)
        routes: list[web.AbstractRouteDef] = [
            get("/health", self._health),
            *(
                get(path, _guarded(partial(self._tell, say)))
                for path, say in self.terms.documents().items()
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
        return await deliver(request, await self._intake.call(dialect.parse, request), dialect)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        parse = DIALECTS["messages"].parse
        return _json({"input_tokens": await self._intake.count(parse, request)})

    async def _health(self, request: web.Request) -> web.Response:
        known = {"protocol": c.PROTOCOL_VERSION, "policies": self._intake.policies()}
        try:
            self._intake.check_engine()
        except EngineError as error:
            return _json({"status": "failed", "reason": str(error), **known}, status=503)
        return _json({"status": "ok", **known})

    async def _tell(self, say: Callable[[], Any], request: web.Request) -> web.StreamResponse:
        await self.terms.admit(request)
        return _json(say())

    async def _models(self, request: web.Request) -> web.StreamResponse:
        await self.terms.admit(request)
        models = self.terms.models(self._intake.policies())
        return _json({"object": "list", "data": [_model(name) for name in models]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        await self.terms.admit(request)
        name = request.match_info["model"]
        models = self.terms.models(self._intake.policies())
        if name not in models:
            raise no_model(f"unknown model {name!r}; this endpoint has {', '.join(models)}")
        return _json(_model(name))

    async def _not_found(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(404, f"no such endpoint: {request.method} {request.path}")


def _guarded(
    handler: Handler, refusal: Callable[[ApiError, str | None], bytes] = openai_refusal
) -> Handler:
    """Answer refusals in the client's format; an error of ours never shows a traceback."""

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

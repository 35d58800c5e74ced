"""HTTP: an endpoint like OpenAI's and Anthropic's: requests come in, their answers go out."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Self

import msgspec
from aiohttp import web

from lightspan.engines.protocol import TokenEngine
from lightspan.errors import ConfigError
from lightspan.gateway.delivery import deliver
from lightspan.gateway.dialects import DIALECTS, Dialect
from lightspan.gateway.intake import Intake
from lightspan.gateway.refusal import ApiError, no_model, openai_refusal
from lightspan.gateway.terms import Terms
from lightspan.schema import conventions as c

log = logging.getLogger(__name__)

MAX_BODY: Final = 16 * 2**20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
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
        self.terms = terms
        self._intake = Intake(terms, engine)
        self._host = host
        self._port = port
        self._max_body = max_body
        self._app_runner: web.AppRunner | None = None

    # --- life -----------------------------------------------------------------------------
    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port cannot be taken.
        """
        app = web.Application(client_max_size=self._max_body)
        app.add_routes(self._routes())
        # a client that leaves cancels its handler, and so its generation
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=self.terms.shutdown_s,
        )
        await runner.setup()
        site = web.TCPSite(runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise _cannot_listen(self._host, self._port, error) from error
        self._app_runner = runner
        self._port = runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening, cancel generations, write what is left. Idempotent."""
        runner, self._app_runner = self._app_runner, None
        if runner is not None:
            await runner.cleanup()
        await self.terms.close()
        await self._intake.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """The origin, such as `http://127.0.0.1:8123`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    # --- routes ---------------------------------------------------------------------------
    def _routes(self) -> list[web.AbstractRouteDef]:
        routes: list[web.AbstractRouteDef] = [
            web.get("/health", self._health),
            *(
                web.get(path, _guarded(partial(self._tell, say)))
                for path, say in self.terms.documents().items()
            ),
        ]
        refusal = DIALECTS["messages"].refusal
        for prefix in ("/v1", "/agents/{agent:.+}/v1"):
            routes += [
                web.get(f"{prefix}/models", _guarded(self._models)),
                web.get(f"{prefix}/models/{{model:.+}}", _guarded(self._one_model)),
                *(
                    web.post(
                        f"{prefix}/{name}", _guarded(partial(self._ask, spoken), spoken.refusal)
                    )
                    for name, spoken in DIALECTS.items()
                ),
                web.post(f"{prefix}/messages/count_tokens", _guarded(self._count, refusal)),
            ]
        routes.append(web.route("*", "/{path:.*}", _guarded(self._not_found)))
        return routes

    async def _ask(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        return await deliver(request, await self._intake.call(dialect.parse, request), dialect)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        parse = DIALECTS["messages"].parse
        return _json({"input_tokens": await self._intake.count(parse, request)})

    async def _health(self, request: web.Request) -> web.Response:
        policies = self._intake.policies()
        return _json({"status": "ok", "protocol": c.PROTOCOL_VERSION, "policies": policies})

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
            return await handler(request)
        except ApiError as error:
            refused = error
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            log.exception("the gateway failed")
            refused = ApiError(500, f"the gateway failed: {type(error).__name__}")
        told = refusal(refused, request.headers.get(c.HEADER_CALL_ID))
        return web.Response(body=told, status=refused.status, content_type="application/json")

    return guarded


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lightspan"}


# --- ports ----------------------------------------------------------------------------------
def check_port(host: str, port: int) -> None:
    """Whether one could listen there now.

    Raises:
        ConfigError: the port cannot be taken.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    # asyncio repeats the address in what the system says
    reason = (error.strerror or str(error)).rpartition(": ")[2]
    return ConfigError(
        f"cannot listen on {host}:{port}: {reason}; give another port, or 0 for a free one"
    )

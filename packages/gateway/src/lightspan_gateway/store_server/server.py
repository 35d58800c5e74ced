"""A store's HTTP server: it reads a request when its key is known, and answers with what the store
returns or raises.

So many requests are worked on at once, and others wait. Heartbeats, claims and reports do not wait
behind bulk writes, or runners would lose their leases; nor do requests that wait for a change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from lightspan import __version__
from lightspan.errors import (
    ConfigError,
    StoreClosedError,
    StoreError,
    StoreFormatError,
)
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema.records import Mode
from lightspan.schema.redaction import clean_text
from lightspan.schema.semconv import HEADER_PROTOCOL, PROTOCOL_VERSION
from lightspan.stores.protocol import Store
from lightspan_gateway.access_policy import token_of
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.http_server import HttpServer, go_on
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.remote_store.rpc import (
    OPERATIONS,
    PATH,
    POLL_S,
    Arguments,
    Greeting,
    Operation,
    encode_batch,
    read_batch,
)
from lightspan_gateway.serving.loopback import check_local
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_gateway.store_server.gateway_proxy import Relay
from lightspan_gateway.store_server.responses import read_body, replied
from lightspan_gateway.store_server.routes import StoreRoute

log = logging.getLogger(__name__)

MAX_BODY: Final = 64 * 2**20
"""Bytes of a request."""
MAX_CONCURRENT: Final = 256
"""Requests that are worked on at once."""
_URGENT: Final = frozenset({"heartbeat", "report", "claim"})
"""Operations that do not wait for others: a runner that cannot extend its leases loses them."""
_HEALTH_S: Final = 5.0
"""How long the store is waited for before it is told that it does not answer."""
_SHUTDOWN_S: Final = 10.0
_encoder = msgspec.msgpack.Encoder()


class StoreServer(HttpServer):
    """Serves an open store.

    Args:
        store: durable: a client takes what is acknowledged for kept.
        keys: who may ask what.
        host: interface; loopback unless told otherwise.
        port: 0 takes a free one.
        max_body: bytes of a request at most.
        max_concurrent: requests that are worked on at once.

    Raises:
        ConfigError: the store is not durable.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = MAX_BODY,
        max_concurrent: int = MAX_CONCURRENT,
    ) -> None:
        if not store.capabilities.durable:
            raise ConfigError(
                f"store {store.url}: what it acknowledges ends with this process, and nobody who "
                "uses it over HTTP would know: serve a file (sqlite:///path.db) or a database"
            )
        super().__init__(host, port, max_body=max_body, shutdown_s=_SHUTDOWN_S)
        self._store = store
        self._keys = keys
        self._places = asyncio.Semaphore(max_concurrent)
        self._extra_routes = [
            load_plugin("store_routes", name)(store) for name in installed_plugins("store_routes")
        ]
        self._relay = Relay(store)
        self._stopping = asyncio.Event()

    async def close(self) -> None:
        """Do what is under way, send away who waits, and stop listening. Idempotent."""
        self._stopping.set()
        await super().close()
        await self._relay.close()

    # --- routes ---------------------------------------------------------------------------
    def _routes(self) -> list[web.AbstractRouteDef]:
        post = partial(web.post, expect_handler=go_on)
        return [
            web.get("/health", self._health),
            *(post(route.PATH, partial(self._extra, route)) for route in self._extra_routes),
            web.get(PATH, self._guarded(self._greet)),
            post(PATH, self._guarded(self._do_together)),
            post(f"{PATH}/{{operation}}", self._guarded(self._do)),
            *self._relay.routes(),
            web.route("*", "/{path:.*}", self._guarded(self._not_found), expect_handler=go_on),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        """Whether the store answers. Tells nothing else, since anybody may ask."""
        try:
            async with asyncio.timeout(_HEALTH_S):  # who asks waits no longer, as a rule
                await self._store.policy_versions("")
        except (StoreError, TimeoutError) as error:
            log.warning("the store does not answer: %s", error or f"within {_HEALTH_S:g} s")
            return web.json_response({"status": "failed"}, status=503)
        return web.json_response({"status": "ok"})

    async def _extra(self, route: StoreRoute, request: web.Request) -> web.StreamResponse:
        """Answer a route of a plugin, whose senders know nothing of our protocol."""
        role: Role | ApiError
        try:
            role = self._role_of(request)
        except ApiError as error:
            role = error
        return await route.answer(request, role)

    async def _greet(self, request: web.Request) -> bytes:
        self._admitted(request)
        return _encoder.encode(
            Greeting(
                protocol=PROTOCOL_VERSION,
                lightspan=__version__,
                power_loss=self._store.capabilities.power_loss,
            )
        )

    async def _do(self, request: web.Request) -> bytes:
        role = self._admitted(request)
        operation = _operation_of(request.match_info["operation"], role)
        if operation.waits or operation.name in _URGENT:
            return await self._done(operation, role, await read_body(request, self._max_body))
        async with self._places:
            return await self._done(operation, role, await read_body(request, self._max_body))

    async def _do_together(self, request: web.Request) -> bytes:
        """Several operations, each with an answer of its own; one that fails fails alone."""
        role = self._admitted(request)
        async with self._places:
            batch = read_batch(await read_body(request, self._max_body))
            answers = (self._one_of_many(role, *item) for item in batch)
            return encode_batch(await asyncio.gather(*answers))

    async def _not_found(self, request: web.Request) -> bytes:
        self._admitted(request)
        raise ApiError(404, f"no such address: {request.method} {request.path}; see {PATH}")

    # --- doing it -------------------------------------------------------------------------
    def _role_of(self, request: web.Request) -> Role:
        """What the sender may do. Raises `ApiError`."""
        if not self._keys.are_needed:
            check_local(request, "start it with --trainer-key-env NAME")
        role = self._keys.role_of(token_of(request))
        if role is None:
            raise ApiError(
                401,
                "the key that was sent opens nothing here, or none was sent: LIGHTSPAN_STORE_KEY "
                "holds a client's, or the variable that ?api_key_env= names",
            )
        return role

    def _admitted(self, request: web.Request) -> Role:
        """The same, of a lightspan of this version. Raises `ApiError` or `StoreFormatError`."""
        role = self._role_of(request)
        if role is Role.TRACER:
            raise ApiError(403, "the key is a tracer's, who may only send traces, to /v1/traces")
        protocol = request.headers.get(HEADER_PROTOCOL, "none")
        if protocol != str(PROTOCOL_VERSION):
            raise StoreFormatError(
                f"the server's lightspan ({__version__}) speaks protocol {PROTOCOL_VERSION}, the "
                f"client's {clean_text(protocol):.20}: install the same version of lightspan on "
                "both sides"
            )
        return role

    async def _one_of_many(self, role: Role, name: str, body: bytes) -> tuple[int, bytes]:
        async def done() -> bytes:
            operation = _operation_of(name, role)
            if not operation.joins:
                raise ApiError(400, f"{name} is asked by itself, at {PATH}/{name}")
            return await self._done(operation, role, body)

        reply = await replied(done())
        return reply.status, reply.body

    async def _done(self, operation: Operation, role: Role, body: bytes) -> bytes:
        answer = await self._answer(operation, operation.read_arguments(body))
        if role is Role.RUNNER:
            answer = _without_secrets(operation.name, answer)
        return operation.encode_answer(answer)

    async def _answer(self, operation: Operation, arguments: Arguments) -> Any:
        work = getattr(self._store, operation.name)
        if not operation.waits:
            return await work(**arguments)
        arguments["timeout_s"] = min(arguments["timeout_s"], POLL_S)
        waiting = asyncio.ensure_future(work(**arguments))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise StoreClosedError("the server is stopping")
            return waiting.result()
        finally:
            waiting.cancel()
            stopping.cancel()

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[bytes]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Answer with what the handler returns, or with what it raises."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            return (await replied(handler(request))).response()

        return guarded


def _operation_of(name: str, role: Role) -> Operation:
    """Raises `ApiError`."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise ApiError(404, f"a store has no operation {name!r}; it has {', '.join(OPERATIONS)}")
    if role not in operation.roles:
        allowed = ", ".join(sorted(operation.roles))
        raise ApiError(403, f"the key is a {role}'s, who may not ask for {name}: only {allowed}")
    return operation


def _without_secrets(name: str, answer: Any) -> Any:
    """Return the answer to a runner without call tokens of others and without production."""
    if name == "attempts":
        return [msgspec.structs.replace(attempt, call_token="") for attempt in answer]
    if name == "rollouts":
        return [state for state in answer if state.rollout.mode is not Mode.PRODUCTION]
    return answer

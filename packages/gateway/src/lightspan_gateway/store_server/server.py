"""The HTTP server of a store. It authenticates a request before it reads the body.

At most `max_concurrent` requests run at once, and further requests wait for their turn. Requests by
which runners get, keep and report their attempts never wait, because a late runner loses its
attempt. Requests that only wait for a change in the store (long polls) do not wait for a turn
either.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from lightspan import __version__, errors
from lightspan.plugins import installed_plugins, load_plugin
from lightspan.schema import clock
from lightspan.schema.records import Attempt, Mode, Peer, PeerRole, RolloutState, new_id
from lightspan.schema.redaction import clean_text
from lightspan.schema.semconv import HEADER_PROTOCOL, PROTOCOL_VERSION
from lightspan.stores.protocol import Store
from lightspan_gateway.access_policy import token_of
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.http_server import HttpServer
from lightspan_gateway.limits import StoreServerLimits
from lightspan_gateway.remote_store import rpc
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.serving.loopback import check_local
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_gateway.store_server.gateway_proxy import GatewayProxy
from lightspan_gateway.store_server.responses import read_body, reply_with
from lightspan_gateway.store_server.routes import StoreRoute

log = logging.getLogger(__name__)

_URGENT: Final = frozenset({"heartbeat", "report", "claim"})
"""Operations that do not wait for a slot: a runner that cannot extend its leases loses them."""


class StoreServer(HttpServer):
    """Serve an open store.

    Args:
        store: a durable store, because clients rely on acknowledged writes.
        keys: keys of the clients.
        host: address of the interface to listen on.
        port: port; 0 for any free port.
        limits: limits and times; None for the defaults.
        tls: settings of TLS; None to serve plain HTTP.

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
        limits: StoreServerLimits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        limits = limits or StoreServerLimits()
        if not store.capabilities.durable:
            raise errors.ConfigError(
                f"store {store.url} is not durable, and its clients could not notice the loss of "
                "acknowledged data: serve a file (sqlite:///path.db) or a database"
            )
        super().__init__(host, port, limits, shutdown_s=limits.shutdown_s, tls=tls)
        self._health_timeout_s = limits.health_timeout_s
        self._health_interval_s = limits.health_interval_s
        self._health_id = new_id("health")
        self._health_check: asyncio.Task[bool] | None = None
        """The latest check of the store; None before the first one."""
        self._health_checked = 0.0
        """Time at which the latest check began, by `clock.monotonic`."""
        self._store = store
        self._keys = keys
        self._slots = asyncio.Semaphore(limits.max_concurrent)
        self._extra_routes = [
            load_plugin("store_routes", name)(store) for name in installed_plugins("store_routes")
        ]
        self._proxy = GatewayProxy(store, limits)
        self._stopping = asyncio.Event()

    async def close(self) -> None:
        """Finish the running requests, end the long polls, and stop listening. Idempotent."""
        self._stopping.set()
        await super().close()
        await self._proxy.close()

    # --- routes ---------------------------------------------------------------------------
    def _routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get("/health", self._health),
            *(web.post(route.PATH, partial(self._extra, route)) for route in self._extra_routes),
            web.get(rpc.PATH, self._authorized(self._greet)),
            web.post(rpc.PATH, self._authorized(self._batch)),
            web.post(f"{rpc.PATH}/{{operation}}", self._authorized(self._single)),
            *self._proxy.routes(),
            web.route("*", "/{path:.*}", self._authorized(self._not_found)),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        """Answer whether the store can be written, without details. No key is required.

        Requests of the same second share one check, so that they cannot overload the store.
        """
        now = clock.monotonic()
        check = self._health_check
        if check is None or (
            check.done() and now - self._health_checked >= self._health_interval_s
        ):
            check = self._health_check = asyncio.create_task(self._is_writable())
            self._health_checked = now
        if await asyncio.shield(check):
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "failed"}, status=503)

    async def _is_writable(self) -> bool:
        """Return whether the store can be written within the time limit.

        A test record is written and removed. Reading is not enough as a check: it succeeds if the
        disk is full, if another process holds a lock, or if the database is a read-only standby.
        """
        peer = Peer(
            peer_id=self._health_id,
            role=PeerRole.RUNNER,
            app="",  # of no training
            protocol=PROTOCOL_VERSION,
            lightspan=__version__,
        )
        try:
            async with asyncio.timeout(self._health_timeout_s):
                await self._store.announce(peer)
                await self._store.withdraw(peer.peer_id)
        except (errors.StoreError, TimeoutError) as error:
            reason = str(error) or f"no answer within {self._health_timeout_s:g} s"
            log.warning("the store cannot be written: %s", reason)
            return False
        return True

    async def _extra(self, route: StoreRoute, request: web.Request) -> web.StreamResponse:
        """Answer a request to a plugin's route.

        The lightspan version of the sender is not checked, because it may be another program.
        """
        role: Role | ApiError
        try:
            role = self._role_of(request)
        except ApiError as error:
            role = error
        return await route.answer(request, role)

    async def _greet(self, request: web.Request, role: Role) -> bytes:
        power_loss = self._store.capabilities.power_loss
        return rpc.encode(
            rpc.Greeting(protocol=PROTOCOL_VERSION, lightspan=__version__, power_loss=power_loss)
        )

    async def _single(self, request: web.Request, role: Role) -> bytes:
        operation = _operation_of(request.match_info["operation"], role)
        waits = not operation.is_long_poll and operation.name not in _URGENT
        async with self._slots if waits else nullcontext():
            return await self._execute(
                operation, role, await read_body(request, self._limits.max_body_bytes)
            )

    async def _batch(self, request: web.Request, role: Role) -> bytes:
        """Run several operations that a client sent in one request.

        The result has the answer or the error of each of them.
        """

        async def execute(name: str, body: bytes) -> bytes:
            operation = _operation_of(name, role)
            if not operation.is_batchable:
                raise ApiError(400, f"{name} must not be in a batch: send it to {rpc.PATH}/{name}")
            return await self._execute(operation, role, body)

        async with self._slots:
            items = rpc.read_batch(await read_body(request, self._limits.max_body_bytes))
            return rpc.encode(await asyncio.gather(*(reply_with(execute(*item)) for item in items)))

    async def _not_found(self, request: web.Request, role: Role) -> bytes:
        raise ApiError(404, f"no such address: {request.method} {request.path}; see {rpc.PATH}")

    # --- authorisation --------------------------------------------------------------------
    def _role_of(self, request: web.Request) -> Role:
        """Return the role of the sender.

        Raises:
            ApiError: 401 for a missing or wrong key; 403 for a web page of another host, if no keys
                are required.
        """
        if not self._keys.are_required:
            check_local(request, "start it with --trainer-key-env NAME")
        role = self._keys.role_of(token_of(request))
        if role is None:
            raise ApiError(
                401,
                "the key is wrong or missing: set LIGHTSPAN_STORE_KEY, or the variable that "
                "?api_key_env= names, to a key of this store",
            )
        return role

    def _authorized(
        self, handler: Callable[[web.Request, Role], Awaitable[bytes]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that checks key and protocol, and encodes the result or error."""

        async def answer(request: web.Request) -> bytes:
            role = self._admit(request)
            protocol = request.headers.get(HEADER_PROTOCOL, "none")
            if protocol != str(PROTOCOL_VERSION):
                raise errors.StoreFormatError(
                    f"the server's lightspan ({__version__}) speaks protocol {PROTOCOL_VERSION}, "
                    f"the client's {clean_text(protocol):.20}: install the same version of "
                    "lightspan on both sides"
                )
            return await handler(request, role)

        async def handle(request: web.Request) -> web.StreamResponse:
            if HEADER_PROTOCOL not in request.headers and not request.path.startswith(rpc.PATH):
                return self._answer_other(request)
            return (await reply_with(answer(request))).response()

        return handle

    def _admit(self, request: web.Request) -> Role:
        """Return the role of a sender that may use the store's protocol.

        Raises:
            ApiError: 401 or 403 as `_role_of`, 403 for a tracer, 404 for traces without the plugin
                that takes them.
        """
        role = self._role_of(request)
        if (request.method, request.path) == ("POST", "/v1/traces"):  # not a plugin's route
            raise ApiError(404, f"to take traces, the server needs {errors.how_to_install('otel')}")
        if role is Role.TRACER:
            raise ApiError(403, "a tracer's key may only send traces, to /v1/traces")
        return role

    def _answer_other(self, request: web.Request) -> web.Response:
        """Answer a browser, curl or a monitor, which reads no MessagePack, in plain text."""
        try:
            self._admit(request)
            status, path = 404, f"{clean_text(request.path):.100}"
            text = (
                f"no such address: {request.method} {path}. This is a lightspan store; /health "
                "says whether it can be written"
            )
        except ApiError as error:
            status, text = error.status, error.message
        return web.Response(status=status, text=f"{text}\n")

    # --- operations -----------------------------------------------------------------------
    async def _execute(self, operation: rpc.Operation, role: Role, body: bytes) -> bytes:
        arguments = operation.read_arguments(body)
        if operation.name == "announce" and role is not Role.RUNNER:
            await self._proxy.check_trainer(arguments["peer"])
        method = getattr(self._store, operation.name)
        if operation.is_long_poll:
            arguments["timeout_s"] = min(arguments["timeout_s"], rpc.POLL_S)
            answer = await self._until_stopping(method(**arguments))
        else:
            answer = await method(**arguments)
        return rpc.encode(
            answer if role in (Role.ADMIN, Role.TRAINER) else _without_secrets(role, answer)
        )

    async def _until_stopping(self, work: Awaitable[Any]) -> Any:
        polling = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([polling, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not polling.done():
                raise errors.StoreClosedError("the server is stopping")
            return polling.result()
        finally:
            polling.cancel()
            stopping.cancel()


def _operation_of(name: str, role: Role) -> rpc.Operation:
    """Return the operation `name`.

    Raises:
        ApiError: 404 if there is no such operation, 403 if the role may not call it.
    """
    operation = rpc.OPERATIONS.get(name)
    if operation is None:
        raise ApiError(
            404, f"a store has no operation {name!r}; it has {', '.join(rpc.OPERATIONS)}"
        )
    if role not in operation.roles:
        allowed = ", ".join(sorted(operation.roles))
        raise ApiError(403, f"a {role}'s key may not call {name}, only that of: {allowed}")
    return operation


def _without_secrets(role: Role, answer: Any) -> Any:
    """Remove what a runner or a reader may not read from the answer of an operation.

    These are the call tokens (keys for model calls) of attempts, and for a runner the recorded runs
    of apps in production. A runner needs the tokens of its claims.
    """
    match answer:
        case Attempt():
            return msgspec.structs.replace(answer, call_token="")
        case [RolloutState(), *_] if role is Role.RUNNER:
            return [state for state in answer if state.rollout.mode is not Mode.PRODUCTION]
        case [Attempt(), *_]:
            return [_without_secrets(role, attempt) for attempt in answer]
    return answer

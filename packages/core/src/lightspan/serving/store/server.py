"""HTTP: what a store can be asked comes in, what it answers goes out.

A request is read when it is known who sends it and that there is room. What an operation raises is
its answer; what a server alone may say (busy, stopping, no such key) has a status of its own, by
which the client knows whether to come again.
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
from lightspan.gateway.bodies import received
from lightspan.gateway.connections import Handler, most_connections
from lightspan.gateway.http_server import HttpServer, go_on
from lightspan.gateway.refusal import ApiError
from lightspan.gateway.terms import token_of
from lightspan.gateway.workers import Workers
from lightspan.schema import clock
from lightspan.schema.conventions import HEADER_PROTOCOL, PROTOCOL_VERSION
from lightspan.schema.texts import clean_text
from lightspan.serving.loopback import check_local
from lightspan.serving.store.gate import Gate, Place
from lightspan.serving.store.keys import Keys
from lightspan.serving.store.limits import check_runner, shown_to_runner
from lightspan.serving.store.metrics import CONTENT_TYPE as METRICS_TYPE, Metrics
from lightspan.serving.store.relay import Relay
from lightspan.serving.store.replies import replied
from lightspan.serving.store.telemetry import PATH as TRACES, Telemetry
from lightspan.stores.protocol import Store
from lightspan.stores.remote.operations import (
    OPERATIONS,
    PATH,
    POLL_S,
    PROOFS,
    Arguments,
    Greeting,
    Operation,
    encode_together,
    is_long,
    read_asked,
)
from lightspan.stores.remote.roles import Role
from lightspan.stores.remote.values import has_more_values

log = logging.getLogger(__name__)

MAX_BODY: Final = 64 * 2**20
"""Bytes of a request."""
MOST_VALUES: Final = 1_000_000
"""Of a runner's request: numbers, texts, lists and so on, which cost more than their bytes."""
MOST_REQUESTS: Final = 256
"""At once, but for those that wait for a change."""
_VITAL: Final = frozenset({"heartbeat", "report", "claim"})
"""What has places of its own: whoever cannot extend its leases because others send megabytes loses
its attempts."""
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
        most_requests: at once, but for those that wait for a change, and runners that wait for
            work; these are four times as many each.

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
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        if not store.capabilities.durable:
            raise ConfigError(
                f"store {store.url}: what it acknowledges ends with this process, and nobody who "
                "uses it over HTTP would know: serve a file (sqlite:///path.db) or a database"
            )
        super().__init__(host, port, max_body=max_body, shutdown_s=_SHUTDOWN_S)
        self._store = store
        self._keys = keys
        self._gate = Gate(most_requests, 4 * max_body)
        # who waits keeps a connection: a quarter of them is left to who comes to do something
        room = most_connections()
        self._waiting = Gate(max(1, min(4 * most_requests, room // 4)), 4 * max_body)
        self._idle = Gate(max(1, min(4 * most_requests, room // 2)), 4 * max_body)
        self._vital = Gate(most_requests, max_body)
        self._reading = Workers("store-bodies")
        self._answering = Workers("store-answers")
        self._telemetry = Telemetry(store)
        self._metrics = Metrics()
        self._relay = Relay(store, partial(self._metrics.count, "gateway"))
        self._stopping = asyncio.Event()

    async def close(self) -> None:
        """Do what is under way, send away who waits, and stop listening. Idempotent."""
        self._stopping.set()
        await super().close()
        await self._relay.close()
        self._telemetry.close()
        self._reading.close()
        self._answering.close()

    # --- routes ---------------------------------------------------------------------------
    def _routes(self) -> list[web.AbstractRouteDef]:
        post = partial(web.post, expect_handler=go_on)
        return [
            web.get("/health", self._health),
            web.get("/metrics", self._measured),
            post(TRACES, self._traced),
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

    async def _measured(self, request: web.Request) -> web.Response:
        """For who may read the store, by Prometheus's own `authorization`."""
        reply = await replied(self._metrics_for(request))
        if reply.status != 200:
            return reply.response()
        return web.Response(body=reply.body, headers={"Content-Type": METRICS_TYPE})

    async def _metrics_for(self, request: web.Request) -> bytes:
        role = self._role_of(request)
        if role in (Role.RUNNER, Role.TRACER):
            raise ApiError(403, f"the key is a {role}'s, who may not ask for metrics")
        inside = {
            "work": self._gate.inside,
            "keep": self._vital.inside,
            "wait": self._waiting.inside,
            "idle": self._idle.inside,
            "gateway": self._relay.inside,
        }
        return self._metrics.text(inside, await self._store.count()).encode()

    async def _traced(self, request: web.Request) -> web.Response:
        """OTLP, whose senders know nothing of our protocol."""
        begun = clock.monotonic()
        role: Role | ApiError
        try:
            role = self._role_of(request)
        except ApiError as error:
            role = error
        response = await self._telemetry.answer(request, role)
        self._count("traces", response.status, begun)
        return response

    async def _greet(self, request: web.Request) -> bytes:
        return _encoder.encode(
            Greeting(
                protocol=PROTOCOL_VERSION,
                lightspan=__version__,
                role=self._admitted(request),
                power_loss=self._store.capabilities.power_loss,
            )
        )

    async def _do(self, request: web.Request) -> bytes:
        role = self._admitted(request)
        operation = _operation_of(request.match_info["operation"], role)
        with self._gate_of(operation).arriving_by_task() as place:
            body = await _body(request, place)
            with place.entered():
                return await self._done(operation, role, body)

    def _gate_of(self, operation: Operation) -> Gate:
        if operation.name in _VITAL:
            return self._vital
        if operation.name == "await_work":  # however many runners are idle, trainers may watch
            return self._idle
        return self._waiting if operation.waits else self._gate

    async def _do_together(self, request: web.Request) -> bytes:
        """Several operations, each with an answer of its own; one that fails fails alone."""
        role = self._admitted(request)
        with self._gate.arriving_by_task() as place:
            asked = read_asked(await _body(request, place))
            with place.entered():
                return encode_together(
                    await asyncio.gather(*(self._one_of_many(role, *item) for item in asked))
                )

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
            raise ApiError(403, f"the key is a tracer's, who may only send traces, to {TRACES}")
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

        begun = clock.monotonic()
        reply = await replied(done())
        self._count(name, reply.status, begun)
        return reply.status, reply.body

    async def _done(self, operation: Operation, role: Role, body: bytes) -> bytes:
        read = operation.read_arguments if role is not Role.RUNNER else partial(_read, operation)
        arguments = await self._reading.run(read, body, size=len(body))
        proofs = arguments.pop(PROOFS, [])
        if role is Role.RUNNER:
            await check_runner(self._store, operation, arguments, proofs)
        answer = await self._answer(operation, arguments)
        if role is Role.RUNNER:
            answer = shown_to_runner(operation.name, answer)
        if is_long(answer):
            return await self._answering.run(operation.encode_answer, answer)
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

    def _guarded(self, handler: Callable[[web.Request], Awaitable[bytes]]) -> Handler:
        """Answer with what the handler returns, or with what it raises."""

        async def guarded(request: web.Request) -> web.Response:
            begun = clock.monotonic()
            reply = await replied(handler(request))
            self._count(request.match_info.get("operation", ""), reply.status, begun)
            return reply.response()

        return guarded

    def _count(self, name: str, status: int, begun: float) -> None:
        known = name if name in OPERATIONS or name == "traces" else "other"
        self._metrics.count(known, status, clock.monotonic() - begun)


def _operation_of(name: str, role: Role) -> Operation:
    """Raises `ApiError`."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise ApiError(404, f"a store has no operation {name!r}; it has {', '.join(OPERATIONS)}")
    if role not in operation.roles:
        allowed = ", ".join(sorted(operation.roles))
        raise ApiError(403, f"the key is a {role}'s, who may not ask for {name}: only {allowed}")
    return operation


def _read(operation: Operation, body: bytes) -> Arguments:
    """What a runner asks. Raises `ApiError` for more values than any of ours sends."""
    if has_more_values(body, MOST_VALUES):
        raise ApiError(413, f"{operation.name}: a runner may send {MOST_VALUES:,} values at once")
    return operation.read_arguments(body)


async def _body(request: web.Request, place: Place) -> bytes:
    return b"".join(await received(request, place.add))

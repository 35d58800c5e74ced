"""A reverse proxy from runners on other machines to the gateway of their training.

Only the call token selects the gateway. The token belongs to an attempt, and the attempt's
resources in the store contain the gateway's address. Only trainers can write resources, so a
request cannot choose its destination.

Answers are forwarded as they arrive, streams part by part. A disconnect at one side closes the
other side too: the gateway cancels an abandoned call as it would without the proxy, and the client
gets an error for an incomplete answer.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from lightspan.errors import ConfigError, StoreError
from lightspan.schema import clock
from lightspan.schema.records import Peer
from lightspan.schema.resources import routing_of
from lightspan.schema.semconv import HEADER_RELAYED
from lightspan.stores.protocol import Store
from lightspan_gateway.access_policy import token_of
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError, call_token_error
from lightspan_gateway.dialects import DIALECTS
from lightspan_gateway.keepalive import keepalive_socket
from lightspan_gateway.limits import StoreServerLimits
from lightspan_gateway.remote_store.url import RELAY_PATH
from lightspan_gateway.server import error_response
from lightspan_gateway.store_server.responses import read_body

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
_HEALTH_TIMEOUT_S: Final = 10.0
_HEALTH_INTERVAL_S: Final = 60.0
"""Seconds for which a passed health check of a gateway is valid."""
_HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("proxy-connection", "trailer", "transfer-encoding", "upgrade"),
    }
)
_REQUEST_ONLY: Final = frozenset({"host", "expect", "content-length"})
_ANSWER_ONLY: Final = frozenset({"date", "server"})
_HEALTH: Final = "/health"
_PATHS: Final = re.compile(r"/health|(/agents/.+)?/v1/.+", re.DOTALL)
_HINT: Final = (
    "a trainer on another machine than the server needs an address that the server can reach: "
    'Trainer(gateway="HOST")'
)

Headers = CIMultiDictProxy[str]


class GatewayProxy:
    """Forward model calls to the gateways of their trainings.

    Args:
        store: the store with the call tokens and the gateways' addresses.
        limits: limits of the server.
    """

    def __init__(self, store: Store, limits: StoreServerLimits) -> None:
        self._store = store
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(limits.max_relayed)
        )
        """Gateway → its slots. A gateway that hangs must not occupy those of other trainings."""
        self._max_bytes = limits.max_relayed_bytes
        self._checked: dict[str, float] = {}
        """Gateway → time of its last passed health check, by `clock.monotonic`."""
        self._announced: set[tuple[str, str]] = set()
        """The trainers whose gateways were reached when they were announced: (peer id, gateway)."""
        self._session: aiohttp.ClientSession | None = None

    def routes(self) -> list[web.AbstractRouteDef]:
        """Return the routes whose requests are forwarded."""
        return [web.route("*", f"{RELAY_PATH}/{{path:.*}}", self._handle)]

    async def close(self) -> None:
        """Close the connections to gateways. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def check_trainer(self, peer: Peer) -> None:
        """Check that this server reaches the gateway of a trainer that announces itself.

        Otherwise every attempt of the training would be lost. Only the first announcement of a
        trainer and its gateway is checked, because a gateway may later be busy or restart.

        Args:
            peer: the trainer's announcement.

        Raises:
            ConfigError: the training accepts runners of other machines, and its gateway cannot be
                reached.
        """
        needs_gateway = peer.remote and peer.gateway and not peer.complete
        if not needs_gateway or (peer.peer_id, peer.gateway) in self._announced:
            return
        try:
            await self._check(_origin(peer.gateway))
        except ApiError as error:
            raise ConfigError(
                f"the gateway {peer.gateway} of the training {peer.run_id} cannot be reached from "
                "the store's server, which hands the model calls of runners on to it. Start the "
                "trainer with an address of its machine that the server reaches, "
                'Trainer(gateway="HOST") or "HOST:PORT", or run the attempts on the trainer\'s own '
                f"machine, Trainer(runners=8) ({error.message})"
            ) from error
        self._announced.add((peer.peer_id, peer.gateway))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            path = _gateway_path(request)
            gateway = await self._gateway_of(request, path)
            async with self._slots[gateway]:
                body = await read_body(request, self._max_bytes)
                await self._check(gateway)
                return await self._forward(request, gateway, path, body)
        except ApiError as error:
            api_error = error
        except ConnectionError:  # the client disconnected
            return web.Response(status=CLIENT_LEFT)
        except web.HTTPException:
            raise
        except Exception as error:
            log.exception("a model call cannot be forwarded")
            api_error = ApiError(500, f"the store's server failed: {type(error).__name__}")
        is_anthropic = request.path.rpartition("/v1/")[2].startswith("messages")
        return error_response(request, api_error, DIALECTS["messages"] if is_anthropic else None)

    async def _gateway_of(self, request: web.Request, path: str) -> str:
        """Return the origin of the gateway to which a request is forwarded.

        The gateway belongs to the training of the request's call token. The token of an ended
        attempt is valid for health checks only: a runner that aborted the attempt because the
        gateway was unreachable uses the token to wait for the gateway.

        Raises:
            ApiError: the token is missing or unknown, its attempt has ended, the training has no
                gateway, or the store fails.
        """
        token = token_of(request)
        if not token:
            raise call_token_error(token)
        try:
            claim = await self._store.claim_of_token(token) if token.isascii() else None
            if claim is None:
                raise call_token_error(token)
            attempt, resources_id = claim.attempt, claim.rollout.resources_id
            if attempt.sealed and path != _HEALTH:
                raise ApiError(403, f"attempt {attempt.attempt_id} has ended ({attempt.status})")
            resources = await self._store.get_resources(resources_id) if resources_id else {}
        except StoreError as error:
            raise ApiError(503, f"the store cannot look the call token up: {error}") from error
        gateway = _origin(routing_of(resources).gateway_url)
        if not gateway:
            raise ApiError(404, "the rollout's training has registered no gateway")
        return gateway

    async def _check(self, gateway: str) -> None:
        """Check that a gateway listens at the origin `gateway`.

        A trainer on another machine may have registered a loopback address, at which another server
        may listen on this machine.

        Raises:
            ApiError: there is no gateway at the origin.
        """
        now = clock.monotonic()
        if now - self._checked.get(gateway, -_HEALTH_INTERVAL_S) < _HEALTH_INTERVAL_S:
            return
        try:
            async with (
                asyncio.timeout(_HEALTH_TIMEOUT_S),
                self._send("GET", URL(f"{gateway}{_HEALTH}")) as answer,
            ):
                health = await answer.json(content_type=None)
        except (ValueError, aiohttp.ClientError, TimeoutError):
            health = None
        if not isinstance(health, dict) or not health.keys() >= {"protocol", "policies"}:
            raise ApiError(502, f"the server at that address is no gateway of a training; {_HINT}")
        self._checked[gateway] = now

    async def _forward(
        self, request: web.Request, gateway: str, path: str, body: bytes
    ) -> web.StreamResponse:
        query = request.rel_url.raw_query_string
        url = URL(f"{gateway}{path}{f'?{query}' if query else ''}", encoded=True)
        headers = _forwardable(request.headers, _REQUEST_ONLY)
        headers[HEADER_RELAYED] = "1"
        async with self._send(request.method, url, headers, body) as answer:
            response = web.StreamResponse(
                status=answer.status,
                reason=answer.reason,
                headers=_forwardable(answer.headers, _ANSWER_ONLY),
            )
            if answer.content_type == "text/event-stream":
                response.headers["X-Accel-Buffering"] = "no"  # for nginx in front of this server
            await response.prepare(request)
            while True:
                try:
                    part = await answer.content.readany()
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    reason = str(error) or type(error).__name__
                    log.warning("gateway %s aborted an answer: %s", gateway, reason)
                    self._checked.pop(gateway, None)
                    if request.transport is not None:  # else the answer would look complete
                        request.transport.close()
                    return response
                if not part:
                    break
                await response.write(part)
            await response.write_eof()
            return response

    @asynccontextmanager
    async def _send(
        self, method: str, url: URL, headers: CIMultiDict[str] | None = None, body: bytes = b""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to a gateway; yield its answer.

        Raises:
            ApiError: 502 if the gateway cannot be reached or closes the connection.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=15.0, socket_factory=keepalive_socket
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        try:
            answer = await self._session.request(
                method,
                url,
                headers=headers,
                data=io.BytesIO(body) if body else None,
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
                allow_redirects=False,  # only the trainer sets the destination
            )
        except (aiohttp.ClientError, OSError) as error:  # OSError: also TimeoutError
            self._checked.pop(str(url.origin()), None)
            if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
                message = (
                    "the gateway of the training cannot be reached from the store's server: the "
                    f"trainer may have ended or stopped; {_HINT}"
                )
            else:
                message = f"the gateway of the training closed the connection ({error})"
            raise ApiError(502, message) from error
        async with answer:
            yield answer


def _gateway_path(request: web.Request) -> str:
    """Return the URL-encoded path to request from the gateway.

    Raises:
        ApiError: 404 if the gateway has no endpoint at the request's path.
    """
    raw = request.rel_url.raw_path
    path = raw.removeprefix(RELAY_PATH)
    steps = request.rel_url.path.split("/")
    if path == raw or ".." in steps or "." in steps or _PATHS.fullmatch(path) is None:
        raise ApiError(404, f"no such endpoint: {request.method} {request.path}")
    return path


def _origin(url: str) -> str:
    """Return the origin of a URL: scheme, host and port.

    The result is empty if the URL is invalid.
    """
    try:
        parts = URL(url)
        is_valid = parts.scheme in ("http", "https") and "@" not in url and parts.port != 0
        return str(parts.origin()) if is_valid else ""
    except ValueError:
        return ""


def _forwardable(headers: Headers | CIMultiDict[str], own: frozenset[str]) -> CIMultiDict[str]:
    """Return the headers that may be forwarded.

    Headers that apply to one connection only are left out. Those in `own` are left out too, because
    the forwarded message gets new ones.
    """
    named = {name.strip().lower() for name in ",".join(headers.getall("Connection", [])).split(",")}
    removed = _HOP_BY_HOP | own | named
    return CIMultiDict(
        (name, text) for name, text in headers.items() if name.lower() not in removed
    )

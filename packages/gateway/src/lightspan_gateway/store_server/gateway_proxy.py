"""Model calls of runners elsewhere, handed on to the gateway of their training.

Which gateway that is a call token says, and nothing else of a request: the token's attempt has the
resources that a trainer's key put into the store, with the address of its gateway. So a request
never chooses where it goes, and opens there what the token opens.

What comes back goes on as it comes, a stream part by part. Who leaves at one end leaves at the
other one too: the gateway knows as soon as on a connection of its own that nobody waits, and a
client that an answer has broken off.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from lightspan import __version__
from lightspan.errors import StoreError
from lightspan.schema import clock
from lightspan.schema.records import Claim
from lightspan.schema.redaction import clean_text
from lightspan.schema.resources import routing_of
from lightspan.schema.semconv import HEADER_CALL_ID, HEADER_RELAYED, PROTOCOL_VERSION
from lightspan.stores.keepalive import keepalive_socket
from lightspan.stores.protocol import Store
from lightspan_gateway.access_policy import token_of
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError, openai_refusal
from lightspan_gateway.dialects import DIALECTS
from lightspan_gateway.http_server import go_on
from lightspan_gateway.remote_store.url import RELAY_PATH
from lightspan_gateway.server import MAX_BODY
from lightspan_gateway.store_server.responses import read_body

log = logging.getLogger(__name__)

MAX_CONCURRENT: Final = 1_024
"""Calls that are handed on at once."""
CONNECT_TIMEOUT_S: Final = 10.0
_HEALTH_TIMEOUT_S: Final = 10.0
_HEALTH_INTERVAL_S: Final = 60.0
"""How long a gateway's answer to a health check is relied on."""
_HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("proxy-connection", "trailer", "transfer-encoding", "upgrade"),
    }
)
_OF_THIS_REQUEST: Final = frozenset({"host", "expect", "content-length"})
_OF_THIS_ANSWER: Final = frozenset({"date", "server"})
_HEALTH: Final = "/health"
_SERVED: Final = re.compile(r"/health|(/agents/.+)?/v1/.+", re.DOTALL)
_ADVICE: Final = (
    "a trainer on another machine than the server's needs an address that the server reaches: "
    'Trainer(gateway="HOST")'
)

Headers = CIMultiDictProxy[str]


class Relay:
    """Hands calls on.

    Args:
        store: where call tokens are known, and which gateway each belongs to.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places = asyncio.Semaphore(MAX_CONCURRENT)
        self._checked: dict[str, float] = {}
        """Gateway → when it last passed the health check, by `clock.monotonic`."""
        self._session: aiohttp.ClientSession | None = None

    def routes(self) -> list[web.AbstractRouteDef]:
        """What is handed on."""
        path = f"{RELAY_PATH}/{{path:.*}}"
        return [web.route("*", path, self._handle, expect_handler=go_on)]

    async def close(self) -> None:
        """Let go of the gateways. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # --- a request ------------------------------------------------------------------------
    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            path = _path_of(request)
            gateway = await self._gateway_of(await self._admitted(request, path))
            async with self._places:
                body = await read_body(request, MAX_BODY)
                await self._check(gateway)
                return await self._handed_on(request, gateway, path, body)
        except ApiError as error:
            return _refused(request, error)
        except ConnectionError:  # the client left
            return web.Response(status=CLIENT_LEFT)
        except web.HTTPException:
            raise
        except Exception as error:
            log.exception("a model call could not be handed on")
            failed = ApiError(500, f"the store's server failed: {type(error).__name__}")
            return _refused(request, failed)

    async def _admitted(self, request: web.Request, path: str) -> Claim:
        """What the call token opens. Of an attempt that has ended it opens nothing, but a look
        whether the gateway is there: a runner that lost it by that waits until it is."""
        token = token_of(request)
        if not token:
            raise ApiError(401, "a call token is missing", code="invalid_api_key")
        try:
            claim = await self._store.claim_of_token(token) if token.isascii() else None
        except StoreError as error:
            raise ApiError(503, f"the store cannot look the call token up: {error}") from error
        if claim is None:
            raise ApiError(401, "unknown call token", code="invalid_api_key")
        if claim.attempt.sealed and path != _HEALTH:
            attempt = claim.attempt
            raise ApiError(403, f"attempt {attempt.attempt_id} has ended ({attempt.status})")
        return claim

    async def _gateway_of(self, claim: Claim) -> str:
        """The origin that the attempt's training registered."""
        resources_id = claim.rollout.resources_id
        try:
            resources = await self._store.get_resources(resources_id) if resources_id else {}
        except StoreError as error:
            raise ApiError(503, f"the store cannot say which gateway: {error}") from error
        gateway = _origin(routing_of(resources).gateway_url)
        if not gateway:
            raise ApiError(404, "the rollout's training has registered no gateway")
        return gateway

    # --- the gateway ----------------------------------------------------------------------
    async def _check(self, gateway: str) -> None:
        """Raise `ApiError` unless a gateway of ours listens there: the loopback address of another
        machine is an address here too."""
        now = clock.monotonic()
        if now - self._checked.get(gateway, -_HEALTH_INTERVAL_S) < _HEALTH_INTERVAL_S:
            return
        try:
            async with (
                asyncio.timeout(_HEALTH_TIMEOUT_S),
                self._asked("GET", URL(f"{gateway}{_HEALTH}")) as answer,
            ):
                health = await answer.json(content_type=None)
        except (ValueError, aiohttp.ClientError, TimeoutError):
            health = None  # not JSON, not text, endless, or nothing
        protocol = health.get("protocol") if isinstance(health, dict) else None
        if protocol is None or "policies" not in health:
            raise ApiError(502, f"who answers there is no gateway of a training; {_ADVICE}")
        if protocol != PROTOCOL_VERSION:
            raise ApiError(
                502,
                f"the training's gateway speaks protocol {clean_text(str(protocol)):.20}, the "
                f"store's server (lightspan {__version__}) {PROTOCOL_VERSION}: install the same "
                "version of lightspan on both sides",
            )
        self._checked[gateway] = now

    async def _handed_on(
        self, request: web.Request, gateway: str, path: str, body: bytes
    ) -> web.StreamResponse:
        query = request.rel_url.raw_query_string
        url = URL(f"{gateway}{path}{f'?{query}' if query else ''}", encoded=True)
        headers = _passed(request.headers, _OF_THIS_REQUEST)
        headers[HEADER_RELAYED] = "1"
        async with self._asked(request.method, url, headers, body) as answer:
            response = web.StreamResponse(
                status=answer.status,
                reason=answer.reason,
                headers=_passed(answer.headers, _OF_THIS_ANSWER),
            )
            if answer.content_type == "text/event-stream":
                response.headers["X-Accel-Buffering"] = "no"  # for nginx, in front of this server
            await response.prepare(request)
            try:
                async for part in _parts(answer):
                    await response.write(part)
            except _BrokenOffError as error:
                log.warning("gateway %s broke off an answer: %s", gateway, error)
                self._checked.pop(gateway, None)
                if request.transport is not None:  # an end would look like that of a whole answer
                    request.transport.close()
                return response
            await response.write_eof()
            return response

    @asynccontextmanager
    async def _asked(
        self, method: str, url: URL, headers: CIMultiDict[str] | None = None, body: bytes = b""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to a gateway; in the block is its answer. Raises `ApiError`."""
        if self._session is None:
            self._session = _made_session()
        try:
            answer = await self._session.request(
                method,
                url,
                headers=headers,
                data=io.BytesIO(body) if body else None,
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
                allow_redirects=False,  # nobody but the trainer says where a call goes
            )
        except (aiohttp.ClientError, OSError) as error:  # `TimeoutError` among them
            self._checked.pop(str(url.origin()), None)
            if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
                raise ApiError(
                    502,
                    "the gateway of the training cannot be reached from the store's server: the "
                    f"trainer may have ended or stopped; {_ADVICE}",
                ) from error
            raise ApiError(
                502, f"the gateway of the training broke off before it answered ({error})"
            ) from error
        async with answer:
            yield answer


class _BrokenOffError(Exception):
    """An answer ended before its end."""


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """What arrives, as it arrives. Raises `_BrokenOffError`."""
    try:
        async for part in answer.content.iter_any():
            yield part
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _BrokenOffError(str(error) or type(error).__name__) from error


def _made_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=15.0, socket_factory=keepalive_socket
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _path_of(request: web.Request) -> str:
    """The path at the gateway, as it was written. Raises `ApiError`."""
    raw = request.rel_url.raw_path
    path = raw.removeprefix(RELAY_PATH)
    steps = request.rel_url.path.split("/")
    if path == raw or ".." in steps or "." in steps or _SERVED.fullmatch(path) is None:
        raise ApiError(404, f"no such endpoint: {request.method} {request.path}")
    return path


def _origin(url: str) -> str:
    """The gateway's address if it is one, without anything else; empty if it is none."""
    try:
        parts = urlsplit(url)
        plain = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in url
        plain = plain and parts.port != 0
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc}" if plain else ""


def _passed(headers: Headers | CIMultiDict[str], own: frozenset[str]) -> CIMultiDict[str]:
    """The headers that go on: those that are about one connection do not."""
    named = {name.strip().lower() for name in ",".join(headers.getall("Connection", [])).split(",")}
    left_out = _HOP_BY_HOP | own | named
    return CIMultiDict(
        (name, text) for name, text in headers.items() if name.lower() not in left_out
    )


def _refused(request: web.Request, error: ApiError) -> web.Response:
    """In the words of the SDK that asks, by the path."""
    endpoint = request.path.rpartition("/v1/")[2]
    spoken = DIALECTS["messages"] if endpoint.startswith("messages") else None
    refusal = openai_refusal if spoken is None else spoken.refusal
    call_id = request.headers.get(HEADER_CALL_ID)
    body = refusal(error, None if call_id is None else clean_text(call_id))
    return web.Response(body=body, status=error.status, content_type="application/json")

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
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from lightspan import __version__
from lightspan.errors import StoreError
from lightspan.gateway.access_policy import token_of
from lightspan.gateway.api_errors import CLIENT_LEFT, ApiError, openai_refusal
from lightspan.gateway.dialects import DIALECTS
from lightspan.gateway.http_server import go_on
from lightspan.gateway.request_body import received
from lightspan.gateway.server import MAX_BODY
from lightspan.schema import clock
from lightspan.schema.conventions import (
    BUSY_RELAY,
    HEADER_CALL_ID,
    HEADER_RELAYED,
    PROTOCOL_VERSION,
)
from lightspan.schema.records import Claim
from lightspan.schema.resources import routing_of
from lightspan.schema.texts import clean_text
from lightspan.serving.store.gate import COME_AGAIN_S, Full, Gate, Place
from lightspan.stores.protocol import Store
from lightspan.stores.remote.address import RELAY_PATH
from lightspan.stores.sockets import watched

log = logging.getLogger(__name__)

MOST_CALLS: Final = 1_024
"""At once: an answer may take minutes."""
MOST_BYTES: Final = 16 * MAX_BODY
"""Of all requests that are under way."""
CONNECT_S: Final = 10.0
_HEALTH_S: Final = 10.0
"""How long it may take to say that it is one."""
_KNOWN_S: Final = 60.0
"""How long a gateway is taken for one that was seen to be one."""
_REMEMBERED: Final = 256
"""Resources whose gateway is remembered: they never change."""
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
        count: is told the status of each answer and the seconds that it took.
        most: calls at once.
        max_body: bytes of a request at most.
    """

    def __init__(
        self,
        store: Store,
        count: Callable[[int, float], None],
        *,
        most: int = MOST_CALLS,
        max_body: int = MAX_BODY,
    ) -> None:
        self._store = store
        self._count = count
        self._max_body = max_body
        self._gate = Gate(most, MOST_BYTES)
        self._most_of_one = max(1, most // 8)
        self._of_attempts: Counter[str] = Counter()
        """Calls under way."""
        self._gateways: OrderedDict[str, str] = OrderedDict()
        """By resources."""
        self._seen: dict[str, float] = {}
        """When a gateway was last seen to be one, by `clock.monotonic`."""
        self._session: aiohttp.ClientSession | None = None

    @property
    def inside(self) -> int:
        """Calls under way."""
        return self._gate.inside

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
        begun, status = clock.monotonic(), CLIENT_LEFT
        try:
            response = await self._answered(request)
            status = response.status
            return response
        finally:
            self._count(status, clock.monotonic() - begun)

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._relayed(request)
        except ApiError as error:
            return _refused(request, error)
        except Full as full:
            busy = ApiError(429, f"the store's server is busy: {full}", code=BUSY_RELAY)
            return _refused(request, busy, {"Retry-After": str(COME_AGAIN_S)})
        except ConnectionError:  # the client left
            return web.Response(status=CLIENT_LEFT)
        except web.HTTPException:
            raise
        except Exception as error:
            log.exception("a model call could not be handed on")
            failed = ApiError(500, f"the store's server failed: {type(error).__name__}")
            return _refused(request, failed)

    async def _relayed(self, request: web.Request) -> web.StreamResponse:
        path = _path_of(request)
        claim = await self._admitted(request, path)
        gateway = await self._gateway_of(claim)
        with self._one_more_of(claim), self._gate.arriving_by_task() as place:
            body = await self._body(request, place)
            with place.entered():
                await self._check(gateway)
                return await self._handed_on(request, gateway, path, body)

    @contextmanager
    def _one_more_of(self, claim: Claim) -> Iterator[None]:
        """One attempt's program is not to take the places of all others' calls. Raises `Full`."""
        name = claim.attempt.attempt_id
        under_way = self._of_attempts[name]
        if under_way >= self._most_of_one:
            raise Full(f"{under_way} calls of this attempt are under way here already")
        self._of_attempts[name] += 1
        try:
            yield
        finally:
            self._of_attempts[name] -= 1
            if not self._of_attempts[name]:
                del self._of_attempts[name]

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
        if resources_id not in self._gateways:
            try:
                found = await self._store.get_resources(resources_id) if resources_id else {}
            except StoreError as error:
                raise ApiError(503, f"the store cannot say which gateway: {error}") from error
            self._gateways[resources_id] = _origin(routing_of(found).gateway_url)
            while len(self._gateways) > _REMEMBERED:
                self._gateways.popitem(last=False)
        self._gateways.move_to_end(resources_id)
        gateway = self._gateways[resources_id]
        if not gateway:
            raise ApiError(404, "the rollout's training has registered no gateway")
        return gateway

    async def _body(self, request: web.Request, place: Place) -> bytes:
        """All of it: a gateway is not to wait for a client that sends slowly."""
        if (request.content_length or 0) > self._max_body:
            raise self._too_large()
        size = 0

        def arrived(more: int) -> None:
            nonlocal size
            size += more
            if size > self._max_body:
                raise self._too_large()
            place.add(more)

        return b"".join(await received(request, arrived))

    def _too_large(self) -> ApiError:
        most = self._max_body
        return ApiError(413, f"the request body is too large: at most {most:,} bytes are read")

    # --- the gateway ----------------------------------------------------------------------
    async def _check(self, gateway: str) -> None:
        """Raise `ApiError` unless a gateway of ours listens there: the loopback address of another
        machine is an address here too."""
        now = clock.monotonic()
        if now - self._seen.get(gateway, -_KNOWN_S) < _KNOWN_S:
            return
        try:
            async with (
                asyncio.timeout(_HEALTH_S),
                self._ask("GET", URL(f"{gateway}{_HEALTH}")) as answer,
            ):
                said = await answer.json(content_type=None)
        except (ValueError, aiohttp.ClientError, TimeoutError):
            said = None  # no JSON, not even a text, no end of it, or nothing
        protocol = said.get("protocol") if isinstance(said, dict) else None
        if protocol is None or "policies" not in said:
            raise ApiError(502, f"who answers there is no gateway of a training; {_ADVICE}")
        if protocol != PROTOCOL_VERSION:
            raise ApiError(
                502,
                f"the training's gateway speaks protocol {clean_text(str(protocol)):.20}, the "
                f"store's server (lightspan {__version__}) {PROTOCOL_VERSION}: install the same "
                "version of lightspan on both sides",
            )
        self._seen = {known: at for known, at in self._seen.items() if now - at < _KNOWN_S}
        self._seen[gateway] = now

    async def _handed_on(
        self, request: web.Request, gateway: str, path: str, body: bytes
    ) -> web.StreamResponse:
        query = request.rel_url.raw_query_string
        url = URL(f"{gateway}{path}{f'?{query}' if query else ''}", encoded=True)
        headers = _passed(request.headers, _OF_THIS_REQUEST)
        headers[HEADER_RELAYED] = "1"
        async with self._ask(request.method, url, headers, body) as answer:
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
                self._seen.pop(gateway, None)
                if request.transport is not None:  # an end would look like that of a whole answer
                    request.transport.close()
                return response
            await response.write_eof()
            return response

    def _ask(
        self, method: str, url: URL, headers: CIMultiDict[str] | None = None, body: bytes = b""
    ) -> _Asked:
        if self._session is None:
            self._session = _made_session()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        return _Asked(
            partial(
                self._session.request,
                method,
                url,
                headers=headers,
                data=body or None,
                timeout=timeout,
                allow_redirects=False,  # nobody but the trainer says where a call goes
            ),
            lambda: self._seen.pop(str(url.origin()), None),
        )


class _BrokenOffError(Exception):
    """An answer ended before its end."""


class _Asked:
    """A request to a gateway; entered, its answer. Raises `ApiError` where there is none."""

    def __init__(self, ask: Callable[[], Any], gone: Callable[[], object]) -> None:
        self._ask = ask
        self._gone = gone
        self._answer: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            self._answer = await self._ask()
        except (aiohttp.ClientConnectorError, TimeoutError) as error:
            self._gone()
            raise ApiError(
                502,
                "the gateway of the training cannot be reached from the store's server: the "
                f"trainer may have ended or stopped; {_ADVICE}",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            self._gone()
            raise ApiError(
                502, f"the gateway of the training broke off before it answered ({error})"
            ) from error
        return self._answer

    async def __aexit__(self, *exception: object) -> None:
        if self._answer is not None:
            self._answer.close() if any(exception) else self._answer.release()


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """What arrives, as it arrives. Raises `_BrokenOffError`."""
    try:
        async for part in answer.content.iter_any():
            yield part
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _BrokenOffError(str(error) or type(error).__name__) from error


def _made_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0, socket_factory=watched),
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


def _refused(
    request: web.Request, error: ApiError, headers: dict[str, str] | None = None
) -> web.Response:
    """In the words of the SDK that asks, by the path."""
    endpoint = request.path.rpartition("/v1/")[2]
    spoken = DIALECTS["messages"] if endpoint.startswith("messages") else None
    refusal = openai_refusal if spoken is None else spoken.refusal
    call_id = request.headers.get(HEADER_CALL_ID)
    body = refusal(error, None if call_id is None else clean_text(call_id))
    return web.Response(
        body=body, status=error.status, content_type="application/json", headers=headers
    )

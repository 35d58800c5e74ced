"""Serve the page and its API.

The API is at `/api/v1`. Answers are JSON of the structs in `views`; an error is a `Problem`. Only
images are answered as bytes, with a policy that forbids what a browser could run in them.
`{place}` is `runs/{run}` or `stores/{store}`.

| path | answer |
|---|---|
| `/places` | `Places` |
| `/runs/{run}` | `RunDetail` |
| `/runs/{run}/metrics?names=a,b&kind=train&points=500&after=0` | `Metrics` |
| `/runs/{run}/prompts` | `Prompts` |
| `/compare?run=a&run=b` | `Comparison` |
| `/{place}/rollouts?FILTERS&sort=newest&limit=50&cursor=` | `RolloutPage` |
| `/{place}/facets?FILTERS` | `Facets` |
| `/{place}/groups?FILTERS&sort=newest&limit=50&cursor=` | `GroupPage` |
| `/{place}/groups/{group}?step=3` | `GroupDetail` |
| `/{place}/rollouts/{rollout or attempt}` | `RolloutDetail` |
| `/{place}/rollouts/{rollout}/spans/{span}` | `SpanDetail` |
| `/{place}/rollouts/{rollout}/calls/{call}` | `CallDetail` |
| `/{place}/images/{digest}` | the bytes of an image |
| `/{place}/export?FILTERS` | `Export` |
| POST `/{place}/feedback` | `Rated`; only with `write` |
| `/events` | server-sent events `change`: `{"place": "runs/x", "lines": 3, "cursor": 17}` |

FILTERS are the fields of `filters.Filters`. Every other path answers the page itself, so that its
addresses can be opened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from lightspan import __version__
from lightspan.errors import ConfigError, DataError, LightspanError, NotFoundError, RewardError
from lightspan.schema.redaction import clean_text
from lightspan_gateway.http_server import HttpServer
from lightspan_gateway.limits import ServerLimits
from lightspan_ui import views
from lightspan_ui.api import Api
from lightspan_ui.guard import API, HEADERS, HEALTH, MAX_BODY_BYTES, Guard, Head
from lightspan_ui.live import Changes
from lightspan_ui.runs import error_text
from lightspan_ui.sources import Sources
from lightspan_ui.static_files import StaticFiles

PREFIX: Final = f"{API}v1"
SHUTDOWN_S: Final = 0.2
"""Seconds for which requests may continue while the server stops."""
IMAGE_TYPES: Final = ("image/gif", "image/jpeg", "image/png", "image/webp")
"""Types of images that are answered under their type. Others are answered as a file to save."""
_PLACE: Final = "/{kind:runs|stores}/{name}"

_log: Final = logging.getLogger(__name__)

Answer = Callable[[web.Request], Awaitable[Any]]


class UiServer(HttpServer):
    """The server of the page.

    Args:
        sources: what is shown.
        host: address of the interface to listen on.
        port: port; 0 for any free port.
        token: secret that every request needs.
        write: whether rollouts may be rated.
    """

    def __init__(
        self, sources: Sources, *, host: str, port: int, token: str, write: bool = False
    ) -> None:
        limits = ServerLimits(max_body_bytes=MAX_BODY_BYTES)
        super().__init__(host, port, limits, shutdown_s=SHUTDOWN_S)
        self._token = token
        self._sources = sources
        self._changes = Changes(sources)
        self._api = Api(sources, write=write, version=__version__)
        self._files = StaticFiles()

    @property
    def guard(self) -> Guard:
        """The guard of the server. Read it after `start`, which sets the port."""
        return Guard(self._host, self._port, self._token)

    async def close(self) -> None:
        """Stop listening, end what goes on in the background and close the stores. Idempotent."""
        await self._changes.close()
        await super().close()
        self._api.close()
        await self._sources.close()

    def _middlewares(self) -> Sequence[Middleware]:
        return (self._answer_errors, self._check)

    def _routes(self) -> Sequence[web.AbstractRouteDef]:
        api = self._api
        reads: dict[str, Answer] = {
            "/places": api.places,
            "/compare": api.compare,
            "/runs/{name}": api.run,
            "/runs/{name}/metrics": api.metrics,
            "/runs/{name}/prompts": api.prompts,
            f"{_PLACE}/rollouts": api.rollouts,
            f"{_PLACE}/facets": api.facets,
            f"{_PLACE}/groups": api.groups,
            f"{_PLACE}/groups/{{group}}": api.group,
            f"{_PLACE}/rollouts/{{rollout}}": api.rollout,
            f"{_PLACE}/rollouts/{{rollout}}/spans/{{span}}": api.span,
            f"{_PLACE}/rollouts/{{rollout}}/calls/{{call}}": api.call,
            f"{_PLACE}/export": api.export,
        }
        return [
            web.get(HEALTH, _health),
            *(web.get(PREFIX + path, _json(answer)) for path, answer in reads.items()),
            web.get(f"{PREFIX}{_PLACE}/images/{{digest}}", self._image),
            web.post(f"{PREFIX}{_PLACE}/feedback", _json(api.feedback)),
            web.get(f"{PREFIX}/events", self._changes.stream),
            web.route("*", f"{API}{{path:.*}}", _unknown),
            web.get("/{path:.*}", self._files.answer),
        ]

    async def _image(self, request: web.Request) -> web.Response:
        image = await self._api.image(request)
        # an SVG may contain scripts, and a wrong type may hide HTML
        is_shown = image.media_type in IMAGE_TYPES
        return web.Response(
            body=image.data,
            content_type=image.media_type if is_shown else "application/octet-stream",
            headers={
                "Cache-Control": "private, max-age=86400, immutable",
                "Content-Disposition": "inline" if is_shown else "attachment",
                "Content-Security-Policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
            },
        )

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse what the guard refuses; sign in who opens a page with the token."""
        guard, head = self.guard, head_of(request, self.guard.cookie)
        refusal = guard.refusal(head)
        if refusal is not None:
            return problem(refusal.status, refusal.text)
        if guard.signs_in(head):
            return signed_in(request, guard, is_link=head.fetch_site == "cross-site")
        return await handler(request)

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Turn errors into answers without secrets, and add the headers to every answer."""
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = problem(error.status, error.reason)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            response = problem(status_of(error), error_text(error))
            if response.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                _log.exception("the page %s failed", request.path)
        if not response.prepared:
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
        return response


def status_of(error: Exception) -> int:
    """Return the status of an answer for an error."""
    if isinstance(error, NotFoundError):
        return HTTPStatus.NOT_FOUND
    if isinstance(error, PermissionError):
        return HTTPStatus.FORBIDDEN
    if isinstance(error, ConfigError | DataError | RewardError):
        return HTTPStatus.BAD_REQUEST
    if isinstance(error, LightspanError | OSError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return HTTPStatus.INTERNAL_SERVER_ERROR


def head_of(request: web.Request, cookie: str) -> Head:
    """Return what the guard reads of a request.

    Args:
        request: the request.
        cookie: name of the server's cookie.
    """
    headers = request.headers
    return Head(
        method=request.method,
        path=request.path,
        host=headers.get("Host", ""),
        origin=headers.get("Origin"),
        fetch_site=headers.get("Sec-Fetch-Site"),
        fetch_mode=headers.get("Sec-Fetch-Mode"),
        authorization=headers.get("Authorization"),
        cookie=request.cookies.get(cookie),
        content_type=request.content_type if "Content-Type" in headers else "",
        token=request.query.get("token"),
    )


def signed_in(request: web.Request, guard: Guard, *, is_link: bool) -> web.Response:
    """Return a redirect to the same page without the token, which the cookie then holds.

    Args:
        request: the request.
        guard: the guard of the server.
        is_link: whether a page of another site, such as a notebook at localhost, links here.
    """
    query = request.rel_url.without_query_params("token").raw_query_string
    # a path that began with two slashes would name another host
    path = "/" + request.rel_url.raw_path.lstrip("/")
    target = f"{path}?{query}" if query else path
    if is_link:  # browsers send no strict cookie while they follow another site's link
        response = web.Response(headers={"Refresh": f"0; url={target}"}, content_type="text/html")
    else:
        response = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": target})
    response.set_cookie(guard.cookie, guard.token, httponly=True, samesite="Strict", path="/")
    return response


def problem(status: int, text: str) -> web.Response:
    """Return an error as an answer."""
    return web.Response(
        status=status,
        body=encoded(views.Problem(error=text)),
        content_type="application/json",
    )


def encoded(value: Any) -> bytes:
    """Return an answer as JSON. Lone surrogates, which files may hold, become U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(without_surrogates(msgspec.to_builtins(value)))


def without_surrogates(value: Any) -> Any:
    """Return JSON with lone surrogates in its texts replaced."""
    if isinstance(value, dict):
        return {clean_text(key): without_surrogates(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_surrogates(each) for each in value]
    return clean_text(value) if isinstance(value, str) else value


def _json(answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        body = encoded(await answer(request))
        return web.Response(body=body, content_type="application/json")

    return handle


async def _health(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _unknown(request: web.Request) -> web.Response:
    raise NotFoundError(f"the API has no {request.path}")

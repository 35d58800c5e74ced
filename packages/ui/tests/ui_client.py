"""A running server of the page, and requests to it, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import ClientSession

from lightspan_ui.server import PREFIX, UiServer
from lightspan_ui.sources import Sources

TOKEN = "a-token-of-the-tests-0123456789-abcdef"
T = TypeVar("T")


class Answer(NamedTuple):
    """An answer of the server."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def read(self, kind: type[T]) -> T:
        """Return the answer as a struct."""
        assert self.status == 200, self.body
        return msgspec.json.decode(self.body, type=kind)

    @property
    def error(self) -> str:
        """The message of an error."""
        return str(msgspec.json.decode(self.body)["error"])


class Client(NamedTuple):
    """Requests to a server."""

    server: UiServer
    session: ClientSession

    async def send(
        self, path: str, *, method: str = "GET", body: Any = None, **headers: str | None
    ) -> Answer:
        """Send a request with the token; a header of None is left out, and `_` stands for `-`."""
        values: dict[str, str | None] = {"Authorization": f"Bearer {TOKEN}"}
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else msgspec.json.encode(body)
            values["Content-Type"] = "application/json"
        values |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {name: value for name, value in values.items() if value is not None}
        skipped = ["Content-Type"] if values.get("Content-Type") is None else []
        async with self.session.request(
            method,
            self.server.url + path,
            data=data,
            headers=sent,
            allow_redirects=False,
            skip_auto_headers=skipped,
        ) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, kind: type[T], /, **query: Any) -> T:
        """Read a part of the API."""
        words = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items())
        return (await self.send(f"{PREFIX}{path}?{words}")).read(kind)


@asynccontextmanager
async def serving(*places: str | Path, write: bool = False) -> AsyncIterator[Client]:
    """Serve places at a free port."""
    sources = Sources([str(place) for place in places])
    server = UiServer(sources, host="127.0.0.1", port=0, token=TOKEN, write=write)
    async with server, ClientSession() as session:
        yield Client(server, session)


async def eventually(condition: Any, timeout_s: float = 20.0) -> Any:
    """Return the first true result of an asynchronous condition."""
    async with asyncio.timeout(timeout_s):
        while not (result := await condition()):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.05)
        return result

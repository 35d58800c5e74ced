"""Fetch images from the web, from hosts that the app's owner allowed and no others.

A policy may write the address of an image, for example in a tool call whose result holds it. So an
address never decides what this machine connects to.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from lightspan.schema import semconv as c
from lightspan_gateway.api_errors import ApiError, bad_request
from lightspan_gateway.dialects.image_parts import ImageSource
from lightspan_gateway.limits import ImageLimits

MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = (301, 302, 303, 307, 308)

Fetch = Callable[[ImageSource], Awaitable[bytes]]


class _PrivateAddress(OSError):
    """A host's name leads to an address that is not public."""


class ImageFetcher:
    """Fetch images from allowed hosts.

    Args:
        limits: the hosts, and the limits of size and time.
    """

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[Fetch]:
        """Yield a function that fetches the images of one request.

        All of them together are bounded in size and time. The function raises `ApiError`: 400 if
        the host is not allowed, or answers with something else than an image that is small enough;
        502 if it cannot be reached.
        """
        loop = asyncio.get_running_loop()
        deadline, left = loop.time() + self._limits.fetch_timeout_s, self._limits.max_fetched_bytes

        async def fetch(source: ImageSource) -> bytes:
            nonlocal left
            try:
                async with asyncio.timeout_at(deadline):
                    data = await self._fetch(source, min(left, self._limits.max_bytes))
            except TimeoutError as error:
                seconds = f"{self._limits.fetch_timeout_s:g} s"
                raise _unreachable(source, f"it took more than {seconds}") from error
            except aiohttp.ClientError as error:
                if isinstance(error.__cause__, _PrivateAddress):
                    raise _refused(source, f"is refused: {error.__cause__}") from error
                raise _unreachable(source, str(error) or type(error).__name__) from error
            left -= len(data)
            return data

        yield fetch

    async def _fetch(self, source: ImageSource, limit: int) -> bytes:
        url = self._checked(source, source.url)
        for _ in range(MAX_REDIRECTS + 1):
            async with self._client().get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS:
                    url = self._checked(source, response.headers.get("Location", ""), url)
                    continue
                if response.status >= 500 or response.status == 429:
                    raise _unreachable(source, f"it answered {response.status}")
                if response.status != 200:
                    raise _refused(source, f"was answered {response.status} by {url.host}")
                return await _read(response.content, source, limit)
        raise _refused(source, f"is refused: {url.host} redirects more than {MAX_REDIRECTS} times")

    def _checked(self, source: ImageSource, address: str, base: URL | None = None) -> URL:
        """Return a URL whose host is allowed.

        Args:
            source: the image.
            address: the URL.
            base: URL that redirects to `address`; None for none.
        """
        try:
            url = URL(address) if base is None else base.join(URL(address))
            port = url.port
        except ValueError as error:
            raise _refused(source, f"is no valid address: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or port is None:
            raise _refused(
                source, "must be a data: URL with base64, or an address that begins with https://"
            )
        if url.user is not None or url.password is not None:
            raise _refused(source, "is refused: an address must not hold a user or a password")
        if base is not None and url.host != base.host:
            raise _refused(source, f"is refused: {base.host} redirects to another host")
        if not self._is_allowed(url):
            raise _refused(
                source,
                f"is at {_name(url)}, from which no images are fetched: send the image itself, as "
                f"base64, or allow the host (Trainer: image_hosts=[{_name(url)!r}], "
                f"`lightspan serve`: --image-host {_name(url)})",
            )
        return url

    def _is_allowed(self, url: URL) -> bool:
        """Return whether an entry of `ImageLimits.hosts` allows a URL."""
        name = _name(url)
        hosts = [host.lower() for host in self._limits.hosts]
        return name in hosts or any(h.startswith("*.") and name.endswith(h[1:]) for h in hosts)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Accept": "image/*", "Accept-Encoding": "identity"},
                auto_decompress=False,  # a small body may become a large one
                connector=aiohttp.TCPConnector(
                    resolver=_PublicResolver(self._limits.hosts), use_dns_cache=False
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


class _PublicResolver(AbstractResolver):
    """Resolve names of hosts; refuse private addresses of hosts that only a pattern allows.

    Args:
        hosts: the allowed hosts. One that is named may have a private address.
    """

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self._named = {URL(f"//{host}").host for host in hosts if not host.startswith("*.")}
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        if host.lower() not in self._named:
            for each in found:
                address = ipaddress.ip_address(each["host"].partition("%")[0])
                if not address.is_global or address.is_multicast:
                    raise _PrivateAddress(f"{host} has a private address; allow it by its name")
        return found

    async def close(self) -> None:
        await self._resolver.close()


async def _read(content: aiohttp.StreamReader, source: ImageSource, limit: int) -> bytes:
    data = bytearray()
    async for chunk in content.iter_chunked(65_536):
        data += chunk
        if len(data) > limit:
            raise _refused(source, f"is too large: at most {limit:,} bytes are read")
    return bytes(data)


def _name(url: URL) -> str:
    """Return a URL's host, with the port unless that is the scheme's, as a setting names it."""
    host = (url.host or "").lower()
    host = f"[{host}]" if ":" in host else host
    return host if url.is_default_port() else f"{host}:{url.port}"


def _refused(source: ImageSource, reason: str) -> ApiError:
    return bad_request(f"'{source.field}' {reason}", source.field, c.UNSUPPORTED_CONTENT)


def _unreachable(source: ImageSource, reason: str) -> ApiError:
    message = f"the image at '{source.field}' could not be fetched: {reason}"
    return ApiError(502, message, param=source.field, code="image_unreachable")

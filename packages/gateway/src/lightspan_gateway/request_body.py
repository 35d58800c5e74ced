"""The body of a request: read, decompressed and decoded."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from lightspan_gateway.api_errors import ApiError, bad_request

SMALL: Final = 8_192
"""Bytes that take a millisecond or two: a thread would cost as much."""
MAX_DEPTH: Final = 128
"""Levels of a request's JSON: the dialects and the chat template read it recursively."""
_WINDOW_BITS: Final[Mapping[str, int]] = {
    "gzip": zlib.MAX_WBITS | 16,
    "x-gzip": zlib.MAX_WBITS | 16,
    "deflate": zlib.MAX_WBITS,
}
"""Content-Encoding → zlib's `wbits`."""
_CHAT: Final = "chat/completions"

_Result = TypeVar("_Result")


class Body(NamedTuple):
    """The decoded body of a request."""

    fields: dict[str, Any]
    digest: str
    """Of the fields and the dialect: equal bodies of two dialects are two requests."""
    size: int
    """In bytes."""


async def read_body(request: web.Request) -> Body:
    """Read and decode the body, a large one in a thread.

    Raises:
        ApiError: 4xx, it is too large, or no JSON object.
    """
    dialect = request.rel_url.raw_path.rpartition("/v1/")[2]
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    data = b"".join(await received(request))
    is_plain = encoding in ("", "identity")
    size = len(data) if is_plain else SMALL + 1  # its decompressed size is unknown
    return await to_thread_if_large(
        size, _decoded, data, "" if is_plain else encoding, dialect, request.client_max_size
    )


async def to_thread_if_large(
    size: int, function: Callable[..., _Result], *arguments: object
) -> _Result:
    """Call the function, in a thread if it works on more than a few thousand bytes."""
    if size <= SMALL:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


async def received(request: web.Request) -> list[bytes]:
    """Return the parts of a body as they were sent.

    aiohttp's `read` would keep the body for as long as the connection idles.

    Args:
        request: whose body is read.

    Raises:
        ApiError: 4xx, the body is too large, or malformed.
    """
    limit, parts, size = request.client_max_size, list[bytes](), 0
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
    except web.RequestPayloadError as error:  # such as a malformed chunk
        raise bad_request(f"the request body cannot be read: {error}") from error
    return parts


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is too large: at most {limit:,} bytes are read")


def _decoded(data: bytes, encoding: str, dialect: str, limit: int) -> Body:
    if encoding:
        data = unpacked(data, encoding, limit)
    try:
        fields = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8
        raise bad_request(f"the request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise bad_request("the request body must be a JSON object")
    if _is_deeper(fields, MAX_DEPTH):
        raise bad_request(f"the request body is nested more than {MAX_DEPTH} levels deep")
    return _body_of(fields, dialect, len(data))


def _body_of(fields: dict[str, Any], dialect: str, size: int) -> Body:
    name = b"" if dialect == _CHAT else dialect.encode()
    return Body(fields, digest_of(name + msgspec.json.encode(fields, order="sorted"), 16), size)


def digest_of(data: bytes, size: int) -> str:
    """Return a digest of so many bytes, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=size).hexdigest()


NOTHING: Final = _body_of({}, _CHAT, 0)
"""Of a request whose body could not be read."""


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether JSON is nested deeper than so many levels."""
    level = [value]
    for _ in range(levels):
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
    return bool(level)


def unpacked(data: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body.

    Args:
        data: as it was sent.
        encoding: of the Content-Encoding header.
        limit: bytes that it may have decompressed.

    Raises:
        ApiError: 4xx, it is larger, malformed, or in another encoding than gzip and deflate.
    """
    if encoding not in _WINDOW_BITS:
        raise ApiError(
            415,
            f"a request body in Content-Encoding {encoding!r} is not read here: send it as gzip or "
            "deflate, or as it is",
        )
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        plain = decompressor.decompress(data, limit + 1)
    except zlib.error as error:
        raise bad_request(f"the request body is no {encoding}: {error}") from error
    if len(plain) > limit:
        raise _too_large(limit)
    if not decompressor.eof:
        raise bad_request(f"the request body is no {encoding}: it ends too early")
    return plain

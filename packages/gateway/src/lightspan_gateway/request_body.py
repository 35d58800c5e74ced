"""Reading of request bodies: size limits, decompression and JSON."""

from __future__ import annotations

import asyncio
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from lightspan_gateway.api_errors import ApiError, bad_request

SMALL: Final = 8_192
"""Maximum bytes that are processed without a thread. A thread costs one or two milliseconds, as
much as processing this many bytes."""
MAX_DEPTH: Final = 128
"""Maximum nesting of a request's JSON: dialects and chat templates process it recursively."""
_WINDOW_BITS: Final[Mapping[str, int]] = {
    "gzip": zlib.MAX_WBITS | 16,
    "x-gzip": zlib.MAX_WBITS | 16,
    "deflate": zlib.MAX_WBITS,
}
"""Content-Encoding → zlib's `wbits`."""
_HALF: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")

_Result = TypeVar("_Result")


class Body(NamedTuple):
    """The decoded body of a request."""

    fields: dict[str, Any]
    digest: str
    """Digest of the fields and the path: equal bodies for different APIs are different requests."""
    size: int
    """Decompressed size in bytes."""


EMPTY: Final = Body({}, "", 0)
"""The body of a request that cannot be read."""


async def read_body(request: web.Request) -> Body:
    """Read a request's body and decode it from JSON.

    A large or compressed body is decoded in a thread.

    Raises:
        ApiError: 4xx if the body is too large, or is not a JSON object.
    """
    dialect = request.rel_url.raw_path.rpartition("/v1/")[2]
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    limit, parts, size = request.client_max_size, list[bytes](), 0
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:  # not `request.read`, which holds the body for as long as the connection is idle
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
    except web.RequestPayloadError as error:  # such as a malformed chunk
        raise bad_request(f"the request body cannot be read: {error}") from error
    if encoding == "identity":
        encoding = ""
    elif encoding:
        size = SMALL + 1  # the decompressed size is unknown
    return await to_thread_if_large(size, decode_body, b"".join(parts), encoding, dialect, limit)


async def to_thread_if_large(
    size: int, function: Callable[..., _Result], *arguments: object
) -> _Result:
    """Call `function(*arguments)` and return its result.

    If `size` is more than `SMALL`, it is called in a thread, because it would block the event loop.

    Args:
        size: bytes of data that the function processes.
        function: the function.
        arguments: arguments of the function.
    """
    if size <= SMALL:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is too large: at most {limit:,} bytes are read")


def decode_body(data: bytes, encoding: str, dialect: str, limit: int) -> Body:
    """Decompress and decode a body.

    Args:
        data: the body as received.
        encoding: Content-Encoding; empty for none.
        dialect: path of the endpoint after `/v1/`.
        limit: maximum decompressed size in bytes.

    Raises:
        ApiError: 4xx if the body is malformed, too large or no JSON object.
    """
    if encoding:
        data = unpacked(data, encoding, limit)
    try:
        fields = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8
        half = _HALF.search(data)  # which msgspec takes for an end of the data
        reason = str(error)
        if half is not None:
            reason = f"{half[0].decode()} is half of a character (a surrogate pair); remove it"
        raise bad_request(f"the request body is not valid JSON: {reason}") from error
    if not isinstance(fields, dict):
        raise bad_request("the request body must be a JSON object")
    if _is_deeper(fields, MAX_DEPTH):
        raise bad_request(f"the request body is nested more than {MAX_DEPTH} levels deep")
    name = b"" if dialect == "chat/completions" else dialect.encode()
    digest = digest_of(name + msgspec.json.encode(fields, order="sorted"), 16)
    return Body(fields, digest, len(data))


def digest_of(data: bytes, size: int) -> str:
    """Return a digest of `size` bytes in hexadecimal."""
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether the JSON `value` is nested deeper than `levels`."""
    level = [value]
    for _ in range(levels):
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, dict | list)
        ]
    return bool(level)


def unpacked(data: bytes, encoding: str, limit: int) -> bytes:
    """Decompress a body.

    Args:
        data: the body as received.
        encoding: Content-Encoding.
        limit: maximum decompressed size in bytes.

    Raises:
        ApiError: 4xx if the body is larger, malformed, or neither gzip nor deflate.
    """
    if encoding not in _WINDOW_BITS:
        raise ApiError(
            415,
            f"Content-Encoding {encoding!r} is not supported: send the body as gzip or deflate, or "
            "uncompressed",
        )
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        plain = decompressor.decompress(data, limit + 1)
    except zlib.error as error:
        raise bad_request(f"the request body is not valid {encoding}: {error}") from error
    if len(plain) > limit:
        raise _too_large(limit)
    if not decompressor.eof:
        raise bad_request(f"the request body is not valid {encoding}: it is incomplete")
    return plain

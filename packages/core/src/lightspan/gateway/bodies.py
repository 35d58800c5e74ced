"""The body of a request: read in time, unpacked and decoded, at a cost that is known beforehand.

Reading ends by the clock, unpacking by the size of what comes out. Decoding holds all of Python in
one step, so what is decoded is bounded by what costs its time: values, not bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web

from lightspan.gateway.refusal import ApiError, bad_request
from lightspan.gateway.schemas import is_deeper
from lightspan.gateway.workers import LARGE, SMALL, Workers

BODY_S: Final = 60.0
"""Seconds that a body may take to arrive."""
DEEPEST: Final = 128
"""Levels of a request's JSON."""
MOST_MARKS: Final = 300_000
"""Quotes, commas and opening brackets that are no part of a text: as many token ids, or some 21,000
messages. Decoding these takes 0.01 s in one step, and all of Python waits for it."""
_MARKS: Final[Mapping[bytes, int]] = {b'"': 1, b",": 1, b"[": 3, b"{": 3}
"""What each counts: the garbage collector looks at lists and objects too."""
_TEXT_OR_MARK: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[,\[{]', re.DOTALL)
_PIECE: Final = 2**18
"""Bytes that are looked through in a fraction of a millisecond."""
_PACKED: Final[Mapping[str, int]] = {
    "gzip": zlib.MAX_WBITS | 16,
    "x-gzip": zlib.MAX_WBITS | 16,
    "deflate": zlib.MAX_WBITS,
}
"""How a body may be packed, with zlib's name of it."""
_CHAT: Final = "chat/completions"


class Body(NamedTuple):
    """What a request says."""

    fields: dict[str, Any]
    digest: str
    """Of what is asked: of two dialects that share a body each has its own."""
    size: int
    """In bytes."""


async def read_body(request: web.Request, reading: Workers) -> Body:
    """What a request says; a large one is decoded beside the event loop.

    Raises:
        ApiError: 4xx, it is too large, too slow, or no JSON object.
    """
    dialect = request.rel_url.raw_path.rpartition("/v1/")[2]
    packing = request.headers.get("Content-Encoding", "").strip().lower()
    parts = await received(request)
    size = sum(map(len, parts))
    if packing not in ("", "identity"):  # it may be large, however small it is
        size += SMALL + 1
    return await reading.run(_decoded, parts, packing, dialect, request.client_max_size, size=size)


async def received(
    request: web.Request, arrived: Callable[[int], object] | None = None
) -> list[bytes]:
    """All of a body as it was sent, in parts: a large one is joined beside the event loop.

    `arrived` is told of the bytes of each part, and ends the reading by what it raises.

    aiohttp's own `read` would keep it as long as the connection idles afterwards.

    Raises:
        ApiError: 4xx, it is too large, too slow, or malformed.
    """
    most, parts, size = request.client_max_size, list[bytes](), 0
    if (request.content_length or 0) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.content.iter_any():
                parts.append(part)
                size += len(part)
                if arrived is not None:
                    arrived(len(part))
                if size > most:
                    raise _too_large(most)
    except TimeoutError as error:
        raise ApiError(408, f"the request body took more than {BODY_S:g} s to arrive") from error
    except web.RequestPayloadError as error:  # such as a malformed chunk
        raise bad_request(f"the request body cannot be read: {error}") from error
    return parts


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the request body is too large: at most {most:,} bytes are read")


def _decoded(parts: list[bytes], packing: str, dialect: str, most: int) -> Body:
    data = b"".join(parts)  # which lets other threads go on if it is large
    if packing not in ("", "identity"):
        data = unpacked(data, packing, most)
    if len(data) > MOST_MARKS and _has_too_many(data):
        raise bad_request(
            f"the request body has more than {MOST_MARKS:,} quotes, commas and opening brackets "
            "outside its texts: no model reads so many values"
        )
    try:
        fields = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # also of letters that are no UTF-8
        raise bad_request(f"the request body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise bad_request("the request body must be a JSON object")
    if is_deeper(fields, DEEPEST):  # what reads it goes down by calling itself
        raise bad_request(f"the request body is nested more than {DEEPEST} levels deep")
    return _body_of(fields, dialect, len(data))


def _body_of(fields: dict[str, Any], dialect: str, size: int) -> Body:
    named = b"" if dialect == _CHAT else dialect.encode()
    said = fields if size <= LARGE else _with_digests(fields)
    return Body(fields, digest_of(named + msgspec.json.encode(said, order="sorted"), 16), size)


def _with_digests(value: Any) -> Any:
    """The value with a digest in place of each long text. To word 15 MB of line ends as JSON is a
    step of 0.05 s, for which all of Python waits; a digest is made while others go on."""
    if isinstance(value, str) and len(value) > _PIECE:
        return ["blake2b", digest_of(value.encode(), 16)]
    if isinstance(value, dict):
        return {key: _with_digests(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_digests(each) for each in value]
    return value


def digest_of(data: bytes, size: int) -> str:
    """So many bytes that stand for the data, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def letters_of(said: Any, *, but: Callable[[Any], bool] = lambda value: False) -> int:
    """Of all texts in it: it has as many bytes as JSON, or more.

    Args:
        but: whether an object is left out.
    """
    letters, left = 0, [said]
    while left:
        value = left.pop()
        if isinstance(value, str):
            letters += len(value)
        elif isinstance(value, Mapping):
            left += () if but(value) else value.values()
        elif isinstance(value, list | tuple):
            left += value
    return letters


NOTHING: Final = _body_of({}, _CHAT, 0)
"""Of a request whose body could not be read."""


def unpacked(data: bytes, packing: str, most: int) -> bytes:
    """A packed body, at most so many bytes of it; zlib lets other threads go on meanwhile."""
    if packing not in _PACKED:
        raise ApiError(
            415,
            f"a request body in Content-Encoding {packing!r} is not read here: send it as gzip or "
            "deflate, or as it is",
        )
    bits = _PACKED[packing]
    if packing == "deflate" and data[:1] and data[0] & 15 != 8:  # as some send it: no header
        bits = -zlib.MAX_WBITS
    unpacking = zlib.decompressobj(bits)
    try:
        plain = unpacking.decompress(data, most + 1)
    except zlib.error as error:
        raise bad_request(f"the request body is no {packing}: {error}") from error
    if len(plain) > most:
        raise _too_large(most)
    if not unpacking.eof or unpacking.unused_data:
        raise bad_request(f"the request body is no {packing}: it ends too early, or too late")
    return plain


def _has_too_many(data: bytes) -> bool:
    # in pieces: between them other threads have their turn
    counted = (
        data.count(mark, start, start + _PIECE) * counts
        for start in range(0, len(data), _PIECE)
        for mark, counts in _MARKS.items()
    )
    if sum(counted) <= MOST_MARKS:
        return False
    marks = 0
    for found in _TEXT_OR_MARK.finditer(data):  # most may be in a text
        marks += _MARKS.get(found[0], 2)
        if marks > MOST_MARKS:
            return True
    return False

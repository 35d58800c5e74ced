"""Tests of request bodies, headers and paths: decoding, limits and errors."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest

from lightspan.schema import semconv as c
from lightspan.stores.protocol import Store
from lightspan_gateway import request_body
from lightspan_testing.gateway_suite import Rig, make_rig
from tests.gateway.posting import ask, post

BODY = json.dumps(ask()).encode()


# --- what tells one body from another -------------------------------------------------------
def test_bodies_are_told_apart_by_all_that_they_say() -> None:
    def digest(text: str, dialect: str = "chat/completions", **fields: Any) -> str:
        body = json.dumps({"model": "m", "messages": [{"content": text}], **fields}).encode()
        return request_body.decode_body(body, "", dialect, 2**24).digest

    assert digest("a", n=2, user="b") == digest("a", user="b", n=2)
    others = [digest("b"), digest("a", n=2), digest("a", dialect="responses")]
    assert len({digest("a"), *others}) == 4


# --- how a body is packed -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("packing", "data"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
    ],
)
async def test_packed_bodies_are_read(store: Store, packing: str, data: bytes) -> None:
    async with make_rig(store, "ok") as rig:
        assert (await post(rig, data, **{"Content-Encoding": packing}))[0] == 200


@pytest.mark.parametrize(
    ("packing", "data", "status", "message"),
    [
        ("gzip", BODY, 400, "is not valid gzip"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], 400, "it is incomplete"),
        ("deflate", b"", 400, "it is incomplete"),
        ("br", BODY, 415, "Content-Encoding 'br' is not supported"),
        ("gzip", gzip.compress(bytes(2**25), 1, mtime=0), 413, "at most 16,777,216 bytes are read"),
        ("deflate", zlib.compress(bytes(2**25), 1), 413, "at most 16,777,216 bytes are read"),
    ],
)
async def test_what_is_not_packed_as_it_says_is_refused(
    store: Store, packing: str, data: bytes, status: int, message: str
) -> None:
    async with make_rig(store, "ok") as rig:
        answered, body = await post(rig, data, **{"Content-Encoding": packing})
    assert answered == status
    assert message in body["error"]["message"]


# --- what is no JSON ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value",
    [
        "1e400",
        "1" * 5_000,
        "NaN",
        '"\\ud800"',
        "[" * 5_000,
    ],
)
async def test_numbers_and_letters_that_nothing_can_hold_are_refused(
    store: Store, value: str
) -> None:
    async with make_rig(store, "ok") as rig:
        data = BODY[:-1] + b', "seed": ' + value.encode() + b"}"
        status, body = await post(rig, data)
    assert status == 400
    assert "is not valid JSON" in body["error"]["message"]


@pytest.mark.parametrize("rest", ["", " y", "\\n", "\\ud83e", " and a longer text"])
async def test_half_of_a_character_is_named_wherever_it_is(store: Store, rest: str) -> None:
    data = b'{"model": "m", "messages": [{"role": "user", "content": "x\\ud83e%s"}]}'
    async with make_rig(store, "ok") as rig:
        status, body = await post(rig, data % rest.encode())
    assert status == 400
    assert r"valid JSON: \ud83e is half of a character" in body["error"]["message"]


async def test_letters_that_are_no_utf_8_are_refused(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        assert (await post(rig, BODY.replace(b"12 + 7", b"\xff")))[0] == 400
        assert (await post(rig, json.dumps(ask()).encode("utf-16")))[0] == 400


async def test_a_whole_number_of_any_size_is_a_number_all_the_same(store: Store) -> None:
    """Check that a number that Python can parse is reported as out of range."""
    async with make_rig(store, "ok") as rig:
        data = BODY[:-1] + f', "seed": {10**4000}}}'.encode()
        status, body = await post(rig, data)
        assert (status, body["error"]["param"]) == (400, "seed")
        assert len(body["error"]["message"]) < 5_000


# --- headers and paths ----------------------------------------------------------------------
ODD_HEADERS = [
    ("Authorization", b"Bearer \xff\xfe"),
    ("x-api-key", b"\xe9"),
    ("Host", b"\xff"),
    ("Content-Encoding", b"\xff"),
    ("Content-Type", b"application/json; charset=\xe9"),
    ("Content-Type", b"multipart/form-data; boundary="),
    (c.HEADER_CALL_ID, b"\xff\xfe"),
    (c.HEADER_AGENT, b"\xff"),
    (c.HEADER_ATTEMPT, b"\xff"),
    (c.HEADER_PARENT, b"\xff"),
    (c.HEADER_PROTOCOL, b"\xff"),
    ("x-stainless-retry-count", b"\xff"),
]


@pytest.mark.parametrize("with_token", [True, False])
async def test_odd_headers_are_answered(store: Store, with_token: bool) -> None:
    """Check that invalid headers never cause a 5xx status, with and without a token."""
    async with make_rig(store, lambda request: "ok") as rig:
        for name, value in ODD_HEADERS:
            headers = {"Host": b"a", name: value}
            if with_token and name != "Authorization":
                headers["Authorization"] = f"Bearer {rig.attempt.call_token}".encode()
            status = await raw(rig, headers)
            if not with_token:
                assert status in (400, 401), (name, value)
            else:
                assert status == 200 or 400 <= status < 500, (name, value)


async def raw(rig: Rig, headers: dict[str, bytes]) -> int:
    """Send a valid body with the given headers; return the status."""
    port = int(rig.gateway.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [b"POST /v1/chat/completions HTTP/1.1"]
    lines += [name.encode() + b": " + value for name, value in headers.items()]
    lines += [b"Connection: close", b"Content-Length: %d" % len(BODY), b"", BODY]
    writer.write(b"\r\n".join(lines))
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ")[1])


async def test_a_model_that_is_no_name_is_refused(store: Store) -> None:
    async with make_rig(store, "ok") as rig:
        for model in (["policy"], {"a": 1}, 5, "x" * 2_000):
            status, body = await post(rig, ask(model=model))
            assert (status, body["error"]["param"]) == (400, "model")

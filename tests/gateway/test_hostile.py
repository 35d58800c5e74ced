"""Tests that hostile requests are answered, and never with a 5xx status."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Final

import pytest

from lightspan.protocols.engine import EngineCapabilities
from lightspan.schema.records import Mode
from lightspan.schema.routing import Routing
from lightspan.stores.protocol import Store
from lightspan_gateway.server import Server
from lightspan_gateway.serving.public_access import ServingGateway
from lightspan_testing.gateway_suite import POLICY, make_rig, shared_tokenizer
from lightspan_testing.scripted_engine import ScriptedEngine
from packages.gateway.tests.hostile import Hostile, requests

REQUESTS: Final = 600
MAX_REFUSAL: Final = 20_000
"""Maximum size in bytes of a response that refuses a request."""
ABLE: Final = EngineCapabilities(exact_tokens=True, grammars="the script")


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.VAL])
async def test_a_training_gateway_answers_every_hostile_request(store: Store, mode: Mode) -> None:
    async with make_rig(store, lambda request: "ok", mode=mode, capabilities=ABLE) as rig:
        await _attack(rig.gateway, rig.attempt.call_token, seed=len(mode))


async def test_a_serving_gateway_answers_every_hostile_request() -> None:
    engine = ScriptedEngine(shared_tokenizer(), lambda request: "ok", capabilities=ABLE)
    async with ServingGateway(engine, Routing(default=POLICY), key="sesame") as gateway:
        await _attack(gateway, "sesame", seed=1)


async def _attack(gateway: Server, token: str, seed: int) -> None:
    port = int(gateway.url.rpartition(":")[2])
    statuses: Counter[int] = Counter()
    hostile = requests(seed, host=f"127.0.0.1:{port}", token=lambda: token)
    for _ in range(REQUESTS):
        request = next(hostile)
        try:
            async with asyncio.timeout(30):
                status, size = await _answer(port, request)
        except (TimeoutError, EOFError, ConnectionError):
            status, size = 599, 0
        assert status < 500, f"{request.kind}: {request.data[:3_000]!r}"
        assert status < 400 or size < MAX_REFUSAL
        statuses[status] += 1
    assert statuses[200] > REQUESTS / 20  # some requests reach the model
    assert statuses[400] > REQUESTS / 20


async def _answer(port: int, request: Hostile) -> tuple[int, int]:
    """Send a request; return the status and the size of the response's body, both 0 without a
    response.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.data)
        with suppress(ConnectionError):  # the server may answer before it reads the whole request
            await writer.drain()
        status = 0
        while request.is_answered and status < 200:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(head.split(b" ", 2)[1])
        if status == 0 or request.data.startswith(b"HEAD"):
            return status, 0
        if b"transfer-encoding: chunked" in head:
            return status, len(await reader.readuntil(b"0\r\n\r\n"))
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        return status, len(await reader.readexactly(length))
    finally:
        writer.transport.abort()

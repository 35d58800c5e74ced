"""Listeners to calls hear how each of them ended, once."""

from __future__ import annotations

import asyncio

import openai
import pytest

from lightspan_testing.scripted import Reply, ScriptedServer
from lightspan_testing.wait import until
from packages.core.tests.capture.clients import (
    MESSAGES,
    WAYS,
    acting_as,
    ask_async,
    async_client_of,
    client_of,
)
from packages.core.tests.capture.streams import stopping

pytestmark = pytest.mark.usefixtures("unwrapped")


async def test_a_cancelled_call(call_ends: list[bool]) -> None:
    with stopping("chat") as server, acting_as(None, "writer"):
        async with async_client_of(server) as client:
            asking = asyncio.ensure_future(ask_async(client, "stream=True"))
            await until(lambda: server.requests)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
    assert call_ends == [False]


@pytest.mark.parametrize("through_gateway", [True, False])
@pytest.mark.parametrize("way", ["create", "stream=True", "raw stream"])
def test_a_failure(call_ends: list[bool], way: str, through_gateway: bool) -> None:
    with ScriptedServer(lambda _: Reply(status=400)) as server:
        gateway = server if through_gateway else None
        with (
            client_of(server) as client,
            acting_as(gateway, "writer"),
            pytest.raises(openai.BadRequestError),
        ):
            WAYS[way](client)
    assert call_ends == [False]


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_stream_that_is_left(call_ends: list[bool], is_begun: bool) -> None:
    """It was answered if anything of it came."""
    with (
        stopping("chat") as server,
        client_of(server) as client,
        acting_as(None, "writer"),
        client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream,
    ):
        if is_begun:
            next(stream)
        assert call_ends == []
    assert call_ends == [is_begun]

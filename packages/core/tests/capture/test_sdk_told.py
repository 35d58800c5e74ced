"""Whoever listens to calls hears how each of them ended, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import openai
import pytest

from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AgentContext, CallEnd, add_call_listener, remove_call_listener
from lightspan_testing.scripted import Reply, ScriptedServer
from lightspan_testing.wait import until
from packages.core.tests.capture.clients import (
    ASYNC_WAYS,
    MESSAGES,
    WAYS,
    acting_as,
    ask_async,
    async_client_of,
    client_of,
)
from packages.core.tests.capture.streams import stopping

pytestmark = pytest.mark.usefixtures("unwrapped")


@pytest.fixture
def told() -> Iterator[list[bool]]:
    """How each call ended."""
    ends: list[bool] = []

    def listener(_: AgentContext) -> CallEnd:
        return ends.append

    add_call_listener(listener)
    yield ends
    remove_call_listener(listener)


@pytest.mark.parametrize("name", ["writer", "checker"], ids=["from the gateway", "from elsewhere"])
@pytest.mark.parametrize("way", WAYS)
def test_an_answer(
    gateway: ScriptedServer, elsewhere: ScriptedServer, told: list[bool], way: str, name: str
) -> None:
    with client_of(elsewhere) as client, acting_as(gateway, name) as scope:
        WAYS[way](client)
    assert (told, scope.recorder.capture_errors()) == ([True], [])


@pytest.mark.parametrize("name", ["writer", "checker"], ids=["from the gateway", "from elsewhere"])
@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_an_async_answer(
    gateway: ScriptedServer, elsewhere: ScriptedServer, told: list[bool], way: str, name: str
) -> None:
    async with async_client_of(elsewhere) as client:
        with acting_as(gateway, name) as scope:
            await ask_async(client, way)
        await sdk_instrumentation.aclose()
    assert (told, scope.recorder.capture_errors()) == ([True], [])


@pytest.mark.parametrize("through_gateway", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_failure(told: list[bool], way: str, through_gateway: bool) -> None:
    with ScriptedServer(lambda _: Reply(status=400)) as server:
        gateway = server if through_gateway else None
        with (
            client_of(server) as client,
            acting_as(gateway, "writer"),
            pytest.raises(openai.BadRequestError),
        ):
            WAYS[way](client)
    assert told == [False]


LEFT: dict[str, tuple[Callable[[openai.Stream[object]], object], bool]] = {
    "in the middle": (next, True),
    "before anything came": (lambda stream: None, False),
}


@pytest.mark.parametrize("when", LEFT)
def test_a_stream_that_is_left(told: list[bool], when: str) -> None:
    leave, is_answered = LEFT[when]
    with (
        stopping("chat") as server,
        client_of(server) as client,
        acting_as(None, "writer"),
        client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream,
    ):
        leave(stream)
        assert told == []
    assert told == [is_answered]


async def test_a_cancelled_call(told: list[bool]) -> None:
    with stopping("chat") as server, acting_as(None, "writer"):
        async with async_client_of(server) as client:
            asking = asyncio.ensure_future(ask_async(client, "stream=True"))
            await until(lambda: server.requests)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
    assert told == [False]

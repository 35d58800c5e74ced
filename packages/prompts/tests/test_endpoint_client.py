"""Tests of the client of reflection models and judges: retries, rate limits, unusual answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import openai
import pytest

from lightspan import LLM
from lightspan.errors import EngineError
from lightspan_prompts import endpoint_client
from lightspan_prompts.endpoint_client import Answer, EndpointClient
from lightspan_testing.scripted import Reply, ScriptedServer


async def asks(url: str, notes: list[str] | None = None, **options: Any) -> Answer:
    values = {"timeout_s": 30.0, "patience_s": 30.0, "retry_backoff_s": 0.01, **options}
    note = [].append if notes is None else notes.append
    model = EndpointClient(LLM(base_url=url, model="thinker"), note=note, **values)
    try:
        return await model.ask("why?")
    finally:
        await model.aclose()


@pytest.mark.parametrize(
    ("reply", "error", "tries"),
    [
        (Reply(status=401, text="who are you"), "AuthenticationError: .*who are you", 1),
        (Reply(status=404), "NotFoundError", 1),
        (Reply(status=429, headers={"retry-after": "31"}), "RateLimitError", 1),
        (Reply(status=500), "InternalServerError", 4),
        (Reply(drop=True), "APIConnectionError", 4),
        (Reply(text="late", delay_s=1.0), "(API)?TimeoutError", 4),
    ],
)
async def test_failures(server: ScriptedServer, reply: Reply, error: str, tries: int) -> None:
    server.script = lambda request: reply
    with pytest.raises(EngineError, match=f"thinker at {server.url} failed: {error}"):
        await asks(server.url, timeout_s=0.3)
    assert len(server.requests) == tries


async def test_an_endpoint_that_never_ends_its_answer() -> None:
    """It never pauses, so no read timeout ends it."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n"
    answering: list[Any] = []

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        while not writer.is_closing():  # while the client is connected
            writer.write(b" ")
            await asyncio.sleep(0.05)
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    endpoint = await asyncio.start_server(drips, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{endpoint.sockets[0].getsockname()[1]}/v1"
    with pytest.raises(EngineError, match=r"failed: TimeoutError: no complete answer within 0.3 s"):
        await asyncio.wait_for(asks(url, timeout_s=0.3), 15)
    assert len(answering) == 4
    await asyncio.gather(*answering)
    endpoint.close()
    await endpoint.wait_closed()


async def test_an_endpoint_that_recovers(server: ScriptedServer) -> None:
    answers = iter([Reply(status=503), Reply(drop=True), "well"])
    server.script = lambda request: next(answers)
    assert await asks(server.url) == Answer("well", "stop", 1, 1)


async def test_a_busy_endpoint_is_waited_for(server: ScriptedServer) -> None:
    busy = Reply(status=429, headers={"retry-after-ms": "20"})
    answers = iter([*[busy] * 9, Reply(status=429), "well"])
    server.script = lambda request: next(answers)
    notes: list[str] = []
    assert (await asks(server.url, notes)).text == "well"
    assert len(server.requests) == 11
    assert notes == []  # well under five seconds


@pytest.mark.parametrize(
    ("after", "waits"),
    [
        ("0", [0.1, 0.1, 0.1]),  # not 1, 2 and 4 s, and not at once either
        ("7", [7.0, 7.0, 7.0]),
        ("Mon, 01 Jan 2001 00:00:00 GMT", [0.1, 0.1, 0.1]),
        ("soon", [1.0, 2.0, 4.0]),
        (None, [1.0, 2.0, 4.0]),
    ],
)
async def test_the_wait_that_the_endpoint_asks_for(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, after: str | None, waits: list[float]
) -> None:
    """Every wait of five seconds is noted, and shorter ones that reach as much together."""
    headers = {} if after is None else {"retry-after": after}
    answers = iter([*[Reply(status=429, headers=headers)] * 3, "well"])
    server.script = lambda request: next(answers)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(endpoint_client, "sleep", sleep)
    notes: list[str] = []
    assert (await asks(server.url, notes, retry_backoff_s=1.0)).text == "well"
    assert slept == waits
    assert len(notes) == {7.0: 3, 1.0: 1}.get(waits[0], 0)


async def test_waits_grow_where_an_endpoint_asks_for_short_ones_for_long(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.script = lambda request: Reply(status=429, headers={"retry-after": "0"})
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(endpoint_client, "sleep", sleep)
    notes: list[str] = []
    with pytest.raises(EngineError, match=r"busy \(429\) for 3\d\d\d s"):
        await asks(server.url, notes, patience_s=3600)
    assert len(server.requests) < 150
    assert slept[-1] == 60.0
    assert len(notes) > 50


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (
            "7200",
            r"busy \(429\) for 0 s, it asks to wait 7200 s more, and patience_s=30 is the limit",
        ),
        (
            None,
            r"for 15 s, the next wait is 16 s more, and patience_s=30 .* a larger patience_s, or",
        ),
    ],
)
async def test_an_endpoint_that_is_busy_for_too_long(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, after: str | None, why: str
) -> None:
    headers = {} if after is None else {"retry-after": after}
    server.script = lambda request: Reply(status=429, headers=headers)

    async def sleep(seconds: float) -> None:
        pass

    monkeypatch.setattr(endpoint_client, "sleep", sleep)
    with pytest.raises(EngineError, match=why):
        await asks(server.url, retry_backoff_s=1.0, patience_s=30.0)


async def answered(body: bytes) -> tuple[Answer | str, int]:
    """Ask an endpoint whose every response is `body`.

    Return the answer or the error, and the number of requests.
    """
    requests = []

    def answers(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, content=body, headers={"content-type": "application/json"})

    llm = LLM(base_url="http://127.0.0.1:9/v1", model="m")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answers)) as http:
        client = openai.AsyncOpenAI(base_url=llm.base_url, api_key="k", http_client=http)
        options: Any = {"timeout_s": None, "patience_s": 0.0, "retry_backoff_s": 0.0}
        model = EndpointClient(llm, note=print, client=client, **options)
        try:
            return await model.ask("?"), len(requests)
        except EngineError as error:
            return str(error), len(requests)


SAID = "well \ud83d"
PARTS = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": SAID}, "odd"]


@pytest.mark.parametrize(
    ("choice", "usage", "expected"),
    [
        (
            {"message": {"content": PARTS}},
            {"prompt_tokens": 3, "completion_tokens": 4},
            ("well \ufffd", "stop", 3, 4),
        ),
        (
            {"message": {"content": SAID}},
            {"prompt_tokens": 3, "completion_tokens": None},
            ("well \ufffd", "stop", 3, 0),
        ),
        ({"message": {"content": 1}}, {"total_tokens": 7}, ("", "stop", 0, 0)),
        ({"message": None}, None, ("", "stop", 0, 0)),
        ({}, None, ("", "stop", 0, 0)),
    ],
)
async def test_answers_that_no_sdk_promises(choice: Any, usage: Any, expected: Any) -> None:
    reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    choices = [{"index": 0, "finish_reason": "stop", **choice}]
    assert await answered(json.dumps({**reply, "choices": choices}).encode()) == (expected, 1)


@pytest.mark.parametrize(
    ("body", "tries", "message"),
    [
        (b'{"choices": [', endpoint_client.MAX_TRIES, "failed: JSONDecodeError: Expecting value"),
        (b"null", 1, "returned no choice: 'None'"),
        (b'{"choices": {"a": 1}}', 1, "returned no choice"),
    ],
)
async def test_a_body_that_is_no_answer(body: bytes, tries: int, message: str) -> None:
    error, requests = await answered(body)
    assert isinstance(error, str)
    assert message in error
    assert requests == tries

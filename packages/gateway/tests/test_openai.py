"""Tests of OpenAIEngine, with the engine suite and without."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from lightspan.errors import ConfigError
from lightspan.schema.llm import LLM
from lightspan_gateway.chat_engine import EndpointRefused
from lightspan_gateway.openai_engine import OpenAIEngine
from lightspan_testing.chat_engine_suite import ChatEngineSuite
from lightspan_testing.scripted import Reply, ScriptedServer

BODY: dict[str, Any] = {"model": "asked", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr("lightspan_gateway.openai_engine.asyncio.sleep", lambda seconds: sleep(0))


class TestOpenAIEngine(ChatEngineSuite):
    def make_engine(self, url: str) -> OpenAIEngine:
        return OpenAIEngine(LLM(base_url=url, model="real"))


async def test_model_sampling_and_key_are_the_endpoints() -> None:
    with ScriptedServer("hello") as server:
        llm = LLM(base_url=server.url + "/", model="real", sampling={"temperature": 0})
        engine = OpenAIEngine(llm)
        await engine.start()
        await engine.chat(BODY)
        await engine.close()
    [request] = server.requests
    assert request.body == {**BODY, "model": "real", "temperature": 0}
    assert request.headers["authorization"] == "Bearer none"


async def test_tries_again() -> None:
    bad = Reply(status=503)
    with ScriptedServer([bad, bad, "fine", bad, bad, bad]) as server:
        engine = OpenAIEngine(LLM(base_url=server.url, model="real"))
        await engine.start()
        assert (await engine.chat(BODY)).status == 200
        assert (await engine.chat(BODY)).status == 503
        await engine.close()
        assert len(server.requests) == 6


async def test_a_refusal_that_quotes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal reaches the app and the store without the key."""
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    bad = Reply(status=401, text="Incorrect API key provided: sk-secret")
    with ScriptedServer([bad, bad]) as server:
        engine = OpenAIEngine(LLM(base_url=server.url, model="real", api_key_env="SOME_KEY"))
        await engine.start()
        answer = await engine.chat(BODY)
        assert json.loads(answer.body)["error"]["message"] == "Incorrect API key provided: ***"
        with pytest.raises(EndpointRefused, match=r"provided: \*\*\*"):
            await anext(aiter(engine.stream({**BODY, "stream": True})))
        await engine.close()
    assert [r.headers["authorization"] for r in server.requests] == ["Bearer sk-secret"] * 2


async def test_a_key_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    llm = LLM(base_url="http://127.0.0.1:9/v1", model="real", api_key_env="SOME_KEY")
    with pytest.raises(ConfigError, match=r"\$SOME_KEY"):
        await OpenAIEngine(llm).start()


async def test_events_of_any_form() -> None:
    """Comments, CRLF, a missing space after the colon, and lines of any length are read."""
    long = json.dumps({"x": "y" * 300_000}).encode()
    body = b": hi\r\n\r\ndata:{}\r\n\r\nevent: x\ndata: " + long + b"\n\ndata:[DONE]\n\n"

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(body), 70_001):
            await response.write(body[start : start + 70_001])
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    engine = OpenAIEngine(LLM(base_url=f"http://127.0.0.1:{port}/v1", model="real"))
    await engine.start()
    assert [payload async for payload in engine.stream(BODY)] == [b"{}", long, b"[DONE]"]
    await engine.close()
    await runner.cleanup()

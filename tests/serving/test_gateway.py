"""Tests of the serving endpoint: routing, authentication and memory."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import tracemalloc
from typing import Any

import aiohttp
import openai
import pytest

from lightspan.errors import ConfigError, EngineError
from lightspan.schema import semconv as c
from lightspan.schema.llm import LLM
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.schema.semconv import ROUTING_PATH
from lightspan_gateway.serving.public_access import (
    MAX_CALLS,
    USAGE_PATH,
    ServingGateway,
    is_loopback,
)
from lightspan_testing.gateway_suite import MESSAGES, shared_tokenizer
from lightspan_testing.scripted import ScriptedServer
from lightspan_testing.scripted_engine import Gate, Say
from lightspan_testing.wait import until
from tests.serving.gateways import (
    ROUTING,
    ask,
    calls_of,
    client_of,
    get,
    input_messages_of,
    make_engine,
    serving,
)


# --- who is answered by what ----------------------------------------------------------------
async def test_agents_are_mapped_as_trained() -> None:
    async with serving() as gateway:
        assert await ask(gateway, "/agents/writer/v1", model="gpt-5") == "I am sql"
        assert await ask(gateway, "/agents/team/planner/v1", model="gpt-5") == "I am plan"
        assert await ask(gateway, "/agents/checker/v1", model="sql") == "I am base"
        assert await ask(gateway, "/agents/judge-2/v1") == "I am sql"
        assert await ask(gateway, extra_headers={c.HEADER_AGENT: "checker"}) == "I am base"
        for model, policy in {"plan": "plan", "writer": "sql", "judge-9": "sql"}.items():
            assert await ask(gateway, model=model) == f"I am {policy}"
        _, usage = await get(gateway, USAGE_PATH)
        assert usage == {
            "agents": {
                "app": {"plan": 1},
                "checker": {"base": 2},
                "judge-2": {"sql": 1},
                "judge-9": {"sql": 1},
                "team/planner": {"plan": 1},
                "writer": {"sql": 2},
            },
            "failed": 0,
            "set_aside": {},
        }


async def test_an_unknown_model_is_404_and_told_what_there_is() -> None:
    async with serving() as gateway:
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(gateway, model="gpt-5")
        error: Any = caught.value.body
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "policies base, plan, sql; agents writer, planner, checker." in error["message"]
        async with client_of(gateway) as client:
            models = [model.id async for model in client.models.list()]
        assert models == ["base", "plan", "sql", "writer", "planner", "checker"]
        model = {"id": "writer", "object": "model", "created": 0, "owned_by": "lightspan"}
        assert await get(gateway, "/v1/models/writer") == (200, model)
        assert (await get(gateway, "/v1/models/gpt-5"))[0] == 404
        with pytest.raises(openai.NotFoundError, match="the request names no model; this endpoint"):
            await ask(gateway, model=None)


async def test_events_have_no_raw_unicode_line_ends() -> None:
    text = "a\u2028b\u2029c\u0085d"
    async with serving(text) as gateway, aiohttp.ClientSession() as session:
        body = {"model": "sql", "messages": MESSAGES, "stream": True}
        async with session.post(f"{gateway.url}/v1/chat/completions", json=body) as response:
            lines = (await response.text()).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


async def test_an_agent_that_we_do_not_answer_is_refused() -> None:
    async with serving() as gateway:
        with pytest.raises(openai.BadRequestError, match="'helper' is not answered here"):
            await ask(gateway, "/agents/helper/v1")


async def test_a_path_with_an_encoded_slash_is_refused_with_the_right_one() -> None:
    """It is the name of one agent with a slash in it, and no nested agent."""
    async with serving() as gateway:
        assert await ask(gateway, "/agents/team/writer/v1") == "I am sql"
        with pytest.raises(
            openai.BadRequestError, match=r"'team/writer' is: .*, /agents/team/writer/v1"
        ):
            await ask(gateway, "/agents/team%2Fwriter/v1")


async def test_an_upstream_answers_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "upstream-key")
    with ScriptedServer("from upstream") as server:
        upstream = LLM(base_url=server.url, model="", api_key_env="UPSTREAM_KEY")
        async with serving(upstream=upstream) as gateway:
            assert await ask(gateway, "/agents/helper/v1", model="gpt-5") == "from upstream"
            assert await ask(gateway, model="gpt-6") == "from upstream"
            assert await ask(gateway, "/agents/writer/v1", model="gpt-5") == "I am sql"
        assert [request.body["model"] for request in server.requests] == ["gpt-5", "gpt-6"]
        headers = {request.headers["authorization"] for request in server.requests}
        assert headers == {"Bearer upstream-key"}


# --- what is understood ---------------------------------------------------------------------


async def test_what_steers_one_providers_models_is_set_aside_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as gateway:
        assert await ask(gateway, verbosity="low") == "I am sql"
        assert await ask(gateway, verbosity="high", reasoning_effort="none") == "I am sql"
        _, usage = await get(gateway, USAGE_PATH)
        assert usage["set_aside"] == {"verbosity": 2, "reasoning_effort": 1}
    prefix = "ignored, because only one provider's models support it: "
    assert caplog.messages == [f"{prefix}verbosity", f"{prefix}reasoning_effort"]


async def test_sampling_is_the_requests_own() -> None:
    routing = Routing(rules=ROUTING.rules, default=Target(route=Route.POLICY, policy="sql"))
    async with serving(routing=routing, max_tokens=7) as gateway:
        await ask(gateway, temperature=0.25, top_p=0.5, max_tokens=9)
        await ask(gateway)
        first, second = (request.sampling for request in input_messages_of(gateway))
        assert (first.temperature, first.top_p, first.max_tokens) == (0.25, 0.5, 9)
        assert (second.temperature, second.top_p, second.max_tokens) == (1.0, 1.0, 7)


async def test_a_retry_joins_its_call_and_old_calls_are_forgotten() -> None:
    async with serving() as gateway, client_of(gateway) as client:
        body: Any = {"model": "sql", "messages": MESSAGES}
        for number in (1, 1, 2):
            headers = {c.HEADER_CALL_ID: f"call-{number}"}
            await client.chat.completions.create(**body, extra_headers=headers)
        assert len(input_messages_of(gateway)) == 2
        # an equal body of another client, retried after a failure elsewhere, is another call
        await client.chat.completions.create(**body, extra_headers={"x-stainless-retry-count": "1"})
        assert len(input_messages_of(gateway)) == 3
        for _ in range(MAX_CALLS + 20):
            await client.chat.completions.create(**body)
        assert len(calls_of(gateway)) == MAX_CALLS


# --- who may call ---------------------------------------------------------------------------
async def test_a_key_is_asked_for() -> None:
    async with serving(key="open sesame") as gateway:
        for path in ("/v1/models", ROUTING_PATH, USAGE_PATH):
            assert (await get(gateway, path))[0] == 401
            assert (await get(gateway, path, Authorization="Bearer open"))[0] == 401
            assert (await get(gateway, path, Authorization="Bearer open sesame"))[0] == 200
            # Anthropic's header; the other header takes precedence
            assert (await get(gateway, path, **{"x-api-key": "open"}))[0] == 401
            assert (await get(gateway, path, **{"x-api-key": "open sesame"}))[0] == 200
            both = {"x-api-key": "open sesame", "Authorization": "Bearer open"}
            assert (await get(gateway, path, **both))[0] == 401
        with pytest.raises(openai.AuthenticationError):
            await ask(gateway)
        status, health = await get(gateway, "/health")
        assert (status, health["status"]) == (200, "ok")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"without a key .*--api-key-env NAME"):
        ServingGateway(make_engine(), ROUTING, host=host)
    ServingGateway(make_engine(), ROUTING, host=host, key="secret")
    with pytest.raises(ConfigError, match="empty"):
        ServingGateway(make_engine(), ROUTING, host=host, key=" ")


def test_the_url_for_others_names_an_address_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightspan_gateway.http_server.own_address", lambda: "10.0.0.5")
    for host, url in (
        ("0.0.0.0", "http://10.0.0.5:8100"),
        ("::", "http://10.0.0.5:8100"),
        ("127.0.0.1", "http://127.0.0.1:8100"),
        ("example.org", "http://example.org:8100"),
    ):
        server = ServingGateway(make_engine(), ROUTING, host=host, port=8100, key="secret")
        assert server.public_url == url
    monkeypatch.setattr("lightspan_gateway.http_server.own_address", lambda: "")
    server = ServingGateway(make_engine(), ROUTING, host="0.0.0.0", port=8100, key="secret")
    assert server.public_url == "http://0.0.0.0:8100"


def test_what_loopback_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "localhost.example.org", "10.0.0.1")))


async def test_without_a_key_web_pages_of_elsewhere_are_refused() -> None:
    async with serving() as gateway:
        for headers in (
            {"Host": "evil.example.org"},
            {"Origin": "null"},
            {"Origin": "http://[bad"},
        ):
            assert (await get(gateway, "/v1/models", **headers))[0] == 403
        for headers in ({"Host": "localhost:8000"}, {"Origin": "http://127.0.0.1:3000"}):
            assert (await get(gateway, "/v1/models", **headers))[0] == 200


async def test_what_others_need_not_know_stays_here() -> None:
    secret = LLM(base_url="http://10.0.0.1/v1", model="m", api_key_env="KEY")
    routing = Routing(rules=[Rule("judge", Target(route=Route.ENDPOINT, endpoint=secret))])
    async with serving(routing=routing) as gateway:
        _, document = await get(gateway, ROUTING_PATH)
    assert "10.0.0.1" not in json.dumps(document)
    assert document["routing"]["rules"][0]["target"]["route"] == "endpoint"


# --- what is kept for retries -----------------------------------------------------------------
LARGE = 2_000_000
"""Number of letters of a request's body that must be freed; the test of 15 MB would take longer."""


async def test_what_no_retry_needs_is_not_kept() -> None:
    body = {"model": "sql", "messages": MESSAGES, "metadata": {"k": "v" * LARGE}}
    async with serving() as gateway, aiohttp.ClientSession(gateway.url) as session:

        async def send(number: int) -> bytes:
            headers = {c.HEADER_CALL_ID: f"call-{number}"}
            data = io.BytesIO(json.dumps(body).encode())
            async with session.post("/v1/chat/completions", data=data, headers=headers) as response:
                assert response.status == 200, await response.text()
                return await response.read()

        first = await send(0)
        gc.collect()
        tracemalloc.start()
        try:
            for number in range(1, 6):
                await send(number)
            # a thread may still hold the body that it decoded
            for _ in range(100):
                gc.collect()
                size = tracemalloc.get_traced_memory()[0]
                if size < LARGE:
                    break
                await asyncio.sleep(0.05)
            assert size < LARGE
        finally:
            tracemalloc.stop()
        assert len(calls_of(gateway)) == 6
        assert await send(0) == first  # a retry gets the stored answer
        assert len(input_messages_of(gateway)) == 6


async def test_a_response_goes_on_from_what_is_kept() -> None:
    async with serving() as gateway, client_of(gateway) as client:
        first = await client.responses.create(model="sql", input="a", instructions="Be brief.")
        await client.responses.create(model="sql", input="b", previous_response_id=first.id)
        earlier, later = (request.prompt_ids for request in input_messages_of(gateway))
        text = shared_tokenizer().decode(later)
        assert "I am sql" in text
        assert len(earlier) < len(later) + 10


# --- an engine that has died ------------------------------------------------------------------
async def test_health_says_what_the_engine_has_died_of() -> None:
    engine = make_engine()
    async with ServingGateway(engine, ROUTING) as gateway:
        status, document = await get(gateway, "/health")
        assert (status, document["status"]) == (200, "ok")
        engine.die(EngineError("the generation thread stopped: boom"))
        status, document = await get(gateway, "/health")
        assert (status, document["status"]) == (503, "failed")
        assert document["reason"] == "the generation thread stopped: boom"
        with pytest.raises(openai.InternalServerError, match="the generation thread stopped: boom"):
            await ask(gateway)


async def test_no_caller_keeps_a_call_going_after_it_has_left() -> None:
    """The header of a store's server has no effect here: nobody could come back for the answer."""
    gate = Gate()
    async with serving([Say(text="abc", gates={1: gate})]) as gateway:
        calling = asyncio.create_task(ask(gateway, extra_headers={c.HEADER_RELAYED: "1"}))
        await gate.reached.wait()
        calling.cancel()
        async with asyncio.timeout(20):  # less than `GatewayLimits.relayed_s`
            await until(lambda: not any(call.active for call in calls_of(gateway)))

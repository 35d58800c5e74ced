"""The serving endpoint, and apps that connect to it: who is answered by what; refusals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

import lightspan
from lightspan.capture import scope, wire
from lightspan.capture.emit import agent, emit_reward
from lightspan.capture.entry import open_scope
from lightspan.capture.scope import Scope
from lightspan.engines.protocol import GenerationRequest
from lightspan.errors import ConfigError, EngineError
from lightspan.gateway.calls import ServedCall
from lightspan.production.connect import ENDPOINT_VARIABLE, KEY_VARIABLE
from lightspan.schema import conventions as c
from lightspan.schema.conventions import ROUTING_PATH
from lightspan.schema.llm import LLM
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.serving import visitors
from lightspan.serving.visitors import (
    REMEMBERED,
    USAGE_PATH,
    ServingGateway,
    Visitors,
    is_loopback,
)
from lightspan.testing.attempts import read_recorded
from lightspan.testing.gateway_suite import MESSAGES, shared_tokenizer
from lightspan.testing.scripted import Reply, ScriptedServer
from lightspan.testing.scripted_engine import ScriptedEngine

ROUTING = Routing(
    rules=[
        Rule("writer", Target(route=Route.POLICY, policy="sql")),
        Rule("planner", Target(route=Route.POLICY, policy="plan")),
        Rule("checker", Target(route=Route.BASE, policy="base")),
        Rule("judge*", Target(route=Route.SHARED, policy="sql")),
    ]
)


def says_who(request: Any) -> str:
    return f"I am {request.policy}"


def make_engine(script: Any = says_who) -> ScriptedEngine:
    policies = {"sql": 4, "plan": 2, "base": 0}
    return ScriptedEngine(shared_tokenizer(), script, policies=policies)


@asynccontextmanager
async def serving(script: Any = says_who, **options: Any) -> AsyncIterator[ServingGateway]:
    gateway = ServingGateway(make_engine(script), options.pop("routing", ROUTING), **options)
    async with gateway:
        yield gateway


def calls_of(gateway: ServingGateway) -> list[ServedCall]:
    [account] = gateway.terms.accounts()
    return list(account.calls.values())


def asked_of(gateway: ServingGateway) -> list[GenerationRequest]:
    engine = gateway._intake._engine
    assert isinstance(engine, ScriptedEngine)
    return engine.requests


def client_of(gateway: ServingGateway, path: str = "/v1", **options: Any) -> openai.AsyncOpenAI:
    known = {"base_url": gateway.url + path, "api_key": "unused", "max_retries": 0}
    return openai.AsyncOpenAI(**{**known, **options})


async def ask(gateway: ServingGateway, path: str = "/v1", **fields: Any) -> str:
    async with client_of(gateway, path) as client:
        body = {"model": "sql", "messages": MESSAGES, **fields}
        answer = await client.chat.completions.create(**body)
        return str(answer.choices[0].message.content)


async def get(gateway: ServingGateway, path: str, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(gateway.url + path, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())


# --- who is answered by what ----------------------------------------------------------------
async def test_agents_are_mapped_as_trained() -> None:
    async with serving() as gateway:
        assert await ask(gateway, "/agents/writer/v1", model="gpt-5") == "I am sql"
        assert await ask(gateway, "/agents/team/planner/v1", model="gpt-5") == "I am plan"
        assert await ask(gateway, "/agents/checker/v1", model="sql") == "I am base"
        assert await ask(gateway, "/agents/judge-2/v1") == "I am sql"
        assert await ask(gateway, extra_headers={c.HEADER_AGENT: "checker"}) == "I am base"
        for model, policy in {
            "sql": "sql",
            "plan": "plan",
            "base": "base",
            "writer": "sql",
            "judge-9": "sql",
            "checker": "base",
        }.items():
            assert await ask(gateway, model=model) == f"I am {policy}"
        _, usage = await get(gateway, USAGE_PATH)
        assert usage == {
            "agents": {
                "app": {"base": 1, "plan": 1, "sql": 1},
                "checker": {"base": 3},
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


async def test_one_model_and_no_model() -> None:
    async with serving() as gateway:
        known = {"id": "writer", "object": "model", "created": 0, "owned_by": "lightspan"}
        assert await get(gateway, "/v1/models/writer") == (200, known)
        status, body = await get(gateway, "/v1/models/gpt-5")
        assert (status, body["error"]["message"]) == (
            404,
            "unknown model 'gpt-5'; this endpoint has base, plan, sql, writer, planner, checker",
        )
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


async def test_clients_that_leave_a_stream_are_no_failure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(self: web.StreamResponse, data: bytes) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async with serving() as gateway:
        body = {"model": "sql", "messages": MESSAGES, "stream": True}
        async with aiohttp.ClientSession() as session:
            with monkeypatch.context() as patch:
                patch.setattr(web.StreamResponse, "write", lost)
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(
                        f"{gateway.url}/v1/chat/completions", json=body
                    ) as response:
                        await response.read()
        [call] = calls_of(gateway)
        await call.settled()
        assert not call.delivered
        assert caplog.records == []


async def test_an_agent_that_we_do_not_answer_is_refused() -> None:
    async with serving() as gateway:
        with pytest.raises(openai.BadRequestError, match="'helper' is not answered here"):
            await ask(gateway, "/agents/helper/v1")
        _, usage = await get(gateway, USAGE_PATH)
        assert usage == {"agents": {}, "failed": 1, "set_aside": {}}


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
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 3),
        ("presence_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
    ],
)
async def test_what_cannot_be_honoured_is_refused(field: str, value: Any) -> None:
    async with serving() as gateway:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(gateway, **{field: value})
        assert caught.value.param == field
        assert asked_of(gateway) == []


async def test_what_steers_one_providers_models_is_set_aside_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as gateway:
        assert await ask(gateway, verbosity="low") == "I am sql"
        assert await ask(gateway, verbosity="high", reasoning_effort="none") == "I am sql"
        _, usage = await get(gateway, USAGE_PATH)
        assert usage["set_aside"] == {"verbosity": 2, "reasoning_effort": 1}
    said = "set aside, since only one provider's models have it: "
    assert caplog.messages == [f"{said}verbosity", f"{said}reasoning_effort"]


async def test_sampling_is_the_requests_own() -> None:
    routing = Routing(rules=ROUTING.rules, default=Target(route=Route.POLICY, policy="sql"))
    async with serving(routing=routing, max_tokens=7) as gateway:
        await ask(gateway, temperature=0.25, top_p=0.5, max_tokens=9)
        await ask(gateway)
        first, second = (request.sampling for request in asked_of(gateway))
        assert (first.temperature, first.top_p, first.max_tokens) == (0.25, 0.5, 9)
        assert (second.temperature, second.top_p, second.max_tokens) == (1.0, 1.0, 7)


async def test_streams_tools_choices_and_texts() -> None:
    called = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serving(called) as gateway, client_of(gateway, "/agents/writer/v1") as client:
        body: Any = {"model": "x", "messages": MESSAGES, "tools": tools, "n": 2}
        answer = await client.chat.completions.create(**body)
        assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 2
        stream = await client.chat.completions.create(**body, stream=True)
        calls = [
            call.function.arguments
            async for chunk in stream
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
        ]
        assert calls == ['{"a": 1}'] * 2
        text = await client.completions.create(model="x", prompt="SELECT", max_tokens=5)
        assert text.choices[0].finish_reason == "length"
        parts = await client.completions.create(
            model="x", prompt="SELECT", max_tokens=5, stream=True
        )
        assert "".join([part.choices[0].text async for part in parts]) == text.choices[0].text


async def test_a_retry_joins_its_call_and_old_calls_are_forgotten() -> None:
    async with serving() as gateway, client_of(gateway) as client:
        body: Any = {"model": "sql", "messages": MESSAGES}
        for number in (1, 1, 2):
            headers = {c.HEADER_CALL_ID: f"call-{number}"}
            await client.chat.completions.create(**body, extra_headers=headers)
        assert len(asked_of(gateway)) == 2
        # the same words of somebody else, whose first try failed elsewhere, are another call
        await client.chat.completions.create(**body, extra_headers={"x-stainless-retry-count": "1"})
        assert len(asked_of(gateway)) == 3
        for _ in range(REMEMBERED + 20):
            await client.chat.completions.create(**body)
        assert len(calls_of(gateway)) == REMEMBERED


async def test_after_a_burst_no_more_calls_are_remembered_than_before() -> None:
    async with serving() as gateway, client_of(gateway) as client:
        body: Any = {"model": "sql", "messages": MESSAGES}
        many = REMEMBERED + 100
        await asyncio.gather(*(client.chat.completions.create(**body) for _ in range(many)))
        for _ in range(2):
            await client.chat.completions.create(**body)
        assert len(calls_of(gateway)) == REMEMBERED


# --- who may call ---------------------------------------------------------------------------
async def test_a_key_is_asked_for() -> None:
    async with serving(key="open sesame") as gateway:
        for path in ("/v1/models", ROUTING_PATH, USAGE_PATH):
            assert (await get(gateway, path))[0] == 401
            assert (await get(gateway, path, Authorization="Bearer open"))[0] == 401
            assert (await get(gateway, path, Authorization="Bearer open sesame"))[0] == 200
            # Anthropic's; a key in the other header comes first
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


def test_what_loopback_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "localhost.example.org", "10.0.0.1")))


async def test_without_a_key_web_pages_of_elsewhere_are_refused() -> None:
    async with serving() as gateway:
        for headers in (
            {"Host": "evil.example.org"},
            {"Host": "evil.example.org:8000"},
            {"Origin": "https://evil.example.org"},
            {"Origin": "null"},
            {"Origin": "http://[bad"},
        ):
            assert (await get(gateway, "/v1/models", **headers))[0] == 403
        for headers in ({"Host": "localhost:8000"}, {"Origin": "http://127.0.0.1:3000"}):
            assert (await get(gateway, "/v1/models", **headers))[0] == 200


async def test_a_port_in_use_is_named() -> None:
    async with serving() as gateway:
        port = int(gateway.url.rpartition(":")[2])
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1:{port}: [Aa]ddress already in use; give"
        ):
            await ServingGateway(make_engine(), ROUTING, port=port).start()


async def test_what_others_need_not_know_stays_here() -> None:
    secret = LLM(base_url="http://10.0.0.1/v1", model="m", api_key_env="KEY")
    routing = Routing(rules=[Rule("judge", Target(route=Route.ENDPOINT, endpoint=secret))])
    async with serving(routing=routing) as gateway:
        _, told = await get(gateway, ROUTING_PATH)
    assert "10.0.0.1" not in json.dumps(told)
    assert told["routing"]["rules"][0]["target"]["route"] == "endpoint"


# --- an app that connects -------------------------------------------------------------------
@contextmanager
def in_thread(**options: Any) -> Iterator[ServingGateway]:
    """A server with an event loop of its own."""
    gateways: list[ServingGateway] = []
    started, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(**options) as gateway:
            gateways.append(gateway)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert started.wait(20)
        yield gateways[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def served() -> Iterator[ServingGateway]:
    with in_thread() as gateway:
        yield gateway


@pytest.fixture
def elsewhere() -> Iterator[ScriptedServer]:
    """Where the app pointed its client."""
    with ScriptedServer(lambda request: Reply(text="from elsewhere")) as server:
        yield server


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (ENDPOINT_VARIABLE, KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    yield
    wire.uninstall()
    wire.close()


def say(client: openai.OpenAI, who: str | None) -> str:
    if who is None:
        answer = client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    else:
        with agent(who):
            answer = client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    return str(answer.choices[0].message.content)


def app_client(elsewhere: ScriptedServer) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=elsewhere.url,
        api_key="app-key",
        organization="app-org",
        default_headers={"x-app": "1"},
        max_retries=0,
    )


EXPECTED = {
    "writer": "I am sql",
    "planner": "I am plan",
    "checker": "I am base",
    "helper": "from elsewhere",
    None: "from elsewhere",
}


def test_one_line_sends_each_agent_to_its_policy(
    served: ServingGateway, elsewhere: ScriptedServer
) -> None:
    """One client for all agents, built before the line."""
    with app_client(elsewhere) as client:
        assert {who: say(client, who) for who in EXPECTED} == dict.fromkeys(
            EXPECTED, "from elsewhere"
        )
        with lightspan.connect(served.url) as connection:
            assert connection.url == served.url
            assert {who: say(client, who) for who in EXPECTED} == EXPECTED
        assert say(client, "writer") == "from elsewhere"
    own = {"sql": 1, "plan": 1, "base": 1}
    counted = {policy: n for one in served.usage.summary().values() for policy, n in one.items()}
    assert counted == own
    assert {request.headers["authorization"] for request in elsewhere.requests} == {
        "Bearer app-key"
    }


def test_nothing_of_the_apps_client_travels(
    elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    original = Visitors.admit

    async def admit(self: Visitors, request: Any) -> Any:
        seen.append({key.lower(): value for key, value in request.headers.items()})
        return await original(self, request)

    monkeypatch.setattr(Visitors, "admit", admit)
    monkeypatch.setenv("OPENAI_PROJECT_ID", "app-project")
    with in_thread() as served, lightspan.connect(served.url), app_client(elsewhere) as client:
        assert say(client, "writer") == "I am sql"
    [asked, called] = seen
    assert asked["authorization"] == "Bearer"
    assert called["authorization"] == "Bearer none"
    assert called[c.HEADER_AGENT] == "writer"
    values = {value for one in seen for value in one.values()}
    assert not any(own in value for value in values for own in ("app-key", "app-org", "app-pro"))
    assert not {"x-app", "openai-organization", "openai-project", "cookie"} & called.keys()
    assert elsewhere.requests == []


@pytest.mark.parametrize("connect_first", [True, False])
def test_what_a_connected_app_says_can_be_recorded(
    served: ServingGateway, elsewhere: ScriptedServer, tmp_path: Path, connect_first: bool
) -> None:
    """The server records nothing, so the app's process does: of trained agents and of others."""
    url = f"sqlite:{tmp_path / 'production.db'}"
    with contextlib.ExitStack() as stack, app_client(elsewhere) as client:
        if connect_first:
            stack.enter_context(lightspan.connect(served.url))
        stack.enter_context(lightspan.record(url))
        if not connect_first:
            stack.enter_context(lightspan.connect(served.url))
        assert {who: say(client, who) for who in EXPECTED} == EXPECTED
        with agent("writer"):
            streamed = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            assert [chunk for chunk in streamed if chunk.choices]
    found = read_recorded(url)
    assert [one.calls[0].attributes[c.AGENT_PATH] for one in found] == [
        "writer",
        "planner",
        "checker",
        "helper",
        "app",
        "writer",
    ]
    answers = [one.answered[0].answer for one in found]
    assert answers == [*EXPECTED.values(), "I am sql"]
    assert [str(one.calls[0].attributes[c.ROUTE]) for one in found] == [
        "policy",
        "policy",
        "base",
        "app",
        "app",
        "policy",
    ]
    assert scope.pushed() is None


def test_the_servers_key(elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_thread(key="the servers key") as served, app_client(elsewhere) as client:
        monkeypatch.setenv("MY_KEY", "the servers key")
        with lightspan.connect(f"{served.url}/v1/", api_key_env="MY_KEY"):
            assert say(client, "writer") == "I am sql"
        monkeypatch.setenv(KEY_VARIABLE, "the servers key")
        with lightspan.connect(served.url):
            assert say(client, "writer") == "I am sql"
        monkeypatch.setenv(KEY_VARIABLE, "app-key")
        with pytest.raises(ConfigError, match=f"wants another key: set {KEY_VARIABLE}"):
            lightspan.connect(served.url)
    assert elsewhere.requests == []


def test_threads_streams_and_async_clients(
    served: ServingGateway, elsewhere: ScriptedServer
) -> None:
    async def stream(who: str) -> str:
        async with openai.AsyncOpenAI(base_url=elsewhere.url, api_key="k") as client:
            with agent(who):
                answer = await client.chat.completions.create(
                    model="m", messages=MESSAGES, stream=True
                )
                async with answer:
                    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    async def several() -> list[str]:
        return await asyncio.gather(*(stream(who) for who in ("writer", "checker", "helper")))

    with lightspan.connect(served.url), app_client(elsewhere) as client:
        with ThreadPoolExecutor(4) as pool:
            names = ["writer", "checker", "planner", "helper"] * 3
            assert list(pool.map(lambda who: say(client, who), names)) == [
                EXPECTED[who] for who in names
            ]
        assert asyncio.run(several()) == ["I am sql", "I am base", "from elsewhere"]
        with agent("writer"):
            text = client.completions.create(model="m", prompt="SELECT")
        assert text.choices[0].text == "I am sql"


def test_a_scope_comes_first(served: ServingGateway, elsewhere: ScriptedServer) -> None:
    """In training the algorithm's routing counts, and a block of agents is the scope's."""
    scope = Scope(rollout_id="ro", attempt_id="at")
    with lightspan.connect(served.url), app_client(elsewhere) as client:
        with open_scope(scope):
            assert say(client, "writer") == "from elsewhere"
        assert say(client, "writer") == "I am sql"
        assert emit_reward(1.0) is not None  # goes nowhere
    kinds = [span.kind for span in scope.recorder.drain()]
    assert kinds == ["llm", "agent"]


def test_an_app_with_anthropics_client_connects(
    served: ServingGateway, elsewhere: ScriptedServer
) -> None:
    with (
        lightspan.connect(served.url),
        anthropic.Anthropic(base_url=elsewhere.origin, api_key="own") as client,
    ):
        answers = {}
        for who in EXPECTED:
            with agent(who) if who else contextlib.nullcontext():
                message: Any = client.messages.create(
                    model="m", max_tokens=50, messages=MESSAGES[1:]
                )
            answers[who] = message.content[0].text
    assert answers == EXPECTED


def test_connections_nest_and_end_once(served: ServingGateway, elsewhere: ScriptedServer) -> None:
    with in_thread(script="the other") as other, app_client(elsewhere) as client:
        first = lightspan.connect(served.url)
        second = lightspan.connect(other.url)
        assert say(client, "writer") == "the other"
        second.close()
        second.close()
        assert say(client, "writer") == "I am sql"
        first.close()
        assert say(client, "writer") == "from elsewhere"


def test_the_environment_names_the_server(
    served: ServingGateway, elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with app_client(elsewhere) as client:
        with lightspan.connect() as connection:
            assert connection.url is None
            assert say(client, "writer") == "from elsewhere"
            assert not wire.installed()
        monkeypatch.setenv(ENDPOINT_VARIABLE, served.url)
        with lightspan.connect():
            assert say(client, "writer") == "I am sql"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "nobody serves at http://127.0.0.1:9"),
        ("127.0.0.1:8000", "is no endpoint: give one such as"),
        ("ftp://127.0.0.1", "is no endpoint"),
        ("http://me:secret@127.0.0.1", "is no endpoint"),
    ],
)
def test_a_server_that_is_not_there(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lightspan.connect(url)


def test_a_server_of_another_kind(elsewhere: ScriptedServer) -> None:
    with pytest.raises(ConfigError, match="is no `lightspan serve` of this version"):
        lightspan.connect(elsewhere.url)
    with pytest.raises(ConfigError, match="api_key_env='NO_SUCH'"):
        lightspan.connect(elsewhere.url, api_key_env="NO_SUCH")


def test_another_protocol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightspan.production.connect._fetch", lambda origin, key: {"protocol": 7})
    with pytest.raises(ConfigError, match="speaks protocol 7, this lightspan speaks 1: install"):
        lightspan.connect("http://127.0.0.1:8000")


# --- what is kept for retries -----------------------------------------------------------------
LARGE = 2_000_000
"""Letters of what is not kept; 15 MB would only take longer."""


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": MESSAGES, "metadata": {"k": "v" * LARGE}}),
        ("chat/completions", {"messages": MESSAGES, "user": "u" * LARGE, "stream": True}),
        ("chat/completions", {"messages": MESSAGES, "verbosity": "v" * LARGE}),
        ("completions", {"prompt": "a", "metadata": {"k": "v" * LARGE}}),
        ("responses", {"input": "a", "prompt_cache_key": "v" * LARGE}),
        ("messages", {"messages": MESSAGES[1:], "max_tokens": 5, "metadata": {"k": "v" * LARGE}}),
    ],
)
async def test_what_no_retry_needs_is_not_kept(path: str, fields: dict[str, Any]) -> None:
    async with serving() as gateway, aiohttp.ClientSession(gateway.url) as session:

        async def send(number: int) -> bytes:
            headers = {c.HEADER_CALL_ID: f"call-{number}"}
            data = io.BytesIO(json.dumps({"model": "sql", **fields}).encode())
            async with session.post(f"/v1/{path}", data=data, headers=headers) as response:
                assert response.status == 200, await response.text()
                return await response.read()

        first = await send(0)
        gc.collect()
        tracemalloc.start()
        try:
            for number in range(1, 6):
                await send(number)
            # a thread that read a body may be about to forget it
            for _ in range(100):
                gc.collect()
                kept = tracemalloc.get_traced_memory()[0]
                if kept < LARGE:
                    break
                await asyncio.sleep(0.05)
            assert kept < LARGE
        finally:
            tracemalloc.stop()
        assert len(calls_of(gateway)) == 6
        assert await send(0) == first  # and a retry is answered from what is
        assert len(asked_of(gateway)) == 6


async def test_large_conversations_are_forgotten_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "REMEMBERED_BYTES", 2_000)
    async with serving() as gateway, client_of(gateway) as client:
        for number in range(6):
            await client.completions.create(
                model="sql",
                prompt=[5] * 200,
                extra_headers={c.HEADER_CALL_ID: f"call-{number}"},
            )
        assert [call.info.call_id for call in calls_of(gateway)] == ["call-4", "call-5"]


async def test_a_response_goes_on_from_what_is_kept() -> None:
    async with serving() as gateway, client_of(gateway) as client:
        first = await client.responses.create(model="sql", input="a", instructions="Be brief.")
        await client.responses.create(model="sql", input="b", previous_response_id=first.id)
        earlier, later = (request.prompt_ids for request in asked_of(gateway))
        text = shared_tokenizer().decode(later)
        assert "I am sql" in text
        assert len(earlier) < len(later) + 10


async def test_metadata_beyond_what_an_answer_repeats_is_refused() -> None:
    async with serving() as gateway, client_of(gateway) as client:
        with pytest.raises(openai.BadRequestError, match="'metadata' has"):
            await client.responses.create(model="sql", input="a", metadata={"k": "v" * 20_000})


# --- an engine that has died ------------------------------------------------------------------
async def test_health_says_what_the_engine_has_died_of() -> None:
    engine = make_engine()
    async with ServingGateway(engine, ROUTING) as gateway:
        status, told = await get(gateway, "/health")
        assert (status, told["status"]) == (200, "ok")
        engine.die(EngineError("the generation thread stopped: boom"))
        status, told = await get(gateway, "/health")
        assert (status, told["status"]) == (503, "failed")
        assert told["reason"] == "the generation thread stopped: boom"
        with pytest.raises(openai.InternalServerError, match="the generation thread stopped: boom"):
            await ask(gateway)

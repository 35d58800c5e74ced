"""The shim: what reaches the gateway, what reaches other endpoints, what is recorded."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import pydantic
import pytest

from lightspan import conventions as c
from lightspan import threads, wire
from lightspan.emit import agent
from lightspan.routing import Route, Routing, Rule, Target
from lightspan.scope import Acting, Frame, Scope, open_scope, register_resolver, unregister_resolver
from lightspan.spans import Span, SpanKind, SpanStatus
from lightspan.testing.gateway_suite import until
from lightspan.testing.scripted import Reply, Request, ScriptedServer, ToolCall

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TRAINED = Routing(rules=[Rule("writer", Target(route=Route.POLICY, policy="policy"))])


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    wire.uninstall()
    wire.close()


@pytest.fixture
def gateway() -> Iterator[ScriptedServer]:
    """What stands where the gateway is."""
    with ScriptedServer(lambda request: Reply(text="from the gateway")) as server:
        yield server


@pytest.fixture
def elsewhere() -> Iterator[ScriptedServer]:
    """Where the app pointed its client."""
    with ScriptedServer(lambda request: Reply(text="from elsewhere")) as server:
        yield server


def make_scope(gateway: ScriptedServer | None, routing: Routing = TRAINED) -> Scope:
    return Scope(
        rollout_id="ro-1",
        attempt_id="at-1",
        gateway_url=None if gateway is None else gateway.origin,
        call_token="token-1",
        routing=routing,
        trace_id="0123456789abcdef0123456789abcdef",
    )


@contextmanager
def acting_as(gateway: ScriptedServer | None, name: str) -> Iterator[Scope]:
    with open_scope(make_scope(gateway)) as scope, agent(name):
        yield scope


def llm_spans(scope: Scope) -> list[Span]:
    return [span for span in scope.recorder.drain() if span.kind is SpanKind.LLM]


def client_of(server: ScriptedServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": server.url, "api_key": "app-key", **options})


def async_client_of(server: ScriptedServer, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": server.url, "api_key": "app-key", **options})


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def text_of_stream(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


class Parsed(pydantic.BaseModel):
    word: str


# --- each way to ask, redirected ------------------------------------------------------------
def _raw_stream(client: openai.OpenAI) -> str:
    raw = client.chat.completions.with_raw_response.create(
        model="m", messages=MESSAGES, stream=True
    )
    assert raw.headers["content-type"] == "text/event-stream"
    return text_of_stream(raw.parse())


def _helper_stream(client: openai.OpenAI) -> str:
    with client.chat.completions.stream(model="m", messages=MESSAGES) as stream:
        return text_of(stream.get_final_completion())


def _streaming_response(client: openai.OpenAI) -> str:
    with client.chat.completions.with_streaming_response.create(
        model="m", messages=MESSAGES
    ) as response:
        return str(json.loads(response.read())["choices"][0]["message"]["content"])


WAYS: dict[str, Any] = {
    "create": lambda client: text_of(client.chat.completions.create(model="m", messages=MESSAGES)),
    "stream=True": lambda client: text_of_stream(
        client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    ),
    "stream()": _helper_stream,
    "raw": lambda client: text_of(
        client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES).parse()
    ),
    "raw stream": _raw_stream,
    "streaming response": _streaming_response,
    "with_options": lambda client: text_of(
        client.with_options(timeout=5).chat.completions.create(model="m", messages=MESSAGES)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask(gateway: ScriptedServer, elsewhere: ScriptedServer, way: str) -> None:
    """A client built before the shim is installed, and used in a scope and outside."""
    with client_of(elsewhere) as client:
        assert WAYS[way](client) == "from elsewhere"
        with acting_as(gateway, "writer") as scope:
            assert WAYS[way](client) == "from the gateway"
            assert llm_spans(scope) == []  # the gateway records it
        assert WAYS[way](client) == "from elsewhere"
        with acting_as(gateway, "checker") as scope:
            assert WAYS[way](client) == "from elsewhere"
        assert len(llm_spans(scope)) == 1
    assert (len(gateway.requests), len(elsewhere.requests)) == (1, 3)


def test_parse(gateway: ScriptedServer, elsewhere: ScriptedServer) -> None:
    with (
        ScriptedServer('{"word": "yes"}') as server,
        client_of(elsewhere) as client,
        acting_as(server, "writer"),
    ):
        answer = client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Parsed)
        assert answer.choices[0].message.parsed == Parsed(word="yes")


@pytest.mark.parametrize("agent_name", ["writer", "checker"])
@pytest.mark.parametrize("raw", [False, True])
def test_an_answer_that_the_app_cannot_parse(agent_name: str, raw: bool) -> None:
    """A length that is over is no failed delivery, and no damage."""
    with (
        ScriptedServer(Reply(text="{", finish_reason="length") for _ in range(1)) as server,
        client_of(server) as client,
    ):
        api = client.chat.completions
        with acting_as(server, agent_name) as scope:
            if raw:
                raw_answer = api.with_raw_response.create(model="m", messages=MESSAGES)
                assert raw_answer.parse().choices[0].finish_reason == "length"
            else:
                with pytest.raises(openai.LengthFinishReasonError):
                    api.parse(model="m", messages=MESSAGES, response_format=Parsed)
        assert scope.recorder.damages() == []
        spans = llm_spans(scope)
    if agent_name == "writer":
        assert spans == []
    else:
        [span] = spans
        assert span.attributes[c.FINISH_REASONS] == ["length"]
        assert span.attributes[c.CALL_OUTCOME] == ("ok" if raw else "error")


# --- what the gateway sees ------------------------------------------------------------------
def test_the_headers_of_a_redirected_call(
    gateway: ScriptedServer, elsewhere: ScriptedServer
) -> None:
    with (
        client_of(elsewhere) as client,
        open_scope(make_scope(gateway)),
        agent("team/ä b"),
        agent("writer") as span,
    ):
        client.chat.completions.create(model="m", messages=MESSAGES, temperature=0.5)
    [request] = gateway.requests
    headers = {key: value for key, value in request.headers.items() if "stainless" not in key}
    call_id = headers.pop(c.HEADER_CALL_ID)
    assert call_id.startswith("call-")
    assert len(call_id) == 37
    assert span is not None
    for transport in ("accept-encoding", "connection", "content-length", "user-agent"):
        headers.pop(transport)
    assert headers == {
        "host": gateway.origin.removeprefix("http://"),
        "accept": "application/json",
        "content-type": "application/json",
        "authorization": "Bearer token-1",
        c.HEADER_ATTEMPT: "at-1",
        c.HEADER_AGENT: "team%2F%C3%A4%20b/writer",
        c.HEADER_PARENT: f"00-0123456789abcdef0123456789abcdef-{span.span_id}-01",
        c.HEADER_PROTOCOL: "1",
    }
    assert request.path == "/v1/chat/completions"
    assert request.body == {"model": "m", "messages": MESSAGES, "temperature": 0.5}


def test_a_call_without_any_agent(gateway: ScriptedServer, elsewhere: ScriptedServer) -> None:
    routing = Routing(default=Target(route=Route.POLICY, policy="policy"))
    with client_of(elsewhere) as client, open_scope(make_scope(gateway, routing)):
        client.chat.completions.create(model="m", messages=MESSAGES)
    headers = gateway.requests[0].headers
    assert headers[c.HEADER_AGENT] == "app"
    assert headers[c.HEADER_PARENT] == f"00-0123456789abcdef0123456789abcdef-{c.NO_PARENT}-01"


def test_the_body_is_kept(gateway: ScriptedServer, elsewhere: ScriptedServer) -> None:
    with client_of(elsewhere) as client, acting_as(gateway, "writer"):
        client.chat.completions.create(
            model="m", messages=MESSAGES, extra_body={"top_k": 5}, extra_query={"a": "b"}
        )
    [request] = gateway.requests
    assert request.path == "/v1/chat/completions"
    assert request.body == {"model": "m", "messages": MESSAGES, "top_k": 5}


def test_an_azure_client_is_redirected_too(
    gateway: ScriptedServer, elsewhere: ScriptedServer
) -> None:
    with openai.AzureOpenAI(
        azure_endpoint=elsewhere.origin, api_key="azure-key", api_version="2024-10-21"
    ) as client:
        with acting_as(gateway, "writer"):
            answer = client.chat.completions.create(model="deployed", messages=MESSAGES)
            assert text_of(answer) == "from the gateway"
        with acting_as(gateway, "checker") as scope:
            client.chat.completions.create(model="deployed", messages=MESSAGES)
        assert len(llm_spans(scope)) == 1
    assert gateway.requests[0].path == "/v1/chat/completions"
    assert "api-key" not in gateway.requests[0].headers
    assert elsewhere.requests[0].path.startswith("/openai/deployments/deployed/chat/completions")


def test_other_requests_are_not_touched(gateway: ScriptedServer, elsewhere: ScriptedServer) -> None:
    with client_of(elsewhere) as client, acting_as(gateway, "writer") as scope:
        assert [model.id for model in client.models.list()] == ["scripted"]
    assert llm_spans(scope) == []


def test_responses_go_to_the_gateway_too(
    gateway: ScriptedServer, elsewhere: ScriptedServer
) -> None:
    """The app's endpoint must not answer."""
    with client_of(elsewhere) as client, acting_as(gateway, "writer"):
        client.responses.with_raw_response.create(model="m", input="hi")
    assert [request.path for request in gateway.requests] == ["/v1/responses"]
    assert elsewhere.requests == []


def test_without_a_gateway_calls_are_recorded_only(elsewhere: ScriptedServer) -> None:
    with client_of(elsewhere) as client, acting_as(None, "writer") as scope:
        assert WAYS["create"](client) == "from elsewhere"
    [span] = llm_spans(scope)
    assert span.attributes[c.AGENT_PATH] == "writer"


# --- retries --------------------------------------------------------------------------------
def test_retries_carry_one_call_id(elsewhere: ScriptedServer) -> None:
    bad = Reply(status=500, headers={"retry-after-ms": "1"})
    with (
        ScriptedServer([bad, bad, "fine"]) as gateway,
        client_of(elsewhere, max_retries=2) as client,
        acting_as(gateway, "writer"),
    ):
        assert WAYS["create"](client) == "fine"
    assert [r.headers["x-stainless-retry-count"] for r in gateway.requests] == ["0", "1", "2"]
    assert len({request.headers[c.HEADER_CALL_ID] for request in gateway.requests}) == 1


def test_the_callers_retries_and_timeout_are_kept(elsewhere: ScriptedServer) -> None:
    bad = Reply(status=500, headers={"retry-after-ms": "1"})
    with (
        ScriptedServer(lambda request: bad) as gateway,
        client_of(elsewhere, max_retries=0, timeout=7.5) as client,
        acting_as(gateway, "writer") as scope,
    ):
        with pytest.raises(openai.InternalServerError):
            WAYS["create"](client)
        with pytest.raises(openai.InternalServerError):
            client.with_options(max_retries=1, timeout=3.5).chat.completions.create(
                model="m", messages=MESSAGES
            )
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="m", messages=MESSAGES, timeout=2.5)
        assert llm_spans(scope) == []  # the gateway answered, and recorded it
    seen = [request.headers["x-stainless-read-timeout"] for request in gateway.requests]
    assert seen == ["7.5", "3.5", "3.5", "2.5"]


def test_a_gateway_that_is_gone(elsewhere: ScriptedServer) -> None:
    with ScriptedServer() as gone:
        pass
    with (
        client_of(elsewhere, max_retries=0) as client,
        acting_as(gone, "writer") as scope,
        pytest.raises(openai.APIConnectionError),
    ):
        WAYS["create"](client)
    [span] = llm_spans(scope)
    assert span.attributes[c.CALL_OUTCOME] == "undelivered"
    assert span.status is SpanStatus.ERROR
    assert elsewhere.requests == []


def test_a_stream_of_the_gateway_that_breaks_off(elsewhere: ScriptedServer) -> None:
    with (
        ScriptedServer([Reply(text="a b c", drop=True)]) as gateway,
        client_of(elsewhere, max_retries=0) as client,
        acting_as(gateway, "writer") as scope,
    ):
        with pytest.raises(Exception):  # noqa: B017 - httpx's or httpx2's, by version
            WAYS["stream=True"](client)
        [span] = llm_spans(scope)
    assert span.attributes[c.CALL_OUTCOME] == "undelivered"
    assert span.attributes[c.CALL_ID] == gateway.requests[0].headers[c.HEADER_CALL_ID]


# --- calls that are not ours ----------------------------------------------------------------
def without_transport(request: Request) -> tuple[str, dict[str, str], Any]:
    changing = ("idempotency-key",)
    headers = {key: value for key, value in request.headers.items() if key not in changing}
    return request.path, headers, request.body


@pytest.mark.parametrize("stream", [False, True])
def test_another_agents_request_is_what_it_would_have_been(
    gateway: ScriptedServer, elsewhere: ScriptedServer, stream: bool
) -> None:
    options = {"default_headers": {"x-mine": "1"}, "default_query": {"q": "1"}}
    way = WAYS["stream=True" if stream else "create"]
    with client_of(elsewhere, **options) as client:
        way(client)
        with acting_as(gateway, "checker"):
            way(client)
    plain, shimmed = elsewhere.requests
    assert without_transport(plain) == without_transport(shimmed)
    assert plain.headers["authorization"] == "Bearer app-key"


@pytest.mark.parametrize("stream", [False, True])
def test_another_agents_call_is_recorded(gateway: ScriptedServer, stream: bool) -> None:
    call = ToolCall(name="f", arguments='{"a": 1}', call_id="call_7")
    with (
        ScriptedServer([Reply(text="hello there", tool_calls=[call])], model="m") as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "temperature": 0.5, "n": 1}
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
            for _ in client.chat.completions.create(**asked):
                pass
        else:
            client.chat.completions.create(**asked)
        [span] = llm_spans(scope)
    known = dict(span.attributes)
    assert known.pop(c.CALL_ID)
    assert str(known.pop(c.RESPONSE_ID)).startswith("chatcmpl-")
    assert json.loads(str(known.pop(c.INPUT_MESSAGES))) == [
        {"role": "user", "parts": [{"type": "text", "content": "hi"}]}
    ]
    assert json.loads(str(known.pop(c.OUTPUT_MESSAGES))) == [
        {
            "role": "assistant",
            "parts": [
                {"type": "text", "content": "hello there"},
                {"type": "tool_call", "id": "call_7", "name": "f", "arguments": '{"a": 1}'},
            ],
            "finish_reason": "tool_calls",
        }
    ]
    if stream:
        assert known.pop(c.REQUEST_STREAM) is True
    address = f"http://{known.pop(c.SERVER_ADDRESS)}:{known.pop(c.SERVER_PORT)}"
    assert address == server.origin
    assert known == {
        c.AGENT_PATH: "checker",
        c.ROUTE: "app",
        c.CALL_OUTCOME: "ok",
        c.OPERATION_NAME: "chat",
        c.OPENINFERENCE_KIND: "LLM",
        c.REQUEST_MODEL: "m",
        c.REQUEST_TEMPERATURE: 0.5,
        c.REQUEST_CHOICES: 1,
        c.RESPONSE_MODEL: "m",
        c.INPUT_TOKENS: 1,
        c.OUTPUT_TOKENS: 2,
        c.FINISH_REASONS: ["tool_calls"],
    }
    assert (span.name, span.status, span.sequence_start) == ("chat m", SpanStatus.OK, None)


def test_another_agents_error_is_recorded(gateway: ScriptedServer) -> None:
    with (
        ScriptedServer([Reply(status=400, text="bad temperature")]) as server,
        client_of(server) as client,
        acting_as(gateway, "checker") as scope,
    ):
        with pytest.raises(openai.BadRequestError, match="bad temperature"):
            WAYS["create"](client)
        [span] = llm_spans(scope)
    assert span.attributes[c.CALL_OUTCOME] == "error"
    assert span.attributes[c.ERROR_TYPE] == "BadRequestError"
    assert "bad temperature" in span.status_message


@pytest.mark.parametrize("closed", [False, True])
def test_another_agents_abandoned_stream_is_cancelled(
    gateway: ScriptedServer, elsewhere: ScriptedServer, closed: bool
) -> None:
    with client_of(elsewhere) as client, acting_as(gateway, "checker") as scope:
        stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        next(stream)
        if closed:
            stream.close()
        else:  # the runner does this at the end of the attempt
            scope.recorder.give_up()
        [span] = llm_spans(scope)
        assert span.attributes[c.CALL_OUTCOME] == "cancelled"
        stream.close()
        scope.recorder.give_up()
        assert llm_spans(scope) == []


@pytest.mark.parametrize("closed", [False, True])
async def test_another_agents_abandoned_async_stream_is_cancelled(
    gateway: ScriptedServer, elsewhere: ScriptedServer, closed: bool
) -> None:
    async with async_client_of(elsewhere) as client:
        with acting_as(gateway, "checker") as scope:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            await anext(stream)
            if closed:
                await stream.close()
            else:
                scope.recorder.give_up()
            [span] = llm_spans(scope)
            assert span.attributes[c.CALL_OUTCOME] == "cancelled"
            await stream.close()
            assert llm_spans(scope) == []


async def test_another_agents_cancelled_call(gateway: ScriptedServer) -> None:
    with ScriptedServer([Reply(delay_s=0.2, text="late")]) as server:
        async with async_client_of(server) as client:
            with acting_as(gateway, "checker") as scope:
                task = asyncio.create_task(
                    client.chat.completions.create(model="m", messages=MESSAGES)
                )
                await until(lambda: server.requests)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            [span] = llm_spans(scope)
            assert span.attributes[c.CALL_OUTCOME] == "cancelled"


# --- async, threads, loops ------------------------------------------------------------------
async def test_32_concurrent_calls(elsewhere: ScriptedServer) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        with agent(f"writer-{number}"):
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": str(number)}]
            )
            return text_of(answer)

    routing = Routing(default=Target(route=Route.POLICY, policy="policy"))
    with ScriptedServer(lambda request: f"answer to {request.last_text}") as gateway:
        async with async_client_of(elsewhere) as client:
            with open_scope(make_scope(gateway, routing)):
                answers = await asyncio.gather(*(one(client, number) for number in range(32)))
    assert answers == [f"answer to {number}" for number in range(32)]
    asked = {r.headers[c.HEADER_AGENT]: r.last_text for r in gateway.requests}
    assert asked == {f"writer-{number}": str(number) for number in range(32)}
    assert len({r.headers[c.HEADER_CALL_ID] for r in gateway.requests}) == 32
    await wire.aclose()


ASYNC_WAYS = ("create", "stream=True", "stream()", "raw", "raw stream", "streaming response")


async def ask_async(client: openai.AsyncOpenAI, way: str) -> str:
    api: Any = client.chat.completions
    asked: dict[str, Any] = {"model": "m", "messages": MESSAGES}
    match way:
        case "create":
            return text_of(await api.create(**asked))
        case "raw":
            return text_of((await api.with_raw_response.create(**asked)).parse())
        case "stream()":
            async with api.stream(**asked) as stream:
                return text_of(await stream.get_final_completion())
        case "streaming response":
            async with api.with_streaming_response.create(**asked) as response:
                body = json.loads(await response.read())
                return str(body["choices"][0]["message"]["content"])
    if way == "raw stream":
        stream = (await api.with_raw_response.create(**asked, stream=True)).parse()
    else:
        stream = await api.create(**asked, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_every_async_way_to_ask(
    gateway: ScriptedServer, elsewhere: ScriptedServer, way: str
) -> None:
    async with async_client_of(elsewhere) as client:
        with acting_as(gateway, "writer") as scope:
            assert await ask_async(client, way) == "from the gateway"
        assert llm_spans(scope) == []
        with acting_as(gateway, "checker") as scope:
            assert await ask_async(client, way) == "from elsewhere"
        assert len(llm_spans(scope)) == 1
    await wire.aclose()


def test_two_event_loops(gateway: ScriptedServer, elsewhere: ScriptedServer) -> None:
    """Each loop has its client, closed with the loop: nothing is left open."""

    async def ask() -> str:
        async with async_client_of(elsewhere) as client:
            return await ask_async(client, "create")

    with acting_as(gateway, "writer"):
        assert [asyncio.run(ask()), asyncio.run(ask())] == ["from the gateway"] * 2
    assert len(wire._async_clients) == 0 or all(loop.is_closed() for loop in wire._async_clients)


def test_threads_carry_the_scope(gateway: ScriptedServer, elsewhere: ScriptedServer) -> None:
    threads.carry()
    try:
        with client_of(elsewhere) as client, acting_as(gateway, "writer"):
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda _: WAYS["create"](client), range(8)))
            thread = threading.Thread(target=lambda: found.append(WAYS["create"](client)))
            thread.start()
            thread.join()
    finally:
        threads.stop_carrying()
    assert found == ["from the gateway"] * 9


# --- capture errors -------------------------------------------------------------------------
def test_a_resolver_that_fails_damages_the_attempt_and_not_the_app(
    gateway: ScriptedServer, elsewhere: ScriptedServer
) -> None:
    def resolver(current: Acting) -> Acting | None:
        raise ValueError("no idea")

    register_resolver(resolver)
    try:
        with client_of(elsewhere) as client, acting_as(gateway, "writer") as scope:
            assert WAYS["create"](client) == "from the gateway"
    finally:
        unregister_resolver(resolver)
    assert set(scope.recorder.damages()) == {
        "who is acting could not be resolved: ValueError('no idea')"
    }


def test_a_resolver_is_asked_when_the_model_is_called(
    gateway: ScriptedServer, elsewhere: ScriptedServer
) -> None:
    def resolver(current: Acting) -> Acting:
        return Acting(current.scope, (Frame("writer", "00000000000000bb"),), "00000000000000bb")

    register_resolver(resolver)
    register_resolver(resolver)
    try:
        with client_of(elsewhere) as client, open_scope(make_scope(gateway)):
            assert WAYS["create"](client) == "from the gateway"
    finally:
        unregister_resolver(resolver)
        unregister_resolver(resolver)
    assert gateway.requests[0].headers[c.HEADER_PARENT].split("-")[2] == "00000000000000bb"


@pytest.mark.parametrize("way", ["create", "stream=True", "raw"])
def test_a_recorder_that_fails_damages_the_attempt_and_not_the_app(
    gateway: ScriptedServer, elsewhere: ScriptedServer, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(wire, "answer_attributes", broken)
    with client_of(elsewhere) as client, acting_as(gateway, "checker") as scope:
        assert WAYS[way](client) == "from elsewhere"
    assert scope.recorder.damages() == ["a model call could not be recorded: ValueError('broken')"]


@pytest.mark.parametrize("broken", ["_sync_client", "_kept_headers"])
def test_a_redirection_that_fails_damages_the_attempt_and_not_the_app(
    gateway: ScriptedServer,
    elsewhere: ScriptedServer,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(wire, broken, fails)
    with client_of(elsewhere) as client, acting_as(gateway, "writer") as scope:
        assert WAYS["create"](client) == "from elsewhere"
    damage = ["a model call could not be redirected: ValueError('broken')"]
    assert scope.recorder.damages() == damage
    assert gateway.requests == []


async def test_an_async_redirection_that_fails_damages_the_attempt_and_not_the_app(
    gateway: ScriptedServer, elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*args: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(wire, "_async_client", fails)
    async with async_client_of(elsewhere) as client:
        with acting_as(gateway, "writer") as scope:
            answer = await client.chat.completions.create(model="m", messages=MESSAGES)
    assert text_of(answer) == "from elsewhere"
    damage = ["a model call could not be redirected: ValueError('broken')"]
    assert scope.recorder.damages() == damage


def test_an_abandoned_stream_that_cannot_be_recorded_damages_the_attempt(
    elsewhere: ScriptedServer, gateway: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(elsewhere) as client, acting_as(gateway, "checker") as scope:
        stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        next(iter(stream))
        monkeypatch.setattr(wire, "request_attributes", None)
        scope.recorder.give_up()
        [damage] = scope.recorder.damages()
        assert "a model call could not be recorded: TypeError" in damage


# --- installing -----------------------------------------------------------------------------
def test_uninstalling_leaves_the_classes_as_they_were() -> None:
    assert not wire.installed()
    before = [dict(vars(kind)) for kind in (openai.OpenAI, openai.AsyncOpenAI)]
    assert wire.install()
    assert wire.install()
    assert wire.installed()
    assert "request" in vars(openai.OpenAI)
    wire.uninstall()
    wire.uninstall()
    assert [dict(vars(kind)) for kind in (openai.OpenAI, openai.AsyncOpenAI)] == before
    assert not wire.installed()


def test_a_wrapper_on_top_of_ours(
    gateway: ScriptedServer, elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenInference's: it sees every call, and outlives our uninstalling."""
    wire.install()
    ours, seen = openai.OpenAI.request, []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(str(args[1].url))
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(openai.OpenAI, "request", theirs)
    with client_of(elsewhere) as client:
        with acting_as(gateway, "writer"):
            assert WAYS["create"](client) == "from the gateway"
        wire.uninstall()
        assert WAYS["create"](client) == "from elsewhere"
    assert seen == ["/chat/completions"] * 2


def test_importing_patches_nothing_and_stays_light() -> None:
    """Law 10, in a process of its own."""
    code = (
        "import sys, lightspan, lightspan.wire, lightspan.emit, lightspan.runner, lightspan.app\n"
        "heavy = {'torch', 'aiohttp', 'openai', 'transformers', 'langchain_core', 'httpx'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "import openai\n"
        "print('request' in vars(openai.OpenAI), 'request' in vars(openai.AsyncOpenAI))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "False False"]

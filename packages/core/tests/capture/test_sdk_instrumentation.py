"""Test which requests reach the gateway, for every way in which an app calls the OpenAI SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pydantic
import pytest

from lightspan.capture import sdk_instrumentation
from lightspan.capture.emit import agent
from lightspan.capture.entry import open_scope
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.routing import Route, Routing, Target
from lightspan.schema.spans import SpanStatus
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
    llm_spans,
    make_scope,
    text_of,
)
from packages.core.tests.capture.streams import stopping

pytestmark = pytest.mark.usefixtures("unwrapped")


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask(
    gateway: ScriptedServer, elsewhere: ScriptedServer, call_ends: list[bool], way: str
) -> None:
    """Check a client that is made before the SDK is wrapped, and is used in a scope and outside."""
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
    assert (call_ends, scope.recorder.capture_errors()) == ([True, True], [])


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("text", ["calm", ["not a text"], "a\ud83d"])
def test_a_stream_that_clients_read_in_different_ways(text: Any, raw: bool) -> None:
    """Check that an attempt is damaged if the record may differ from what the app gets."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}]
    with (
        ScriptedServer([Reply(chunks=chunks)]) as server,
        client_of(server) as client,
        acting_as(server, "checker") as scope,
    ):
        completions = client.chat.completions
        api: Any = completions.with_raw_response if raw else completions
        answer = api.create(model="m", messages=MESSAGES, stream=True)
        assert len(list(answer.http_response.iter_lines() if raw else answer)) > 0
        errors = scope.recorder.capture_errors()
        [span] = llm_spans(scope)
    field = "content" if isinstance(text, list) else "half of a character"
    assert [f"{field!r} is irregular" in error for error in errors] == [True] * (text != "calm")
    [message] = genai_messages.output_messages_of(span.attributes)
    assert message["content"] == {"calm": "calm", "a\ud83d": "a\N{REPLACEMENT CHARACTER}"}.get(
        str(text), "not a text"
    )


@pytest.mark.parametrize(("agent_name", "recorded"), [("writer", 0), ("checker", 1)])
@pytest.mark.parametrize("way", ["cut", "chat", "responses", "async"])
async def test_an_answer_that_the_app_cannot_parse(
    agent_name: str, recorded: int, way: str
) -> None:
    """Check that such an answer counts as delivered and is recorded, and damages no attempt."""

    class Parsed(pydantic.BaseModel):
        word: str

    wrong = '{"sentence": "no"}'
    reply = Reply(text=wrong, finish_reason="length" if way == "cut" else "stop")
    with (
        ScriptedServer(['{"word": "yes"}', reply]) as server,
        client_of(server) as client,
        acting_as(server, agent_name) as scope,
    ):
        async_client = async_client_of(server)
        apis: Any = async_client if way == "async" else client
        asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "response_format": Parsed}
        parse = apis.chat.completions.parse
        if way == "responses":
            asked = {"model": "m", "input": "hi", "text_format": Parsed}
            parse = apis.responses.parse
        answer = await parse(**asked) if way == "async" else parse(**asked)
        assert Parsed(word="yes") in (
            answer.output_parsed if way == "responses" else answer.choices[0].message.parsed,
        )
        llm_spans(scope)
        failure = openai.LengthFinishReasonError if way == "cut" else pydantic.ValidationError
        with pytest.raises(failure):
            await parse(**asked) if way == "async" else parse(**asked)
        assert scope.recorder.capture_errors() == []
        spans = llm_spans(scope)
        await async_client.close()
    assert len(spans) == recorded
    for span in spans:
        assert span.attributes[c.CALL_OUTCOME] == "error"
        assert span.attributes[c.EXCEPTION_TYPE].endswith(failure.__name__)
        [message] = genai_messages.output_messages_of(span.attributes)
        assert (message["content"], span.attributes[c.OUTPUT_TOKENS]) == (wrong, 2)
    await sdk_instrumentation.aclose()


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
        c.HEADER_PROTOCOL: str(c.PROTOCOL_VERSION),
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


def test_responses_go_to_the_gateway_too_and_other_requests_do_not(
    gateway: ScriptedServer, elsewhere: ScriptedServer
) -> None:
    with client_of(elsewhere) as client, acting_as(gateway, "writer") as scope:
        assert [model.id for model in client.models.list()] == ["scripted"]
        assert elsewhere.requests == []
        client.responses.with_raw_response.create(model="m", input="hi")
        # `responses.input_tokens.count` of the newer SDKs
        client.post("/responses/input_tokens", body={"model": "m", "input": "hi"}, cast_to=object)
        client.embeddings.with_raw_response.create(model="m", input="hi")
    assert [r.path for r in gateway.requests] == ["/v1/responses", "/v1/responses/input_tokens"]
    assert [request.path for request in elsewhere.requests] == ["/v1/embeddings"]
    elsewhere.requests.clear()
    assert (llm_spans(scope), elsewhere.requests) == ([], [])


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
        for asking, options in (
            (client, {}),
            (client.with_options(max_retries=1, timeout=3.5), {}),
            (client, {"timeout": 2.5}),
        ):
            with pytest.raises(openai.InternalServerError):
                asking.chat.completions.create(model="m", messages=MESSAGES, **options)
        assert llm_spans(scope) == []  # the gateway answered, and recorded it
    seen = [request.headers["x-stainless-read-timeout"] for request in gateway.requests]
    assert seen == ["7.5", "3.5", "3.5", "2.5"]


@pytest.mark.parametrize("way", ["create", "stream=True"])
def test_a_gateway_that_breaks_off(elsewhere: ScriptedServer, way: str) -> None:
    """Check a gateway that disconnects before it answers, or in the middle of a stream."""
    with (
        ScriptedServer([Reply(text="a b c", drop=True)]) as gateway,
        client_of(elsewhere, max_retries=0) as client,
        acting_as(gateway, "writer") as scope,
    ):
        with pytest.raises(Exception):  # noqa: B017 - of a stream httpx's or httpx2's, by version
            WAYS[way](client)
        [span] = llm_spans(scope)
    assert span.attributes[c.CALL_OUTCOME] == "undelivered"
    assert span.attributes[c.CALL_ID] == gateway.requests[0].headers[c.HEADER_CALL_ID]
    assert span.status is SpanStatus.ERROR
    assert elsewhere.requests == []


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_the_gateway_does_not_answer_is_lost_until_it_is_repeated(
    elsewhere: ScriptedServer, way: str
) -> None:
    """Check every form of an answer, and that a call which began before the failure repeats none.

    A stream breaks off in the middle.
    """
    replies = [Reply(text="a b c", drop=True), "fine", Reply(text="a b c", drop=True)]
    with (
        ScriptedServer(replies) as gateway,
        client_of(elsewhere, max_retries=0) as client,
        acting_as(gateway, "writer") as scope,
    ):
        lost = scope.recorder.lost_calls
        with pytest.raises(Exception):  # noqa: B017 - of a stream httpx's or httpx2's, by version
            WAYS[way](client)
        [(request, _, _)] = lost
        scope.recorder.settle_call(request, 0)
        assert len(lost) == 1
        assert WAYS[way](client) == "fine"
        assert lost == []
        with pytest.raises(Exception):  # noqa: B017
            WAYS[way](client)
    assert [call[0] for call in lost] == [request]


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
    await sdk_instrumentation.aclose()


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_every_async_way_to_ask(
    gateway: ScriptedServer, elsewhere: ScriptedServer, call_ends: list[bool], way: str
) -> None:
    async with async_client_of(elsewhere) as client:
        with acting_as(gateway, "writer") as scope:
            assert await ask_async(client, way) == "from the gateway"
        assert llm_spans(scope) == []
        with acting_as(gateway, "checker") as scope:
            assert await ask_async(client, way) == "from elsewhere"
        assert len(llm_spans(scope)) == 1
    assert (call_ends, scope.recorder.capture_errors()) == ([True, True], [])
    await sdk_instrumentation.aclose()


# --- how calls ended -------------------------------------------------------------------------
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
    """Check that a stream that the app stops reading counts as answered after its first chunk."""
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


def test_another_instrumentation_that_puts_the_original_back(
    gateway: ScriptedServer, elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the next attempt wraps the SDK again.

    OpenInference restores the SDK's original methods when it is uninstalled.
    """
    original = openai.OpenAI.request
    with client_of(elsewhere) as client:
        for _ in range(2):
            with acting_as(gateway, "writer"):
                assert WAYS["create"](client) == "from the gateway"
            monkeypatch.setattr(openai.OpenAI, "request", original)
    assert len(gateway.requests) == 2


def test_a_version_older_than_the_tested_ones_is_logged_once(
    elsewhere: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(openai, "__version__", "1.109.1")
    with client_of(elsewhere) as client:
        for _ in range(2):
            with acting_as(None, "writer"):
                WAYS["create"](client)
    assert caplog.messages == ["lightspan: openai 1.109.1 is untested: use version 2.0 or later"]

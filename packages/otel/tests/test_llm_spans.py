"""Tests of model calls known only from spans: each is recorded once, in attempts of production."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind as Side, Tracer

import lightspan
import lightspan_otel as otel
from lightspan.capture import context
from lightspan.errors import ConfigError
from lightspan.production.record import record
from lightspan.schema import genai_messages, semconv as c
from lightspan.schema.records import AttemptStatus
from lightspan.schema.spans import now_ns
from lightspan_testing.attempts import Recorded, captured, read_recorded
from lightspan_testing.scripted import ScriptedServer
from packages.otel.tests.dialects import ASKED, DIALECTS, GENAI, OPENINFERENCE
from packages.otel.tests.spans import agent, say, tool


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Return the app's own exporter."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    """An app's provider whose spans' content is recorded."""
    tracer_provider = TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    with otel.instrument(tracer_provider, content=True):
        yield tracer_provider
    assert context.resolvers() == context.call_listeners() == ()


def bypassing(tracer: Tracer, said: dict[str, Any] = GENAI) -> None:
    """Emit a span with the attributes `said` of a model call that passes through no SDK."""
    with tracer.start_as_current_span("chat", kind=Side.CLIENT) as span:
        span.set_attributes(said)


def only(url: str) -> Recorded:
    [recorded] = read_recorded(url)
    return recorded


# --- what is kept -----------------------------------------------------------------------------
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_past_the_sdks(tracer: Tracer, url: str, dialect: str) -> None:
    with record(url, service="desk"), agent(tracer, "writer"):
        bypassing(tracer, DIALECTS[dialect])
    found = only(url)
    assert found.tree() == (
        "invoke_workflow writer\n  invoke_agent writer\n    chat groq/m @writer"
    )
    assert (found.attempt.status, found.attempt.capture_errors) == (AttemptStatus.SUCCEEDED, [])
    assert found.rollout.task == {"messages": ASKED[1:]}
    [call] = found.calls
    assert genai_messages.input_messages_of(call.attributes) == ASKED
    assert [each.answer for each in found.answered] == ["It rains."]
    usage = (call.attributes[c.INPUT_TOKENS], call.attributes[c.OUTPUT_TOKENS])
    assert usage == (7, 3)
    assert call.attributes[c.CALL_OUTCOME] == "ok"
    assert str(call.attributes[c.CALL_ID]).startswith("call-")
    assert call.attempt_id == found.attempt.attempt_id
    assert call.resource == {"service.name": "desk"}
    assert "llm.input_messages" not in repr(call)  # recorded once, as the SDK patches do


def test_a_bare_call_is_an_attempt(tracer: Tracer, url: str) -> None:
    with record(url):
        bypassing(tracer)
        bypassing(tracer, OPENINFERENCE)
    first, second = read_recorded(url)
    assert first.tree() == second.tree() == "chat groq/m @app"
    assert first.rollout.task == {"messages": ASKED}
    [call] = first.calls
    assert first.attempt.started_at is not None
    assert first.attempt.started_at <= call.start_ns / 1e9


def test_tools_and_agents_say_what_they_were_given(tracer: Tracer, url: str) -> None:
    attributes = {"openinference.span.kind": "AGENT", "input.value": '{"question": "Where?"}'}
    with record(url), tracer.start_as_current_span("writer.run", attributes=attributes) as outer:
        bypassing(tracer)
        with tool(tracer, "look") as span:
            span.set_attribute("gen_ai.tool.call.result", "a town")
        outer.set_attribute("output.value", "Here.")
    found = only(url)
    assert found.rollout.task == {"question": "Where?"}
    by_name = {span.name: span.attributes for span in found.spans}
    assert by_name["invoke_agent writer"][c.OPERATION_INPUT] == '{"question": "Where?"}'
    assert by_name["invoke_agent writer"][c.OPERATION_OUTPUT] == "Here."
    looked = by_name["execute_tool look"]
    assert (looked[c.TOOL_CALL_ARGUMENTS], looked[c.TOOL_CALL_RESULT]) == ("secret", "a town")


def test_a_call_that_fails(tracer: Tracer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_API_KEY", "s3cret-of-the-shop")

    def run() -> None:
        with tracer.start_as_current_span("chat", attributes=GENAI):
            raise LookupError("no model for s3cret-of-the-shop")

    with record(url), pytest.raises(LookupError):
        run()
    found = only(url)
    assert found.attempt.status is AttemptStatus.FAILED
    [call] = found.calls
    assert (call.status, call.attributes[c.ERROR_TYPE]) == ("error", "LookupError")
    assert call.attributes[c.CALL_OUTCOME] == "error"
    assert call.status_message == "LookupError: no model for <key>"
    [event] = call.events
    assert event.attributes[c.EXCEPTION_MESSAGE] == "no model for <key>"
    assert "s3cret" not in repr(found)


def test_a_hook_sees_it(tracer: Tracer, url: str) -> None:
    def hide(span: Any) -> Any:
        return lightspan.map_text(span, lambda text: text.replace("Weather", "***"))

    with record(url, redact=hide), agent(tracer, "writer"):
        bypassing(tracer)
    assert "Weather" not in repr(only(url))
    assert genai_messages.input_messages_of(only(url).calls[0].attributes)[1]["content"] == "***?"


# --- each call once ---------------------------------------------------------------------------
def test_a_call_that_the_shim_records_is_its_own(
    tracer: Tracer, client: openai.OpenAI, url: str
) -> None:
    """The framework's span around a call of the SDK is not recorded as a second call."""
    with record(url), agent(tracer, "writer"):
        with tracer.start_as_current_span("chat", attributes=GENAI):
            say(client)
        bypassing(tracer)
    assert only(url).tree() == (
        "invoke_workflow writer\n  invoke_agent writer\n    chat m @writer\n    chat groq/m @writer"
    )


def test_a_span_that_is_made_after_the_answer_is_no_call_of_its_own(
    tracer: Tracer, url: str, client: openai.OpenAI
) -> None:
    """Check a span with an earlier start, as OpenLLMetry makes for the Responses API."""
    with record(url), lightspan.operation("request"):
        start = now_ns()
        client.responses.create(model="m", input="hi")
        tracer.start_span("openai.response", start_time=start, attributes=GENAI).end()
        bypassing(tracer)
    assert [call.name for call in only(url).calls] == ["chat m", "chat groq/m"]


def test_of_two_spans_of_one_call_the_inner_one_is_it(tracer: Tracer, url: str) -> None:
    around = tracer.start_as_current_span("outer", attributes=OPENINFERENCE)
    with record(url), agent(tracer, "writer"), around:
        bypassing(tracer)
    assert [call.name for call in only(url).calls] == ["chat groq/m"]


def test_of_two_spans_of_one_call_the_one_with_messages_is_it(tracer: Tracer, url: str) -> None:
    bare = {key: GENAI[key] for key in GENAI if "messages" not in key}
    around = tracer.start_as_current_span("outer", attributes=OPENINFERENCE)
    with record(url), agent(tracer, "writer"):
        with around:
            bypassing(tracer, bare)
        bypassing(tracer, bare)
    first, second = only(url).calls
    assert genai_messages.output_messages_of(first.attributes)
    assert second.attributes[c.REQUEST_MODEL] == "groq/m"
    assert c.OUTPUT_MESSAGES not in second.attributes


def test_a_call_in_a_tool_inside_a_call_is_another(
    tracer: Tracer, client: openai.OpenAI, url: str
) -> None:
    """Some libraries run tools within the span of the requesting call."""
    around = tracer.start_as_current_span("chat", attributes=GENAI)
    with record(url), agent(tracer, "writer"), around, tool(tracer, "look"):
        say(client)
    assert sorted(call.name for call in only(url).calls) == ["chat groq/m", "chat m"]


def test_a_call_that_an_adapter_records_is_its_own(tracer: Tracer, url: str) -> None:
    with record(url), agent(tracer, "writer"):
        acting = context.current_agent()
        assert acting is not None
        told = context.notify_call_start(acting)
        bypassing(tracer)
        told(True)
        bypassing(tracer, OPENINFERENCE)
    assert len(only(url).calls) == 1


@pytest.fixture(params=["before", "after"])
def instrumented(
    request: pytest.FixtureRequest, provider: TracerProvider, url: str
) -> Iterator[Callable[[], Any]]:
    """OpenInference's instrumentation of the SDK, installed before or after our patches."""
    instrumentor = OpenAIInstrumentor()
    if request.param == "before":
        instrumentor.instrument(tracer_provider=provider)
    with record(url) as recording:
        if request.param == "after":
            instrumentor.instrument(tracer_provider=provider)
        yield recording.flush
        instrumentor.uninstrument()


def test_openinference_beside_the_shim(
    instrumented: Callable[[], Any],
    tracer: Tracer,
    exporter: InMemorySpanExporter,
    client: openai.OpenAI,
    server: ScriptedServer,
    url: str,
) -> None:
    async def asynchronous() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="key") as other:
            await other.chat.completions.create(model="m", messages=messages)
            async for _ in await other.chat.completions.create(
                model="m", messages=messages, stream=True
            ):
                pass

    messages: Any = [{"role": "user", "content": "hello"}]
    with agent(tracer, "writer"):
        say(client)
        for _ in say(client, stream=True):
            pass
        bypassing(tracer, {**GENAI, "gen_ai.request.model": "after"})
        asyncio.run(asynchronous())
    assert instrumented()
    names = [span.name for span in exporter.get_finished_spans()]
    assert names.count("ChatCompletion") == 4  # OpenInference's
    calls = [call.name for call in only(url).calls]
    assert sorted(calls) == ["chat after", *["chat m"] * 4]


# --- only where it is wanted ------------------------------------------------------------------
def test_without_the_option_only_identity_is_read(url: str) -> None:
    provider = TracerProvider()
    tracer = provider.get_tracer("app")
    with otel.instrument(provider), record(url), agent(tracer, "writer"):
        bypassing(tracer)
        with tool(tracer, "look"):
            pass
    found = only(url)
    assert found.calls == []
    assert "secret" not in repr(found.spans)
    assert "Weather" not in repr(found)


def test_it_ends_with_its_block(url: str) -> None:
    provider = TracerProvider()
    tracer = provider.get_tracer("app")
    with otel.instrument(provider), record(url):
        with otel.instrument(provider, content=True), agent(tracer, "first"):
            bypassing(tracer)
        with agent(tracer, "second"):
            bypassing(tracer)
    assert [found.tree().count("chat") for found in read_recorded(url)] == [1, 0]


def test_in_a_rollout_nothing_is_read(tracer: Tracer) -> None:
    with captured() as attempt, agent(tracer, "writer"):
        bypassing(tracer)
        with tool(tracer, "look"):
            pass
    assert attempt.tree == ["invoke_agent writer @writer", "  execute_tool look @writer"]
    assert "secret" not in repr(attempt.spans)


def test_a_framework_by_its_name_has_no_content() -> None:
    with pytest.raises(ConfigError, match="content needs the TracerProvider"):
        otel.instrument("pydantic-ai", content=True)

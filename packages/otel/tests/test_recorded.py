"""Tests of recorded agent spans: identity and ending, one attempt per run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextvars import copy_context
from typing import Any

import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode, Tracer

import lightspan
import lightspan_otel as otel
from lightspan.capture import context
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan_otel import LightspanSpanProcessor
from lightspan_testing.attempts import Recorded, captured, read_recorded
from lightspan_testing.scripted import ScriptedServer
from packages.otel.tests.spans import INVOKES, agent, path, say, tool


# --- spans ----------------------------------------------------------------------------------
def test_an_agent_says_who_it_is_and_no_more(tracer: Tracer) -> None:
    with captured() as attempt, agent(tracer, "boss"), agent(tracer, "expert") as span:
        span.set_attributes({"gen_ai.input.messages": "secret", "final_result": "secret"})
    expert = attempt.one("invoke_agent expert")
    assert expert.attributes == {
        c.OPERATION_NAME: "invoke_agent",
        c.AGENT_NAME: "expert",
        c.AGENT_PATH: "boss/expert",
        c.OPENINFERENCE_KIND: "AGENT",
        c.OPENINFERENCE_AGENT: "expert",
        c.OPENINFERENCE_NODE: "expert",
        c.OPENINFERENCE_PARENT: "boss",
    }
    assert expert.span_id == f"{span.get_span_context().span_id:016x}"
    assert expert.trace_id == attempt.scope.trace_id
    assert expert.start_ns <= expert.end_ns
    assert "secret" not in repr(attempt.spans)


def test_a_tool_says_which_it_is_and_not_what_it_was_told(tracer: Tracer) -> None:
    with captured() as attempt, agent(tracer, "boss"), tool(tracer, "look"):
        pass
    assert attempt.one("execute_tool look").attributes == {
        c.OPERATION_NAME: "execute_tool",
        c.TOOL_NAME: "look",
        c.TOOL_CALL_ID: "call_look",
        c.AGENT_PATH: "boss",
        c.OPENINFERENCE_KIND: "TOOL",
    }
    assert "secret" not in repr(attempt.spans)


def test_an_exception_that_goes_through_it_is_its_kind_without_words(tracer: Tracer) -> None:
    def run() -> None:
        with agent(tracer, "writer"), tool(tracer, "look"):
            raise LookupError("nothing on 'a prompt'")

    with captured() as attempt, pytest.raises(LookupError):
        run()
    for span in attempt.spans:
        assert (span.status, span.status_message) == ("error", "")
        assert span.attributes[c.ERROR_TYPE] == "LookupError"
        assert "a prompt" not in repr(span)
    assert len(attempt.spans) == 2


@pytest.mark.parametrize("says", ["attribute", "event", "status"])
def test_an_error_that_the_span_tells_of_is_its_kind_without_words(
    tracer: Tracer, says: str
) -> None:
    with captured() as attempt, agent(tracer, "writer") as span:
        if says == "attribute":
            span.set_attribute("error.type", "LookupError")
        if says == "event":
            span.record_exception(LookupError("secret"))
        span.set_status(StatusCode.ERROR, "secret")
    [found] = attempt.spans
    assert (found.status, found.status_message) == ("error", "")
    assert found.attributes[c.ERROR_TYPE] == ("error" if says == "status" else "LookupError")
    assert "secret" not in repr(found)


def test_an_exception_in_whose_handler_it_ends_is_not_its_error(tracer: Tracer) -> None:
    """The exception that ends a stream is no error of the agent."""
    with captured() as attempt:
        span = tracer.start_span("invoke_agent writer", attributes=INVOKES)
        try:
            raise StopAsyncIteration
        except StopAsyncIteration:
            span.end()
    assert attempt.tree == ["invoke_agent writer @writer"]


def test_an_error_of_a_span_that_says_at_its_end_that_all_went_well(tracer: Tracer) -> None:
    """OpenInference's spans of smolagents do this when smolagents streams."""

    def run() -> None:
        with agent(tracer, "writer") as span:
            error = LookupError("nothing there")
            span.record_exception(error)
            span.set_status(StatusCode.OK)
            raise error

    with captured() as attempt, pytest.raises(LookupError):
        run()
    assert attempt.tree == ["invoke_agent writer @writer error"]


def test_a_run_that_is_cancelled(tracer: Tracer) -> None:
    async def run() -> None:
        with agent(tracer, "writer"):
            await asyncio.sleep(60)

    async def cancel() -> None:
        task = asyncio.create_task(run())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    with captured() as attempt:
        asyncio.run(cancel())
    assert attempt.tree == ["invoke_agent writer @writer error"]
    assert attempt.spans[0].attributes[c.ERROR_TYPE] == "CancelledError"


def test_a_span_that_is_left_open_by_its_library_when_its_agent_fails() -> None:
    """smolagents by OpenInference: the failed agent's span stays current for ever."""
    provider = TracerProvider()
    tracer = provider.get_tracer("openinference.instrumentation.smolagents")
    kind = {"openinference.span.kind": "AGENT"}
    with (
        otel.instrument(provider),
        captured() as attempt,
        tracer.start_as_current_span("boss.run", attributes=kind),
        tracer.start_as_current_span("expert.run", attributes=kind, end_on_exit=False) as left,
    ):
        assert path() == "boss/expert"
        left.record_exception(LookupError("secret"))
        left.set_status(StatusCode.ERROR)
        assert path() == "boss"
    assert attempt.tree == ["invoke_agent boss @boss", "  invoke_agent expert @boss/expert error"]
    assert attempt.spans[0].attributes[c.ERROR_TYPE] == "LookupError"


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_span_that_is_kept_whole_is_kept_once(order: str) -> None:
    """`LightspanSpanProcessor` records all attributes; the agent is ours."""
    provider = TracerProvider()
    if order == "first":
        provider.add_span_processor(LightspanSpanProcessor())
    with otel.instrument(provider), captured() as attempt:
        if order == "last":
            provider.add_span_processor(LightspanSpanProcessor())
        tracer = provider.get_tracer("t")
        with agent(tracer, "boss"), tool(tracer, "look"), agent(tracer, "expert"):
            assert path() == "boss/expert"
    assert attempt.tree == [
        "invoke_agent boss @boss unset",
        "  execute_tool look @boss unset",
        "    invoke_agent expert @boss/expert unset",
    ]
    assert attempt.one("execute_tool look").attributes[c.TOOL_CALL_ARGUMENTS] == "secret"
    assert attempt.one("invoke_agent expert").attributes[c.OPENINFERENCE_PARENT] == "boss"


# --- production -----------------------------------------------------------------------------
def only(url: str) -> Recorded:
    [found] = read_recorded(url)
    assert found.attempt.capture_errors == []
    span_ids = {span.span_id for span in found.spans}
    assert [span.name for span in found.spans if span.parent_id not in {*span_ids, None}] == []
    return found


def test_a_run_is_an_attempt(tracer: Tracer, client: openai.OpenAI, url: str) -> None:
    with record(url):
        with agent(tracer, "boss"):
            say(client, "one")
            with tool(tracer, "ask"), agent(tracer, "expert"):
                say(client, "two")
        with agent(tracer, "other"):
            pass
        assert context.current_agent() is not None
    first, second = read_recorded(url)
    assert first.tree() == (
        "invoke_workflow boss\n"
        "  invoke_agent boss\n"
        "    chat m @boss\n"
        "    execute_tool ask\n"
        "      invoke_agent expert\n"
        "        chat m @boss/expert"
    )
    assert first.rollout.task == {"messages": [{"role": "user", "content": "one"}]}
    assert second.tree() == "invoke_workflow other\n  invoke_agent other"
    assert (first.attempt.status, second.attempt.status) == ("succeeded", "succeeded")


def test_a_task_that_goes_on_after_its_attempt_is_outside(
    provider: TracerProvider, tracer: Tracer, server: ScriptedServer, url: str
) -> None:
    """Check a background task whose span began in the attempt, but whose calls come later."""
    otel.instrument(provider)
    with openai.OpenAI(base_url=server.url, api_key="k") as client, record(url):
        with lightspan.operation("request"):
            span = tracer.start_span("work")
            with trace.use_span(span):
                task = copy_context()
        task.run(say, client)
        with agent(tracer, "other"):
            say(client)
        span.end()
    assert [one.tree() for one in read_recorded(url)] == [
        "invoke_workflow request\n  request",
        "chat m @app",
        "invoke_workflow other\n  invoke_agent other\n    chat m @other",
    ]


def test_agents_of_a_workflow_are_one_attempt(
    tracer: Tracer, client: openai.OpenAI, url: str
) -> None:
    chain = {"openinference.span.kind": "CHAIN"}
    with record(url), tracer.start_as_current_span("flow", attributes=chain):
        for name in ("writer", "checker"):
            with agent(tracer, name):
                say(client)
    assert only(url).tree() == (
        "invoke_workflow flow\n"
        "  invoke_agent writer\n"
        "    chat m @writer\n"
        "  invoke_agent checker\n"
        "    chat m @checker"
    )


@pytest.mark.parametrize("is_left", [False, True])
def test_a_stream_is_in_the_attempt_that_asked_for_it(
    tracer: Tracer, server: ScriptedServer, url: str, is_left: bool
) -> None:
    async def stream(client: openai.AsyncOpenAI) -> AsyncGenerator[str]:
        with agent(tracer, "writer"):
            messages: Any = [{"role": "user", "content": "hello"}]
            async for chunk in await client.chat.completions.create(
                model="m", messages=messages, stream=True
            ):
                yield chunk.choices[0].delta.content or ""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="key") as client:
            with record(url):
                items = stream(client)
                async for _ in items:
                    if is_left:
                        break
                await items.aclose()

    asyncio.run(run())
    found = only(url)
    assert found.tree() == ("invoke_workflow writer\n  invoke_agent writer\n    chat m @writer")
    assert found.calls[0].attributes[c.CALL_OUTCOME] == ("cancelled" if is_left else "ok")


def test_a_run_inside_an_operation_of_ours(tracer: Tracer, client: openai.OpenAI, url: str) -> None:
    with (
        record(url),
        lightspan.operation("handle", input=7),
        agent(tracer, "writer"),
        lightspan.agent("inner"),
    ):
        say(client)
    assert only(url).tree() == (
        "invoke_workflow handle\n"
        "  handle\n"
        "    invoke_agent writer\n"
        "      invoke_agent inner\n"
        "        chat m @writer/inner"
    )
    assert only(url).rollout.task == 7


def test_a_run_that_fails(tracer: Tracer, url: str) -> None:
    with record(url), pytest.raises(LookupError), agent(tracer, "writer"):
        raise LookupError("nothing on 'a prompt'")
    found = only(url)
    assert found.attempt.status == "failed"
    assert [span.status for span in found.spans] == ["error", "error"]
    assert "a prompt" not in repr(found.spans)

"""Test which work `lightspan.record` stores as attempts, with real HTTP, stores and processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

import lightspan
from lightspan.capture import context
from lightspan.capture.entry import open_scope
from lightspan.lightning import Rejection, build_episode, classify_calls
from lightspan.production.record import record
from lightspan.schema import semconv as c
from lightspan.schema.records import Mode
from lightspan.schema.reward import Reward
from lightspan.schema.routing import make_routing
from lightspan_testing.attempts import read_recorded
from lightspan_testing.strategies import make_record
from packages.core.tests.production.chat import USER, say


def test_a_bare_call_is_an_attempt(client: openai.OpenAI, url: str) -> None:
    with record(url, service="support"):
        answer = say(client)
    [found] = read_recorded(url)
    [span] = found.spans
    assert found.tree() == "chat m @app"
    assert (span.parent_id, span.status, span.resource) == (None, "ok", {"service.name": "support"})
    assert span.attributes[c.RESPONSE_ID] == answer.id
    assert span.attributes[c.ROUTE] == "app"
    assert span.attributes[c.CALL_OUTCOME] == "ok"
    assert span.attributes[c.CALL_ID] == found.attempt.attempt_id.replace("at-", "call-") + "-1"
    assert found.answered == [("hello", "echo hello")]
    assert found.rollout.task == {"messages": USER}
    assert (found.rollout.mode, found.rollout.run_id) == (Mode.PRODUCTION, "support")
    assert (found.attempt.status, found.attempt.outcome, found.attempt.capture_errors) == (
        "succeeded",
        "ok",
        [],
    )
    assert found.attempt.call_token not in ("", found.attempt.attempt_id)
    assert "secret-key" not in repr(found)


@pytest.mark.parametrize(
    ("context", "value"),
    [
        ({"previous_response_id": "resp_1"}, "resp_1"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ],
)
def test_a_prompt_that_the_provider_keeps(
    client: openai.OpenAI, url: str, context: dict[str, Any], value: str
) -> None:
    with record(url):
        client.responses.create(model="m", input="yes", instructions="Be short.", **context)
    [found] = read_recorded(url)
    [span] = found.calls
    assert (span.attributes[c.CALL_CONTEXT], span.attributes[c.INSTRUCTIONS]) == (value, True)
    assert found.rollout.task is None  # half a prompt is no task


def test_the_outermost_block_is_an_attempt(client: openai.OpenAI, url: str) -> None:
    with record(url):
        with lightspan.operation("handle", input={"ticket": 7}):
            attempt_id = lightspan.current_attempt_id()
            with lightspan.agent("writer"):
                say(client, "one")
                assert lightspan.current_attempt_id() == attempt_id
            lightspan.emit_reward(0.5)
        assert lightspan.current_attempt_id() is None
        with lightspan.agent("writer"):
            say(client, "two")
    first, second = read_recorded(url)
    assert first.attempt.attempt_id == attempt_id
    assert first.rollout.task == {"ticket": 7}
    assert first.rollout.run_id == "unknown_service"
    assert first.tree() == (
        "invoke_workflow handle\n"
        "  handle\n"
        "    invoke_agent writer\n"
        "      chat m @writer\n"
        "    lightspan.reward"
    )
    assert second.rollout.task == {"messages": [{"role": "user", "content": "two"}]}


def _in_loop(pool: ThreadPoolExecutor, work: Callable[[str], object]) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(pool, work, "executor")
        await loop.run_in_executor(None, work, "own executor")

    asyncio.run(run())


def test_work_of_a_pool_belongs_to_the_attempt_that_submits_it(
    client: openai.OpenAI, url: str
) -> None:
    """Check pools that are older than the block and than the recording, and pools of the block."""
    own: ContextVar[str] = ContextVar("own", default="empty")
    values: list[str] = []

    def work(text: str) -> None:
        values.append(own.get())
        say(client, text)

    with ThreadPoolExecutor(2) as older, ThreadPool(2) as processes:
        older.submit(int).result()
        with record(url), lightspan.operation("request"):
            own.set("app")
            with lightspan.agent("writer"):
                older.submit(work, "submit").result()
                list(older.map(work, ["map"]))
                processes.map(work, ["process pool"])
                with ThreadPoolExecutor(1) as newer:
                    newer.submit(work, "newer").result()
                _in_loop(older, work)
        older.submit(work, "after").result()
    [request] = read_recorded(url)
    assert [call.asked for call in request.answered] == [
        *("submit", "map", "process pool", "newer", "executor", "own executor")
    ]
    assert {call.attributes[c.AGENT_PATH] for call in request.calls} == {"writer"}
    assert set(values) == {"empty"}  # the app's own variables stay as they were


def test_work_that_a_pool_begins_after_the_attempt_is_another(
    client: openai.OpenAI, url: str
) -> None:
    with ThreadPoolExecutor(1) as pool, record(url):
        gate = pool.submit(asyncio.run, asyncio.sleep(0.1))
        with lightspan.operation("request"):
            say(client, "inside")
            later = pool.submit(say, client, "later")
        later.result()
        pool.submit(say, client, "outside").result()
        assert gate.done()
    asked = [[call.asked for call in found.answered] for found in read_recorded(url)]
    assert sorted(asked) == [["inside"], ["later"], ["outside"]]


def test_a_function_that_is_trained_is_an_attempt_too(client: openai.OpenAI, url: str) -> None:
    @lightspan.rollout
    def answer(task: dict[str, Any]) -> str:
        return str(say(client, task["q"]).choices[0].message.content)

    @lightspan.rollout
    async def later(task: dict[str, Any]) -> str:
        return await asyncio.to_thread(answer, task)

    with record(url):
        assert answer({"q": "one"}) == "echo one"
        assert asyncio.run(later({"q": "two"})) == "echo two"
    tasks = [found.rollout.task for found in read_recorded(url)]
    assert tasks == [{"q": "one"}, {"q": "two"}]


@pytest.mark.parametrize("kind", [ValueError("boom"), KeyboardInterrupt()])
def test_an_app_that_raises(client: openai.OpenAI, url: str, kind: BaseException) -> None:
    @lightspan.operation("handle")
    def handle() -> None:
        say(client)
        raise kind

    with record(url), pytest.raises(type(kind)):
        handle()
    [found] = read_recorded(url)
    assert (found.attempt.status, found.attempt.outcome) == ("failed", "app_error")
    [root] = [span for span in found.spans if span.parent_id is None]
    assert (root.status, root.attributes[c.EXCEPTION_TYPE]) == ("error", type(kind).__name__)


def test_code_in_the_context_of_an_ended_attempt_is_outside(
    client: openai.OpenAI, url: str
) -> None:
    """Check what a background task does: each run after the attempt's end is its own attempt."""
    with record(url):
        with lightspan.operation("handle"):
            say(client, "now")
            copy = copy_context()
        assert copy.run(lightspan.current_attempt_id) is None
        copy.run(say, client, "later")
        copy.run(lightspan.agent("writer")(say), client, "last")
    found = read_recorded(url)
    assert [[call.asked for call in one.answered] for one in found] == [
        ["now"],
        ["later"],
        ["last"],
    ]
    assert [call.attributes[c.AGENT_PATH] for one in found for call in one.calls] == [
        "app",
        "app",
        "writer",
    ]
    assert not any(span.late for one in found for span in one.spans)


async def test_an_attempt_lasts_as_long_as_the_blocks_in_it(
    client: openai.OpenAI, url: str
) -> None:
    """Check a response that is sent while its agent still runs, as with a middleware."""
    started, sent = asyncio.Event(), asyncio.Event()

    async def respond() -> str | None:
        with lightspan.agent("boss"):
            await asyncio.to_thread(say, client, "one")
            started.set()
            await sent.wait()
            with lightspan.agent("expert"):
                await asyncio.to_thread(say, client, "two")
            return lightspan.current_attempt_id()

    with record(url) as made:
        with lightspan.operation("handle"):
            attempt_id = lightspan.current_attempt_id()
            response = asyncio.create_task(respond())
            await started.wait()
        sent.set()
        assert await response == attempt_id
        assert await asyncio.to_thread(made.flush)
    [found] = await asyncio.to_thread(read_recorded, url)
    assert found.tree() == (
        "invoke_workflow handle\n"
        "  handle\n"
        "    invoke_agent boss\n"
        "      chat m @boss\n"
        "      invoke_agent expert\n"
        "        chat m @boss/expert"
    )
    assert not any(span.late for span in found.spans)


def test_a_trace_of_the_apps_own_is_kept(client: openai.OpenAI, url: str) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with record(url), provider.get_tracer("app").start_as_current_span("request") as span:
        say(client, "private words")
    [found] = read_recorded(url)
    assert found.calls[0].trace_id == f"{span.get_span_context().trace_id:032x}"
    [theirs] = exporter.get_finished_spans()
    assert "private words" not in theirs.to_json()


# --- never trained --------------------------------------------------------------------------
def test_production_is_never_trained(client: openai.OpenAI, url: str) -> None:
    with record(url):
        say(client)
    [found] = read_recorded(url)
    [call] = found.calls
    forged = make_record(
        str(call.attributes[c.CALL_ID]),
        attempt_id=found.attempt.attempt_id,
        span_id=call.span_id,
        agent_path="app",
    )
    rewarded = msgspec.structs.replace(found.attempt, reward=Reward(1.0))
    episode = build_episode(rewarded, found.rollout, found.spans, [forged])
    routing = make_routing({"*": "policy"}, None, "policy", None)
    [entry] = classify_calls(episode, routing, modes=tuple(Mode)).entries
    assert entry.rejection is Rejection.MODE_NOT_TRAIN


def test_rollouts_inside_a_recording_are_not_recorded(client: openai.OpenAI, url: str) -> None:
    with record(url), open_scope(context.AttemptContext(rollout_id="r", attempt_id="a")) as inner:
        say(client)
        assert len(inner.recorder.drain()) == 1
    assert not Path(url.removeprefix("sqlite:")).exists()


def test_what_was_none_is_not_kept_unless_something_comes_late(url: str) -> None:
    """Check that an attempt without a call is dropped, unless a call arrives after its end."""
    with record(url):
        current = context.current_context()
        assert current is not None
        empty, late, full = (
            context.start_attempt(current, name)[1] for name in ("empty", "late", "full")
        )
        assert empty is not None
        assert late is not None
        assert full is not None
        with context.attempt_scope(full):
            lightspan.emit_message("hello")
        for attempt in (full, empty, late):
            attempt.close_unless_empty()
        leave = context.set_agent(late.context)
        lightspan.emit_message("late")
        leave()
    assert [one.tree() for one in read_recorded(url)] == [
        "lightspan.message",
        "invoke_workflow full\n  lightspan.message",
    ]

"""Test that streams that an app leaves open are recorded as cancelled.

The gateway may notice it only after the end of the attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lightspan.capture import context_propagation, emit, sdk_instrumentation
from lightspan.lightning import build_episode
from lightspan.lightning.selection import classify_calls
from lightspan.runners.app import App
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import Runner
from lightspan.schema import semconv as c
from lightspan.schema.records import AttemptStatus, Rollout
from lightspan.schema.routing import Route, Routing, Rule, Target
from lightspan.stores import open_store
from lightspan_gateway import Gateway
from lightspan_testing.gateway_suite import shared_tokenizer
from lightspan_testing.scripted_engine import Gate, Say, ScriptedEngine
from lightspan_testing.wait import until

WRITER = Rule("writer", Target(route=Route.POLICY, policy="policy"))
MESSAGES: Any = [{"role": "user", "content": "How are you?"}]
ASKED: dict[str, Any] = {"model": "m", "messages": MESSAGES, "stream": True}
TEXT = "I am fine, thank you very much."
KEPT: list[Any] = []
"""Streams that apps leave open."""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", "app-key")
    yield
    KEPT.clear()
    context_propagation.stop_carrying()
    sdk_instrumentation.uninstall()
    sdk_instrumentation.close()


def first_word(stream: Any) -> None:
    next(chunk for chunk in stream if chunk.choices[0].delta.content)


def leaves_it_open(task: Any) -> float:
    with openai.OpenAI() as client, emit.agent("writer"):
        KEPT.append(client.chat.completions.create(**ASKED))
        first_word(KEPT[-1])
    return 1.0


async def leaves_it_open_async(task: Any) -> float:
    async with openai.AsyncOpenAI() as client:
        with emit.agent("writer"):
            KEPT.append(await client.chat.completions.create(**ASKED))
            async for chunk in KEPT[-1]:
                if chunk.choices[0].delta.content:
                    break
    return 1.0


async def is_cancelled(task: Any) -> float:
    async def ask() -> None:
        with emit.agent("writer"):
            async for chunk in await client.chat.completions.create(**ASKED):
                if chunk.choices[0].delta.content:
                    has_begun.set()

    has_begun = asyncio.Event()
    async with openai.AsyncOpenAI() as client:
        asking = asyncio.create_task(ask())
        await has_begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
    return 1.0


@pytest.mark.parametrize(
    "app",
    [
        leaves_it_open,
        leaves_it_open_async,
        is_cancelled,
    ],
)
async def test_a_stream_that_the_app_leaves_is_cancelled(app: Any) -> None:
    gate = Gate()
    before_the_end = {len(shared_tokenizer().encode(TEXT)) - 1: gate}
    engine = ScriptedEngine(shared_tokenizer(), [Say(text=TEXT, gates=before_the_end)])
    async with open_store("memory:") as store:
        async with Gateway(store, engine) as gateway:
            routing = Routing(gateway_url=gateway.url, rules=[WRITER])
            resources = await store.put_resources({"routing": routing})
            rollout = Rollout(rollout_id="ro-1", task={}, task_id="t", resources_id=resources)
            await store.enqueue([rollout])
            runner = Runner(store, App(app), RunnerConfig())
            running = asyncio.create_task(runner.run())
            cursor = 0
            while not (await store.rollouts())[0].status.final:
                cursor = (await store.watch(cursor, timeout_s=5)).cursor
            gate.open()  # later output of the engine is late
            await until(lambda: engine.finished or engine.cancelled)
            runner.stop()
            await running
        [attempt] = await store.attempts(["ro-1"])
        name = attempt.attempt_id
        spans = (await store.spans([name]))[name]
        records = (await store.token_records([name]))[name]
    assert (attempt.status, attempt.capture_errors) == (AttemptStatus.SUCCEEDED, [])
    assert len(records) == 1
    episode = build_episode(attempt, rollout, spans, records)
    coverage = classify_calls(episode, Routing(rules=[WRITER]))
    assert coverage.counts() == {"rejected:cancelled": 1}
    assert episode.late_calls == ()
    llm_spans = [span for span in spans if c.CALL_ID in span.attributes and not span.late]
    assert {span.attributes[c.CALL_OUTCOME] for span in llm_spans} == {"cancelled"}

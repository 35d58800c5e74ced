"""Test agents whose stream is a generator that another thread continues, as web servers do.

Instrumentations make an agent's span the current one in the first step only.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import openai
import pytest
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Tracer, set_span_in_context

import lightspan
import lightspan_otel as otel
from lightspan.production.record import record
from lightspan_otel.identity_tracer import PROVIDER
from lightspan_testing.attempts import captured, path_of, read_recorded
from packages.otel.tests.spans import INVOKES, agent, say, tool

Stream = Callable[[Tracer, openai.OpenAI, str], Iterator[Any]]
REQUESTS = [f"request {number}" for number in range(8)]


def as_agno(tracer: Tracer, client: openai.OpenAI, text: str) -> Iterator[Any]:
    """Ask three times as the agent `boss`, whose generator has the span."""
    span = tracer.start_span("boss.run", attributes={**INVOKES, "gen_ai.agent.name": "boss"})
    first = threading.current_thread()
    token = otel_context.attach(set_span_in_context(span))
    try:
        for number in range(3):
            with tool(tracer, "ask"):
                say(client, f"{text}: {number}")
            yield number
    finally:
        if threading.current_thread() is first:
            otel_context.detach(token)
        span.end()


def as_smolagents(tracer: Tracer, client: openai.OpenAI, text: str) -> Iterator[Any]:
    """Do the same; the span begins when the generator is made."""
    span = tracer.start_span("boss.run", attributes={**INVOKES, "gen_ai.agent.name": "boss"})

    def steps() -> Iterator[Any]:
        try:
            for number in range(3):
                with tool(tracer, "ask"):
                    say(client, f"{text}: {number}")
                yield number
        finally:
            span.end()

    return steps()


def as_block(tracer: Tracer, client: openai.OpenAI, text: str) -> Iterator[Any]:
    """Do the same; no variable has the span, and an agent inside ends before each call."""
    boss, expert = ({**INVOKES, "gen_ai.agent.name": name} for name in ("boss", "expert"))
    with tracer.start_as_current_span("boss", attributes=boss):
        for number in range(3):
            with tracer.start_as_current_span("expert", attributes=expert):
                pass
            say(client, f"{text}: {number}")
            yield number


def nested(tracer: Tracer, client: openai.OpenAI, text: str) -> Iterator[Any]:
    """Run the stream of `boss` inside the agent `outer`."""
    span = tracer.start_span("outer", attributes={**INVOKES, "gen_ai.agent.name": "outer"})
    try:
        yield from as_agno(tracer, client, text)
    finally:
        span.end()


def copied_contexts(steps: list[Iterator[Any]]) -> None:
    """Take the items of all generators in turn, each in a worker thread, as Starlette does."""

    async def take(items: Iterator[Any]) -> None:
        while await anyio.to_thread.run_sync(next, items, None) is not None:
            pass

    async def take_all() -> None:
        async with anyio.create_task_group() as group:
            for items in steps:
                group.start_soon(take, items)

    anyio.run(take_all)


def bare_threads(steps: list[Iterator[Any]]) -> None:
    """Take the items in turn in a pool's threads, which keep a context of their own."""
    with ThreadPoolExecutor(3) as pool:
        while any(list(pool.map(lambda items: next(items, None) is not None, steps))):
            pass


def one_context_for_all(steps: list[Iterator[Any]]) -> None:
    """Take the items in turn in one context, where each first step leaves its span."""
    contextvars.copy_context().run(lambda: [list(row) for row in zip(*steps, strict=True)])
    for items in steps:
        assert next(items, None) is None


@pytest.mark.parametrize("take", [copied_contexts, bare_threads, one_context_for_all])
@pytest.mark.parametrize("stream", [as_agno, as_smolagents, as_block, nested])
@pytest.mark.parametrize("is_private", [False, True], ids=["of the app", "of ours"])
def test_a_stream_in_several_threads_is_one_attempt(
    provider: TracerProvider,
    client: openai.OpenAI,
    url: str,
    stream: Stream,
    take: Callable[[list[Iterator[Any]]], None],
    is_private: bool,
) -> None:
    tracer = (PROVIDER if is_private else provider).get_tracer("some.framework")
    with record(url):
        take([stream(tracer, client, text) for text in REQUESTS])
    attempts = read_recorded(url)
    asked = [[call.asked.partition(":")[0] for call in one.answered] for one in attempts]
    assert sorted(asked) == [[text] * 3 for text in REQUESTS]
    path = "outer/boss" if stream is nested else "boss"
    assert {path_of(call) for one in attempts for call in one.calls} == {path}
    assert [one.attempt.capture_errors for one in attempts] == [[]] * len(REQUESTS)
    assert {one.attempt.status for one in attempts} == {"succeeded"}


def submitted(pool: ThreadPoolExecutor, *work: Any) -> Future[Any]:
    return pool.submit(*work)


def submitted_with_context(pool: ThreadPoolExecutor, *work: Any) -> Future[Any]:
    """Submit work in a copy of the context, as smolagents does for managed agents."""
    return pool.submit(contextvars.copy_context().run, *work)


@pytest.mark.parametrize("take", [copied_contexts, bare_threads, one_context_for_all])
@pytest.mark.parametrize("submit", [submitted, submitted_with_context])
@pytest.mark.parametrize("is_recorded_first", [True, False])
@pytest.mark.parametrize("has_operation", [True, False])
def test_agents_that_a_stream_runs_at_once(
    client: openai.OpenAI,
    url: str,
    take: Callable[[list[Iterator[Any]]], None],
    submit: Callable[..., Future[Any]],
    is_recorded_first: bool,
    has_operation: bool,
) -> None:
    """Check agents in a pool's threads, where the span of the streaming agent is not current."""
    tracer = PROVIDER.get_tracer("some.framework")

    def expert(text: str) -> None:
        with agent(tracer, "expert"):
            say(client, f"{text}: expert")

    def stream(text: str) -> Iterator[int]:
        span = tracer.start_span("run", attributes={**INVOKES, "gen_ai.agent.name": "desk"})

        def steps() -> Iterator[int]:
            for number in range(2):
                say(client, f"{text}: desk")
                with ThreadPoolExecutor(2) as pool:
                    for each in [submit(pool, expert, text) for _ in range(2)]:
                        each.result()
                yield number
            span.end()

        return steps()

    def whole(text: str) -> Iterator[int]:
        with lightspan.operation("request"):
            yield from stream(text)

    starts: list[Any] = [partial(record, url), partial(otel.instrument, TracerProvider())]
    with ExitStack() as stack:
        for start in starts if is_recorded_first else reversed(starts):
            stack.enter_context(start())
        take([(whole if has_operation else stream)(text) for text in REQUESTS[:3]])
    attempts = read_recorded(url)
    asked = [[call.asked.partition(":")[0] for call in one.answered] for one in attempts]
    assert sorted(asked) == [[text] * 6 for text in REQUESTS[:3]]
    paths = [sorted(path_of(call) for call in one.calls) for one in attempts]
    assert paths == [["desk"] * 2 + ["desk/expert"] * 4] * 3
    assert [one.attempt.capture_errors for one in attempts] == [[]] * 3


class Lazy:
    """A proxy that cannot load its object here, as Django's lazy user in an event loop."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("not here")


def test_variables_of_a_generator_are_not_loaded() -> None:
    def steps(user: Lazy) -> Iterator[int]:
        with PROVIDER.get_tracer("some.framework").start_as_current_span("boss"):
            yield 1

    with captured() as attempt:
        assert list(steps(Lazy())) == [1]
    assert attempt.scope.recorder.capture_errors() == []


@pytest.mark.parametrize("stream", [as_agno, as_smolagents, as_block])
def test_a_stream_of_a_rollout_in_other_threads(
    tracer: Tracer, client: openai.OpenAI, stream: Stream
) -> None:
    with captured() as attempt:
        copied_contexts([stream(tracer, client, "one")])
    paths = [path_of(span) for span in attempt.spans if span.name.startswith("chat")]
    assert (paths, attempt.scope.recorder.capture_errors()) == (["boss"] * 3, [])

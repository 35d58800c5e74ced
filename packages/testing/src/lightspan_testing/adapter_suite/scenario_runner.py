"""Run the app of a scenario, in an attempt or outside of any attempt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

import pytest

from lightspan.capture import sdk_instrumentation
from lightspan.capture.context import AttemptContext
from lightspan.capture.entry import open_scope
from lightspan.schema import semconv as c
from lightspan.schema.spans import SpanKind
from lightspan_testing.adapter_harness import Part, Played, Stage
from lightspan_testing.adapter_suite.scenarios import SCENARIOS, App
from lightspan_testing.attempts import ROOT_ID, Recorded


def part_of(app: App, scenario: str) -> Part:
    """Return the script of the agents: the scenario's answers, except where the app has its own."""
    return Part({**SCENARIOS[scenario].says, **app.says}, app.marks)


def play(stage: Stage, app: App, scenario: str, mode: str, *, through_gateway: bool) -> Played:
    """Open an attempt, run the app in it to the end, and return the attempt with its spans.

    Args:
        stage: the scripted endpoint and gateway.
        app: the app.
        scenario: name of the scenario.
        mode: `async`, `sync` or `stream`.
        through_gateway: whether model calls go to the gateway; otherwise they go to the app's own
            endpoint.
    """
    played = stage.open(part_of(app, scenario), through_gateway=through_gateway)
    return play_opened(stage, app, played, scenario, mode)


def play_opened(stage: Stage, app: App, played: Played, scenario: str, mode: str) -> Played:
    """Run the app in the open attempt `played` to the end, and return `played` with its spans."""
    with open_scope(played.scope):
        _run(stage, app, played, scenario, mode)
    sdk_instrumentation.close()
    _settle(stage, played)
    stage.close(played)
    return played


def play_outside(
    stage: Stage, app: App, scenario: str, mode: str, part: Part | None = None
) -> Played:
    """Run the app once outside of any attempt, as in production.

    Args:
        part: script of the agents; None for the scenario's.
    """
    played = stage.open(part or part_of(app, scenario), through_gateway=False)
    _run(stage, app, played, scenario, mode)
    return played


def inside_root(recorded: Recorded, played: Played) -> Played:
    """Convert an attempt that was recorded in production to the form of an attempt in a rollout.

    In production, there is a span for the attempt itself, and there may be spans for operations of
    the app. A rollout has neither, so these spans are left out.

    Args:
        recorded: the attempt in the store.
        played: the attempt of the test, for its tag.
    """
    roots = [span for span in recorded.spans if span.parent_id is None]
    assert [root.kind for root in roots] == [SpanKind.CHAIN], recorded.tree()
    [root] = roots
    enclosing = [root, *(span for span in recorded.spans if span.kind is SpanKind.OPERATION)]
    scope = AttemptContext(
        rollout_id=recorded.rollout.rollout_id,
        attempt_id=recorded.attempt.attempt_id,
        trace_id=root.trace_id,
        root_span_id=ROOT_ID,
    )
    spans = [
        span.replace(parent_id=ROOT_ID) if span.parent_id == enclosing[-1].span_id else span
        for span in recorded.spans
        if span not in enclosing
    ]
    return Played(tag=played.tag, scope=scope, spans=spans)


def _run(stage: Stage, app: App, played: Played, scenario: str, mode: str) -> None:
    """Run the app, and check that it ends as expected: by an error, cancelled, or with success."""
    is_cancelled = SCENARIOS[scenario].cancelled
    expected: Any = nullcontext()
    if is_cancelled or app.raises is not None:
        expected = pytest.raises(asyncio.CancelledError if is_cancelled else app.raises or ())
    with expected:
        if mode == "sync":
            run_sync(app, played)
        else:
            asyncio.run(_attempt(stage, app, played, is_cancelled=is_cancelled))


async def _attempt(stage: Stage, app: App, played: Played, *, is_cancelled: bool) -> None:
    task = asyncio.ensure_future(awaited(app.run(played.text)))
    try:
        if is_cancelled:
            while not stage.brain.calls_in(played.tag) and not task.done():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            task.cancel()
        await task
    finally:
        await asyncio.sleep(0.02)  # let cancelled tasks record their end
        await close_clients([app], played)


async def awaited(value: Awaitable[Any]) -> Any:
    """Turn any awaitable into a coroutine, which `asyncio.create_task` requires."""
    return await value


def run_sync(app: App, played: Played) -> Any:
    """Run the app synchronously."""
    if app.run_sync is not None:
        return app.run_sync(played.text)

    async def work() -> Any:
        try:
            return await app.run(played.text)
        finally:
            await close_clients([app], played)

    return asyncio.run(work())


def run_in_own_loop(work: Callable[[], Any]) -> Any:
    """Run a framework's synchronous call in a thread that has an event loop, and close the loop.

    Without this loop, the framework would create one and not close it.
    """

    def in_a_thread() -> Any:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            return work()
        finally:
            loop.run_until_complete(sdk_instrumentation.aclose())
            loop.close()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, in_a_thread).result()


async def close_clients(apps: Sequence[App], played: Played) -> None:
    """Close the connections of the apps' clients and of the patched OpenAI SDK.

    They are closed in the event loop that runs this function.

    Args:
        apps: the apps.
        played: any attempt of the apps. If it used the gateway, the apps' clients are left open.
    """
    await sdk_instrumentation.aclose()
    for app in apps:
        if app.close is not None and not played.through_gateway:
            await app.close()


def _settle(stage: Stage, played: Played) -> None:
    """Wait at most 5 s until the gateway has recorded the calls that the app abandoned."""
    if not played.through_gateway:
        return
    name, until = played.scope.attempt_id, time.monotonic() + 5
    calls = len(stage.brain.calls_in(played.tag))
    while time.monotonic() < until:
        spans = stage.wait(stage.store.spans([name]))[name]
        if len({span.attributes[c.CALL_ID] for span in spans}) >= min(calls, 1) and all(
            request.request_id in {*stage.engine.finished, *stage.engine.cancelled}
            for request in stage.engine.requests
        ):
            return
        time.sleep(0.01)

"""Long-lived workers of an app: threads and tasks that one attempt started and others use."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Any

import openai
import pytest

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.capture.emit import agent
from lightspan.capture.misattributed_calls import ADVICE
from lightspan.runners.app import App
from lightspan.runners.protocol import RunnerConfig
from lightspan.runners.runner import Runner
from lightspan.schema.records import Attempt, Mode, Rollout
from lightspan.schema.spans import SpanKind
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan_testing.scripted import ScriptedServer

MISSING = (
    "it made no model call that was captured, and meanwhile one was made outside every open "
    "attempt, by {}, which belongs to {}: " + ADVICE
)
THREAD = "the thread 'consumer'"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    context_propagation.stop_carrying()
    sdk_instrumentation.uninstall()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store("memory:") as store:
        yield store


@pytest.fixture
def ask() -> Iterator[Callable[[], float]]:
    """Ask a model with a client of the app."""
    with (
        ScriptedServer("1") as server,
        openai.OpenAI(base_url=server.url, api_key="k", max_retries=0) as client,
    ):

        def ask() -> float:
            messages: Any = [{"role": "user", "content": "How many?"}]
            answer = client.chat.completions.create(model="m", messages=messages)
            return float(answer.choices[0].message.content or "nan")

        yield ask


class Consumer:
    """A thread that does the work of a queue, started at the first call or at once."""

    def __init__(self, orders: Any, *, at_once: bool = False) -> None:
        self.orders = orders
        self._thread = threading.Thread(target=self._consume, name="consumer", daemon=True)
        if at_once:
            self._thread.start()

    def _consume(self) -> None:
        while (order := self.orders.get()) is not None:
            work, done = order
            done.set_result(work())

    def __call__(self, work: Callable[[], float]) -> float:
        done: Future[float] = Future()
        if not self._thread.is_alive():
            self._thread.start()
        self.orders.put((work, done))
        return done.result()


class AsyncConsumer:
    """The same as a task."""

    def __init__(self) -> None:
        self._orders: asyncio.Queue[Any] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def _consume(self) -> None:
        while True:
            work, done = await self._orders.get()
            done.set_result(await asyncio.to_thread(work))

    async def __call__(self, work: Callable[[], float]) -> float:
        if self._task is None:
            self._task = asyncio.create_task(self._consume(), name="consumer")
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait((work, done))
        return await done


@asynccontextmanager
async def two_attempts(
    store: Store, app: Callable[[Any], float | Awaitable[float]], slots: int = 1
) -> AsyncIterator[list[Attempt]]:
    """Run tasks 0 and 1 and return their attempts."""
    await store.enqueue(
        [Rollout(rollout_id=f"ro-{n}", task=n, task_id=f"t{n}", mode=Mode.VAL) for n in range(2)]
    )
    runner = Runner(store, App(app), RunnerConfig(slots=slots))
    working = asyncio.create_task(runner.run())
    while not all(state.status.final for state in await store.rollouts()):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    runner.stop()
    await working
    yield await store.attempts(["ro-0", "ro-1"])


async def damage_of(store: Store, app: Any, slots: int = 1) -> list[list[str]]:
    async with two_attempts(store, app, slots) as attempts:
        assert [attempt.message for attempt in attempts] == ["", ""]
        return [attempt.capture_errors for attempt in attempts]


async def test_a_worker_of_an_attempt_that_is_over(store: Store, ask: Any) -> None:
    """The call of the second attempt is attributed to the first."""
    consumer = Consumer(queue.Queue())
    errors = await damage_of(store, lambda task: consumer(ask))
    assert errors == [[], [MISSING.format(THREAD, "an attempt that is over")]]


async def test_a_worker_that_was_there_before(store: Store, ask: Any) -> None:
    context_propagation.carry()  # as a runner process does before it imports the app
    consumer = Consumer(queue.Queue(), at_once=True)
    message = MISSING.format(THREAD, "no attempt")
    assert await damage_of(store, lambda task: consumer(ask)) == [[message]] * 2
    consumer.orders.put(None)


async def test_a_worker_that_asks_no_model_is_nobodys_business(store: Store, ask: Any) -> None:
    """Its answers go through a queue that a thread of the attempt reads."""
    consumer = Consumer(queue.Queue())

    def app(task: int) -> float:
        replies: queue.Queue[float] = queue.Queue()
        results: list[float] = []
        consumer(lambda: replies.put(1.0) or 0.0)
        reader = threading.Thread(target=lambda: results.append(replies.get() * ask()))
        reader.start()
        reader.join()
        return results[0]

    assert await damage_of(store, app) == [[], []]


async def test_a_runner_leaves_threads_as_they_were(store: Store, ask: Any) -> None:
    """It may run in a notebook."""
    before = threading.Thread.start
    assert await damage_of(store, lambda task: ask()) == [[], []]
    assert threading.Thread.start is before


async def test_what_an_attempt_leaves_running_is_its_own_affair(store: Store, ask: Any) -> None:
    """Its call comes too late; the next attempt has its own calls."""
    over, late = threading.Event(), threading.Event()

    def leaves() -> None:
        over.wait()
        ask()
        late.set()

    def app(task: int) -> float:
        if task == 0:
            threading.Thread(target=leaves).start()
            return 1.0
        over.set()
        late.wait()
        return ask()

    assert await damage_of(store, app) == [[], []]


@pytest.mark.parametrize("kind", ["thread", "task"])
async def test_work_that_comes_with_its_context(store: Store, ask: Any, kind: str) -> None:
    """The hint in the error message works."""
    consumer, other = Consumer(queue.Queue()), AsyncConsumer()

    def app(task: int) -> float:
        with agent(f"agent-{task}"):
            context = copy_context()
            return consumer(lambda: context.run(ask))

    async def async_app(task: int) -> float:
        with agent(f"agent-{task}"):
            context = copy_context()
            return await other(lambda: context.run(ask))

    async with two_attempts(store, app if kind == "thread" else async_app) as attempts:
        assert [attempt.capture_errors for attempt in attempts] == [[], []]
        for number, attempt in enumerate(attempts):
            spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
            [call] = [span for span in spans if span.kind is SpanKind.LLM]
            assert call.attributes["lightspan.agent.path"] == f"agent-{number}"

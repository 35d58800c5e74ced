"""Test threads and tasks of an app that one attempt has started and later attempts use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

import openai
import pytest

from lightspan.capture import context_propagation
from lightspan.capture.emit import agent
from lightspan.capture.misattributed_calls import ADVICE
from lightspan.schema.records import Attempt
from lightspan.schema.spans import SpanKind
from lightspan.stores.protocol import Store
from lightspan_testing.scripted import ScriptedServer
from packages.core.tests.runners.runs import enqueue, finished, running

pytestmark = pytest.mark.usefixtures("clean")

MISSING = (
    "it made no model call that was captured, and meanwhile one was made outside every open "
    "attempt, by {}, which belongs to {}: " + ADVICE
)
THREAD = "the thread 'consumer'"


@pytest.fixture
def ask() -> Iterator[Callable[[], float]]:
    """Return a function that calls the model with a client of the app, and returns the number."""
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
    """A thread that executes functions from a queue, started with the first one or at once."""

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


async def two_attempts(store: Store, app: Callable[[Any], float]) -> list[Attempt]:
    """Run tasks 0 and 1 and return their attempts."""
    await enqueue(store, [0, 1])
    async with running(store, app, slots=1):
        await finished(store)
    return await store.attempts(["ro-0", "ro-1"])


async def damage_of(store: Store, app: Any) -> list[list[str]]:
    attempts = await two_attempts(store, app)
    assert [attempt.message for attempt in attempts] == ["", ""]
    return [attempt.capture_errors for attempt in attempts]


async def test_a_worker_of_an_attempt_that_is_over(store: Store, ask: Any) -> None:
    """Check the capture error of the second attempt, whose call the first one's thread makes."""
    consumer = Consumer(queue.Queue())
    errors = await damage_of(store, lambda task: consumer(ask))
    assert errors == [[], [MISSING.format(THREAD, "an attempt that is over")]]


async def test_a_worker_that_was_there_before(store: Store, ask: Any) -> None:
    context_propagation.carry()  # as a runner process does before it imports the app
    consumer = Consumer(queue.Queue(), at_once=True)
    message = MISSING.format(THREAD, "no attempt")
    assert await damage_of(store, lambda task: consumer(ask)) == [[message]] * 2
    consumer.orders.put(None)


async def test_what_an_attempt_leaves_running_is_its_own_affair(store: Store, ask: Any) -> None:
    """Check that a late call of the first attempt does not damage the second."""
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


async def test_work_that_comes_with_its_context(store: Store, ask: Any) -> None:
    """Check the remedy that the error message names: running the work in the attempt's context."""
    consumer = Consumer(queue.Queue())

    def app(task: int) -> float:
        with agent(f"agent-{task}"):
            context = copy_context()
            return consumer(lambda: context.run(ask))

    for number, attempt in enumerate(await two_attempts(store, app)):
        assert attempt.capture_errors == []
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        [call] = [span for span in spans if span.kind is SpanKind.LLM]
        assert call.attributes["lightspan.agent.path"] == f"agent-{number}"

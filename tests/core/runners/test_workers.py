"""Workers that an app keeps: threads and tasks that one attempt began, and others feed."""

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

from lightspan.capture import threads, wire
from lightspan.capture.emit import agent
from lightspan.capture.strays import ADVICE
from lightspan.runners.app import App
from lightspan.runners.runner import Runner, RunnerConfig
from lightspan.schema.records import Attempt, Mode, Rollout
from lightspan.schema.spans import SpanKind
from lightspan.stores import open_store
from lightspan.stores.protocol import Store
from lightspan.testing.scripted import ScriptedServer

ANOTHERS = "a model call was made for an attempt by {}, which does not belong to it: " + ADVICE
MISSING = (
    "it made no model call that was seen, and one was made beside it for no attempt under way, by "
    "{}, which belongs to {}: " + ADVICE
)
THREAD, TASK = "the thread 'consumer'", "the task 'consumer' (AsyncConsumer._consume)"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    threads.stop_carrying()
    wire.uninstall()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store("memory:") as store:
        yield store


@pytest.fixture
def ask() -> Iterator[Callable[[], float]]:
    """Asks a model by a client of the app's own."""
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
    """A thread that does what it finds in a queue, begun when it is first asked, or at once."""

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
    """The same with a task."""

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
    """Of tasks 0 and 1."""
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
        return [attempt.damage for attempt in attempts]


async def test_a_worker_of_an_attempt_that_is_over(store: Store, ask: Any) -> None:
    """The first attempt has its call; that of the second was made in the first one's name."""
    consumer = Consumer(queue.Queue())
    found = await damage_of(store, lambda task: consumer(ask))
    assert found == [[], [ANOTHERS.format(THREAD)]]


async def test_a_worker_that_is_a_task(store: Store, ask: Any) -> None:
    """The call itself is made in a thread that the task waits for."""
    consumer = AsyncConsumer()

    async def app(task: int) -> float:
        return await consumer(ask)

    [first, [reason]] = await damage_of(store, app)
    assert first == []
    assert reason.startswith("a model call was made for an attempt by the thread 'asyncio_")


async def test_a_worker_of_an_attempt_that_goes_on(store: Store, ask: Any) -> None:
    """It may have calls that are not its own, and the other lacks one."""
    consumer, asked, began = Consumer(queue.Queue()), threading.Event(), threading.Event()

    def app(task: int) -> float:
        if task == 0:
            reward = consumer(ask)
            began.set()
            asked.wait()
            return reward
        began.wait()
        reward = consumer(ask)
        asked.set()
        return reward

    assert await damage_of(store, app, slots=2) == [[ANOTHERS.format(THREAD)]] * 2


async def test_a_worker_that_nothing_tells_whom_it_works_for(store: Store, ask: Any) -> None:
    consumer = Consumer(queue.SimpleQueue())
    found = await damage_of(store, lambda task: consumer(ask))
    assert found == [[], [MISSING.format(THREAD, "one that is over")]]


@pytest.mark.parametrize("orders", [queue.Queue, queue.SimpleQueue])
async def test_a_worker_that_was_there_before(store: Store, ask: Any, orders: Any) -> None:
    threads.carry()  # as a process does before it imports the app
    consumer = Consumer(orders(), at_once=True)
    told = ANOTHERS.format(THREAD) if orders is queue.Queue else MISSING.format(THREAD, "none")
    assert await damage_of(store, lambda task: consumer(ask)) == [[told]] * 2
    consumer.orders.put(None)


async def test_a_worker_that_asks_no_model_is_nobodys_business(store: Store, ask: Any) -> None:
    """It answers by a queue, too, which a thread of the attempt's own reads."""
    consumer = Consumer(queue.Queue())

    def app(task: int) -> float:
        replies: queue.Queue[float] = queue.Queue()
        found: list[float] = []
        consumer(lambda: replies.put(1.0) or 0.0)
        reader = threading.Thread(target=lambda: found.append(replies.get() * ask()))
        reader.start()
        reader.join()
        return found[0]

    assert await damage_of(store, app) == [[], []]


async def test_an_answer_that_comes_by_a_queue_is_no_order(store: Store, ask: Any) -> None:
    """Nothing tells whom the worker worked for, but the attempt itself waited for it."""
    consumer = Consumer(queue.SimpleQueue())

    def app(task: int) -> float:
        replies: queue.Queue[float] = queue.Queue()
        consumer(lambda: replies.put(1.0) or 0.0)
        return replies.get() * ask()

    assert await damage_of(store, app) == [[], []]


@pytest.mark.parametrize("kind", [asyncio.LifoQueue, asyncio.Queue])
async def test_what_is_taken_and_given_back_is_no_order(store: Store, ask: Any, kind: Any) -> None:
    """A pool's connection, a limiter's permission: the next attempt has it of the one before."""
    shared: asyncio.Queue[None] = kind()
    shared.put_nowait(None)

    async def node() -> float:
        permission = await shared.get()
        try:
            return await asyncio.to_thread(ask)
        finally:
            shared.put_nowait(permission)

    async def app(task: int) -> float:
        await asyncio.gather(node(), node())
        return await asyncio.create_task(node())

    assert await damage_of(store, app) == [[], []]


@pytest.mark.parametrize("kind", [queue.LifoQueue, queue.Queue])
async def test_a_worker_of_an_attempts_own_works_for_it(store: Store, ask: Any, kind: Any) -> None:
    """Whatever the attempt holds that another one gave back."""
    pool: queue.Queue[object] = kind()
    pool.put(object())

    def app(task: int) -> float:
        connection, orders = pool.get(), queue.Queue[Any]()
        try:
            return Consumer(orders)(ask)
        finally:
            orders.put(None)
            pool.put(connection)

    assert await damage_of(store, app) == [[], []]


async def test_a_runner_leaves_queues_and_threads_as_they_were(store: Store, ask: Any) -> None:
    """It may run in somebody's notebook."""
    before = (queue.Queue.put, asyncio.Queue.get_nowait, threading.Thread.start)
    assert await damage_of(store, lambda task: ask()) == [[], []]
    assert before == (queue.Queue.put, asyncio.Queue.get_nowait, threading.Thread.start)


async def test_what_an_attempt_leaves_running_is_its_own_affair(store: Store, ask: Any) -> None:
    """Its call comes too late; the next attempt has its own."""
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
    """As the message says."""
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
        assert [attempt.damage for attempt in attempts] == [[], []]
        for number, attempt in enumerate(attempts):
            spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
            [call] = [span for span in spans if span.kind is SpanKind.LLM]
            assert call.attributes["lightspan.agent.path"] == f"agent-{number}"


async def test_a_queue_that_takes_nothing_more(store: Store) -> None:
    """What could not be put there was given to nobody."""
    orders: queue.Queue[Any] = queue.Queue(1)

    def app(task: int) -> float:
        orders.put_nowait(task)
        with pytest.raises(queue.Full):
            orders.put_nowait(task)
        assert len(vars(orders)["_lightspan_given"][id(task)]) == 1
        assert orders.get_nowait() == task
        assert vars(orders)["_lightspan_given"] == {}
        return 1.0

    assert await damage_of(store, app) == [[], []]

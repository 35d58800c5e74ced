"""Test that threads and executors inherit the attempt's scope."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from multiprocessing.pool import ThreadPool

import pytest

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.capture.context import AttemptContext, current_agent
from lightspan.capture.emit import agent
from lightspan.capture.entry import open_scope
from lightspan.schema.records import Mode


@pytest.fixture(autouse=True)
def carrying() -> Iterator[None]:
    context_propagation.carry()
    context_propagation.carry()
    yield
    context_propagation.stop_carrying()
    sdk_instrumentation.uninstall()


def acting_path() -> str | None:
    current = current_agent()
    return None if current is None else current.path


def seen_in_thread() -> str | None:
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(acting_path()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_inherit() -> None:
    with open_scope(AttemptContext(rollout_id="r", attempt_id="a")), agent("writer"):
        assert seen_in_thread() == "writer"
    assert seen_in_thread() is None


def test_executors_inherit_per_submit() -> None:
    """Check that work in a pool is attributed to the agent that submits it, not to the pool's
    first.
    """
    with ThreadPoolExecutor(1) as pool:
        with open_scope(AttemptContext(rollout_id="r", attempt_id="a")):
            with agent("writer"):
                assert pool.submit(acting_path).result() == "writer"
            with agent("checker"):
                assert list(pool.map(lambda _: acting_path(), range(2))) == ["checker"] * 2
        assert pool.submit(acting_path).result() is None


def test_pools_of_multiprocessing_inherit_per_call() -> None:
    """Check that several threads of a pool run in the scope of each call, not of the pool's
    start.
    """
    paths = ["writer", "writer"]

    def path(*_: object) -> str | None:
        return acting_path()

    with open_scope(AttemptContext(rollout_id="r", attempt_id="a")):
        with agent("starter"):
            pool = ThreadPool(2)
        with agent("writer"):
            assert pool.apply(path) == "writer"
            assert pool.map(path, range(2)) == paths
            assert list(pool.imap(path, range(2))) == paths
            assert pool.starmap_async(func=path, iterable=[(1,)]).get() == ["writer"]
    with pool:
        assert pool.apply_async(path).get() is None
    pool.join()


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.PRODUCTION])
def test_a_context_of_another_agent_keeps_that_agent(mode: Mode) -> None:
    """Check work that runs in a context copied earlier, with and without a generator around it."""

    def in_pool_and_thread(run: Callable[..., str | None]) -> list[str | None]:
        paths: list[str | None] = []
        with ThreadPoolExecutor(1) as pool:
            paths.append(pool.submit(run, acting_path).result())
        thread = threading.Thread(target=run, args=(lambda: paths.append(acting_path()),))
        thread.start()
        thread.join()
        return paths

    def items(run: Callable[..., str | None]) -> Iterator[list[str | None]]:
        with agent("checker"):
            yield in_pool_and_thread(run)
            yield in_pool_and_thread(run)

    with open_scope(AttemptContext(rollout_id="r", attempt_id="a", mode=mode)):
        with agent("planner"):
            run = copy_context().run
        with agent("writer"):
            assert in_pool_and_thread(run) == ["planner", "planner"]
        assert list(items(run)) == [["planner", "planner"]] * 2


def test_stop_carrying_leaves_the_classes_as_they_were() -> None:
    context_propagation.stop_carrying()
    context_propagation.stop_carrying()
    assert threading.Thread.start.__module__ == "threading"
    assert ThreadPoolExecutor.submit.__module__ == "concurrent.futures.thread"
    with open_scope(AttemptContext(rollout_id="r", attempt_id="a")):
        assert seen_in_thread() is None


# --- work that a later item of a generator starts ---------------------------------------------
async def path_in_task() -> str | None:
    return await asyncio.create_task(async_path())


async def async_path() -> str | None:
    return acting_path()


def in_new_loop() -> str | None:
    return asyncio.run(path_in_task())


def in_own_loop() -> str | None:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(path_in_task())
    finally:
        loop.close()


def in_older_loop() -> str | None:
    return asyncio.run_coroutine_threadsafe(path_in_task(), OLDER_LOOP).result()


OLDER_LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="module")
def older_loop() -> Iterator[None]:
    thread = threading.Thread(target=OLDER_LOOP.run_forever)
    thread.start()
    yield
    OLDER_LOOP.call_soon_threadsafe(OLDER_LOOP.stop)
    thread.join()
    OLDER_LOOP.close()


def in_copied_context() -> str | None:
    found: list[str | None] = []
    run = copy_context().run
    thread = threading.Thread(target=run, args=(lambda: found.append(acting_path()),))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("older_loop")
@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.PRODUCTION])
@pytest.mark.parametrize(
    "start", [in_new_loop, in_own_loop, in_older_loop, in_copied_context, seen_in_thread]
)
def test_work_of_a_later_item_belongs_to_its_agent(
    start: Callable[[], str | None], mode: Mode
) -> None:
    """Each item is taken in a new copy of the context, as by Starlette."""
    if start is seen_in_thread and mode is Mode.PRODUCTION:
        pytest.skip("threads of an app in production need copy_context().run")

    def items() -> Iterator[str | None]:
        with agent("writer"):
            yield start()
            yield start()
            with agent("checker"):
                yield start()
        yield start()

    with open_scope(AttemptContext(rollout_id="r", attempt_id="a", mode=mode)):
        stream, around = items(), copy_context()
        taken = [around.copy().run(next, stream) for _ in range(4)]
    assert taken == ["writer", "writer", "writer/checker", "app"]


async def test_a_task_of_a_later_item_belongs_to_its_agent() -> None:
    """Each item of the asynchronous generator is taken by a new task."""

    async def items() -> AsyncIterator[str | None]:
        with agent("writer"):
            yield await path_in_task()
            yield await path_in_task()
        yield await path_in_task()

    with open_scope(AttemptContext(rollout_id="r", attempt_id="a")):
        stream, around = items(), copy_context()

        async def take() -> str | None:
            return await anext(stream)

        loop = asyncio.get_running_loop()
        taken = [await loop.create_task(take(), context=around.copy()) for _ in range(3)]
    assert taken == ["writer", "writer", "app"]

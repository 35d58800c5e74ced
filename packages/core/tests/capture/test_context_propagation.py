"""Test that threads and executors inherit the attempt's scope."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest

from lightspan.capture import context_propagation, sdk_instrumentation
from lightspan.capture.context import AttemptContext, current_agent
from lightspan.capture.emit import agent
from lightspan.capture.entry import open_scope


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


def test_stop_carrying_leaves_the_classes_as_they_were() -> None:
    context_propagation.stop_carrying()
    context_propagation.stop_carrying()
    assert threading.Thread.start.__module__ == "threading"
    assert ThreadPoolExecutor.submit.__module__ == "concurrent.futures.thread"
    with open_scope(AttemptContext(rollout_id="r", attempt_id="a")):
        assert seen_in_thread() is None

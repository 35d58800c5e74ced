"""The scope follows into threads and executors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightspan.capture import threads, wire
from lightspan.capture.emit import agent
from lightspan.capture.entry import open_scope
from lightspan.capture.scope import Scope, acting


@pytest.fixture(autouse=True)
def carrying() -> Iterator[None]:
    threads.carry()
    threads.carry()
    yield
    threads.stop_carrying()
    wire.uninstall()


def acting_path() -> str | None:
    current = acting()
    return None if current is None else current.path


def seen_in_thread() -> str | None:
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(acting_path()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_inherit() -> None:
    with open_scope(Scope(rollout_id="r", attempt_id="a")), agent("writer"):
        assert seen_in_thread() == "writer"
    assert seen_in_thread() is None


def test_thread_classes_inherit() -> None:
    class Worker(threading.Thread):
        found: str | None = None

        def run(self) -> None:
            self.found = acting_path()

    with open_scope(Scope(rollout_id="r", attempt_id="a")), agent("writer"):
        worker = Worker()
        worker.start()
        worker.join()
    assert worker.found == "writer"


def test_executors_inherit_per_submit() -> None:
    """A pool's thread, started by one agent, belongs to whoever submits."""
    with ThreadPoolExecutor(1) as pool:
        with open_scope(Scope(rollout_id="r", attempt_id="a")):
            with agent("writer"):
                assert pool.submit(acting_path).result() == "writer"
            with agent("checker"):
                assert list(pool.map(lambda _: acting_path(), range(2))) == ["checker"] * 2
        assert pool.submit(acting_path).result() is None


def test_stop_carrying_leaves_the_classes_as_they_were() -> None:
    threads.stop_carrying()
    threads.stop_carrying()
    assert threading.Thread.start.__module__ == "threading"
    assert ThreadPoolExecutor.submit.__module__ == "concurrent.futures.thread"
    with open_scope(Scope(rollout_id="r", attempt_id="a")):
        assert seen_in_thread() is None

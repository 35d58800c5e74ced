"""Who waits for work is looked for by one, and woken a few at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence

import pytest

from lightspan.errors import StoreClosedError
from lightspan.stores._signal import Signal
from lightspan.stores._waiting import Runs, WorkWaiters, with_work
from lightspan.testing.conditions import until

LONG_S = 60.0


class Shop:
    """What is queued, by run; and who looks at it."""

    def __init__(self) -> None:
        self.queued: set[str] = set()
        self.looks: list[set[Runs]] = []
        self.due: dict[int, str] = {}
        """What is queued while a look, by its number, is under way."""
        self.error: Exception | None = None
        self.signal = Signal()
        self.waiters = WorkWaiters(self.signal, self.look)

    async def look(self, asked: Collection[Runs]) -> set[Runs]:
        self.looks.append(set(asked))
        if self.error is not None:
            raise self.error
        seen = set(self.queued)
        if due := self.due.pop(len(self.looks), None):
            self.queue(due)  # it is not seen by this look
        return with_work(asked, seen)

    def queue(self, run_id: str) -> None:
        self.queued.add(run_id)
        self.signal.notify()

    async def waiting(self, *asked: Sequence[str] | None) -> list[asyncio.Task[bool]]:
        """Tasks that wait, in this order. The first looks once more than the others: for all."""
        tasks = []
        for run_ids in asked:
            due = len(self.looks) + (1 if tasks else 2)
            tasks.append(asyncio.create_task(self.waiters.wait(run_ids, LONG_S)))
            await until(lambda due=due: len(self.looks) == due)  # type: ignore[misc]
        return tasks


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def end(tasks: Sequence[asyncio.Task[bool]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_much_that_moves_is_one_look_however_many_wait(shop: Shop) -> None:
    tasks = await shop.waiting(*[["a"]] * 100)
    before = len(shop.looks)
    for _ in range(1_000):
        shop.signal.notify()
    await until(lambda: len(shop.looks) > before)
    assert shop.looks[before:] == [{frozenset("a")}]
    await end(tasks)


async def test_all_who_wait_are_in_one_look(shop: Shop) -> None:
    tasks = await shop.waiting(["a"], ["b", "c"], None, ["a"])
    before = len(shop.looks)
    shop.queue("d")
    assert await tasks[2]
    assert shop.looks[before] == {frozenset("a"), frozenset("bc"), None}
    shop.queue("c")
    assert await tasks[1]
    assert [task.done() for task in tasks] == [False, True, True, False]
    await end(tasks)


async def test_the_longest_waiting_first_and_twice_as_many_by_each_look(shop: Shop) -> None:
    ended: list[tuple[int, int]] = []

    async def wait(number: int) -> None:
        assert await shop.waiters.wait(["a"], LONG_S)
        ended.append((number, len(shop.looks)))

    waiting = [asyncio.create_task(wait(number)) for number in range(11)]
    await until(lambda: len(shop.looks) == 12)  # each has looked, and the first for all
    shop.queue("a")
    await asyncio.gather(*waiting)
    # by the looks 13, 14, 15 and 16: the longest waiting is no exception, although it leads
    assert sorted(ended) == [
        (number, look)
        for number, look in zip(range(11), [13] + [14] * 2 + [15] * 4 + [16] * 4, strict=True)
    ]
    # as before: what is found after nothing was, is found by one
    shop.queued.clear()
    tasks = await shop.waiting(["a"], ["a"])
    shop.queue("a")
    assert await tasks[0]
    shop.queued.clear()  # it claims what there is
    before = len(shop.looks)
    await until(lambda: len(shop.looks) > before)
    assert not tasks[1].done()
    await end(tasks)


@pytest.mark.parametrize("look", [1, 2])
async def test_what_is_queued_while_the_first_looks_is_found(shop: Shop, look: int) -> None:
    shop.due[look] = "a"
    assert await shop.waiters.wait(["a"], LONG_S)
    assert len(shop.looks) == look + 1


async def test_what_is_queued_while_another_looks_first_is_found(shop: Shop) -> None:
    others = await shop.waiting(["b"])
    shop.due[3] = "c"
    assert await shop.waiters.wait(["c"], LONG_S)
    assert shop.looks[2:] == [{frozenset("c")}, {frozenset("b"), frozenset("c")}]
    await end(others)


async def test_who_leads_may_go(shop: Shop) -> None:
    tasks = await shop.waiting(["a"], ["a"], ["a"])
    tasks[0].cancel()
    await until(tasks[0].cancelled)
    shop.queue("a")
    assert await asyncio.gather(*tasks[1:]) == [True, True]


async def test_time_that_is_up_is_no_work_and_ends_nobody_else(shop: Shop) -> None:
    leader = asyncio.create_task(shop.waiters.wait(["a"], 0.05))
    await until(lambda: len(shop.looks) == 2)
    other = asyncio.create_task(shop.waiters.wait(["a"], LONG_S))
    brief = asyncio.create_task(shop.waiters.wait(["a"], 0.05))
    assert [await leader, await brief] == [False, False]
    assert not other.done()
    shop.queue("a")
    assert await other
    assert not await shop.waiters.wait(["b"], 0.0)


async def test_an_error_of_a_look_reaches_all(shop: Shop) -> None:
    tasks = await shop.waiting(["a"], ["a"], ["b"])
    shop.error = StoreClosedError()
    shop.signal.notify()
    assert [type(e) for e in await asyncio.gather(*tasks, return_exceptions=True)] == [
        StoreClosedError
    ] * 3


async def test_each_event_loop_has_who_looks_for_it(shop: Shop) -> None:
    found: list[bool] = []

    def other_loop() -> None:
        found.append(asyncio.run(shop.waiters.wait(["a"], LONG_S)))

    [here] = await shop.waiting(["a"])
    thread = threading.Thread(target=other_loop)
    thread.start()
    await until(lambda: len(shop.looks) == 4)
    shop.queue("a")
    assert await here
    await asyncio.to_thread(thread.join)
    assert found == [True]


def test_for_whom_there_is_work() -> None:
    sets: list[Runs] = [frozenset("ab"), frozenset("a"), frozenset("b"), frozenset(), None]
    assert with_work(sets, {"b", "c"}) == {frozenset("ab"), frozenset("b"), None}
    assert with_work(sets, set()) == set()

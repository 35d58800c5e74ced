"""What crosses from the loops that ask to the one that has the sockets, and back, together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from lightspan.errors import StoreClosedError
from lightspan.stores.remote.handovers import Handovers, Question
from lightspan.stores.remote.operations import OPERATIONS

COUNT = OPERATIONS["count"]


class Doing:
    """A loop in a thread of its own, which answers when it is let."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.turns: list[list[bytes]] = []
        """What was begun in each turn of the loop."""
        self.cancelled: list[bytes] = []
        self.begun, self.left = threading.Event(), threading.Event()
        self._open: asyncio.Event
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.run(self._prepare())
        self.handovers = Handovers(self.loop, self._begin)

    async def _prepare(self) -> None:
        self._open = asyncio.Event()

    def run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result()  # type: ignore[arg-type]

    def let(self) -> None:
        self.loop.call_soon_threadsafe(self._open.set)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _begin(self, asked: Question) -> asyncio.Task[bytes]:
        if not self.turns or self._turn_is_over:
            self.turns.append([])
            self._turn_is_over = False
            self.loop.call_soon(self._end_turn)
        self.turns[-1].append(asked.body)
        return self.loop.create_task(self._answer(asked.body))

    _turn_is_over = False

    def _end_turn(self) -> None:
        self._turn_is_over = True
        self.begun.set()

    async def _answer(self, body: bytes) -> bytes:
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(body)
            self.left.set()
            raise
        if body == b"wrong":
            raise ValueError("wrong")
        return b"answer to " + body


@pytest.fixture
def doing() -> Iterator[Doing]:
    doing = Doing()
    yield doing
    doing.end()


async def test_what_one_turn_asks_goes_together_and_comes_back_together(doing: Doing) -> None:
    turns = list[int]()
    turn = 0

    async def ask(body: bytes) -> bytes:
        answer = await doing.handovers.asked(COUNT, body, None)
        turns.append(turn)
        return answer

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    asking = [asyncio.create_task(ask(body)) for body in (b"1", b"2", b"3")]
    await asyncio.to_thread(doing.begun.wait)
    doing.let()
    assert await asyncio.gather(*asking) == [b"answer to 1", b"answer to 2", b"answer to 3"]
    counting.cancel()
    assert doing.turns == [[b"1", b"2", b"3"]]
    assert len(set(turns)) == 1


async def test_what_fails_fails_alone(doing: Doing) -> None:
    doing.let()
    asked = [doing.handovers.asked(COUNT, body, None) for body in (b"wrong", b"right")]
    wrong, right = await asyncio.gather(*asked, return_exceptions=True)
    assert (type(wrong), right) == (ValueError, b"answer to right")


async def test_whoever_leaves_takes_back_what_was_asked(doing: Doing) -> None:
    gone, later = (doing.handovers.asked(COUNT, body, None) for body in (b"gone", b"later"))
    gone.cancel()  # before it goes over
    await asyncio.to_thread(doing.begun.wait)
    assert doing.turns == [[b"later"]]
    later.cancel()
    await asyncio.to_thread(doing.left.wait)
    assert doing.cancelled == [b"later"]


async def test_what_was_asked_before_it_closes_is_done(doing: Doing) -> None:
    asked = doing.handovers.asked(COUNT, b"last", None)
    doing.handovers.close("it is closed")
    with pytest.raises(StoreClosedError, match="it is closed"):
        doing.handovers.asked(COUNT, b"late", None)
    doing.let()
    assert await asked == b"answer to last"

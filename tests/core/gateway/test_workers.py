"""Work beside the event loop: the small at once, the large one at a time, the rest beside it."""

from __future__ import annotations

import asyncio
import threading

from lightspan.gateway.workers import LARGE, SMALL, THREADS, Workers


async def test_small_work_is_done_at_once() -> None:
    assert await Workers("a").run(threading.current_thread, size=SMALL) is threading.main_thread()


async def test_large_work_of_any_kind_is_done_one_at_a_time() -> None:
    """And takes no place from what is shorter."""
    kinds = [Workers("a"), Workers("b")]
    begun, go_on, at_once = threading.Event(), threading.Event(), list[int]()
    running = 0

    def large() -> None:
        nonlocal running
        running += 1
        at_once.append(running)
        begun.set()
        assert go_on.wait(60)
        running -= 1

    working = [asyncio.create_task(kind.run(large, size=LARGE + 1)) for kind in kinds * THREADS]
    assert await asyncio.to_thread(begun.wait, 60)
    for kind in kinds:
        ran_in = await kind.run(threading.current_thread, size=LARGE)
        assert ran_in is not threading.main_thread()
    assert at_once == [1]
    go_on.set()
    await asyncio.gather(*working)
    assert at_once == [1] * len(working)
    for kind in kinds:
        kind.close()

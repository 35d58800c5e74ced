"""How many a store's server does something for at once, and who leaves room for whom."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.core.serving.asking import ask, begun, packed
from tests.core.stores.served import serving

from lightspan.errors import StoreUnreachableError
from lightspan.schema.records import RolloutStatus
from lightspan.serving.store.gate import Full, Gate, Place
from lightspan.stores import open_store
from lightspan.stores.remote import operations
from lightspan.stores.sqlite import SQLiteStore
from lightspan.testing.store_suite import make_rollout


def unmoved(full: Full) -> None:
    """Of one who is never to be turned away."""
    pytest.fail("there was room")


@contextlib.contextmanager
def inside(gate: Gate, size: int) -> Iterator[Place]:
    """All of a request of this size is here."""
    with gate.arriving(unmoved) as place:
        place.add(size)
        with place.entered():
            yield place


def test_a_gate_lets_in_so_many_with_so_much() -> None:
    gate = Gate(2, 100)
    with inside(gate, 60):
        with pytest.raises(Full, match="60 bytes"), inside(gate, 50):
            pytest.fail("there is no room")
        with inside(gate, 40), pytest.raises(Full, match="2 requests"), inside(gate, 0):
            pytest.fail("there is no room")
    with inside(gate, 1_000):  # alone
        pass
    assert (gate.inside, gate.bytes) == (0, 0)


def test_who_is_let_in_is_the_first_that_is_here_with_all() -> None:
    gate = Gate(1, 100)
    with gate.arriving(unmoved) as slow, gate.arriving(unmoved) as fast:
        with fast.entered(), pytest.raises(Full, match="1 requests"), slow.entered():
            pytest.fail("there is no room")
        with gate.arriving(unmoved) as other, other.entered():
            assert gate.inside == 1
    assert gate.inside == 0


def test_who_brings_more_and_more() -> None:
    """What comes in pieces counts as it comes, and is refused when there is no room any more."""
    gate = Gate(9, 100)
    with gate.arriving(unmoved) as slow, inside(gate, 60):
        slow.add(40)
        with pytest.raises(Full, match="100 bytes"):
            slow.add(1)
    assert gate.bytes == 0


def test_who_has_brought_most_and_stops_makes_room() -> None:
    """Not one who is inside, nor who has brought no more than the other would have then."""
    turned_away: list[str] = []
    gate = Gate(9, 100)
    with contextlib.ExitStack() as stack:
        for name, size in (("small", 20), ("large", 30), ("same", 20)):
            arriving = gate.arriving(lambda full, name=name: turned_away.append(f"{name}: {full}"))  # type: ignore[misc]
            stack.enter_context(arriving).add(size)
        stack.enter_context(inside(gate, 25))
        late = stack.enter_context(gate.arriving(unmoved))
        late.add(10)
        assert turned_away == ["large: requests of 95 bytes are under way here already"]
        assert gate.bytes == 75
        late.add(9)
        with pytest.raises(Full, match="84 bytes"):
            late.add(17)
        assert (len(turned_away), gate.bytes) == (1, 84)
    assert gate.bytes == 0


def test_who_is_fast_leaves_for_what_is_small_only() -> None:
    turned_away: list[str] = []
    gate = Gate(9, 100_000)
    with gate.arriving(lambda full: turned_away.append(str(full))) as large:
        large.add(90_000)
        with gate.arriving(unmoved) as late, pytest.raises(Full, match="90,000 bytes"):
            late.add(16_385)
        assert turned_away == []
        with gate.arriving(unmoved) as late:
            late.add(16_384)
        assert turned_away == ["requests of 90,000 bytes are under way here already"]


def test_who_is_slow_leaves_before_who_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it has brought: many small ones that stop are not to starve a large one."""
    times = iter([0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr("lightspan.serving.store.gate.clock.monotonic", lambda: next(times))
    turned_away: list[str] = []
    gate = Gate(9, 100_000)
    with contextlib.ExitStack() as stack:

        def arriving(name: str) -> Place:
            return stack.enter_context(gate.arriving(lambda full: turned_away.append(name)))

        large, small = arriving("large"), arriving("small")  # at 0 and 0
        small.add(10_000)  # at 0
        large.add(40_000)  # at 1
        large.add(40_000)  # at 1
        with gate.arriving(unmoved) as late:  # at 2
            late.add(15_000)  # at 2 and 2
            assert (turned_away, gate.bytes) == (["small"], 95_000)


async def test_slow_bodies_keep_out_nobody(tmp_path: Path) -> None:
    """However many: who is not here yet takes no place."""
    options = {"max_body": 1_000, "most_requests": 4}
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), **options) as served:
        chunked = {"Transfer_Encoding": "chunked"}
        with contextlib.ExitStack() as stack:
            for number in range(1, 9):
                path, start = "/store/v1/add_spans", b"1\r\n\x81\r\n"
                stack.enter_context(begun(served.url, path, start, **chunked))
                while served.server._gate.bytes < number:  # noqa: ASYNC110 - it tells nobody
                    await asyncio.sleep(0)
            assert (served.server._gate.inside, served.server._gate.bytes) == (0, 8)
            beat = packed(attempts=[], lease_s=1.0)
            for path, body in (("count", packed()), ("heartbeat", beat)):
                answer = await asyncio.to_thread(ask, served.url, f"/store/v1/{path}", body)
                assert answer.status == 200


async def test_large_bodies_that_stop_before_their_end_keep_out_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has sent most of them is told to come again, and its connection is closed."""
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), max_body=1_000) as served:
        gate = served.server._vital
        path, start = "/store/v1/heartbeat", b"x" * 999
        with begun(served.url, path, start, Content_Length=1_000) as stopped:
            while gate.bytes < 999:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            beat = packed(attempts=[], lease_s=1.0)
            answer = await asyncio.to_thread(ask, served.url, path, beat)
            assert answer.status == 200
            told = await asyncio.to_thread(stopped.makefile("rb").read)
        assert told.startswith(b"HTTP/1.1 429 ")
        assert b"Retry-After: 1\r\n" in told
        assert caplog.text == "", "an attack is not to fill the log"
        assert (gate.inside, gate.bytes) == (0, 0)


@pytest.mark.parametrize("path", ["add_spans", "heartbeat"])
async def test_sizes_that_are_only_said_keep_out_nobody(tmp_path: Path, path: str) -> None:
    """What counts is here: one who says that a large body comes, and sends nothing, has brought
    nothing; one who says that more comes than there may be is told so at once."""
    options = {"max_body": 1_000, "most_requests": 4}
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), **options) as served:
        gate = served.server._vital if path == "heartbeat" else served.server._gate
        begin = partial(begun, served.url, f"/store/v1/{path}", b"\x81")
        with begin(Content_Length=1_000), begin(Content_Length=10**12) as absurd:
            while gate.bytes < 1:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0)
            assert (await asyncio.to_thread(absurd.recv, 12)) == b"HTTP/1.1 413"
            assert (gate.inside, gate.bytes) == (0, 1)
            beat = packed(attempts=[], lease_s=1.0)
            for other, body in (("count", packed()), ("heartbeat", beat)):
                answer = await asyncio.to_thread(ask, served.url, f"/store/v1/{other}", body)
                assert answer.status == 200


async def test_a_long_answer_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is encoded beside the event loop, which answers others meanwhile."""
    encode, others = operations._encode_items, threading.Event()

    def slowly(items: Any) -> bytes:
        assert others.wait(60)
        return encode(items)

    monkeypatch.setattr(operations, "_encode_items", slowly)
    names = [f"ro-{number}" for number in range(operations.LONG + 1)]
    with serving(lambda: SQLiteStore(tmp_path / "store.db")) as served:
        async with open_store(served.url) as store:
            await store.enqueue([make_rollout(name) for name in names])
            listed = asyncio.create_task(store.rollouts())
            assert (await store.count())[RolloutStatus.QUEUED] == len(names)
            others.set()
            assert [state.rollout.rollout_id for state in await listed] == names


async def test_a_database_that_is_away_is_one_to_come_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a refusal, which clients would take for the last word."""

    async def away(run_id: str | None = None) -> Any:
        raise StoreUnreachableError("the server cannot be reached")

    with serving(lambda: SQLiteStore(tmp_path / "store.db")) as served:
        monkeypatch.setattr(served.store, "count", away)
        answer = await asyncio.to_thread(ask, served.url, "/store/v1/count", packed())
        assert (answer.status, answer.message) == (503, "the server cannot be reached")


async def test_who_finds_no_room_to_wait_claims_as_soon_as_it_is_told(tmp_path: Path) -> None:
    """A rollout is not to wait for half a minute because more runners are idle than may wait."""
    with serving(lambda: SQLiteStore(tmp_path / "store.db")) as served:
        served.server._idle._most = 0
        async with open_store(served.url) as store:
            with pytest.raises(StoreUnreachableError, match="0 requests are under way"):
                await store.await_work(timeout_s=60.0)
        asked = served.server._metrics.text({}, {})
    assert 'operation="await_work",status="429"} 2' in asked


async def test_who_waits_takes_no_place_of_who_works(tmp_path: Path) -> None:
    with serving(lambda: SQLiteStore(tmp_path / "store.db"), most_requests=1) as served:
        async with open_store(served.url) as store:
            watching = [asyncio.create_task(store.watch(timeout_s=60)) for _ in range(4)]
            await asyncio.sleep(0)
            await store.enqueue([make_rollout()])
            for changes in await asyncio.gather(*watching):
                assert [state.rollout.rollout_id for state in changes.rollouts] == ["ro-1"]
        assert (served.server._gate.inside, served.server._waiting.inside) == (0, 0)

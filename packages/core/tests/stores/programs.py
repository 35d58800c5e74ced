"""Programs for tests of shared stores, which run in other processes.

Their argument is the store's URL or file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from lightspan.schema.images import Image
from lightspan.schema.records import RolloutStatus
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite import Clock

FORKED: Final = """
import asyncio, os, sys
from lightspan.stores import open_store
from lightspan.errors import StoreClosedError

store = open_store(sys.argv[1])
asyncio.run(store.open())
assert asyncio.run(store.allot_version("sql")) == 1
child = os.fork()
if child == 0:
    try:
        asyncio.run(store.count())
    except StoreClosedError as error:
        assert "forked" in str(error), error
    else:
        os._exit(1)
    asyncio.run(store.open())
    assert asyncio.run(store.allot_version("sql")) == 2
    asyncio.run(store.close())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert asyncio.run(store.allot_version("sql")) == 3
"""
"""Program `FORKED STORE`: the parent's store stays open after the child has closed its own."""

END: Final = "asyncio.run(store.close())"

WRITER: Final = """
import asyncio, itertools, sys
from lightspan.errors import StoreError
from lightspan.stores import open_store
from lightspan.schema.images import Image
from lightspan_testing.store_suite import claim_one, make_call, make_report, make_rollout, ref

def say(*words):
    print(*words, flush=True)

async def one(store, round_number):
    name = f"ro-{sys.argv[2]}-{round_number}"
    await store.enqueue([make_rollout(name, run_id=name)])
    say("queued", name)
    attempt = await claim_one(store, run_id=name)
    say("claimed", attempt.attempt_id)
    await store.add_images(ref(attempt), [Image.of(name.encode() * 100, "image/png")])
    say("image", name)
    for number in range(3):
        assert await store.add_calls([make_call(attempt, number)]) == [False]
        say("call", attempt.attempt_id, number)
    assert await store.report([make_report(attempt)]) == [True]
    say("reported", name)

async def main():
    async with open_store(sys.argv[1]) as store:
        for turn in itertools.count():
            await asyncio.gather(*(one(store, 10 * turn + i) for i in range(10)))

try:
    asyncio.run(main())
except StoreError:  # the server was killed
    pass
"""
"""Program `WRITER STORE NAME`: print each write after it is acknowledged, without an end."""


async def check_acknowledged(make_store: Callable[[Clock], Store], lines: list[list[str]]) -> None:
    """Check that every write that the program `WRITER` printed is stored."""
    clock = Clock()
    clock.now = time.time() + 1e6  # every lease has run out
    async with make_store(clock) as store:
        for kind, name, *rest in lines:
            if kind == "queued":
                assert await store.rollouts([name])
            elif kind == "image":
                image = Image.of(name.encode() * 100, "image/png")
                assert await store.images([image.digest]) == {image.digest: image}
            elif kind == "claimed":
                assert (await store.attempt(name)).number == 1
            elif kind == "call":
                records = (await store.token_records([name]))[name]
                assert [r.late for r in records if r.call_id == f"call-{rest[0]}"] == [False]
            else:
                [state] = await store.rollouts([name])
                assert state.status is RolloutStatus.SUCCEEDED
        await store.expire()
        assert RolloutStatus.RUNNING not in await store.count()

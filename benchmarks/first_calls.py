"""CPU time of the gateway for attempts of one call each, compared with another version of it.

    python benchmarks/first_calls.py [--calls 1500] [--json PATH]

Everything is in one process: the client (aiohttp), the gateway, a SQLite store on disk, and an
engine that has its tokens ready. Each attempt makes one call, 16 at once, so that the gateway looks
up a call token for each. The committed figure compares whole processes, start and end included, of
two checkouts that took turns; it was written by hand from their medians.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Final

import aiohttp
from _gateway_server import ReadyEngine
from _report import Figure, finish, options_of

from lightspan.schema.records import Claim, Mode, Rollout, new_id
from lightspan.schema.routing import Route, Routing, Target
from lightspan.stores import open_store
from lightspan_gateway import Gateway

IN_FLIGHT: Final = 16
BODY: Final = {
    "model": "m",
    "messages": [{"role": "user", "content": "How many singers are there? " * 8}],
    "max_tokens": 8,
}


async def measure(count: int) -> float:
    """Return the CPU milliseconds of a call, the client's included."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            open_store(f"sqlite:///{folder}/run.db") as store,
            Gateway(store, ReadyEngine()) as gateway,
            aiohttp.ClientSession() as session,
        ):
            target = Target(route=Route.POLICY, policy="policy")
            resources = await store.put_resources({"routing": Routing(default=target)})
            await store.enqueue([_rollout(resources) for _ in range(count)])
            claims: list[Claim] = []
            while len(claims) < count:
                claims += await store.claim("bench", 128, 3600)
            url, left = f"{gateway.url}/v1/chat/completions", iter(claims)
            begun = time.process_time()
            await asyncio.gather(*(_ask(session, url, left) for _ in range(IN_FLIGHT)))
            return 1000 * (time.process_time() - begun) / count


def _rollout(resources: str) -> Rollout:
    return Rollout(
        rollout_id=new_id("ro"), task={}, task_id="t", resources_id=resources, mode=Mode.VAL
    )


async def _ask(session: aiohttp.ClientSession, url: str, claims: Iterator[Claim]) -> None:
    for claim in claims:
        headers = {"Authorization": f"Bearer {claim.attempt.call_token}"}
        async with session.post(url, json=BODY, headers=headers) as got:
            assert got.status == 200, await got.text()
            await got.read()


def main() -> int:
    """Run the benchmark and print the figure; return the exit status."""
    parser = options_of(__doc__ or "")
    parser.add_argument("--calls", type=int, default=1500)
    options = parser.parse_args()
    spent = asyncio.run(measure(options.calls))
    what = "an attempt's first call, client included"
    return finish([Figure(what=what, unit="CPU-ms", ours=spent)], options.json)


if __name__ == "__main__":
    sys.exit(main())

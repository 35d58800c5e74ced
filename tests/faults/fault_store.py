"""A store's server that ends itself by SIGKILL: `fault_store STORE PORT POINT NUMBER`.

It dies at its so many-th request, `before` what that asks is done or `after` it is committed and
before anybody is told.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from lightspan.stores import open_store
from lightspan_gateway.remote_store.rpc import Arguments, Operation
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_gateway.store_server.server import StoreServer


class Mortal(StoreServer):
    left = 0
    point = ""

    async def _answer(self, operation: Operation, arguments: Arguments) -> Any:
        self.left -= 1
        is_last = self.left == 0
        if is_last and self.point == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await super()._answer(operation, arguments)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


async def main(url: str, port: str, point: str, number: str) -> None:
    async with open_store(url) as store:
        server = Mortal(store, Keys(None), port=int(port))
        server.point, server.left = point, int(number)
        async with server:
            print(server.url, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

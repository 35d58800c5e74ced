"""Run a store's server that kills itself: `fault_store STORE PORT POINT NUMBER`.

It sends itself SIGKILL at the request with this number, `before` the operation is executed, or
`after` it is committed and before the response is sent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from lightspan.stores import open_store
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.remote_store.rpc import Operation
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_gateway.store_server.server import StoreServer


class Mortal(StoreServer):
    left = 0
    point = ""

    async def _execute(self, operation: Operation, role: Role, body: bytes) -> bytes:
        self.left -= 1
        is_last = self.left == 0
        if is_last and self.point == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await super()._execute(operation, role, body)
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

"""Run `lightspan serve --store URL`, to be killed at a known point: `fault_served STORE PORT`.

After SIGUSR1 it kills itself before the operation of the next request is executed. After SIGUSR2 it
kills itself after the commit and before the response.
"""

from __future__ import annotations

import signal
import sys

from fault_store import Mortal  # type: ignore[import-not-found]

from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.store_server import main as server_main
from lightspan_gateway.store_server.server import StoreServer

KEYS = {Role.TRAINER: "TRAINER_KEY", Role.RUNNER: "RUNNER_KEY"}


def _at_the_next(server: StoreServer) -> None:
    assert isinstance(server, Mortal)

    def die(point: str) -> None:
        server.point, server.left = point, 1

    signal.signal(signal.SIGUSR1, lambda *_: die("before"))
    signal.signal(signal.SIGUSR2, lambda *_: die("after"))


def main(url: str, port: str) -> None:
    server_main.StoreServer = Mortal
    options = server_main.StoreOptions(url=url, port=int(port), key_variables=KEYS)
    server_main.serve_store(options, ready=_at_the_next)


if __name__ == "__main__":
    main(*sys.argv[1:])

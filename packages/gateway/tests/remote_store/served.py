"""Stores that are served over HTTP in this process, each in a separate event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from lightspan.stores.protocol import Store
from lightspan_gateway.remote_store.roles import Role
from lightspan_gateway.store_server.api_keys import Keys
from lightspan_gateway.store_server.server import StoreServer

T = TypeVar("T")

ADMIN = "an-admin-key-0123456789"
TRAINER = "a-trainer-key-0123456789"
RUNNER = "a-runner-key-0123456789"
READER = "a-reader-key-0123456789"
KEYS = {Role.ADMIN: ADMIN, Role.TRAINER: TRAINER, Role.RUNNER: RUNNER, Role.READER: READER}


class Served:
    """A running server.

    Args:
        make_store: function that returns a store; called again when the server restarts.
        options: options of `StoreServer`.
    """

    def __init__(
        self, make_store: Callable[[], Store], keys: Keys | None = None, **options: Any
    ) -> None:
        self._make_store = make_store
        self._keys = keys or Keys(None)
        self._options = options
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run_loop)
        self._thread.start()
        self.server: StoreServer
        self.store: Store
        self.start()

    @property
    def url(self) -> str:
        return self.server.url

    def start(self, port: int = 0) -> None:
        self.run(self._start(port))

    def stop(self) -> int:
        """Stop the server; return its port, which is free afterwards."""
        port = int(self.url.rpartition(":")[2])
        self.run(self._stop())
        return port

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run_loop(self) -> None:
        with self._runner:  # cancels the tasks of aborted connections
            self._loop.run_forever()

    async def _start(self, port: int) -> None:
        self.store = self._make_store()
        await self.store.open()
        self.server = StoreServer(self.store, self._keys, port=port, **self._options)
        await self.server.start()

    async def _stop(self) -> None:
        await self.server.close()
        await self.store.close()


@contextmanager
def serving(
    make_store: Callable[[], Store], keys: Keys | None = None, **options: Any
) -> Iterator[Served]:
    """Run a server in the block."""
    served = Served(make_store, keys, **options)
    try:
        yield served
    finally:
        served.close()

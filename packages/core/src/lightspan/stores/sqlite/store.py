"""SQLiteStore: one file, any number of processes on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lightspan.schema import clock as machine
from lightspan.stores._sql.store import SQLStore
from lightspan.stores.protocol import StoreCapabilities
from lightspan.stores.sqlite.database import SQLiteDatabase, SQLiteReader
from lightspan.stores.timings import StoreTimings

_POLL_INTERVALS_S: Final = (0.002, 0.02)
"""Shortest and longest time, in seconds, between two polls of the file by `watch`. SQLite does not
notify a process of the writes of another process. A change by this process ends the wait at once.
"""


class SQLiteStore(SQLStore[SQLiteDatabase | SQLiteReader]):
    """A store in a SQLite file. Open it in each process that uses it, and again after a fork.

    The file is in WAL mode, so reads never wait for writes. Acknowledged writes survive `kill -9`.
    If `read_only` is set before `open`, nothing in the file's folder is changed.

    Args:
        path: the file; it is created if it does not exist.
        power_loss: whether acknowledged writes must survive a power loss too.
        clock: function that returns seconds since the epoch; tests replace it.
        timings: times and limits; None for the defaults.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        power_loss: bool = False,
        clock: Callable[[], float] = machine.now,
        timings: StoreTimings | None = None,
    ) -> None:
        self.path: Final = Path(path).absolute()
        self._power_loss = power_loss
        self._clock = clock
        self._timings = timings or StoreTimings()
        super().__init__(str(self.path), _POLL_INTERVALS_S)

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(durable=True, multi_process=True, power_loss=self._power_loss)

    @property
    def url(self) -> str:
        return f"sqlite://{self.path}{'?power_loss=true' if self._power_loss else ''}"

    def _start(self) -> SQLiteDatabase | SQLiteReader:
        if self.read_only:
            return SQLiteReader(self.path, self._clock, self._timings)
        return SQLiteDatabase(
            self.path, self._power_loss, self._clock, self._signal.notify, self._timings
        )

"""SQLiteStore: one file, any number of processes on one machine.

What is written at the same time is committed together, by the event loop itself if it is little and
by a thread if it is more; what one task alone writes is committed at once (`database`). Reads have
a connection and a thread of their own and, the file being in WAL mode, wait for nobody.
What was acknowledged survives `kill -9`; with `power_loss=True` it survives a power loss too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lightspan.schema import clock as machine
from lightspan.stores._sql.store import SQLStore
from lightspan.stores.protocol import StoreCapabilities
from lightspan.stores.sqlite.database import SQLiteDatabase

_POLLS_S: Final = (0.002, 0.02)
"""Between two looks of `watch` at the file, because SQLite tells no process what another has
written; a change of this process's own wakes it at once."""


class SQLiteStore(SQLStore[SQLiteDatabase]):
    """A store in a SQLite file. Open it in each process that uses it; after a fork, again."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        power_loss: bool = False,
        clock: Callable[[], float] = machine.now,
    ) -> None:
        self.path: Final = Path(path).absolute()
        self._power_loss = power_loss
        self._clock = clock
        super().__init__(str(self.path), _POLLS_S)

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(durable=True, multi_process=True, power_loss=self._power_loss)

    @property
    def url(self) -> str:
        option = "?power_loss=true" if self._power_loss else ""
        return f"sqlite://{self.path}{option}"

    def _start(self) -> SQLiteDatabase:
        return SQLiteDatabase(self.path, self._power_loss, self._clock, self._signal.notify)

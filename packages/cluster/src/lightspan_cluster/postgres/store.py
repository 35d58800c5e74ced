"""PostgresStore: a store in one schema of a database, for processes on any machines.

Acknowledged writes survive `kill -9` of the server and a power loss; a server whose settings do not
guarantee this is rejected. Leases are timed by the server's clock. A lost connection is opened
again, for up to half a minute, and its unacknowledged writes are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lightspan.errors import ConfigError, how_to_install
from lightspan.stores._sql.store import SQLStore
from lightspan.stores.protocol import StoreCapabilities
from lightspan.stores.timings import StoreTimings
from lightspan_cluster.postgres.dsn import read_address

try:
    from lightspan_cluster.postgres.database import PostgresDatabase
    from lightspan_cluster.postgres.server import Server
except ImportError as error:
    raise ConfigError(
        f"a PostgreSQL store needs psycopg ({error}): {how_to_install('postgres')}; where the "
        "system has no libpq, also `pip install 'psycopg[binary]'`"
    ) from error

_POLLS_S: Final = (0.5, 0.5)
"""Minimum and maximum seconds between two polls of `watch`. A notification causes a poll at
once."""


class PostgresStore(SQLStore[PostgresDatabase]):
    """A store in a PostgreSQL database.

    Each process that uses the store opens it itself. A forked process opens it again.

    Args:
        url: `postgresql://user@host:port/database?sslmode=…&schema=…`; libpq finds missing parts by
            its own rules. The default schema is `lightspan`.
        create: whether to create the tables if there are none.
        clock: a clock for tests; None for the server's clock.
        timings: times and limits; None for the defaults of `StoreTimings`.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        clock: Callable[[], float] | None = None,
        timings: StoreTimings | None = None,
    ) -> None:
        self._server = Server(read_address(url), timings or StoreTimings())
        self._create = create
        self._clock = clock
        super().__init__(self.url, _POLLS_S)

    def set_patience(self, seconds: float) -> None:
        """Retry operations for `seconds` while the server is unreachable. Call it before `open`."""
        self._server.patience_s = seconds

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(durable=True, multi_process=True, power_loss=True)

    @property
    def url(self) -> str:
        """The URL without its password."""
        return self._server.address.url

    def _start(self) -> PostgresDatabase:
        self._server.read_only = self.read_only
        return PostgresDatabase(
            self._server,
            self._clock,
            self._signal.notify,
            create=self._create and not self.read_only,
        )

    def _listen(self) -> None:
        self._opened.listen()

"""The server of a PostgreSQL store: connections and error messages.

A server that may lose acknowledged writes is rejected. One of the settings that decide this is
`synchronous_commit`. Every session fixes its value when it starts, so that later changes of the
setting do not affect the session.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg
from psycopg import errors, sql

from lightspan.errors import (
    ConfigError,
    DataError,
    LightspanError,
    StoreError,
    StoreFormatError,
    StoreUnreachableError,
)
from lightspan.schema import clock
from lightspan.stores.timings import StoreTimings
from lightspan_cluster.postgres.dsn import Address

log = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]

_OLDEST: Final = 120000
_MIN_BACKOFF_S: Final = 0.02
_MAX_BACKOFF_S: Final = 1.0
_WARN_FROM_S: Final = 3.0
"""Seconds of retries from which a warning is logged."""
_WARN_INTERVAL_S: Final = 60.0
"""Minimum seconds between two such warnings of a process."""
_DEFAULTS: Final = {
    "application_name": "lightspan",
    "client_encoding": "utf8",
    "connect_timeout": "10",
    # to detect a server that is gone without closing the connection
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
# A role or database may have other settings. A process that is suspended (Ctrl-Z) in a transaction
# must not block the others, so the server ends its session. With the default random_page_cost of 4,
# which is for hard disks, the server reads whole tables where a thousand rows are looked up by id.
_SESSION: Final = """
SELECT set_config('search_path', %s, false),
    set_config('synchronous_commit', current_setting('synchronous_commit'), false),
    set_config('idle_in_transaction_session_timeout', '10s', false),
    set_config('lock_timeout', '30s', false),
    set_config('random_page_cost', '1.1', false),
    set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_read_only', %s, false)
"""
_SETTINGS: Final = """
SELECT name, setting, source FROM pg_settings
WHERE name IN ('synchronous_commit', 'fsync', 'server_encoding', 'server_version_num')
"""
_LOSSES: Final = {
    "fsync": "the whole database when the machine loses power",
    "synchronous_commit": "the latest writes when it is killed",
}
"""Setting that must be on → what the server may lose if it is off, for the error message."""


class Server:
    """The database server of one store: opens connections, and explains errors.

    Args:
        address: the store's address.
        timings: how long operations are retried, and other times and limits.
    """

    def __init__(self, address: Address, timings: StoreTimings) -> None:
        """Check the address; raise `ConfigError` if libpq does not know one of its options."""
        self.address: Final = address
        self.timings = timings
        self.read_only = False
        """Whether new sessions refuse to write."""
        self.patience_s = timings.database_retry_s
        """Seconds for which an operation is retried while the server is unreachable."""
        self._warned_at = -_WARN_INTERVAL_S
        self._parameters = {**_DEFAULTS, **address.parameters}
        try:
            psycopg.conninfo.make_conninfo("", **self._parameters)
        except psycopg.Error as error:
            reason = str(error).strip()
            raise ConfigError(
                f"store {address.url!r}: {reason}; the options after ? are schema= and those of "
                "libpq, such as sslmode="
            ) from None

    def retry_s(self, is_closing: bool) -> float:
        """Return the seconds for which an operation is retried.

        While the store is being closed (`is_closing`), they are at most `database_retry_s`.
        """
        limit_s = self.timings.database_retry_s
        return min(limit_s, self.patience_s) if is_closing else self.patience_s

    def warn(self, error: psycopg.Error, retry: Retry) -> None:
        """Log that an operation is retried because of `error`, if it has been for seconds."""
        now = clock.monotonic()
        if retry.waited_s >= _WARN_FROM_S and now - self._warned_at >= _WARN_INTERVAL_S:
            self._warned_at = now
            log.warning("retrying for up to %g s: %s", retry.timeout_s, self.explain(error))

    def connect(self) -> Connection:
        """Open a session in autocommit mode, with the store's schema as its search path.

        Raises:
            StoreError: the server may lose acknowledged writes, or its encoding or version cannot
                be used.
            psycopg.Error: the server cannot be reached.
        """
        parameters = {**self._parameters, **self.address.secrets}
        db = psycopg.connect(psycopg.conninfo.make_conninfo("", **parameters), autocommit=True)
        try:
            db.execute("SET statement_timeout = 0")
            self._check(db)
            path = sql.Identifier(self.address.schema).as_string(db)
            db.execute(_SESSION, (path, "on" if self.read_only else "off"))
        except BaseException:
            db.close()
            raise
        return db

    def _check(self, db: Connection) -> None:
        settings = {name: (value, source) for name, value, source in db.execute(_SETTINGS)}
        for name, loss in _LOSSES.items():
            value, source = settings[name]
            if value == "off":
                raise StoreError(
                    f"store {self.address.url}: {name} is off (set by: {source}), so this server "
                    f"loses {loss}: turn it on there"
                )
        encoding, _ = settings["server_encoding"]
        if encoding != "UTF8":
            raise StoreError(
                f"store {self.address.url}: the database's encoding {encoding} lacks characters: "
                "CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
            )
        version = int(settings["server_version_num"][0])
        if version < _OLDEST:
            raise StoreError(
                f"store {self.address.url}: PostgreSQL {version // 10000} is too old: "
                f"{_OLDEST // 10000} or newer is needed"
            )

    def explain(self, error: Exception) -> StoreError:
        """Return a `StoreError` for an error of PostgreSQL, with advice if the cause is known."""
        text = str(error).strip() or type(error).__name__
        state = getattr(error, "sqlstate", None) or ""
        kind, hint = StoreError, ""
        if isinstance(error, (UnicodeError, psycopg.DataError)):
            kind, hint = _UnstorableError, "this cannot be stored"
        elif isinstance(error, UNREADABLE):
            kind, hint = StoreFormatError, "the data cannot be read: restore a backup"
        elif key := next(filter(state.startswith, _STATE_HINTS), None):
            kind, hint = _KINDS.get(key, StoreError), _STATE_HINTS[key]
        elif key := next((words for words in _MESSAGE_HINTS if words in text), None):
            kind, hint = _KINDS.get(key, StoreError), _MESSAGE_HINTS[key]
        return kind(f"store {self.address.url}: " + (f"{hint} ({text})" if hint else text))


class _UnstorableError(StoreError, DataError):
    """A value that PostgreSQL cannot store."""


UNREADABLE: Final = (LookupError, TypeError, ValueError, OverflowError)
"""Exceptions that decoding a malformed row can raise."""
_NO_CONNECTION: Final = (
    "the server has no connection left, and each process needs up to five: raise its "
    "max_connections"
)
_STATE_HINTS: Final = {
    "53100": "the server's disk is full: this write was refused, and acknowledged writes are safe; "
    "free some space there",
    "53300": _NO_CONNECTION,
    "54000": "an id or a name is longer than PostgreSQL can index, about 2,700 bytes: use a "
    "shorter one",
    "28": "the server rejects this user: set PGPASSWORD, or see ~/.pgpass",
    "3D000": "there is no such database: CREATE DATABASE, or name another",
    "42501": "the user lacks permissions: GRANT CREATE ON DATABASE, or use the owner of the tables",
    "25006": "the server is read-only, perhaps a standby: name the primary",
    "55P03": "another session has held its lock for 30 s: see pg_stat_activity",
    "42P01": "a table is missing: restore a backup, or name another schema",
    "42703": "a column is missing: restore a backup, or name another schema",
    "XX": "the database is damaged: restore a backup",
}
"""SQLSTATE code, or its first characters → advice."""
_MESSAGE_HINTS: Final = {
    "password authentication failed": "the password is wrong: set PGPASSWORD, or see ~/.pgpass",
    "no password supplied": "the server requires a password: set PGPASSWORD, or see ~/.pgpass",
    "does not exist": "there is no such database or role: create it, or name another",
    "too many clients": _NO_CONNECTION,
    "remaining connection slots": _NO_CONNECTION,
    "definition of service": "libpq finds no such service: see ~/.pg_service.conf",
    "connection": "the server cannot be reached: is it running, and is this its address?",
}
"""Words in libpq's message → advice. They are used for errors without a SQLSTATE code, which occur
before there is a session."""
_KINDS: Final[dict[str, type[StoreError]]] = {
    "54000": _UnstorableError,
    "42P01": StoreFormatError,
    "42703": StoreFormatError,
    "XX": StoreFormatError,
    "connection": StoreUnreachableError,
}


def needs_explanation(error: BaseException) -> bool:
    """Return whether `error` needs the message that `explain` gives it.

    It does if it comes from the server, or if stored data cannot be decoded (a plain `DataError`).
    Other errors of lightspan have a message for the user already.
    """
    if isinstance(error, LightspanError):
        return isinstance(error, DataError) and not isinstance(error, StoreError)
    return isinstance(error, (psycopg.Error, OSError, *UNREADABLE))


def is_connection_lost(error: BaseException) -> bool:
    """Return whether the server could not be reached, or ended the session."""
    state = getattr(error, "sqlstate", None) or "08"  # there is none without a session
    return isinstance(error, psycopg.OperationalError) and state.startswith(("57P", "08"))


def is_starting(error: BaseException) -> bool:
    """Return whether an error means that the server runs but is not ready yet."""
    words = ("starting up", "in recovery mode", "shutting down")
    return isinstance(error, psycopg.OperationalError) and any(w in str(error) for w in words)


class Link:
    """A connection for one thread. It is opened when first used, and again after it was lost."""

    def __init__(self, server: Server, db: Connection | None = None) -> None:
        self.server: Final = server
        self._db = db

    @property
    def db(self) -> Connection:
        """The connection; it is opened if necessary."""
        if self._db is None:
            self._db = self.server.connect()
        return self._db

    def recover(self, error: BaseException, retry: Retry) -> bool:
        """Clean up the session after `error`; return whether to repeat the transaction.

        If it returns True, it has made a pause (`retry.pause`). It returns False if the error is
        permanent or the retries have timed out.
        """
        db = self._db
        if db is not None and not db.closed:
            with contextlib.suppress(psycopg.Error):
                db.rollback()
            # A pipeline that the server ended may leave a broken session that counts as open.
            if not db.closed and not is_connection_lost(error):
                return isinstance(error, _ROLLED_BACK) and retry.pause()
        self.close()
        was_open = isinstance(error, psycopg.OperationalError) or db is not None
        if not was_open or not isinstance(error, psycopg.Error):
            return False
        self.server.warn(error, retry)
        return retry.pause()

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


_ROLLED_BACK: Final = (errors.DeadlockDetected, errors.SerializationFailure)
"""Errors of a transaction that the server rolled back because of a conflict."""


class Retry:
    """Pauses between retries. They get longer, until a timeout has passed.

    The timeout begins with the first pause. A lost connection may be noticed late, and the whole
    timeout is left even then.

    Args:
        timeout_s: the timeout in seconds, or a function that returns it, which may change.
    """

    def __init__(self, timeout_s: float | Callable[[], float]) -> None:
        self._timeout_s = timeout_s if callable(timeout_s) else lambda: timeout_s
        self._start: float | None = None
        self._backoff_s = _MIN_BACKOFF_S

    @property
    def timeout_s(self) -> float:
        """The timeout in seconds."""
        return self._timeout_s()

    @property
    def waited_s(self) -> float:
        """Seconds since the first pause."""
        return 0.0 if self._start is None else clock.monotonic() - self._start

    def pause(self) -> bool:
        """Pause before a retry and return True. After the timeout, return False without a pause."""
        now = clock.monotonic()
        self._start = now if self._start is None else self._start
        if now - self._start >= self._timeout_s():
            return False
        time.sleep(random.uniform(0.5, 1.0) * self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
        return True

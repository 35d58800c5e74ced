"""The server of a PostgreSQL store: connecting to it, and what its errors mean.

A server that forgets what it has acknowledged is refused. Every session keeps the setting that
decides it (`synchronous_commit`) as it found it, whatever others change later.
"""

from __future__ import annotations

import contextlib
import random
import time
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
from lightspan_cluster.postgres.dsn import Address

Connection = psycopg.Connection[Any]

OUT_OF_REACH_S: Final = 30.0
"""How long a server is waited for that was there before."""
_OLDEST: Final = 120000
_RETRY_BACKOFF_S: Final = (0.02, 1.0)
_DEFAULTS: Final = {
    "application_name": "lightspan",
    "client_encoding": "utf8",
    "connect_timeout": "10",
    # a server that is gone without a word is noticed
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
# What a role or database may have set otherwise. A process that stops in the middle of a
# transaction (Ctrl-Z) must not keep the others out: the server ends its session.
_SESSION: Final = """
SELECT set_config('search_path', %s, false),
    set_config('synchronous_commit', current_setting('synchronous_commit'), false),
    set_config('idle_in_transaction_session_timeout', '10s', false),
    set_config('lock_timeout', '30s', false),
    set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_read_only', 'off', false)
"""
_SETTINGS: Final = """
SELECT name, setting, source FROM pg_settings
WHERE name IN ('synchronous_commit', 'fsync', 'server_encoding', 'server_version_num')
"""


class Server:
    """Makes connections to one store's database."""

    def __init__(self, address: Address) -> None:
        """Raises `ConfigError` for an option that libpq does not know."""
        self.address: Final = address
        self._parameters = {**_DEFAULTS, **address.parameters}
        try:
            psycopg.conninfo.make_conninfo("", **self._parameters)
        except psycopg.Error as error:
            why = str(error).strip()
            raise ConfigError(
                f"store {address.url!r}: {why}; after ? come schema= and libpq's options, such as "
                "sslmode="
            ) from None

    def connect(self) -> Connection:
        """A session that commits by itself and has the store's schema as its search path.

        Raises:
            StoreError: the server forgets what it has acknowledged, or can't keep a store.
            psycopg.Error: it cannot be reached.
        """
        parameters = {**self._parameters, **self.address.secrets}
        db = psycopg.connect(psycopg.conninfo.make_conninfo("", **parameters), autocommit=True)
        try:
            db.execute("SET statement_timeout = 0")
            self._check(db)
            path = sql.Identifier(self.address.schema).as_string(db)
            db.execute(_SESSION, (path,))
        except BaseException:
            db.close()
            raise
        return db

    def _check(self, db: Connection) -> None:
        found = {name: (value, source) for name, value, source in db.execute(_SETTINGS)}
        for name in ("synchronous_commit", "fsync"):
            value, source = found[name]
            if value == "off":
                raise self._forgetful(name, source)
        encoding, _ = found["server_encoding"]
        if encoding != "UTF8":
            raise StoreError(
                f"store {self.address.url}: the database is encoded in {encoding}, which has not "
                "all characters: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
            )
        version = int(found["server_version_num"][0])
        if version < _OLDEST:
            raise StoreError(
                f"store {self.address.url}: PostgreSQL {version // 10000} is too old: "
                f"{_OLDEST // 10000} or newer"
            )

    def _forgetful(self, name: str, source: str) -> StoreError:
        """Return the error for a setting under which acknowledged writes can be lost."""
        lost = {
            "fsync": "the whole database when the machine loses power",
            "synchronous_commit": "the latest writes when it is killed",
        }
        return StoreError(
            f"store {self.address.url}: {name} is off (set by: {source}), so this server loses "
            f"{lost[name]}: turn it on there"
        )

    def explain(self, error: Exception) -> StoreError:
        """What an error of PostgreSQL's means, and what to do."""
        text = str(error).strip() or type(error).__name__
        if isinstance(error, (UnicodeError, psycopg.DataError)):
            return _Unstorable(f"store {self.address.url}: this cannot be stored: {text}")
        if isinstance(error, UNREADABLE):
            return StoreFormatError(
                f"store {self.address.url}: what it holds cannot be read: restore a backup ({text})"
            )
        state = getattr(error, "sqlstate", None) or ""
        for prefix, (kind, advice) in _ADVICE.items():
            if state.startswith(prefix):
                return kind(f"store {self.address.url}: {advice} ({text})")
        for words, (kind, advice) in _CONNECTING.items():
            if words in text:
                return kind(f"store {self.address.url}: {advice} ({text})")
        return StoreError(f"store {self.address.url}: {text}")


class _Unstorable(StoreError, DataError):
    """A value that PostgreSQL has no place for."""


UNREADABLE: Final = (LookupError, TypeError, ValueError, OverflowError)
"""What is raised where a row is not what was written there."""
_ADVICE: Final[dict[str, tuple[type[StoreError], str]]] = {
    "53100": (
        StoreError,
        "the server's disk is full: this write was refused and what was acknowledged before is "
        "safe; free some space there",
    ),
    "53300": (
        StoreError,
        "the server has no connection left, and each process needs up to five: raise its "
        "max_connections",
    ),
    "54000": (
        _Unstorable,
        "an id or a name is longer than PostgreSQL finds again, about 2,700 bytes: give a "
        "shorter one",
    ),
    "28": (StoreError, "the server does not let this user in: set PGPASSWORD, or see ~/.pgpass"),
    "3D000": (StoreError, "there is no such database: CREATE DATABASE, or name another"),
    "42501": (
        StoreError,
        "the user may not do this: GRANT CREATE ON DATABASE, or let the owner of the tables do it",
    ),
    "25006": (StoreError, "the server is read-only, perhaps a standby: name the primary"),
    "55P03": (StoreError, "another session has held its lock for 30 s: see pg_stat_activity"),
    "42P01": (StoreFormatError, "a table is gone: restore a backup, or name another schema"),
    "42703": (StoreFormatError, "a column is gone: restore a backup, or name another schema"),
    "XX": (StoreFormatError, "the database is damaged: restore a backup"),
}
_CONNECTING: Final[dict[str, tuple[type[StoreError], str]]] = {
    "password authentication failed": (
        StoreError,
        "the password is wrong: set PGPASSWORD, or see ~/.pgpass",
    ),
    "no password supplied": (
        StoreError,
        "the server wants a password: set PGPASSWORD, or see ~/.pgpass",
    ),
    "does not exist": (
        StoreError,
        "there is no such database or role: create it, or name another",
    ),
    "too many clients": _ADVICE["53300"],
    "remaining connection slots": _ADVICE["53300"],
    "definition of service": (
        StoreError,
        "libpq finds no such service: see ~/.pg_service.conf",
    ),
    "connection": (
        StoreUnreachableError,
        "the server cannot be reached: is it running, and is this its address?",
    ),
}
"""By what libpq says, which has no code for an error before there is a session."""


def is_low_level(error: BaseException) -> bool:
    """Whether the error is of the server or what lies there, and not one that a caller is to see
    as it is. The decoding of a row says `DataError`."""
    if isinstance(error, LightspanError):
        return isinstance(error, DataError) and not isinstance(error, StoreError)
    return isinstance(error, (psycopg.Error, OSError, *UNREADABLE))


def is_lost(error: BaseException) -> bool:
    """Whether a server could not be reached, or ended the session."""
    state = getattr(error, "sqlstate", None) or "08"  # libpq has none where there is no session
    return isinstance(error, psycopg.OperationalError) and state.startswith(("57P", "08"))


def is_about_to_start(error: BaseException) -> bool:
    """Whether the server is there, and on its way up."""
    words = ("starting up", "in recovery mode", "shutting down")
    return isinstance(error, psycopg.OperationalError) and any(w in str(error) for w in words)


class Link:
    """A connection of one thread, made when it is needed and made again when it was lost."""

    def __init__(self, server: Server, db: Connection | None = None) -> None:
        self.server: Final = server
        self._db = db

    @property
    def db(self) -> Connection:
        """The connection, open."""
        if self._db is None:
            self._db = self.server.connect()
        return self._db

    def recover(self, error: BaseException, patience: Patience) -> bool:
        """After an error: whether the same may be tried again, on a session where nothing is under
        way. Waits for a while."""
        db = self._db
        if db is not None and not db.closed:
            with contextlib.suppress(psycopg.Error):
                db.rollback()
            # A pipeline that the server ended may leave a session stuck that says it is open.
            if not db.closed and not is_lost(error):
                return isinstance(error, _AGAIN) and patience.pause()
        self.close()
        is_gone = isinstance(error, psycopg.OperationalError) or db is not None
        return is_gone and isinstance(error, psycopg.Error) and patience.pause()

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


_AGAIN: Final = (errors.DeadlockDetected, errors.SerializationFailure)
"""The server chose one of several transactions to undo."""


class Patience:
    """Pauses between tries, until their time is over. It begins with the first: what was lost may
    have been noticed late."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: float | None = None
        self._pause, self._longest = _RETRY_BACKOFF_S

    def pause(self) -> bool:
        """Wait a little; False, at once, if the time is over."""
        now = clock.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        if now >= self._end:
            return False
        time.sleep(random.uniform(0.5, 1.0) * self._pause)
        self._pause = min(2 * self._pause, self._longest)
        return True

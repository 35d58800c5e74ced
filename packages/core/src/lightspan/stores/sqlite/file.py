"""The file of a SQLite store: creating, recognising and opening it, and what its errors mean.

Nothing here may open the file other than through SQLite: closing any descriptor of a file drops
the locks that this process holds on it, so a mere look at the header could corrupt a store that is
open elsewhere in the process.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from lightspan import __version__
from lightspan.errors import DataError, LightspanError, StoreError, StoreFormatError
from lightspan.schema import clock
from lightspan.stores._sql.queries import read_text, statements_of

APPLICATION_ID: Final = 0x6C737061
"""'lspa': how a store is told from any other SQLite file."""
FORMAT_VERSION: Final = 5
_PACKAGE: Final = "lightspan.stores.sqlite"
_BUSY_S: Final = 30.0
_MAX_PAUSE_S: Final = 0.002
_STATEMENTS: Final = 512
"""Statements that a connection keeps compiled. An insert of n rows is another statement for each n,
so SQLite's 128 would be compiled over and over."""
_opening = threading.Lock()

T = TypeVar("T")


def connect(path: Path, *, power_loss: bool = False, read_only: bool = False) -> sqlite3.Connection:
    """A connection to the store at `path`, which is created if there is none.

    Raises:
        StoreFormatError: the file is not a store, or a newer one.
        StoreError: it cannot be opened or created.
    """
    _check_place(path)
    try:
        with _opening:
            _create_private(path)
            db = sqlite3.connect(
                path,
                timeout=0,  # we wait ourselves: `patiently`
                isolation_level=None,
                check_same_thread=False,  # several threads write, one at a time: `Writer._turn`
                cached_statements=_STATEMENTS,
            )
            _prepare_or_close(db, path)
        db.execute(f"PRAGMA synchronous = {'FULL' if power_loss else 'NORMAL'}")
        # Not opened read-only: in WAL mode a reader, too, writes to the index beside the file.
        db.execute(f"PRAGMA query_only = {int(read_only)}")
        return db
    except (sqlite3.Error, OSError) as error:
        raise explain(error, path) from error


def connect_memory() -> sqlite3.Connection:
    """Return a connection to a new store in memory, for threads that use it one at a time."""
    db = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, cached_statements=_STATEMENTS
    )
    for statement in schema():
        db.execute(statement)
    return db


def patiently(function: Callable[[], T]) -> T:
    """The function's result, tried again for a while as long as another process holds a lock.

    SQLite's own busy handler sleeps up to 100 ms at a time, so that a busy neighbour can starve
    us; short random pauses do not.
    """
    deadline = clock.monotonic() + _BUSY_S
    pause = _MAX_PAUSE_S / 16
    while True:
        try:
            return function()
        except sqlite3.OperationalError as error:
            if not error_name(error).startswith("SQLITE_BUSY") or clock.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0, pause))
        pause = min(2 * pause, _MAX_PAUSE_S)


def begin(db: sqlite3.Connection) -> None:
    """Take the write lock."""
    patiently(lambda: db.execute("BEGIN IMMEDIATE"))


def begin_now(db: sqlite3.Connection) -> bool:
    """Take the write lock; False if another connection holds it."""
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if error_name(error).startswith("SQLITE_BUSY"):
            return False
        raise
    return True


def keep_log(db: sqlite3.Connection) -> None:
    """Let no commit of this connection move the write-ahead log into the file: that waits for the
    disk. Whoever calls this calls `shorten_log` now and then.
    """
    db.execute("PRAGMA wal_autocheckpoint = 0")


def shorten_log(db: sqlite3.Connection) -> None:
    """Move what can be moved of the write-ahead log into the file. Keeps nobody from writing."""
    with contextlib.suppress(sqlite3.Error):  # what was not moved stays in the log
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def explain(error: Exception, path: Path) -> StoreError:
    """What a low-level error (`is_low_level`) means, for the file concerned, and what to do."""
    name = error_name(error)
    if isinstance(error, UNREADABLE):
        return StoreFormatError(f"store {path}: {_DAMAGED} (what it holds cannot be read: {error})")
    for prefix, (kind, advice) in _ADVICE.items():
        if name.startswith(prefix):
            return kind(f"store {path}: {advice} ({name}: {error})")
    return StoreError(f"store {path}: {error} ({name})")


def is_low_level(error: BaseException) -> bool:
    """Whether the error is of SQLite, the disk or what lies there, and not one that a caller is to
    see as it is. The decoding of a row says `DataError`."""
    if isinstance(error, LightspanError):
        return isinstance(error, DataError)
    return isinstance(error, (sqlite3.Error, OSError, *UNREADABLE))


def error_name(error: Exception) -> str:
    """`SQLITE_BUSY` and the like; else the exception's own name."""
    return str(getattr(error, "sqlite_errorname", type(error).__name__))


UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, LookupError, OverflowError)
"""What is raised where a row is not what was written there: SQLite has no checksums."""
_DAMAGED: Final = "the file is damaged: restore a copy, or salvage it with `sqlite3 FILE .recover`"
_CHANGED: Final = (
    "it lacks what every store has, so it is damaged or another program has changed it: restore a "
    "copy"
)
_WRITABLE: Final = (
    "it cannot be written: check the owner and permissions of the file and of its folder (SQLite "
    "keeps two more files beside it), or name another place"
)
_ADVICE: Final[dict[str, tuple[type[StoreError], str]]] = {
    "SQLITE_FULL": (
        StoreError,
        "the disk or its quota is full: this write was refused and what was acknowledged before "
        "is safe; free some space or move the file",
    ),
    "SQLITE_NOTADB": (
        StoreFormatError,
        "this is not a SQLite file, so no lightspan store: name another file",
    ),
    "SQLITE_CORRUPT": (
        StoreFormatError,
        _DAMAGED,
    ),
    "SQLITE_ERROR": (StoreFormatError, _CHANGED),  # no such table, no such column
    "OperationalError": (StoreFormatError, _DAMAGED),  # of Python's module: a text that is none
    "SQLITE_READONLY": (StoreError, _WRITABLE),
    "SQLITE_CANTOPEN": (StoreError, _WRITABLE),
    "SQLITE_PERM": (StoreError, _WRITABLE),
    "SQLITE_AUTH": (StoreError, _WRITABLE),
    "PermissionError": (StoreError, _WRITABLE),
    "SQLITE_BUSY": (
        StoreError,
        f"another process has held its lock for {_BUSY_S:.0f} s: find out which has it open",
    ),
    "SQLITE_IOERR": (StoreError, "the disk failed: check it and its free space"),
}


def _check_place(path: Path) -> None:
    if path.is_dir():
        raise StoreError(f"store {path}: this is a folder; name a file in it")
    if not path.parent.is_dir():
        raise StoreError(f"store {path}: the folder {path.parent} does not exist; create it first")


def _create_private(path: Path) -> None:
    """Make an empty file that only its owner reads; SQLite gives its side files the same mode.

    Under `_opening`: no other store of this process may open the file before it is closed here.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return


def _prepare_or_close(db: sqlite3.Connection, path: Path) -> None:
    try:
        patiently(lambda: _prepare(db, path))
    except BaseException:
        db.close()
        raise


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Recognise the file before anything in it is changed."""
    db.execute("BEGIN")  # one moment of the file: another process may be making its tables
    try:
        empty = _is_empty(db, path)
    finally:
        roll_back(db)
    [mode] = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(
            f"store {path}: its file system cannot share memory between processes (journal mode "
            f"{mode!r}); put the store on a local disk"
        )
    # SQLite opens a write-protected file for reading, silently: only a lock to write tells.
    db.execute("BEGIN IMMEDIATE")
    db.execute("ROLLBACK")
    if empty:
        _create_schema(db, path)


def _is_empty(db: sqlite3.Connection, path: Path) -> bool:
    """True for a file without content, False for one of ours. Raises `StoreFormatError`."""
    application, version = _number(db, "application_id"), _number(db, "user_version")
    if application == APPLICATION_ID:
        _check_version(version, path)
        return False
    [tables] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application or version or tables:
        raise StoreFormatError(
            f"store {path}: this SQLite file belongs to another program (application id "
            f"{application}, {tables} tables); name another file"
        )
    return True


def _check_version(version: int, path: Path) -> None:
    if version != FORMAT_VERSION:
        age, remedy = (
            ("a newer", "upgrade lightspan there")
            if version > FORMAT_VERSION
            else ("an older", "read it, or finish its run, with that lightspan")
        )
        raise StoreFormatError(
            f"store {path}: written by {age} lightspan (format {version}, this one, {__version__} "
            f"of {sys.executable}, reads {FORMAT_VERSION}); {remedy}, or name another file"
        )


def _create_schema(db: sqlite3.Connection, path: Path) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        if _is_empty(db, path):  # nobody was faster
            for statement in schema():
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        db.execute("COMMIT")
    except BaseException:
        roll_back(db)
        raise


def roll_back(db: sqlite3.Connection) -> None:
    """Undo the transaction, if the error has not already undone it."""
    if db.in_transaction:
        db.execute("ROLLBACK")


def _number(db: sqlite3.Connection, pragma: str) -> int:
    return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])


@cache
def schema() -> list[str]:
    """The statements of schema.sql. Read once: an upgrade may replace it while we run."""
    return statements_of(read_text(_PACKAGE, "schema.sql"))

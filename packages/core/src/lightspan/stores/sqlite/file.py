"""Create, recognise and open the file of a SQLite store, and translate its errors.

Only SQLite may open the file. When a process closes any descriptor of a file, the system drops all
locks that the process holds on it. A store that is open elsewhere in the process would lose its
locks and could be corrupted.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from lightspan import __version__
from lightspan.errors import DataError, LightspanError, NotFoundError, StoreError, StoreFormatError
from lightspan.schema import clock
from lightspan.stores._sql.queries import read_text, statements_of

APPLICATION_ID: Final = 0x6C737061
"""The bytes "lspa" as a number. They distinguish a store from any other SQLite file."""
FORMAT_VERSION: Final = 6
_WITHOUT_IMAGES: Final = 5
"""The format before there were images. A writer adds their tables."""
_MAX_BACKOFF_S: Final = 0.002
_STATEMENTS: Final = 512
"""Number of statements that a connection keeps compiled. An insert of n rows is another statement
for each n, so SQLite's default of 128 would compile them again and again."""
_opening = threading.Lock()

T = TypeVar("T")


def connect(
    path: Path, busy_timeout_s: float, *, power_loss: bool = False, read_only: bool = False
) -> sqlite3.Connection:
    """Return a connection to the store at `path`, creating the file if it does not exist.

    Raises:
        StoreFormatError: the file is not a store, or has another format version.
        StoreError: the file cannot be opened or created.
    """
    if path.is_dir():
        raise StoreError(f"store {path}: this is a folder; name a file in it")
    if not path.parent.is_dir():
        raise StoreError(f"store {path}: the folder {path.parent} does not exist; create it first")
    try:
        with _opening:
            _create_private(path)
            db = _connect(str(path))
            try:
                retry_while_busy(lambda: _prepare(db, path), busy_timeout_s)
            except BaseException:
                db.close()
                raise
        db.execute(f"PRAGMA synchronous = {'FULL' if power_loss else 'NORMAL'}")
        # SQLite's read-only mode is no option: in WAL mode a reader writes to the index file too.
        db.execute(f"PRAGMA query_only = {int(read_only)}")
        return db
    except (sqlite3.Error, OSError) as error:
        raise explain(error, path) from error


def connect_to_memory() -> sqlite3.Connection:
    """Return a connection to a new, empty store in this process's memory."""
    db = _connect(":memory:")
    for statement in schema():
        db.execute(statement)
    return db


class Files(NamedTuple):
    """What identifies the files of a store, to notice that another process has replaced them."""

    device: int
    inode: int
    log: int | None
    """Inode of the write-ahead log; None if there is none or it is empty."""
    changed_ns: int
    """Time of the last change of the file; 0 if there is a log, by which changes are noticed."""


NO_FILES: Final = Files(0, 0, None, 0)


def files_of(path: Path) -> Files:
    """Return what identifies the files of a store.

    Raises:
        StoreError: the store's file does not exist any more, or cannot be reached.
    """
    try:
        store = path.stat()
    except OSError as error:
        raise StoreError(f"store {path}: it cannot be read any more: {error.strerror}") from error
    log = _log_of(path)
    inode = log.st_ino if log is not None and log.st_size else None
    return Files(store.st_dev, store.st_ino, inode, 0 if inode else store.st_mtime_ns)


def _log_of(path: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return path.with_name(f"{path.name}-wal").stat()
    return None


def connect_to_read(
    path: Path, files: Files, busy_timeout_s: float, *, is_written: bool
) -> sqlite3.Connection:
    """Return a connection to the store at `path` that changes nothing in its folder.

    Args:
        path: file of the store.
        files: what `files_of` returned.
        busy_timeout_s: seconds for which another process may hold the lock.
        is_written: whether this process has other connections, which write.

    Raises:
        NotFoundError: the file is empty.
        StoreFormatError: the file is not a store, or has another format version.
        StoreError: the file cannot be read.
    """
    # SQLite cannot read a file in WAL mode without the files that a writer adds, and would create
    # them. If there are none, no process writes, so the file can be read without locks.
    mode = "immutable=1" if files.log is None else f"readonly_shm={int(not is_written)}"
    try:
        db = _connect(f"{path.as_uri()}?mode=ro&{mode}", uri=True)
        try:
            if retry_while_busy(lambda: _is_empty(db, path), busy_timeout_s):
                raise NotFoundError(f"there is no store {path}: nothing was recorded there")
            if _read_pragma(db, "user_version") == _WITHOUT_IMAGES:
                db.execute("CREATE TEMP TABLE images (digest, media_type, data)")
        except BaseException:
            close_reader(db, path, files)
            raise
        return db
    except (sqlite3.Error, OSError) as error:
        if (current := files_of(path)) != files:  # the last writer has closed it meanwhile
            return connect_to_read(path, current, busy_timeout_s, is_written=is_written)
        raise explain(error, path, is_reader=True) from error


def close_reader(db: sqlite3.Connection, path: Path, files: Files) -> None:
    """Close a connection of `connect_to_read`, unless that would drop locks of this process.

    Closing a file that was opened without locks drops the locks of the process's other connections
    to it. If there are such connections, there is a write-ahead log.
    """
    if files.log is None and _log_of(path) is not None:
        _unclosed.append(db)
    else:
        db.close()


_unclosed: Final[list[sqlite3.Connection]] = []


def _connect(name: str, *, uri: bool = False) -> sqlite3.Connection:
    """Return a connection that several threads may use, one at a time, and that never waits."""
    return sqlite3.connect(
        name,
        uri=uri,
        timeout=0,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS,
    )


def inode(path: Path) -> int | None:
    """Return the number that identifies a file; None if there is no file."""
    return path.stat().st_ino if path.exists() else None


def retry_while_busy(function: Callable[[], T], busy_timeout_s: float) -> T:
    """Call `function` until no other process holds the lock that it needs; return its result.

    It sleeps for short random times between the calls. SQLite's own wait sleeps up to 100 ms at a
    time, so another process that writes often could always get the lock first.

    Raises:
        sqlite3.OperationalError: the lock is held for longer than `busy_timeout_s` seconds.
    """
    deadline = clock.monotonic() + busy_timeout_s
    backoff = _MAX_BACKOFF_S / 16
    while True:
        try:
            return function()
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or clock.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0, backoff))
        backoff = min(2 * backoff, _MAX_BACKOFF_S)


def begin(db: sqlite3.Connection, busy_timeout_s: float) -> None:
    """Begin a transaction with the write lock, waiting while another process holds it."""
    retry_while_busy(lambda: db.execute("BEGIN IMMEDIATE"), busy_timeout_s)


def try_begin(db: sqlite3.Connection) -> bool:
    """Begin a transaction with the write lock; return False if another connection holds it."""
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if _is_busy(error):
            return False
        raise
    return True


def _is_busy(error: sqlite3.OperationalError) -> bool:
    # A reader that may not write waits until a writer has prepared the log's index.
    return _error_name(error).startswith(("SQLITE_BUSY", "SQLITE_READONLY_CANTINIT"))


def checkpoint(db: sqlite3.Connection) -> None:
    """Move as much of the write-ahead log as possible into the file, blocking no writer."""
    with contextlib.suppress(sqlite3.Error):  # the rest stays in the log
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def explain(error: Exception, path: Path, *, is_reader: bool = False) -> StoreError:
    """Return the `StoreError` for a low-level error (`is_low_level`), with cause and remedy.

    Args:
        error: the error.
        path: the store's file.
        is_reader: whether the store was opened for reading only.
    """
    name = _error_name(error)
    if isinstance(error, UNREADABLE):
        return StoreFormatError(f"store {path}: {_DAMAGED} (a value cannot be read: {error})")
    for prefix, (kind, advice) in _ADVICE.items():
        if name.startswith(prefix):
            advice = _UNREADABLE if is_reader and advice is _WRITABLE else advice
            return kind(f"store {path}: {advice} ({name}: {error})")
    return StoreError(f"store {path}: {error} ({name})")


def is_low_level(error: BaseException) -> bool:
    """Return whether an error comes from SQLite, the disk or damaged data.

    Such an error must be translated by `explain`. A `DataError` is one of them, because decoding a
    damaged row raises it.
    """
    if isinstance(error, LightspanError):
        return isinstance(error, DataError)
    return isinstance(error, (sqlite3.Error, OSError, *UNREADABLE))


def _error_name(error: Exception) -> str:
    """Return SQLite's name of an error, such as `SQLITE_BUSY`.

    If the error has no such name, return the name of its type.
    """
    return str(getattr(error, "sqlite_errorname", type(error).__name__))


UNREADABLE: Final = (msgspec.MsgspecError, ValueError, TypeError, LookupError, OverflowError)
"""Errors raised when a damaged row is read. SQLite has no checksums that would detect the
damage."""
_DAMAGED: Final = "the file is damaged: restore a copy, or salvage it with `sqlite3 FILE .recover`"
_CHANGED: Final = (
    "tables or columns are missing, so the file is damaged or another program has changed it: "
    "restore a copy"
)
_WRITABLE: Final = (
    "it cannot be written: check the owner and permissions of the file and of its folder (SQLite "
    "keeps two more files there), or name another place"
)
_UNREADABLE: Final = (
    "it cannot be read: check the permissions of the file and of its folder. A file FILE-wal "
    "beside it can be read only with FILE-shm: copy all three, or open the store for writing once"
)
_FULL: Final = (
    "the disk or its quota is full: this write was refused and what was acknowledged before is "
    "safe; free some space or move the file"
)
_FOREIGN: Final = "this is not a SQLite file, so no lightspan store: name another file"
_BUSY: Final = "another process has held its lock for too long: find out which has it open"
_ADVICE: Final[dict[str, tuple[type[StoreError], str]]] = {
    "SQLITE_FULL": (StoreError, _FULL),
    "SQLITE_NOTADB": (StoreFormatError, _FOREIGN),
    "SQLITE_CORRUPT": (StoreFormatError, _DAMAGED),
    "SQLITE_ERROR": (StoreFormatError, _CHANGED),  # no such table, no such column
    "OperationalError": (StoreFormatError, _DAMAGED),  # of Python's module: text that is not UTF-8
    "SQLITE_READONLY": (StoreError, _WRITABLE),
    "SQLITE_CANTOPEN": (StoreError, _WRITABLE),
    "SQLITE_PERM": (StoreError, _WRITABLE),
    "SQLITE_AUTH": (StoreError, _WRITABLE),
    "PermissionError": (StoreError, _WRITABLE),
    "SQLITE_BUSY": (StoreError, _BUSY),
    "SQLITE_IOERR": (StoreError, "the disk failed: check it and its free space"),
}


def _create_private(path: Path) -> None:
    """Create an empty file that only its owner can read.

    SQLite creates the store's other files with the same mode. The caller must hold the lock
    `_opening`, so that no other store of this process opens the file before it is closed here.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Check the file before changing anything in it, then set its mode and create its tables."""
    db.execute("BEGIN")  # one snapshot: another process may be creating the tables
    try:
        is_empty = _is_empty(db, path)
    finally:
        _roll_back(db)
    [mode] = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(
            f"store {path}: its file system cannot share memory between processes (journal mode "
            f"{mode!r}); put the store on a local disk"
        )
    # SQLite opens a write-protected file for reading without an error; only a write lock raises it.
    db.execute("BEGIN IMMEDIATE")
    db.execute("ROLLBACK")
    if is_empty or _read_pragma(db, "user_version") == _WITHOUT_IMAGES:
        _create_schema(db, path)


def _is_empty(db: sqlite3.Connection, path: Path) -> bool:
    """Return True if the file is empty, False if it is a store.

    Raises:
        StoreFormatError: the file belongs to another program, or has another format version.
    """
    application, version = _read_pragma(db, "application_id"), _read_pragma(db, "user_version")
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
    if version not in (FORMAT_VERSION, _WITHOUT_IMAGES):
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
    """Create the tables that the file lacks: all of them, or those of images."""
    db.execute("BEGIN IMMEDIATE")
    with committing(db):
        is_empty = _is_empty(db, path)  # another process may have created the tables meanwhile
        for statement in schema():
            if is_empty or "images" in statement:
                db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")


@contextlib.contextmanager
def committing(db: sqlite3.Connection) -> Iterator[None]:
    """Commit the open transaction at the end of the `with` block, or roll it back at an error."""
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        _roll_back(db)
        raise


def _roll_back(db: sqlite3.Connection) -> None:
    """Roll the open transaction back, if an error has not done so already."""
    if db.in_transaction:
        db.execute("ROLLBACK")


def _read_pragma(db: sqlite3.Connection, pragma: str) -> int:
    return int(db.execute(f"PRAGMA {pragma}").fetchone()[0])


@cache
def schema() -> list[str]:
    """Return the statements of schema.sql.

    The file is read once per process, because an upgrade of the package may replace it.
    """
    return statements_of(read_text("lightspan.stores.sqlite", "schema.sql"))

"""Writes recorded attempts to a store, in the background.

The app hands an attempt over and goes on; a thread of this process writes it. The queue is bounded
by number and by size. What does not fit, and what the store refuses, is counted, and the end of the
process logs the count. A store that cannot be reached is tried again and again; the app does not
notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from lightspan.errors import (
    ConflictError,
    DataError,
    IllegalMoveError,
    LightspanError,
    NotFoundError,
    StoreFormatError,
)
from lightspan.schema.records import (
    Attempt,
    AttemptRef,
    AttemptStatus,
    Claim,
    Json,
    Mode,
    Outcome,
    Report,
    Rollout,
    fingerprint,
)
from lightspan.schema.spans import Span
from lightspan.stores import open_store
from lightspan.stores.protocol import RETRY_BACKOFF_S, Store

log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 2_000
"""That wait to be written."""
MAX_TEXT: Final = 64 * 2**20
"""Characters of text that wait to be written, about."""
EXIT_S: Final = 5.0
"""How long the end of the process waits for what is not written yet."""

_EPOCH: Final = 1
_BATCH: Final = 64
_GATHER_S: Final = 0.1
"""What comes within it is written together."""
_OPENING_S: Final = 0.2
"""How long the first attempt of a process waits for the store, at most."""
_PIECE: Final = (64, 512 * 1024)
"""Spans, and characters of their text, that are written at once."""
_HOPELESS: Final = (
    ConflictError,
    DataError,
    IllegalMoveError,
    NotFoundError,
    OverflowError,
    StoreFormatError,
    TypeError,
    ValueError,
)
"""What another try does not mend."""


class PendingWrite(NamedTuple):
    """What is to be written of one attempt."""

    ref: AttemptRef
    spans: Sequence[Span]
    claim: Claim | None = None
    """None: more spans of an attempt that was written."""
    report: Report | None = None


def parcel_of(
    attempt_id: str,
    rollout_id: str,
    service: str,
    task: Json,
    spans: Sequence[Span],
    *,
    started_at: float,
    report: Report,
) -> PendingWrite:
    """An attempt that nobody asked for, to be written whole."""
    rollout = Rollout(
        rollout_id=rollout_id,
        task=task,
        task_id=fingerprint(task),
        run_id=service,
        mode=Mode.PRODUCTION,
        max_infrastructure_tries=1,
    )
    attempt = Attempt(
        attempt_id=attempt_id,
        rollout_id=rollout_id,
        number=1,
        epoch=_EPOCH,
        runner_id=service,
        call_token=secrets.token_urlsafe(24),  # nobody ever gets to know it
        lease_until=float("inf"),
        started_at=started_at,
    )
    claim = Claim(rollout=rollout, attempt=attempt)
    return PendingWrite(AttemptRef(attempt_id, _EPOCH), spans, claim, report)


def more_of(attempt_id: str, spans: Sequence[Span]) -> PendingWrite:
    """Spans that came after their attempt was written."""
    return PendingWrite(AttemptRef(attempt_id, _EPOCH), spans)


def report_of(attempt_id: str, status: AttemptStatus, outcome: Outcome, **more: object) -> Report:
    """How an attempt ended that nobody asked for."""
    return Report(
        attempt_id=attempt_id,
        epoch=_EPOCH,
        status=status,
        outcome=outcome,
        **more,  # type: ignore[arg-type]
    )


class StoreWriter:
    """One process's queue and thread. The thread starts with `begin`.

    Args:
        url: of the store.
        service: whose attempts these are.
    """

    def __init__(self, url: str, service: str) -> None:
        self.pid: Final = os.getpid()
        self.lost = 0
        """Attempts that were not written and never will be."""
        self._url = url
        self._service = service
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], PendingWrite], int]] = deque()
        self._text = 0
        self._unwritten = 0
        """Handed over and neither written nor lost."""
        self._reason = ""
        """Of the last loss or failure."""
        self._closing = False
        self._opened = threading.Event()
        """The store is open, or could not be opened."""
        self._first = True
        self._warned = False
        self._thread: threading.Thread | None = None

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked since: the queue, and what is in it, is the parent's."""
        return self.pid != os.getpid()

    # --- in the app's threads -------------------------------------------------------------
    def begin(self) -> None:
        """Start the thread, once: the store is opened while the first attempt is under way."""
        if self._thread is not None:
            return
        with self._changed:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(
                    target=self._run, name="lightspan-journal", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # the interpreter is on its way out
                    self._thread.start()
                    _at_end_of_child(self)

    def put(self, take: Callable[[], PendingWrite], size: int) -> None:
        """Have something written; never blocks for long, never raises.

        Args:
            take: hands out what is to be written, in the journal's thread.
            size: characters of text that wait in it, about.
        """
        if self.is_parents:
            return
        self.begin()
        if self._first:  # a program that ends now could not start the store's threads any more
            self._first = False
            self._opened.wait(_OPENING_S)
        with self._changed:
            if self._closing:
                self._lose(1, "it ended after recording was closed")
                return
            if len(self._queue) >= MAX_ATTEMPTS or self._text > MAX_TEXT:
                self._lose(1, "the queue was full: the store takes too long, or is out of reach")
                return
            self._queue.append((take, size))
            self._text += size
            self._unwritten += 1
            if len(self._queue) == 1:
                self._changed.notify_all()

    def record_drop(self, attempts: int, reason: str) -> None:
        """Count attempts that cannot be written."""
        with self._changed:
            self._lose(attempts, reason)

    def _lose(self, attempts: int, reason: str) -> None:
        self.lost += attempts
        self._warn(f"attempts are not recorded: {reason}")

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was handed over is written or lost; False if time was too short."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, timeout_s)

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Write what is left, as far as the time allows. Idempotent."""
        with self._changed:
            was_closing, self._closing = self._closing, True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(timeout_s)
        with self._changed:
            self.lost += self._unwritten
            self._unwritten = 0
            if self.lost and not was_closing:
                log.warning(
                    "lightspan: %d attempts of %r could not be recorded in %s: %s",
                    self.lost,
                    self._service,
                    self._url,
                    self._reason or "there was no time left",
                )
            self._queue.clear()
            self._changed.notify_all()

    # --- in the journal's thread ----------------------------------------------------------
    def _run(self) -> None:
        # Not asyncio.run: it ends the loop's threads by starting one, which an interpreter on its
        # way out refuses from Python 3.12 on.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
        except Exception as error:  # a daemon thread must not print into the app's terminal
            self.record_drop(0, f"the journal ended: {error!r}")
        finally:
            loop.close()
            self._opened.set()

    async def _serve(self) -> None:
        store = open_store(self._url)
        waiting: list[PendingWrite] = []
        failures = 0
        try:
            while True:
                more, closing = self._next(waiting, failures)
                waiting += more
                waiting, failed = await self._deliver(store, waiting)
                failures = failures + 1 if failed else 0
                if closing and (failed or self._is_empty(waiting)):
                    return
        finally:
            with contextlib.suppress(LightspanError, OSError, RuntimeError):
                await store.close()

    def _next(
        self, waiting: Sequence[PendingWrite], failures: int
    ) -> tuple[list[PendingWrite], bool]:
        """What is to be written next; waits for it. True if it is over."""
        with self._changed:
            if waiting:  # the store failed
                pause = RETRY_BACKOFF_S[min(failures, len(RETRY_BACKOFF_S)) - 1]
                self._changed.wait_for(lambda: self._closing, pause)
            elif self._opened.is_set():
                self._changed.wait_for(lambda: bool(self._queue) or self._closing)
            closing = self._closing
        if not closing and not waiting and self._opened.is_set():
            time.sleep(_GATHER_S)
        with self._changed:
            count = max(0, min(_BATCH - len(waiting), len(self._queue)))
            taken = [self._queue.popleft() for _ in range(count)]
            # a copy: the garbage collector may end an attempt just then, which is put
            self._text = sum(size for _, size in list(self._queue))
            closing = self._closing
        return [parcel for take, _ in taken if (parcel := self._taken(take))], closing

    def _taken(self, take: Callable[[], PendingWrite]) -> PendingWrite | None:
        try:
            return take()
        except Exception as error:  # one of them must not end the journal
            self.record_drop(1, f"one could not be put together: {error!r}")
            with self._changed:
                self._unwritten -= 1
                self._changed.notify_all()
            return None

    def _is_empty(self, waiting: Sequence[PendingWrite]) -> bool:
        with self._changed:
            return not waiting and not self._queue

    async def _deliver(
        self, store: Store, parcels: Sequence[PendingWrite]
    ) -> tuple[list[PendingWrite], Exception | None]:
        """Write them; returns those to be tried again, and why."""
        try:
            await store.open()
        except Exception as error:
            self._troubled(error)
            return [*parcels], error
        finally:
            self._opened.set()
        writes = (write_parcel(store, parcel) for parcel in parcels)
        results = await asyncio.gather(*writes, return_exceptions=True)
        again: list[PendingWrite] = []
        trouble: Exception | None = None
        for parcel, result in zip(parcels, results, strict=True):
            if isinstance(result, _HOPELESS):
                self.record_drop(int(parcel.claim is not None), f"the store refused one: {result}")
            elif isinstance(result, Exception):
                again.append(parcel)
                trouble = result
        if trouble is not None:
            self._troubled(trouble)
        with self._changed:
            self._warned = self._warned and trouble is not None
            self._unwritten -= len(parcels) - len(again)
            self._changed.notify_all()
        return again, trouble

    def _troubled(self, error: Exception) -> None:
        with self._changed:
            self._warn(f"{error}; the app goes on, and what has to be left out is counted")

    def _warn(self, text: str) -> None:
        """Once per trouble."""
        self._reason = text
        if not self._warned:
            self._warned = True
            log.warning("lightspan: %s (recording %r to %s)", text, self._service, self._url)


async def write_parcel(store: Store, parcel: PendingWrite) -> None:
    """Write a parcel to an open store. Every step may be repeated."""
    if parcel.claim is not None:
        await store.start([parcel.claim])
    for piece in _pieces(parcel.spans):
        await store.add_spans(parcel.ref, piece)
    if parcel.report is not None:
        await store.report([parcel.report])


def _pieces(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans in pieces that a store writes in one short transaction."""
    piece: list[Span] = []
    size = 0
    for span in spans:
        piece.append(span)
        size += text_size(span) + _size_of(span.resource)
        size += sum(_size_of(event.attributes) for event in span.events)
        size += sum(_size_of(link.attributes) for link in span.links)
        if len(piece) >= _PIECE[0] or size >= _PIECE[1]:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def text_size(span: Span) -> int:
    """Characters in the span's attributes, about."""
    return _size_of(span.attributes)


def _size_of(attributes: Mapping[str, Any]) -> int:
    return sum(len(value) for value in attributes.values() if isinstance(value, str))


def _at_end_of_child(journal: StoreWriter) -> None:
    """A child of `multiprocessing` ends without the interpreter's own end."""
    if multiprocessing.parent_process() is not None:
        from multiprocessing import util

        util.Finalize(None, journal.close, exitpriority=0)


__all__ = [
    "PendingWrite",
    "StoreWriter",
    "more_of",
    "parcel_of",
    "report_of",
    "text_size",
    "write_parcel",
]

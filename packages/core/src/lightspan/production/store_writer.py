"""Write recorded attempts to a store in the background.

The app queues an attempt and continues; a thread of this process writes it. The queue is limited in
number and size. Attempts that do not fit and attempts that the store rejects are counted, and the
count is logged at the end of the process. If the store cannot be reached, writes are repeated after
growing pauses. The app does not notice this.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from lightspan import errors
from lightspan.schema import records
from lightspan.schema.images import Image
from lightspan.schema.spans import Span
from lightspan.stores import open_store
from lightspan.stores.protocol import RETRY_BACKOFF_S, Store

log = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 2_000
"""Maximum number of queued attempts."""
MAX_TEXT_SIZE: Final = 64 * 2**20
"""Approximate maximum number of characters of text and bytes of images in the queue."""
EXIT_S: Final = 5.0
"""Maximum seconds that a process waits at its end for unwritten attempts."""

EPOCH: Final = 1
_BATCH: Final = 64
_GATHER_S: Final = 0.1
"""Seconds to wait for more attempts to write in the same batch."""
_OPENING_S: Final = 0.2
"""Maximum seconds that the first attempt of a process waits until the store is open."""
_MAX_PIECE_SPANS: Final = 64
"""Maximum number of spans in one transaction."""
_MAX_PIECE_TEXT: Final = 512 * 1024
"""Approximate number of characters of the spans' text after which a transaction ends."""
_PERMANENT_ERRORS: Final = (
    *(errors.ConflictError, errors.DataError, errors.IllegalMoveError, errors.NotFoundError),
    *(errors.StoreFormatError, OverflowError, TypeError, ValueError),
)
"""Errors after which a write is not retried."""
_ENDINGS: Final = (signal.SIGTERM, signal.SIGINT)
"""Signals with which servers end themselves after a graceful stop."""


class PendingWrite(NamedTuple):
    """Data of one write to the store: a whole attempt, or spans that arrived after its write."""

    ref: records.AttemptRef
    spans: Sequence[Span]
    claim: records.Claim | None = None
    """Rollout and attempt to start. None for late spans of an attempt that was written before."""
    report: records.Report | None = None
    images: Sequence[Image] = ()
    """The images to which the spans refer."""


def attempt_write(
    attempt_id: str,
    rollout_id: str,
    service: str,
    task: records.Json,
    spans: Sequence[Span],
    *,
    started_at: float,
    status: records.AttemptStatus,
    outcome: records.Outcome,
    **end: Any,
) -> PendingWrite:
    """Return the write that stores a whole attempt of an app that is recorded in production.

    Args:
        attempt_id: id of the attempt.
        rollout_id: id of the attempt's rollout.
        service: name of the recorded service.
        task: task of the rollout.
        spans: spans of the attempt.
        started_at: start, seconds since the epoch.
        status: final status of the attempt.
        outcome: outcome of the attempt.
        **end: further fields of the report that ends the attempt.
    """
    rollout = records.Rollout(
        rollout_id=rollout_id,
        task=task,
        task_id=records.fingerprint(task),
        run_id=service,
        mode=records.Mode.PRODUCTION,
        max_infrastructure_tries=1,
    )
    attempt = records.Attempt(
        attempt_id=attempt_id,
        rollout_id=rollout_id,
        number=1,
        epoch=EPOCH,
        runner_id=service,
        call_token=secrets.token_urlsafe(24),  # never given to anyone
        lease_until=float("inf"),
        started_at=started_at,
    )
    claim = records.Claim(rollout=rollout, attempt=attempt)
    report = attempt.report(status, outcome, **end)
    return PendingWrite(records.AttemptRef(attempt_id, EPOCH), spans, claim, report)


class StoreWriter:
    """A queue of attempts to write, and the thread that writes them. `begin` starts the thread.

    Args:
        url: URL of the store.
        service: name of the recorded service.
    """

    def __init__(self, url: str, service: str) -> None:
        self.pid: Final = os.getpid()
        self.lost = 0
        """Number of attempts so far that could not be written."""
        self._url = url
        self._service = service
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], PendingWrite], int]] = deque()
        self._text = 0
        """Approximate number of characters of text in the queue."""
        self._unwritten = 0
        """Number of attempts that were queued and are neither written nor dropped yet."""
        self._reason = ""
        """Text of the last warning that was logged; empty if there was none."""
        self._is_closing = False
        self._opened = threading.Event()
        """Set once the store is open or could not be opened."""
        self._is_first = True
        self._has_warned = False
        self._thread: threading.Thread | None = None

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the process that made the writer.

        If so, the queue belongs to that process.
        """
        return self.pid != os.getpid()

    # --- in the app's threads -------------------------------------------------------------
    def begin(self) -> None:
        """Start the thread if it has not been started. It opens the store at once."""
        if self._thread is not None:
            return
        with self._changed:
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(
                    target=self._run, name="lightspan-store-writer", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                    self._thread.start()
                    close_at_exit_of_child(self.close, priority=0)

    def put(self, take: Callable[[], PendingWrite], size: int) -> None:
        """Queue an attempt. Never raises; only the first call waits, for the store to open.

        Args:
            take: returns the pending write; called in the writer's thread.
            size: approximate number of characters of text and bytes of images in the attempt.
        """
        if self.is_forked:
            return
        self.begin()
        if self._is_first:  # a program that ends now could no longer start the store's threads
            self._is_first = False
            self._opened.wait(_OPENING_S)
        with self._changed:
            if self._is_closing:
                self.record_drop(1, "it ended after recording was closed")
                return
            if len(self._queue) >= MAX_ATTEMPTS or self._text > MAX_TEXT_SIZE:
                self.record_drop(1, "the queue was full: the store is too slow or unreachable")
                return
            self._queue.append((take, size))
            self._text += size
            self._unwritten += 1
            if len(self._queue) == 1:
                self._changed.notify_all()

    def record_drop(self, attempts: int, reason: str) -> None:
        """Count `attempts` as lost, and log the reason unless a warning was just logged."""
        with self._changed:
            self.lost += attempts
            self._warn(f"attempts are not recorded: {reason}")

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all queued attempts are written or dropped; return whether that is done.

        Waiting ends after `timeout_s` seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, timeout_s)

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Write the queue for at most `timeout_s` seconds, then stop the thread. Idempotent."""
        with self._changed:
            was_closing, self._is_closing = self._is_closing, True
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
                    self._reason or "the time limit was reached",
                )
            self._queue.clear()
            self._changed.notify_all()

    # --- in the writer's thread -----------------------------------------------------------
    def _run(self) -> None:
        # Not asyncio.run: it ends the loop's threads by starting a thread, which an interpreter
        # that is shutting down refuses from Python 3.12 on.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
        except Exception as error:  # a daemon thread must not print into the app's terminal
            self.record_drop(0, f"the writer ended: {error!r}")
        finally:
            loop.close()
            self._opened.set()

    async def _serve(self) -> None:
        store = open_store(self._url)
        writes: list[PendingWrite] = []
        failures = 0
        try:
            while True:
                new, is_closing = self._dequeue(writes, failures)
                writes, error = await self._write(store, [*writes, *new])
                failures = failures + 1 if error else 0
                if is_closing and (error or not (writes or self._queue)):
                    return
        finally:
            with contextlib.suppress(errors.LightspanError, OSError, RuntimeError):
                await store.close()

    def _dequeue(
        self, retries: Sequence[PendingWrite], failures: int
    ) -> tuple[list[PendingWrite], bool]:
        """Wait for attempts to write; return them, and whether the writer is closing.

        Args:
            retries: attempts whose write failed. If there are any, the wait is a pause before the
                next try.
            failures: number of failed batches since the last successful batch.
        """
        with self._changed:
            if retries:
                pause = RETRY_BACKOFF_S[min(failures, len(RETRY_BACKOFF_S)) - 1]
                self._changed.wait_for(lambda: self._is_closing, pause)
            elif self._opened.is_set():
                self._changed.wait_for(lambda: bool(self._queue) or self._is_closing)
            is_closing = self._is_closing
        if not is_closing and not retries and self._opened.is_set():
            time.sleep(_GATHER_S)
        with self._changed:
            count = max(0, min(_BATCH - len(retries), len(self._queue)))
            items = [self._queue.popleft() for _ in range(count)]
            # A copy, since the garbage collector may end an attempt here, which is then queued.
            self._text = sum(size for _, size in list(self._queue))
            is_closing = self._is_closing
        return [write for take, _ in items if (write := self._take(take))], is_closing

    def _take(self, take: Callable[[], PendingWrite]) -> PendingWrite | None:
        try:
            return take()
        except Exception as error:  # one attempt must not end the writer
            self.record_drop(1, f"an attempt could not be assembled: {error!r}")
            with self._changed:
                self._unwritten -= 1
                self._changed.notify_all()
            return None

    async def _write(
        self, store: Store, writes: list[PendingWrite]
    ) -> tuple[list[PendingWrite], Exception | None]:
        """Write attempts; return the attempts to write again, and the last error.

        The error is None if no attempt has to be written again.
        """
        retries: list[PendingWrite] = []
        failure: Exception | None = None
        results: Sequence[BaseException | None] = ()
        try:
            await store.open()
            results = await asyncio.gather(
                *(write_pending(store, write) for write in writes), return_exceptions=True
            )
        except Exception as error:
            retries, failure = writes, error
        finally:
            self._opened.set()
        for write, result in zip(writes, results, strict=False):
            if isinstance(result, _PERMANENT_ERRORS):
                self.record_drop(int(write.claim is not None), f"the store refused one: {result}")
            elif isinstance(result, Exception):
                retries.append(write)
                failure = result
        with self._changed:
            if failure is not None:
                self._warn(f"{failure}; the app is not affected, and dropped attempts are counted")
            self._has_warned = self._has_warned and failure is not None
            self._unwritten -= len(writes) - len(retries)
            self._changed.notify_all()
        return retries, failure

    def _warn(self, text: str) -> None:
        """Log a warning, unless a warning was logged since the last batch without an error."""
        if not self._has_warned:
            self._has_warned, self._reason = True, text
            log.warning("lightspan: %s (recording %r to %s)", text, self._service, self._url)


async def write_pending(store: Store, write: PendingWrite) -> None:
    """Write an attempt to an open store. The call can be repeated after an error."""
    if write.claim is not None:
        await store.start([write.claim])
    if write.images:
        await store.add_images(write.ref, write.images)
    for piece in _pieces(write.spans):
        await store.add_spans(write.ref, piece)
    if write.report is not None:
        await store.report([write.report])


def _pieces(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Yield the spans in lists that a store can write in one short transaction."""
    piece: list[Span] = []
    size = 0
    for span in spans:
        piece.append(span)
        size += text_size(span.attributes) + text_size(span.resource)
        size += sum(text_size(event.attributes) for event in span.events)
        size += sum(text_size(link.attributes) for link in span.links)
        if len(piece) >= _MAX_PIECE_SPANS or size >= _MAX_PIECE_TEXT:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def text_size(attributes: Mapping[str, Any]) -> int:
    """Return the number of characters in the attributes whose values are texts."""
    return sum(len(value) for value in attributes.values() if isinstance(value, str))


def close_at_exit(close: Callable[[], None]) -> None:
    """Call `close` at the end of this process, also if it ends by a signal that it raises itself.

    uvicorn ends a graceful stop by `signal.raise_signal(SIGTERM)`, after which Python does not run
    `atexit`.
    """
    atexit.register(close)
    before = signal.raise_signal

    def raise_signal(signalnum: int, /) -> None:
        if signalnum in _ENDINGS and signal.getsignal(signalnum) is signal.SIG_DFL:
            close()
        before(signalnum)

    signal.raise_signal = raise_signal


def close_at_exit_of_child(close: Callable[[], None], priority: int) -> None:
    """Call `close` at the end of a child process of `multiprocessing`, which runs no `atexit`.

    In another process do nothing.

    Args:
        priority: functions of a higher priority are called first.
    """
    if multiprocessing.parent_process() is not None:
        from multiprocessing import util

        util.Finalize(None, close, exitpriority=priority)

"""Our spans on their way to any backend: `LIGHTSPAN_OTLP=URL`, or an exporter of the user's.

Off unless asked for. What is sent waits in a queue that is bounded by number and by size, and a
thread of this process sends it: neither the app nor a training ever waits for a backend or sees its
errors. What cannot be sent is told of once per trouble, and counted.

What the thread uses is imported before it starts, by the senders: a child that is forked in the
middle of an import has half a module for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from lightspan.errors import ConfigError
from lightspan.production.options import resource_of_environment
from lightspan.production.otlp_sender import OTLP_VARIABLE, OtlpSender, Undelivered
from lightspan.schema.content import without_keys
from lightspan.schema.spans import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

MOST_SPANS: Final = 20_000
"""That wait to be sent."""
MOST_TEXT: Final = 64 * 2**20
"""Characters of text that wait to be sent, about."""
_BATCH: Final = (256, 2 * 2**20)
"""Spans, and characters of their text, that are sent at once, about."""
_TRIES: Final = 6
PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before each further try."""
_LONGEST_PAUSE_S: Final = 30.0
"""Whatever a backend asks for."""
EXIT_S: Final = 5.0
"""How long the end of the process waits for what is not sent yet."""
_CLOSED: Final = "they came after sending was closed"


class Sender(Protocol):
    """What an outlet sends by."""

    def __call__(self, spans: Sequence[Span]) -> int:
        """Send them; returns how many of them the backend refused.

        Raises:
            Undelivered: none of them has arrived.
        """
        ...


class ExporterSender:
    """Sends by an exporter of OpenTelemetry's SDK, which tries again as it likes."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        from lightspan.capture.readable_spans import to_otel

        self._exporter = exporter
        self._to_otel = to_otel
        self._success = SpanExportResult.SUCCESS

    def __call__(self, spans: Sequence[Span]) -> int:
        result = self._exporter.export([self._to_otel(span) for span in spans])
        if result is not self._success:
            raise Undelivered(f"{type(self._exporter).__name__} failed")
        return 0


class Outlet:
    """One process's queue and thread.

    Args:
        sender: called in the thread only.
        place: where spans go, for people.
    """

    def __init__(self, sender: Sender, place: str) -> None:
        self.pid: Final = os.getpid()
        self.sent = 0
        """Spans that have arrived."""
        self.lost = 0
        """Spans that were not sent and never will be, or were refused."""
        self.place: Final = place
        self._sender = sender
        self._resource = resource_of_environment()
        self._changed = threading.Condition()
        self._queue: deque[tuple[Span, int]] = deque()
        self._text = 0
        self._unsent = 0
        """Put, and neither arrived nor lost."""
        self._closing = False
        self._is_troubled = False
        self._thread: threading.Thread | None = None

    def put(self, spans: Sequence[Span]) -> None:
        """Have spans sent; those that find no room are lost. Never waits, never raises."""
        sized = [(span, _size(span)) for span in spans]
        with self._changed:
            for span, size in sized:
                if self._closing:
                    self._lose(1, _CLOSED)
                elif len(self._queue) >= MOST_SPANS or self._text + size > MOST_TEXT:
                    self._lose(1, "the queue is full: the backend is too slow, or out of reach")
                else:
                    self._take(span, size)
            self._wake()

    def offer(self, spans: Sequence[Span]) -> bool:
        """Have spans sent if there is room for all of them, or nothing waits. Never waits, never
        raises; who is told False keeps them, and offers them again."""
        sized = [(span, _size(span)) for span in spans]
        text = sum(size for _, size in sized)
        with self._changed:
            if self._closing:
                self._lose(len(sized), _CLOSED)
                return True
            many = len(self._queue) + len(sized) > MOST_SPANS
            if self._queue and (many or self._text + text > MOST_TEXT):
                return False
            for span, size in sized:
                self._take(span, size)
            self._wake()
            return True

    @property
    def unsent(self) -> int:
        """Spans that were taken, and have neither arrived nor been lost."""
        return self._unsent

    @property
    def has_room(self) -> bool:
        """Whether it is worth the while to offer more: half of the queue is free."""
        return len(self._queue) <= MOST_SPANS // 2 and self._text <= MOST_TEXT // 2

    def _take(self, span: Span, size: int) -> None:
        self._queue.append((span, size))
        self._text += size
        self._unsent += 1

    def _wake(self) -> None:
        try:
            self.begin()
        except Exception as error:  # never into the app: no thread can be started now
            self._told(repr(error))
        self._changed.notify_all()

    def begin(self) -> None:
        """Start the thread, once: a process that ends may start none any more."""
        with self._changed:
            if self._thread is None and not self._closing:
                thread = threading.Thread(target=self._run, name="lightspan-outlet", daemon=True)
                thread.start()
                self._thread = thread
                _at_end_of_child()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was put is sent or lost; False if the time was too short."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unsent, timeout_s)

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Send what is left, as far as the time allows. Idempotent."""
        with self._changed:
            was_closing, self._closing = self._closing, True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(timeout_s)
        with self._changed:
            self.lost += self._unsent
            self._unsent = self._text = 0
            self._queue.clear()
            self._changed.notify_all()
        if self.lost and not was_closing:
            log.warning("lightspan: %d spans did not get to %s", self.lost, self.place)

    # --- in the outlet's thread -----------------------------------------------------------
    def _run(self) -> None:
        with _unwatched():
            while True:
                batch = self._next()
                if not batch:
                    return
                self._send([self._with_resource(span) for span in batch])

    def _next(self) -> list[Span]:
        """The next spans to send; waits for them. None when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closing)
            batch: list[Span] = []
            size = 0
            while self._queue and len(batch) < _BATCH[0] and size < _BATCH[1]:
                span, own = self._queue.popleft()
                batch.append(span)
                size += own
                self._text -= own
            return batch

    def _send(self, batch: list[Span]) -> None:
        refused = len(batch)
        why = ""
        for number in range(_TRIES):
            try:
                refused = self._sender(batch)
                why = "it refused some of them" if refused else ""
                break
            except Undelivered as error:
                why = str(error)
                if not error.again or number == _TRIES - 1 or self._closing:
                    break
                self._told(why)
                pause = PAUSES_S[number] if error.pause_s is None else error.pause_s
                self._wait(min(pause, _LONGEST_PAUSE_S))
            except Exception as error:  # of an exporter of the user's
                why = repr(error)
                break
        with self._changed:
            if not self._unsent:  # it was closed meanwhile
                return
            self._unsent -= len(batch)
            self.sent += len(batch) - refused
            if refused:
                self._lose(refused, why)
            elif not self._queue:  # a backend that is merely slow is one trouble
                self._is_troubled = False
            self._changed.notify_all()

    def _with_resource(self, span: Span) -> Span:
        """What the environment says of this process, where the span does not."""
        if not self._resource:
            return span
        return span.replace(resource={**self._resource, **span.resource})

    def _wait(self, pause_s: float) -> None:
        end = time.monotonic() + pause_s
        with self._changed:
            while not self._closing and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def _lose(self, count: int, reason: str) -> None:
        self.lost += count
        self._told(reason)

    def _told(self, reason: str) -> None:
        """Once per trouble."""
        if not self._is_troubled:
            self._is_troubled = True
            log.warning(
                "lightspan: spans do not get to %s: %s; nothing waits for it, and what is lost is "
                "counted",
                self.place,
                reason,
            )


def _size(span: Span) -> int:
    texts = sum(_length(value) for value in span.attributes.values())
    events = sum(100 + sum(map(_length, e.attributes.values())) for e in span.events)
    return 200 + len(span.status_message) + texts + events


def _length(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(8 + _length(each) for each in value) if isinstance(value, (list, tuple)) else 0


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """An app that traces its HTTP clients gets no spans of what is sent here."""
    from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value

    token = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
    try:
        yield
    finally:
        detach(token)


# --- the process's own ----------------------------------------------------------------------
class _State:
    """Of this process."""

    lock: Any = threading.RLock()
    explicit: Outlet | None = None
    by_environment: Outlet | None = None
    url = ""
    """That `by_environment` was made of."""
    lost = 0
    """Spans that did not get as far as an outlet."""


class Sending:
    """What `send` returns; as a context manager it ends with the block."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    @property
    def sent(self) -> int:
        """Spans that have arrived."""
        return self._outlet.sent

    @property
    def lost(self) -> int:
        """Spans that never will."""
        return self._outlet.lost

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was recorded is sent or lost; False if the time was too short."""
        return self._outlet.flush(timeout_s)

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Send what is left, and no more after that. Idempotent; the exporter is left open."""
        with _State.lock:
            if _State.explicit is self._outlet:
                _State.explicit = None
        self._outlet.close(timeout_s)

    def __enter__(self) -> Sending:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def send(exporter: SpanExporter) -> Sending:
    """Send what this process records (`lightspan.record`) and trains to an exporter of yours, in
    place of `LIGHTSPAN_OTLP`: whole, prompts and answers included.

    Args:
        exporter: of OpenTelemetry's SDK; called in a thread of ours.

    Raises:
        ConfigError: it is none, or this process sends to one already.
    """
    if isinstance(exporter, type) or not callable(getattr(exporter, "export", None)):
        raise ConfigError(f"send({exporter!r}): give an exporter of OpenTelemetry's SDK")
    with _State.lock:
        if _State.explicit is not None:
            raise ConfigError("this process sends its spans to an exporter already: close() that")
        _State.explicit = outlet = Outlet(ExporterSender(exporter), type(exporter).__name__)
        outlet.begin()
    return Sending(outlet)


def current() -> Outlet | None:
    """Where this process's spans go; None for nowhere.

    Raises:
        ConfigError: `LIGHTSPAN_OTLP` is no URL, or what it needs is not installed.
    """
    url = os.environ.get(OTLP_VARIABLE, "")
    found = _State.explicit
    if found is not None and found.pid == os.getpid():
        return found
    if not url:
        return None
    with _State.lock:
        known = _State.by_environment
        if known is None or _State.url != url or known.pid != os.getpid():
            sender = OtlpSender.of_environment(url)
            _State.by_environment, _State.url = Outlet(sender, sender.place), url
            _State.by_environment.begin()
        return _State.by_environment


def put(spans: Sequence[Span]) -> None:
    """Have spans sent, if that is wanted; those that find no room are lost. Never raises."""
    try:
        outlet = current()
        if outlet is not None and spans:
            outlet.put([without_keys(span) for span in spans])
    except Exception as error:  # never into the app, nor between an attempt and its store
        _lose(len(spans), error)


def offer(spans: Sequence[Span]) -> bool:
    """Have spans sent, if that is wanted and there is room for them; see `Outlet.offer`."""
    try:
        outlet = current()
        return outlet is None or outlet.offer([without_keys(span) for span in spans])
    except Exception as error:
        _lose(len(spans), error)
        return True


def _lose(count: int, error: Exception) -> None:
    """Told once, and counted until the process ends."""
    if not _State.lost and not isinstance(error, ConfigError):  # told when recording began
        log.warning("lightspan: spans could not be sent: %s", type(error).__name__)
    _State.lost += count


def _at_end_of_child() -> None:
    """A child of `multiprocessing` ends without the interpreter's own end."""
    if multiprocessing.parent_process() is not None:
        from multiprocessing import util

        util.Finalize(None, _close, exitpriority=-1)  # after the journal's


def _close() -> None:
    for outlet in (_State.explicit, _State.by_environment):
        if outlet is not None and outlet.pid == os.getpid():
            outlet.close()
    lost, _State.lost = _State.lost, 0
    if lost:
        log.warning("lightspan: %d spans could not be sent, nor handed to who sends them", lost)


def _after_fork() -> None:
    """What the parent sends by is the parent's; somebody may have held the lock."""
    _State.lock = threading.RLock()
    _State.explicit = _State.by_environment = None
    _State.lost = 0


# At import, so before anything records: what is registered first is called last, and recordings
# hand over their last attempts when the process ends.
atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

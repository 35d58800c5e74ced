"""Collect an attempt's spans in the app's process until they are sent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from lightspan.schema.content import without_keys
from lightspan.schema.images import Image
from lightspan.schema.media import digests_in
from lightspan.schema.records import new_id
from lightspan.schema.redaction import bounded_text, clean_text
from lightspan.schema.spans import Span, SpanKind, now_ns

log = logging.getLogger(__name__)


class Recorder:
    """A thread-safe collector of one attempt's spans.

    It holds at most `limit` spans between two calls of `drain`. If spans are dropped because of the
    limit, that is a capture error, which excludes the attempt from training.
    """

    keeps = True
    """Whether added spans are kept. False in subclasses that discard them."""

    def __init__(self, limit: int = 100_000) -> None:
        self.has_called = False
        """Whether the attempt has made a model call."""
        self.is_over = False
        """Whether the attempt has ended; later calls are not part of it."""
        self.lost_calls: list[tuple[str, int, str]] = []
        """The calls that the gateway did not answer and the app has not repeated: agent path and
        body, end in nanoseconds since the epoch, error."""
        self.images: dict[str, Image] | None = {} if self.keeps else None
        """The images of the attempt's calls (`images_into`); None if they are not kept."""
        self._limit = limit
        self._spans: list[Span] = []
        self._capture_errors: list[str] = []
        self._dropped = 0
        self._pending: dict[str, Callable[[], None]] = {}
        # An RLock: the garbage collector may run while the lock is held and end a dropped stream,
        # which the same thread then records.
        self._lock = threading.RLock()

    def new_call_id(self) -> str:
        """Return a new call id, and record that the attempt has made a model call."""
        self.has_called = True
        return new_id("call")

    def add(self, span: Span) -> None:
        """Add a span with API keys replaced.

        If the limit is reached, the span is dropped and counted.
        """
        if span.status_message or not span.name.isascii():
            name, message = clean_text(span.name), bounded_text(span.status_message)
            span = span.replace(name=name, status_message=message)
        span = without_keys(span)
        self.has_called = self.has_called or span.kind is SpanKind.LLM
        with self._lock:
            if len(self._spans) < self._limit:
                self._spans.append(span)
            else:
                self._dropped += 1

    def add_capture_error(self, reason: str) -> None:
        """Record a capture error, so that the attempt is not trained."""
        with self._lock:
            self._capture_errors.append(bounded_text(reason))

    def settle_call(self, request: str, start_ns: int, error: str | None = None) -> None:
        """Record the end of a call to the gateway; forget one lost call that it repeats.

        Args:
            request: agent path and body of the call.
            start_ns: start of the call, nanoseconds since the epoch.
            error: why the gateway's answer did not come; None if it came.
        """
        with self._lock:
            for call in [x for x in self.lost_calls if x[0] == request and x[1] <= start_ns][:1]:
                self.lost_calls.remove(call)
            if error is not None:
                self.lost_calls.append((request, now_ns(), error))

    def register_pending(self, key: str, give_up: Callable[[], None]) -> None:
        """Register an operation that has begun and not ended, such as a stream.

        Args:
            key: id for `resolve_pending`.
            give_up: records that the operation never ended; called by `cancel_pending`.
        """
        with self._lock:
            self._pending[key] = give_up

    def resolve_pending(self, key: str) -> bool:
        """Remove a pending operation that has ended; return False if it was removed before."""
        with self._lock:
            return self._pending.pop(key, None) is not None

    def cancel_pending(self) -> None:
        """End all pending operations, by calling their `give_up`.

        An operation is pending, for example, if the app stopped reading a stream.
        """
        for give_up in list(self._pending.values()):
            give_up()

    @property
    def spans(self) -> list[Span]:
        """The spans added since the last drain."""
        return list(self._spans)

    def images_of(self, spans: Sequence[Span]) -> list[Image]:
        """Return the images to which spans refer, as far as they are kept."""
        found = dict(self.images or {})
        digests = {digest for span in spans if found for digest in digests_in(span.attributes)}
        return [found[digest] for digest in sorted(digests & found.keys())]

    def drain(self) -> list[Span]:
        """Return the spans added since the last drain."""
        with self._lock:
            spans, self._spans = self._spans, []
            return spans

    def capture_errors(self) -> list[str]:
        """Return every capture error so far, including the number of dropped spans."""
        with self._lock:
            drops = [f"{self._dropped} spans dropped"] if self._dropped else []
            return [*self._capture_errors, *drops]


class NullRecorder(Recorder):
    """A recorder that keeps nothing, for calls that are not part of a recorded attempt."""

    keeps = False

    def add(self, span: Span) -> None:
        """Discard the span."""

    def add_capture_error(self, reason: str) -> None:
        """Log a capture error, since there is no attempt to exclude from training."""
        log.warning("%s", reason)

    def register_pending(self, key: str, give_up: Callable[[], None]) -> None:
        """Do nothing: there is no attempt at whose end `give_up` would be called."""

    def resolve_pending(self, key: str) -> bool:
        """Return False, because nothing was registered. The caller then records no end."""
        return False


class LostRewardRecorder(NullRecorder):
    """A recorder for code outside every attempt. It discards spans, and warns of lost rewards."""

    def add(self, span: Span) -> None:
        """Discard the span, and log a warning if it is a reward."""
        if span.kind is SpanKind.REWARD:
            log.warning(
                "a reward was emitted outside every attempt and is lost: call emit_reward() while "
                "the agent runs, or lightspan.feedback(attempt_id, reward) later"
            )

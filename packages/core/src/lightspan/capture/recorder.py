"""Recorders keep the spans of one attempt in the app's process, until they are sent."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from lightspan.schema.content import without_keys
from lightspan.schema.provenance import Request
from lightspan.schema.records import new_id
from lightspan.schema.redaction import bounded_text, clean_text
from lightspan.schema.spans import Span, SpanKind

log = logging.getLogger(__name__)


class Recorder:
    """Collects the spans of one attempt in the app's process; thread-safe.

    It holds at most `limit` spans between two drains. What does not fit is counted in `dropped`,
    and the runner then marks the attempt damaged: nothing is dropped silently.
    """

    keeps = True
    """False: whatever is added is forgotten."""

    def __init__(self, limit: int = 100_000) -> None:
        self.has_called = False
        """A model call was seen here."""
        self.is_over = False
        """The attempt has ended: what is made in its name now is no part of it."""
        self.uncaptured: Counter[Request] = Counter()
        """Requests to models that no SDK made; counted in a dry run alone."""
        self._limit = limit
        self._spans: list[Span] = []
        self._damage: list[str] = []
        self._dropped = 0
        self._pending: dict[str, Callable[[], None]] = {}
        # The garbage collector may run inside a locked block and end a stream that the app dropped,
        # which is recorded by the same thread.
        self._lock = threading.RLock()

    def new_call_id(self) -> str:
        """The id of a call that is made now."""
        self.has_called = True
        return new_id("call")

    def add(self, span: Span) -> None:
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

    def add_uncaptured(self, request: Request) -> None:
        """Count a request to a model that no SDK made."""
        with self._lock:
            self.uncaptured[request] += 1

    def add_capture_error(self, reason: str) -> None:
        """Note a capture error: the attempt will not be trained."""
        with self._lock:
            self._damage.append(bounded_text(reason))

    def expect(self, key: str, give_up: Callable[[], None]) -> None:
        """Something is under way that will be recorded; `give_up` records that it never ended."""
        with self._lock:
            self._pending[key] = give_up

    def settle(self, key: str) -> bool:
        """It ended; False if it was settled already."""
        with self._lock:
            return self._pending.pop(key, None) is not None

    def give_up(self) -> None:
        """Record what is still under way, such as streams that the app let go of."""
        for note in list(self._pending.values()):
            note()

    def drain(self) -> list[Span]:
        """The spans added since the last drain."""
        with self._lock:
            spans, self._spans = self._spans, []
            return spans

    def capture_errors(self) -> list[str]:
        """Every capture error so far, dropped spans included."""
        with self._lock:
            lost = [f"{self._dropped} spans dropped"] if self._dropped else []
            return [*self._damage, *lost]


class NullRecorder(Recorder):
    """Of calls to served policies outside any attempt: keeps nothing."""

    keeps = False

    def add(self, span: Span) -> None:
        """Forget it."""

    def add_capture_error(self, reason: str) -> None:
        """Nothing is trained, so nothing is damaged; a person may want to know."""
        log.warning("%s", reason)

    def expect(self, key: str, give_up: Callable[[], None]) -> None:
        """Nobody asks how it ended."""

    def settle(self, key: str) -> bool:
        """Nothing is left to record."""
        return False


class LostRewardRecorder(NullRecorder):
    """Of a process that records, outside every attempt."""

    def add(self, span: Span) -> None:
        """Forget it; a reward that is lost this way is worth a word."""
        if span.kind is SpanKind.REWARD:
            log.warning(
                "a reward was emitted outside every attempt and is lost: call emit_reward() while "
                "the agent runs, or lightspan.feedback(attempt_id, reward) later"
            )

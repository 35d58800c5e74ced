"""The life of a model call, which is answered once, however often a client retries it.

A `ServedCall` belongs to a call id of a `CallerSession`. Retries with the same call id subscribe to
it while it runs, and replay its answer afterwards. When the last client disconnects, the work is
cancelled and its tokens are recorded as cancelled; a later retry continues from them.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from lightspan.errors import EngineError, LightspanError
from lightspan.schema import semconv as c
from lightspan.schema.images import Image
from lightspan.schema.records import Claim
from lightspan.schema.routing import Routing, Rule, Target
from lightspan.schema.spans import Attributes, Span
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan_gateway.api_errors import ApiError
from lightspan_gateway.forks import Replay

TRACEPARENT: Final = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
"""The header `traceparent`: the trace id, and the id of the parent span."""
_Part = TypeVar("_Part")


@dataclass(slots=True)
class RecordedCall:
    """A call that is read from the store.

    It was recorded before the session was opened, for example before a restart of the gateway.
    """

    span: Span
    records: list[TokenRecord] = field(default_factory=list)

    @property
    def body_hash(self) -> str:
        return str(self.span.attributes.get(c.REQUEST_HASH, ""))


@dataclass(slots=True)
class CallerSession:
    """The model calls of one client, and the routing rules for them.

    The client is one attempt (one run of the app). In `lightspan serve`, all clients share one
    session.
    """

    claim: Claim
    routing: Routing
    checked_at: float = 0.0
    """Time of the last look-up of the call token, by `time.monotonic`."""
    sequence: int = 0
    """Latest number that `next_sequence` returned; 0 before the first."""
    calls: dict[str, ServedCall] = field(default_factory=dict)
    """Call id → call."""
    recorded: dict[str, RecordedCall] = field(default_factory=dict)
    """Call id → call that was recorded before this session was opened."""
    replay: Replay | None = None
    """The recorded attempt that the client's attempt repeats; None if it repeats none."""
    shared: bool = False
    """Whether several clients share the session, so that equal bodies may be different calls."""
    stored_images: set[str] = field(default_factory=set)
    """Digests of the images that the store has for this attempt."""
    max_calls: int | None = None
    """Maximum number of calls in memory; None for all."""
    answer_model: Callable[[str], str] | None = None
    """Function from a policy to the name of the model in answers; None for the request's name."""

    @property
    def attempt_id(self) -> str:
        return self.claim.attempt.attempt_id

    @property
    def is_busy(self) -> bool:
        """Whether a call is running, or waits for its turn in a replay."""
        is_waiting = self.replay is not None and bool(self.replay.waiting)
        return is_waiting or any(call.active for call in self.calls.values())

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    @property
    def naming_rules(self) -> list[Rule]:
        """The routing rules that may name the `model` of a request.

        The patterns `*` and `**` are left out, because they match every name.
        """
        return [rule for rule in self.routing.rules if rule.pattern not in ("*", "**")]

    def add(self, call: ServedCall) -> None:
        """Add `call`; beyond `max_calls` calls, evict the oldest ones that are not running."""
        if self.max_calls is not None:
            answered = [call_id for call_id, other in self.calls.items() if not other.active]
            for call_id in answered[: max(0, len(self.calls) + 1 - self.max_calls)]:
                del self.calls[call_id]
        self.calls[call.info.call_id] = call

    def undelivered(self, body_hash: str) -> str | None:
        """Find the earlier call that a request without a call id repeats.

        A call qualifies if its request body has the hash `body_hash`, and if no client is known to
        have received its answer. Calls whose clients have all disconnected are preferred, then the
        latest call.

        Returns:
            The call id; None if no call qualifies. If several clients share the session, the result
            is always None, because two clients may send equal bodies.
        """
        if self.shared:
            return None
        candidates = [
            call_id
            for call_id, call in reversed(self.calls.items())
            if call.info.body_hash == body_hash and not call.delivered
        ]
        abandoned = (call_id for call_id in candidates if self.calls[call_id].is_abandoned)
        candidates = [*abandoned, *candidates] or [
            call_id
            for call_id, recorded in reversed(self.recorded.items())
            if call_id not in self.calls and recorded.body_hash == body_hash
        ]
        return candidates[0] if candidates else None


@dataclass(slots=True, kw_only=True)
class CallInfo:
    """The request of a call, its caller, and the policy or endpoint that answers it."""

    session: CallerSession
    call_id: str
    agent_path: str
    target: Target
    body: dict[str, Any]
    """The decoded JSON; empty after the call is recorded."""
    body_hash: str
    size: int
    """Size of the request in bytes."""
    policy: str
    span_id: str
    parent_id: str | None
    trace_id: str
    start_ns: int
    api: str = ""
    """Path of the API after `/v1/`, such as `chat/completions`."""
    grace_s: float = 0.0
    """Seconds for which the call continues after its last client disconnected."""
    sequence_start: int = 0
    """Sequence number of the call's start; 0 until the call starts."""
    repeats: RecordedCall | None = None
    """The call of another attempt whose answer is given again, under the same call id; None for
    other calls."""
    request_id: str = ""
    """Call id that the client sent with a replayed call; empty for other calls."""
    is_fork: bool = False
    """Whether a fork ends its replay at this call."""
    equal: RecordedCall | None = None
    """The call of another attempt with the same request; None for other calls."""
    images: dict[str, Image] = field(default_factory=dict)
    """Digest → image of the request, for the store; empty after the call is recorded."""
    image_fields: dict[str, str] = field(default_factory=dict)
    """Digest → path of the field with the image in the request."""


class CallLog(ABC):
    """A destination for the records of calls."""

    needs_bodies = True
    """Whether the log records the bodies of requests."""

    def __init__(self) -> None:
        self._background: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def record(self, call: ServedCall, outcome: CallOutcome) -> None:
        """Record a call; return when the record is durable, or after a timeout."""

    @abstractmethod
    async def record_refusal(self, info: CallInfo, error: ApiError) -> None:
        """Record a call that never started.

        Either the call was refused, or its client disconnected (`error` has the status 499).
        """

    @abstractmethod
    async def update_outcome(self, info: CallInfo, outcome: CallOutcome) -> None:
        """Change the recorded outcome of a call."""

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` as a task that is never cancelled; `drain` waits for it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def drain(self) -> None:
        """Wait for the background tasks."""
        while self._background:
            await asyncio.wait(list(self._background))


class ServedCall(ABC):
    """A model call that this process answers, once, for any number of connected clients.

    A subclass produces the answer. The call is recorded in a `CallLog`.
    """

    def __init__(self, info: CallInfo, log: CallLog) -> None:
        self.info = info
        self.overrides: Mapping[str, Any] = {}
        """Field of the request → (requested value, used value)."""
        self.streamed = bool(info.body.get("stream"))
        """Whether the client requested a stream of events."""
        self.error: Exception | None = None
        self.answered = False
        """Whether the answer is complete and recorded."""
        self.delivered = False
        self.is_undelivered = False
        """Whether the answer was recorded as undelivered."""
        self.tries = 0
        self._log = log
        self._clients = 0
        self._task: asyncio.Task[None] | None = None
        self._cancellable = False
        self._cancel_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    # --- state -----------------------------------------------------------------------
    @property
    def outcome(self) -> CallOutcome:
        """The outcome that is recorded if the call is answered."""
        return CallOutcome.REPLAYED if self.info.repeats is not None else CallOutcome.OK

    @property
    def active(self) -> bool:
        """Whether the call is running."""
        return self._task is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether the call has no client."""
        return self._clients == 0

    def forget_request(self) -> None:
        """Drop the request's body to free memory; it is not needed after the call is recorded."""
        self.info.body, self.info.images = {}, {}

    @abstractmethod
    def attributes(self) -> Attributes:
        """Return the span attributes of the answer so far."""

    def token_records(self, outcome: CallOutcome, sequence_end: int) -> list[TokenRecord]:
        """Return the records of the tokens sampled so far.

        The result is empty if an endpoint answers the call, because endpoints return no tokens.

        Raises:
            DataError: a token cannot be trained, for example because its log-probability is
                infinite.
        """
        return []

    def conversation(self) -> list[dict[str, Any]] | None:
        """Return the messages up to this answer, which a later request may continue.

        The result is None if the call has no answer yet, or if its API cannot continue an answer.
        """
        return None

    # --- answer -----------------------------------------------------------------
    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer.

        The last event is held back until the call is in the store.

        Raises (while iterating):
            ApiError: an endpoint refused the call.
            LightspanError: the engine failed.
        """

    @abstractmethod
    async def body(self) -> bytes:
        """Return the complete answer of a call that is not streamed, after the call is recorded.

        Raises:
            ApiError: an endpoint refused the call.
            LightspanError: the engine failed.
        """

    async def _wait(self) -> None:
        async for _ in self._follow(tuple):
            pass

    async def _follow(self, parts: Callable[[], Sequence[_Part]]) -> AsyncGenerator[_Part, None]:
        """Yield the items of `parts()` as they are added, until the answer is recorded."""
        position = 0
        while True:
            changed, available = self._changed, parts()
            while position < len(available):
                yield available[position]
                position += 1
            if self.error is not None:
                raise self.error
            if self.answered and position == len(parts()):
                return
            if changed is self._changed:
                await changed.wait()

    # --- clients -----------------------------------------------------------------
    def subscribe(self) -> None:
        """Add a client to the call.

        Start to produce the answer, unless this is running already or the answer is complete.
        """
        self._clients += 1
        if self._cancel_timer is not None:
            self._cancel_timer.cancel()
        if self._task is None and not self.answered:
            self._start()

    def unsubscribe(self) -> None:
        """Remove a client from the call.

        If it was the last client, the work on the answer is cancelled after `grace_s` seconds.
        """
        self._clients -= 1
        if not self.info.grace_s:
            self.cancel_if_abandoned()
        elif self.is_abandoned and self._task is not None:
            loop = asyncio.get_running_loop()
            self._cancel_timer = loop.call_later(self.info.grace_s, self.cancel_if_abandoned)

    def cancel_if_abandoned(self) -> None:
        """Cancel the work if the call has no client."""
        if self.is_abandoned and self._task is not None and self._cancellable:
            self._cancellable = False
            self._task.cancel()

    async def mark_delivered(self) -> None:
        """Record that a client received the answer."""
        self.delivered = True
        if self.info.session.replay is not None:
            self.info.session.replay.answer(self.info.call_id)
        if self.is_undelivered:  # an earlier delivery failed, and a retry fetched the answer
            self.is_undelivered = False
            await self._log.update_outcome(self.info, self.outcome)

    def mark_undelivered(self) -> None:
        """Record that a client disconnected without the answer."""
        self._log.background(self._mark_undelivered())

    async def _mark_undelivered(self) -> None:
        await self.wait_done()
        # while another client waits, the answer may still be delivered
        is_marked = self.delivered or self.is_undelivered
        if self.answered and self.is_abandoned and not is_marked:
            self.is_undelivered = True
            await self._log.update_outcome(self.info, CallOutcome.UNDELIVERED)

    # --- work ---------------------------------------------------------------------
    @abstractmethod
    async def _work(self) -> None:
        """Produce the answer. The task is cancelled if all clients have disconnected."""

    def _start(self) -> None:
        self.error = None
        self._cancellable = True
        self._task = asyncio.create_task(self._try(), name=self.info.call_id)

    async def _try(self) -> None:
        self.tries += 1
        outcome: CallOutcome | None = None
        try:
            await self._work()
        except asyncio.CancelledError:
            outcome = CallOutcome.CANCELLED
        except Exception as error:
            outcome, self.error = CallOutcome.ERROR, _call_error(error)
        self._cancellable = False
        try:
            await self._log.record(self, outcome or self.outcome)
            self.answered = outcome is None
            if self.answered:
                self.forget_request()
        except Exception as error:  # without an error the clients would wait for ever
            self.error = _call_error(error)
        finally:
            self._task = None
            self._notify()
            if outcome is CallOutcome.CANCELLED and not self.is_abandoned:
                self._start()  # a retry arrived while this try was being cancelled

    async def wait_done(self) -> None:
        """Wait until the call is not running."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def _notify(self) -> None:
        """Wake the clients."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _call_error(error: Exception) -> Exception:
    """Convert an exception to an `ApiError` or a `LightspanError`.

    Of an exception group, the first exception is converted.
    """
    first = error
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, LightspanError | ApiError):
        return first
    failure = EngineError(f"the engine failed: {type(first).__name__}: {first}")
    failure.__cause__ = first
    return failure

"""The life of a model call, which is answered once, however often a client retries it.

A `ServedCall` belongs to a call id of a `CallerSession`. Retries with the same call id subscribe to
it while it runs, and replay its answer afterwards. When the last client disconnects, the work is
cancelled and its tokens are recorded as cancelled; a later retry continues from them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightspan.errors import EngineError, LightspanError
from lightspan.schema import semconv as c
from lightspan.schema.records import Claim
from lightspan.schema.routing import Routing, Rule, Target
from lightspan.schema.spans import Attributes, Span
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan_gateway.api_errors import ApiError

_Part = TypeVar("_Part")


@dataclass(slots=True)
class RecordedCall:
    """A call that only the store remembers, as after a restart of the gateway."""

    span: Span
    records: list[TokenRecord] = field(default_factory=list)

    @property
    def body_hash(self) -> str:
        return str(self.span.attributes.get(c.REQUEST_HASH, ""))


@dataclass(slots=True)
class CallerSession:
    """The calls of one attempt, or of all clients of `lightspan serve`."""

    claim: Claim
    routing: Routing
    checked_at: float = 0.0
    sequence: int = 0
    """The latest sequence number."""
    calls: dict[str, ServedCall] = field(default_factory=dict)
    """By call id."""
    past: dict[str, RecordedCall] = field(default_factory=dict)
    """By call id: recorded by another gateway process, or by this one before it forgot them."""
    shared: bool = False
    """Whether several clients share it: equal bodies may then be of two of them."""
    most_calls: int | None = None
    """Calls that are kept in memory; None: all."""

    @property
    def attempt_id(self) -> str:
        return self.claim.attempt.attempt_id

    @property
    def is_busy(self) -> bool:
        """Whether a call is running."""
        return any(call.active for call in self.calls.values())

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    @property
    def naming_rules(self) -> list[Rule]:
        """Return the rules by which a request's `model` may name an agent."""
        return [rule for rule in self.routing.rules if rule.pattern not in ("*", "**")]

    def add(self, call: ServedCall) -> None:
        """Add a call, and evict the oldest answered ones beyond `most_calls`."""
        if self.most_calls is not None:
            answered = [name for name, earlier in self.calls.items() if not earlier.active]
            for name in answered[: max(0, len(self.calls) + 1 - self.most_calls)]:
                del self.calls[name]
        self.calls[call.info.call_id] = call

    def undelivered(self, body_hash: str) -> str | None:
        """Return the id of the latest call with this body whose answer may not have arrived.

        A call without clients comes first: of two equal calls at once (best-of-n) the retry belongs
        to the one whose client disconnected. In a shared session only the call id identifies one.
        """
        if self.shared:
            return None
        missed = [
            call_id
            for call_id, call in reversed(self.calls.items())
            if call.info.body_hash == body_hash and not call.delivered
        ]
        if missed:
            return next((name for name in missed if self.calls[name].is_abandoned), missed[0])
        for call_id, past in reversed(self.past.items()):
            if call_id not in self.calls and past.body_hash == body_hash:
                return call_id
        return None


@dataclass(slots=True, kw_only=True)
class CallInfo:
    """The request side of a call."""

    session: CallerSession
    call_id: str
    agent_path: str
    target: Target
    body: dict[str, Any]
    """Empty after it was recorded."""
    body_hash: str
    size: int
    """Of the request, in bytes."""
    policy: str
    span_id: str
    parent_id: str | None
    trace_id: str
    start_ns: int
    patience_s: float = 0.0
    """How long the call goes on without a client, who may retry."""
    sequence_start: int = 0
    """0 before it starts."""


class CallLog(ABC):
    """Records calls."""

    needs_bodies = True
    """Whether the bodies of requests are recorded."""

    def __init__(self) -> None:
        self._background: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def record(self, call: ServedCall, outcome: CallOutcome) -> None:
        """Record a call; returns when that is durable, or after a timeout."""

    @abstractmethod
    async def refuse(self, info: CallInfo, error: ApiError) -> None:
        """Record a call that was refused, or whose client disconnected (499), before it started."""

    @abstractmethod
    async def mark(self, info: CallInfo, outcome: CallOutcome) -> None:
        """Change the recorded outcome of a call."""

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that `drain` waits for and nothing cancels."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def drain(self) -> None:
        """Wait for the background tasks."""
        while self._background:
            await asyncio.wait(list(self._background))


class ServedCall(ABC):
    """A call: its clients, its work, its record and its answer."""

    def __init__(self, info: CallInfo, log: CallLog) -> None:
        self.info = info
        self.overrides: Mapping[str, Any] = {}
        """Field of the request → (what the app asked, what is used)."""
        self.streamed = bool(info.body.get("stream"))
        """Whether the client asked for events rather than a body."""
        self.error: Exception | None = None
        self.answered = False
        """The answer is complete and recorded."""
        self.delivered = False
        self.lost = False
        """Its answer was recorded as undelivered."""
        self.tries = 0
        self._log = log
        self._clients = 0
        self._task: asyncio.Task[None] | None = None
        self._cancellable = False
        self._patience: asyncio.TimerHandle | None = None
        self._pulse = asyncio.Event()

    # --- state -----------------------------------------------------------------------
    @property
    def outcome(self) -> CallOutcome:
        """The outcome that is recorded for an answered call."""
        return CallOutcome.OK

    @property
    def active(self) -> bool:
        """Whether it is running."""
        return self._task is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether it has no client."""
        return self._clients == 0

    def forget_request(self) -> None:
        """Free the body of an answered and recorded call."""
        self.info.body = {}

    @abstractmethod
    def attributes(self) -> Attributes:
        """Return the span attributes of the answer so far."""

    def token_records(self, outcome: CallOutcome, sequence_end: int) -> list[TokenRecord]:
        """Return the records of the tokens sampled so far; none for an endpoint's answer.

        Raises:
            DataError: the engine gave tokens that cannot be trained.
        """
        return []

    def conversation(self) -> list[dict[str, Any]] | None:
        """Return what a next response continues; None without an answered response."""
        return None

    # --- answer -----------------------------------------------------------------
    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer, the last one after the call is recorded.

        Raises (while iterating):
            ApiError: an endpoint refused.
            LightspanError: the engine failed.
        """

    @abstractmethod
    async def body(self) -> bytes:
        """Return the answer after it is recorded; raises what `events` raises."""

    async def _wait(self) -> None:
        async for _ in self._follow(tuple):
            pass

    async def _follow(self, parts: Callable[[], Sequence[_Part]]) -> AsyncGenerator[_Part, None]:
        """Yield the parts as they come, until the answer is complete and recorded."""
        position = 0
        while True:
            pulse, known = self._pulse, parts()
            while position < len(known):
                yield known[position]
                position += 1
            if self.error is not None:
                raise self.error
            if self.answered and position == len(parts()):
                return
            if pulse is self._pulse:
                await pulse.wait()

    # --- clients -----------------------------------------------------------------
    def subscribe(self) -> None:
        """Add a client; starts the work, or restarts it after a cancellation or an error."""
        self._clients += 1
        if self._patience is not None:
            self._patience.cancel()
        if self._task is None and not self.answered:
            self._start()

    def unsubscribe(self) -> None:
        """Remove a client; without any the work is cancelled, after `patience_s`."""
        self._clients -= 1
        if not self.info.patience_s:
            self.cancel_if_abandoned()
        elif self.is_abandoned and self._task is not None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self.info.patience_s, self.cancel_if_abandoned)

    def cancel_if_abandoned(self) -> None:
        """Cancel the work if it has no client."""
        if self.is_abandoned and self._task is not None and self._cancellable:
            self._cancellable = False
            self._task.cancel()

    async def mark_delivered(self) -> None:
        """Note that a client has the answer."""
        self.delivered = True
        if self.lost:  # an earlier delivery failed, this retry fetched the answer
            self.lost = False
            await self._log.mark(self.info, self.outcome)

    def mark_undelivered(self) -> None:
        """Note that a client disconnected without the answer."""
        self._log.background(self._mark_undelivered())

    async def _mark_undelivered(self) -> None:
        await self.wait_done()
        # while another client waits, the answer may still be delivered
        if self.answered and self.is_abandoned and not self.delivered and not self.lost:
            self.lost = True
            await self._log.mark(self.info, CallOutcome.UNDELIVERED)

    # --- work ---------------------------------------------------------------------
    @abstractmethod
    async def _work(self) -> None:
        """Get the answer; cancelled when the last client disconnects."""

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
            outcome, self.error = CallOutcome.ERROR, _explained(error)
        self._cancellable = False
        try:
            await self._log.record(self, outcome or self.outcome)
            self.answered = outcome is None
            if self.answered:
                self.forget_request()
        except Exception as error:  # else the clients would wait for ever
            self.error = _explained(error)
        finally:
            self._task = None
            self._beat()
            if outcome is CallOutcome.CANCELLED and not self.is_abandoned:
                self._start()  # a retry came while this try was being cancelled

    async def wait_done(self) -> None:
        """Wait until it is not running."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def _beat(self) -> None:
        """Wake the clients."""
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()


def _explained(error: Exception) -> Exception:
    """Return the error as one that an API error can be made of."""
    first = error
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, LightspanError | ApiError):
        return first
    failure = EngineError(f"the engine failed: {type(first).__name__}: {first}")
    failure.__cause__ = first
    return failure

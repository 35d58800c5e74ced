"""One model call: answered once, however often it is asked for.

A `ServedCall` belongs to a call id of an `Account`. Its work starts once; retries with the same
call id join it while it runs and replay it when it is finished. When the last client leaves, the
work is cancelled, what was sampled so far is logged as cancelled, and a later retry goes on from
there. `generations` and `forwards` have its two kinds.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightspan.errors import EngineError, LightspanError
from lightspan.gateway.refusal import ApiError
from lightspan.schema import conventions as c
from lightspan.schema.records import Claim
from lightspan.schema.routing import Routing, Rule, Target
from lightspan.schema.spans import Attributes, Span
from lightspan.schema.tokens import CallOutcome, TokenRecord

_Part = TypeVar("_Part")


@dataclass(slots=True)
class Past:
    """What the store knows of a call that this gateway does not remember."""

    span: Span
    records: list[TokenRecord] = field(default_factory=list)

    @property
    def body_hash(self) -> str:
        return str(self.span.attributes.get(c.REQUEST_HASH, ""))


@dataclass(slots=True)
class Account:
    """The calls of one attempt, or of everybody who uses what was trained."""

    claim: Claim
    routing: Routing
    checked_at: float = 0.0
    sequence: int = 0
    """The latest sequence number given."""
    calls: dict[str, ServedCall] = field(default_factory=dict)
    """Call id → its call: retries join it."""
    past: dict[str, Past] = field(default_factory=dict)
    """Call id → what another gateway process, or this one long ago, logged of it."""
    shared: bool = False
    """Whether strangers share it: equal bodies may then be of two of them."""
    most_calls: int | None = None
    """Calls that are remembered; None for all."""

    @property
    def attempt_id(self) -> str:
        return self.claim.attempt.attempt_id

    @property
    def is_busy(self) -> bool:
        """Whether a call is being worked on."""
        return any(call.active for call in self.calls.values())

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    @property
    def naming_rules(self) -> list[Rule]:
        """Those that do not take every name: by them a request's `model` may be an agent."""
        return [rule for rule in self.routing.rules if rule.pattern not in ("*", "**")]

    def add(self, call: ServedCall) -> None:
        """Remember a call, and forget the oldest answered ones where there are too many."""
        if self.most_calls is not None:
            answered = [name for name, earlier in self.calls.items() if not earlier.active]
            for name in answered[: max(0, len(self.calls) + 1 - self.most_calls)]:
                del self.calls[name]
        self.calls[call.info.call_id] = call

    def undelivered(self, body_hash: str) -> str | None:
        """The latest call with this body whose answer may not have arrived.

        One that nobody waits for comes first: of two equal calls at once (best-of-n) the retry is
        of the one whose client is gone. Of a shared account there is none: only the call id tells.
        """
        if self.shared:
            return None
        missed = [
            call_id
            for call_id, call in reversed(self.calls.items())
            if call.info.body_hash == body_hash and not call.delivered
        ]
        if missed:
            return next((name for name in missed if self.calls[name].deserted), missed[0])
        for call_id, past in reversed(self.past.items()):
            if call_id not in self.calls and past.body_hash == body_hash:
                return call_id
        return None


@dataclass(slots=True, kw_only=True)
class CallInfo:
    """What is known of a call before it is answered."""

    account: Account
    call_id: str
    agent_path: str
    target: Target
    body: dict[str, Any]
    """Empty once nothing is written of it any more."""
    body_hash: str
    size: int
    """Of the request, in bytes."""
    policy: str
    span_id: str
    parent_id: str | None
    trace_id: str
    start_ns: int
    patience_s: float = 0.0
    """How long it is worked on when nobody waits for it: somebody may come again."""
    sequence_start: int = 0
    """Its number; 0 before it starts."""


class CallLog(ABC):
    """Where it is written what became of calls."""

    needs_bodies = True
    """Whether what a request says is written too."""

    def __init__(self) -> None:
        self._background: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def record(self, call: ServedCall, outcome: CallOutcome) -> None:
        """Write what became of a call; returns when that is safe, or was waited for too long."""

    @abstractmethod
    async def refuse(self, info: CallInfo, error: ApiError) -> None:
        """Write a call that was refused before it was worked on, or whose client left (499)."""

    @abstractmethod
    async def mark(self, info: CallInfo, outcome: CallOutcome) -> None:
        """Change what became of a call."""

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that `drain` waits for, and that nothing cancels."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def drain(self) -> None:
        """Wait for what is under way."""
        while self._background:
            await asyncio.wait(list(self._background))


class ServedCall(ABC):
    """The life of a call: who waits for it, when it works, when it is logged, what it delivers."""

    def __init__(self, info: CallInfo, log: CallLog) -> None:
        self.info = info
        self.overrides: Mapping[str, Any] = {}
        """Field of the request → (what the app asked, what is used)."""
        self.streamed = bool(info.body.get("stream"))
        """Whether the client asked for events rather than a body."""
        self.error: Exception | None = None
        self.answered = False
        """The answer is there, logged."""
        self.delivered = False
        self.lost = False
        """It was answered and the answer did not arrive."""
        self.tries = 0
        self._log = log
        self._clients = 0
        self._task: asyncio.Task[None] | None = None
        self._cancellable = False
        self._patience: asyncio.TimerHandle | None = None
        self._pulse = asyncio.Event()

    # --- what it is -----------------------------------------------------------------------
    @property
    def outcome(self) -> CallOutcome:
        """What an answered call is logged as."""
        return CallOutcome.OK

    @property
    def active(self) -> bool:
        """Whether it is being worked on."""
        return self._task is not None

    @property
    def deserted(self) -> bool:
        """Whether nobody waits for it."""
        return self._clients == 0

    def forget_request(self) -> None:
        """Keep no more of what was asked: it is answered, and that is written."""
        self.info.body = {}

    @abstractmethod
    def attributes(self) -> Attributes:
        """What its span says of the answer, as far as it has come."""

    def token_records(self, outcome: CallOutcome, sequence_end: int) -> list[TokenRecord]:
        """What was sampled, as far as it has come; nothing of an endpoint's answer.

        Raises:
            DataError: the engine gave tokens that cannot be trained.
        """
        return []

    def conversation(self) -> list[dict[str, Any]] | None:
        """What a next response goes on from; None without an answered response."""
        return None

    # --- what it delivers -----------------------------------------------------------------
    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the answer as they come, the last of them when it is logged.

        Raises (while iterating):
            ApiError: an endpoint refused.
            LightspanError: the engine failed.
        """

    @abstractmethod
    async def body(self) -> bytes:
        """The answer in one piece, logged; raises what `events` raises."""

    async def _wait(self) -> None:
        async for _ in self._follow(tuple):
            pass

    async def _follow(self, parts: Callable[[], Sequence[_Part]]) -> AsyncGenerator[_Part, None]:
        """The parts as they come; ends when the answer is there and logged."""
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

    # --- who waits for it -----------------------------------------------------------------
    def join(self) -> None:
        """A client came; the work starts, goes on after a cancellation, or again after an error."""
        self._clients += 1
        if self._patience is not None:
            self._patience.cancel()
        if self._task is None and not self.answered:
            self._start()

    def leave(self) -> None:
        """A client left; the last one cancels the work, in a while where it may come again."""
        self._clients -= 1
        if not self.info.patience_s:
            self.give_up()
        elif self.deserted and self._task is not None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self.info.patience_s, self.give_up)

    def give_up(self) -> None:
        """Cancel the work if nobody waits for it."""
        if self.deserted and self._task is not None and self._cancellable:
            self._cancellable = False
            self._task.cancel()

    async def arrived(self) -> None:
        """A client has the answer."""
        self.delivered = True
        if self.lost:  # an earlier delivery failed, this retry fetched the answer
            self.lost = False
            await self._log.mark(self.info, self.outcome)

    def missed(self) -> None:
        """A client left without the answer."""
        self._log.background(self._missed())

    async def _missed(self) -> None:
        await self.settled()
        # of the last client: while another waits, somebody may still get it
        if self.answered and self.deserted and not self.delivered and not self.lost:
            self.lost = True
            await self._log.mark(self.info, CallOutcome.UNDELIVERED)

    # --- how it works ---------------------------------------------------------------------
    @abstractmethod
    async def _work(self) -> None:
        """Get the answer; cancelled when the last client leaves."""

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
        except Exception as error:  # whoever waits must not wait for ever
            self.error = _explained(error)
        finally:
            self._task = None
            self._beat()
            if outcome is CallOutcome.CANCELLED and not self.deserted:
                self._start()  # a retry came while this try was being cancelled

    async def settled(self) -> None:
        """Wait until it is not worked on."""
        while self._task is not None:
            await asyncio.wait([self._task])

    def _beat(self) -> None:
        """Wake who waits for news."""
        pulse, self._pulse = self._pulse, asyncio.Event()
        pulse.set()


def _explained(error: Exception) -> Exception:
    """What a client can be told: an error of ours."""
    first = error
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, LightspanError | ApiError):
        return first
    failure = EngineError(f"the engine failed: {type(first).__name__}: {first}")
    failure.__cause__ = first
    return failure

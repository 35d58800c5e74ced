"""What the gateway writes of a call: one LLM span, and a token record per choice."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from lightspan import conventions as c
from lightspan.errors import DataError
from lightspan.gateway.calls import Run
from lightspan.gateway.sessions import Session
from lightspan.records import CallOutcome, FinishReason, TokenRecord
from lightspan.routing import agent_name
from lightspan.spans import Attributes, Span, SpanKind, SpanStatus, clean_attributes, now_ns
from lightspan.store import StoredCall
from lightspan.wire import request_attributes

if TYPE_CHECKING:
    from lightspan.gateway.calls import Call, CallInfo, ChoiceRun
    from lightspan.store import Store

log = logging.getLogger(__name__)

_DAMAGE_PAUSES: Final = (0.0, 0.1, 0.5, 2.0, 8.0, 30.0)


class Records(ABC):
    """Where calls are written."""

    def __init__(self) -> None:
        self._background: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def record(self, session: Session, call: Call, outcome: CallOutcome) -> None:
        """Write what became of a call."""

    @abstractmethod
    async def write(self, session: Session, stored: StoredCall) -> None:
        """Write a call that was not worked on."""

    @abstractmethod
    async def mark(self, session: Session, call_id: str, outcome: CallOutcome) -> None:
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


class Capture(Records):
    """Writes calls to the store.

    Args:
        store: where they go.
        patience_s: how long an answer waits for the store. After that it is sent and the attempt
            is marked damaged: the app goes on, and nothing unrecorded is trained.
    """

    def __init__(self, store: Store, *, patience_s: float = 10.0) -> None:
        super().__init__()
        self._store = store
        self._patience_s = patience_s
        self._closing = asyncio.Event()

    async def record(self, session: Session, call: Call, outcome: CallOutcome) -> None:
        """Write what became of a call."""
        try:
            stored = stored_call(session, call, outcome)
        except DataError as error:
            self._damaged(session, f"call {call.info.call_id} has unusable tokens: {error}")
            stored = stored_call(session, call, outcome, tokens=False)
        await self.write(session, stored)

    async def write(self, session: Session, stored: StoredCall) -> None:
        """Wait for the store's acknowledgement, as long as patience lasts."""
        task = self.background(self._store.add_calls([stored]))
        done, _ = await asyncio.wait([task], timeout=self._patience_s)
        if not done:
            self._damaged(session, f"the store took over {self._patience_s:g} s for a call")
            task.add_done_callback(_look_at)
        elif (error := task.exception()) is not None:
            self._damaged(session, f"the store refused a call: {error}")

    async def mark(self, session: Session, call_id: str, outcome: CallOutcome) -> None:
        """Change what became of a call; a store that fails damages the attempt."""
        try:
            await self._store.mark_call(session.attempt_id, call_id, outcome)
        except Exception as error:
            self._damaged(session, f"call {call_id} could not be marked {outcome}: {error}")

    def _damaged(self, session: Session, reason: str) -> None:
        log.warning("attempt %s is damaged: %s", session.attempt_id, reason)
        self.background(self._mark_damaged(session.attempt_id, reason))

    async def _mark_damaged(self, attempt_id: str, reason: str) -> None:
        for pause in _DAMAGE_PAUSES:
            await self._pause(pause)
            try:
                await self._store.mark_damaged(attempt_id, reason)
                return
            except Exception as error:
                log.warning("attempt %s could not be marked damaged: %s", attempt_id, error)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return

    async def drain(self) -> None:
        """Wait for writes under way; what fails now is not tried again later."""
        self._closing.set()
        await super().drain()
        self._closing.clear()


def _look_at(task: asyncio.Task[Any]) -> None:
    """Its error was reported as damage already."""
    if not task.cancelled():
        task.exception()


def stored_call(
    session: Session, call: Call, outcome: CallOutcome, *, tokens: bool = True
) -> StoredCall:
    """The span and token records of a call, as far as it has come."""
    end = session.next_sequence()
    span = call_span(
        session,
        call.info,
        outcome,
        sequence_end=end,
        attributes=call.attributes(),
        message=str(call.error or ""),
    )
    sampled = call.choices if isinstance(call, Run) and outcome is not CallOutcome.ERROR else []
    records = [
        _record(session.attempt_id, call, choice, outcome, end)
        for choice in sampled
        if choice.ids and tokens and isinstance(call, Run)
    ]
    return StoredCall(span=span, records=records, epoch=session.claim.attempt.epoch)


def call_span(
    session: Session,
    info: CallInfo,
    outcome: CallOutcome,
    *,
    sequence_end: int,
    attributes: Attributes,
    message: str = "",
) -> Span:
    """The LLM span of a call."""
    failed = outcome is CallOutcome.ERROR
    known: Attributes = {
        c.CALL_ID: info.call_id,
        c.AGENT_PATH: info.agent_path,
        c.AGENT_NAME: agent_name(info.agent_path),
        c.SELECTED: info.target.selected,
        c.ROUTE: info.target.route.value,
        c.CALL_OUTCOME: outcome.value,
        c.REQUEST_HASH: info.body_hash,
        **request_attributes(info.body),
    }
    model = info.body.get("model", "")
    return Span(
        span_id=info.span_id,
        trace_id=info.trace_id,
        parent_id=info.parent_id,
        name=f"{known[c.OPERATION_NAME]} {model}".rstrip(),
        kind=SpanKind.LLM,
        rollout_id=session.claim.rollout.rollout_id,
        attempt_id=session.attempt_id,
        start_ns=info.start_ns,
        end_ns=now_ns(),
        status=SpanStatus.ERROR if failed else SpanStatus.OK,
        status_message=message,
        attributes=clean_attributes({**known, **attributes}),
        sequence_start=info.sequence_start,
        sequence_end=sequence_end,
    )


def _record(
    attempt_id: str, run: Run, choice: ChoiceRun, outcome: CallOutcome, sequence_end: int
) -> TokenRecord:
    info = run.info
    return TokenRecord.create(
        prompt_ids=choice.prompt_ids,
        response_ids=choice.ids,
        logprobs=choice.logprobs,
        versions=choice.versions,
        attempt_id=attempt_id,
        call_id=info.call_id,
        choice=choice.index,
        policy=info.policy,
        sampling=run.request.sampling,
        finish_reason=choice.finish or FinishReason.CANCELLED,
        span_id=info.span_id,
        agent_path=info.agent_path,
        sequence_start=info.sequence_start,
        sequence_end=sequence_end,
        outcome=outcome,
    )

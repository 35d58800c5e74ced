"""Records calls in the store: an LLM span each, and the token records of its choices."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightspan.errors import DataError
from lightspan.schema import semconv as c
from lightspan.schema.content import without_keys
from lightspan.schema.genai_attributes import request_attributes
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.redaction import bounded_text
from lightspan.schema.routing import agent_name
from lightspan.schema.spans import Attributes, Span, SpanKind, SpanStatus, clean_attributes, now_ns
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores.aio import wait_for_event
from lightspan.stores.protocol import RETRY_BACKOFF_S, StoredCall
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError
from lightspan_gateway.calls import CallerSession, CallInfo, CallLog, ServedCall
from lightspan_gateway.request_body import to_thread_if_large

if TYPE_CHECKING:
    from lightspan.stores.protocol import Store

log = logging.getLogger(__name__)

RETRY_TIMEOUT_S: Final = 90.0
"""Remote stores retry for a minute while their server restarts, and may take half a minute to
answer."""


class CallRecorder(CallLog):
    """Write calls to the store.

    Args:
        store: where they go.
        patience_s: how long an answer waits for the store. After that it is sent and the attempt
            is marked damaged: the app goes on, and nothing unrecorded is trained.
    """

    def __init__(self, store: Store, *, patience_s: float = RETRY_TIMEOUT_S) -> None:
        super().__init__()
        self._store = store
        self._patience_s = patience_s
        self._closing = asyncio.Event()

    async def record(self, call: ServedCall, outcome: CallOutcome) -> None:
        info = call.info
        end = info.session.next_sequence()
        records = []
        if outcome is not CallOutcome.ERROR:
            try:
                records = call.token_records(outcome, end)
            except DataError as error:
                self._damaged(info.session, f"call {info.call_id} has unusable tokens: {error}")
        attributes = call.attributes()
        if call.overrides:
            attributes[c.SAMPLING_OVERRIDES] = dump_json(call.overrides)
        span = await self._span(info, outcome, attributes, end, str(call.error or ""))
        await self._write(info.session, span, records)

    async def refuse(self, info: CallInfo, error: ApiError) -> None:
        info.sequence_start = info.session.next_sequence()
        end = info.session.next_sequence()
        outcome, attributes = CallOutcome.ERROR, Attributes()
        if error.status == CLIENT_LEFT:
            outcome = CallOutcome.CANCELLED
        else:
            attributes[c.ERROR_TYPE] = error.code or str(error.status)
            if error.status < 500:
                attributes[c.CALL_REFUSED] = error.param or ""
        span = await self._span(info, outcome, attributes, end, error.message)
        await self._write(info.session, span, [])

    async def _span(
        self, info: CallInfo, outcome: CallOutcome, attributes: Attributes, end: int, message: str
    ) -> Span:
        make = partial(call_span, info, outcome, attributes, end=end, message=message)
        return await to_thread_if_large(info.size, make)

    async def _write(self, session: CallerSession, span: Span, records: list[TokenRecord]) -> None:
        """Wait for the store's acknowledgement, at most `patience_s`."""
        stored = StoredCall(span=span, records=records, epoch=session.claim.attempt.epoch)
        task = self.background(self._store.add_calls([stored]))
        done, _ = await asyncio.wait([task], timeout=self._patience_s)
        if not done:
            self._damaged(session, f"the store took over {self._patience_s:g} s for a call")
            task.add_done_callback(_retrieve_error)
        elif (error := task.exception()) is not None:
            self._damaged(session, f"the store refused a call: {error}")

    async def mark(self, info: CallInfo, outcome: CallOutcome) -> None:
        attempt_id, call_id = info.session.attempt_id, info.call_id
        try:
            await self._store.mark_call(attempt_id, call_id, outcome)
        except Exception as error:
            self._damaged(info.session, f"call {call_id} could not be marked {outcome}: {error}")

    def _damaged(self, session: CallerSession, reason: str) -> None:
        log.warning("attempt %s is damaged: %s", session.attempt_id, reason)
        self.background(self._mark_damaged(session.attempt_id, reason))

    async def _mark_damaged(self, attempt_id: str, reason: str) -> None:
        for pause in (0.0, *RETRY_BACKOFF_S):
            await wait_for_event(pause, self._closing)
            try:
                await self._store.mark_damaged(attempt_id, reason)
                return
            except Exception as error:
                log.warning("attempt %s could not be marked damaged: %s", attempt_id, error)

    async def drain(self) -> None:
        """Wait for the running writes; from now on a failed mark is retried without a pause."""
        self._closing.set()
        await super().drain()
        self._closing.clear()


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Retrieve the error, which was reported as damage already."""
    if not task.cancelled():
        task.exception()


def call_span(
    info: CallInfo, outcome: CallOutcome, attributes: Attributes, *, end: int, message: str
) -> Span:
    """Return the LLM span of a call.

    Args:
        info: the call.
        outcome: of the call.
        attributes: further ones than those of the request.
        end: its last sequence number.
        message: what failed.
    """
    session = info.session
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
    span = Span(
        span_id=info.span_id,
        trace_id=info.trace_id,
        parent_id=info.parent_id,
        name=f"{known[c.OPERATION_NAME]} {model}".rstrip(),
        kind=SpanKind.LLM,
        rollout_id=session.claim.rollout.rollout_id,
        attempt_id=session.attempt_id,
        start_ns=info.start_ns,
        end_ns=now_ns(),
        status=SpanStatus.ERROR if outcome is CallOutcome.ERROR else SpanStatus.OK,
        status_message=bounded_text(message),
        attributes=clean_attributes({**known, **attributes}),
        sequence_start=info.sequence_start,
        sequence_end=end,
    )
    return without_keys(span)

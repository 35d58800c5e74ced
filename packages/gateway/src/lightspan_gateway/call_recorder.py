"""Storage of calls: an LLM span of each call, and the token records of its choices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, Final

from lightspan.errors import DataError
from lightspan.schema import semconv as c
from lightspan.schema.content import without_keys
from lightspan.schema.genai_attributes import request_attributes
from lightspan.schema.genai_messages import dump_json
from lightspan.schema.images import Image
from lightspan.schema.media import images_into
from lightspan.schema.records import AttemptRef
from lightspan.schema.redaction import bounded_text
from lightspan.schema.routing import Route, agent_name
from lightspan.schema.spans import (
    Attributes,
    Span,
    SpanKind,
    SpanLink,
    SpanStatus,
    clean_attributes,
    now_ns,
)
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores.aio import wait_for_event
from lightspan.stores.protocol import RETRY_BACKOFF_S, Store, StoredCall
from lightspan_gateway.api_errors import CLIENT_LEFT, ApiError
from lightspan_gateway.calls import CallerSession, CallInfo, CallLog, ServedCall
from lightspan_gateway.dialects.response_tools import TOOLS
from lightspan_gateway.request_body import to_thread_if_large

log = logging.getLogger(__name__)


class CallRecorder(CallLog):
    """Write calls to the store.

    Args:
        store: the store.
        store_timeout_s: seconds for which an answer waits until its call is stored. Afterwards the
            answer is sent, so that the app continues, and the attempt is marked damaged, so that it
            is not trained.
    """

    def __init__(self, store: Store, *, store_timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._store_timeout_s = store_timeout_s
        self._closing = asyncio.Event()
        self.damaged: dict[str, tuple[str, ...]] = {}
        """Attempt id → the first reason why the attempt is damaged. An attempt is added before the
        app gets its answer, so before it can end; the store has the mark later, or never."""
        self._reported: set[str] = set()
        """Names of tools that a log line has reported as not offered."""

    async def record(self, call: ServedCall, outcome: CallOutcome) -> None:
        info = call.info
        end = info.session.next_sequence()
        records = []
        if outcome not in (CallOutcome.ERROR, CallOutcome.REPLAYED):
            try:
                records = call.token_records(outcome, end)
            except DataError as error:
                self._report_damage(
                    info.session, f"call {info.call_id} has unusable tokens: {error}"
                )
        attributes = call.attributes()
        if call.overrides:
            attributes[c.SAMPLING_OVERRIDES] = dump_json(call.overrides)
            self._report_omitted(call)
        await self._store_call(info, outcome, attributes, end, str(call.error or ""), records)

    def _report_omitted(self, call: ServedCall) -> None:
        """Report tools that the model is not offered, each once in a run."""
        fields = call.overrides.items()
        tools = {name for name, pair in fields if name.startswith(TOOLS) and pair[1] is None}
        for name in sorted(tools - self._reported):
            self._reported.add(name)
            log.warning(
                "the tool %r of agent %s is not offered to the model, because it works with its "
                "provider's models and servers only: switch it off in the program",
                name.removeprefix(TOOLS),
                call.info.agent_path,
            )

    async def record_refusal(self, info: CallInfo, error: ApiError) -> None:
        replay = info.session.replay
        if error.code == c.REPLAY_DEPARTED and replay is not None and not replay.is_reported:
            replay.is_reported = True
            self.background(self._mark_damaged(info.session.attempt_id, error.message))
        info.sequence_start = info.session.next_sequence()
        end = info.session.next_sequence()
        outcome, attributes = CallOutcome.ERROR, Attributes()
        if error.status == CLIENT_LEFT:
            outcome = CallOutcome.CANCELLED
        else:
            attributes[c.ERROR_TYPE] = error.error_type
            if error.status < 500:
                attributes[c.CALL_REFUSED] = error.param or ""
        await self._store_call(info, outcome, attributes, end, error.message)

    async def _store_call(
        self,
        info: CallInfo,
        outcome: CallOutcome,
        attributes: Attributes,
        end: int,
        message: str,
        records: Sequence[TokenRecord] = (),
    ) -> None:
        """Write a call to the store; wait at most `store_timeout_s` until the store confirms it.

        If the write fails or takes longer, the attempt is marked as damaged.

        Args:
            info: the call.
            outcome: outcome of the call.
            attributes: attributes of the call's span that cannot be read from `info` and `outcome`.
            end: last sequence number of the call.
            message: error message; empty if there is no error.
            records: the tokens that were sampled for the call.
        """
        session = info.session
        size = max(info.size, sum(len(image.data) for image in info.images.values()))
        span = await to_thread_if_large(size, call_span, info, outcome, attributes, end, message)
        stored = StoredCall(span=span, records=[*records], epoch=session.claim.attempt.epoch)
        images = [i for i in info.images.values() if i.digest not in session.stored_images]
        task = self.background(self._write(stored, images, session))
        done, _ = await asyncio.wait([task], timeout=self._store_timeout_s)
        if not done:
            self._report_damage(
                session, f"the store took over {self._store_timeout_s:g} s for a call"
            )
            task.add_done_callback(_retrieve_error)
        elif (error := task.exception()) is not None:
            self._report_damage(session, f"the store refused a call: {error}")

    async def _write(
        self, call: StoredCall, images: Sequence[Image], session: CallerSession
    ) -> None:
        if images:  # before what refers to them
            attempt = AttemptRef(session.attempt_id, call.epoch)
            await self._store.add_images(attempt, images)
            session.stored_images.update(image.digest for image in images)
        await self._store.add_calls([call])

    async def update_outcome(self, info: CallInfo, outcome: CallOutcome) -> None:
        attempt_id, call_id = info.session.attempt_id, info.call_id
        try:
            await self._store.mark_call(attempt_id, call_id, outcome)
        except Exception as error:
            self._report_damage(info.session, f"call {call_id} cannot be marked {outcome}: {error}")

    def _report_damage(self, session: CallerSession, reason: str) -> None:
        log.warning("attempt %s is damaged: %s", session.attempt_id, reason)
        if session.attempt_id not in self.damaged:
            self.damaged[session.attempt_id] = (reason,)
            self.background(self._mark_damaged(session.attempt_id, reason))

    async def _mark_damaged(self, attempt_id: str, reason: str) -> None:
        """Mark an attempt as damaged in the store. Until `drain`, failed tries are repeated."""
        for pause in chain((0.0,), RETRY_BACKOFF_S, repeat(RETRY_BACKOFF_S[-1])):
            await wait_for_event(pause, self._closing)
            try:
                await self._store.mark_damaged(attempt_id, reason)
                return
            except Exception as error:
                if self._closing.is_set():
                    log.warning("attempt %s cannot be marked damaged: %s", attempt_id, error)
                    return

    async def drain(self) -> None:
        """Wait until all writes that run in the background are finished.

        If an attempt could not be marked as damaged in the store, a last try follows at once.
        """
        self._closing.set()
        await super().drain()
        self._closing.clear()


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Retrieve the task's error, which is already reported, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


_REPLAYED_KEYS: Final = (
    *(c.CALL_ID, c.AGENT_PATH, c.AGENT_NAME, c.SELECTED, c.ROUTE, c.CALL_OUTCOME, c.REQUEST_HASH),
    *(c.OPERATION_NAME, c.OPENINFERENCE_KIND, c.REQUEST_MODEL, c.REQUEST_STREAM, c.REQUEST_CHOICES),
    *(c.POLICY, c.RESPONSE_ID, c.RESPONSE_MODEL, c.FINISH_REASONS),
)
"""The attributes of a replayed call, which refers to the call that it repeats."""


def call_span(
    info: CallInfo, outcome: CallOutcome, attributes: Attributes, end: int, message: str
) -> Span:
    """Build the span (record) of a model call.

    Args:
        info: the call.
        outcome: outcome of the call.
        attributes: attributes of the span that cannot be read from `info` and `outcome`.
        end: last sequence number of the call; sequence numbers order the records of an attempt.
        message: error message; empty if there is no error.
    """
    session = info.session
    is_proxied = info.target.route is Route.ENDPOINT  # else the images are read already
    with images_into(info.images if is_proxied else None):
        messages = request_attributes(info.body)
    request: Attributes = {
        c.CALL_ID: info.call_id,
        c.AGENT_PATH: info.agent_path,
        c.AGENT_NAME: agent_name(info.agent_path),
        c.SELECTED: info.target.selected,
        c.ROUTE: info.target.route.value,
        c.CALL_OUTCOME: outcome.value,
        c.REQUEST_HASH: info.body_hash,
        **messages,
    }
    # the gateway itself keeps the conversation, and records it whole
    request.pop(c.CALL_CONTEXT, None)
    links: list[SpanLink] = []
    if info.is_fork:
        attributes = {**attributes, c.REPLAY_FORK: True}
    if info.repeats is not None:  # the other attempt has the texts
        both = {**request, **attributes}
        request = {key: both[key] for key in _REPLAYED_KEYS if key in both}
        repeated = info.repeats.span
        attributes = {
            c.REPLAYED_FROM: repeated.attempt_id,
            c.REPLAYED_ROLLOUT: repeated.rollout_id,
            c.REPLAY_REQUEST: info.request_id,
        }
        links = [SpanLink(repeated.trace_id, repeated.span_id)]
    model = info.body.get("model", "")
    span = Span(
        span_id=info.span_id,
        trace_id=info.trace_id,
        parent_id=info.parent_id,
        name=f"{request[c.OPERATION_NAME]} {model}".rstrip(),
        kind=SpanKind.LLM,
        rollout_id=session.claim.rollout.rollout_id,
        attempt_id=session.attempt_id,
        start_ns=info.start_ns,
        end_ns=now_ns(),
        status=SpanStatus.ERROR if outcome is CallOutcome.ERROR else SpanStatus.OK,
        status_message=bounded_text(message),
        attributes=clean_attributes({**request, **attributes}),
        links=links,
        sequence_start=info.sequence_start,
        sequence_end=end,
    )
    return without_keys(span)

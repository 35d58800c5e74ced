"""Tests of spans, model calls, and their token records."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from lightspan.errors import DataError, NotFoundError
from lightspan.schema.records import Attempt, AttemptRef, AttemptStatus, Outcome
from lightspan.schema.reward import Reward
from lightspan.schema.semconv import CALL_OUTCOME
from lightspan.schema.spans import SpanEvent, SpanKind, SpanLink, SpanStatus
from lightspan.schema.token_records import CallOutcome, FinishReason, Sampling
from lightspan.stores.protocol import Store, StoredCall
from lightspan_testing.store_suite.base import (
    LEASE_S,
    NUL,
    UNICODE,
    StoreTests,
    make_call,
    make_record,
    make_report,
    make_rollout,
    make_span,
    make_try,
    records_of,
    ref,
    spans_of,
    start,
)


class SpanTests(StoreTests):
    """Test that the store keeps spans and calls once, complete and in order.

    If an attempt has ended, later spans and calls are marked as late. If a call failed and is made
    again, the later try replaces the failed one.
    """

    async def test_spans_come_back_whole_and_in_order(self, store: Store) -> None:
        attempt = await start(store)
        rich = make_span(
            attempt,
            99,
            name=UNICODE,
            kind=SpanKind.TOOL,
            parent_id="b" * 16,
            start_ns=2**62,
            end_ns=2**62 + 1,
            status=SpanStatus.ERROR,
            status_message=UNICODE,
            attributes={
                UNICODE: UNICODE,
                "nul": NUL,
                "bool": True,
                "int": -(2**63),
                "float": 1e-300,
                "strings": ["a", UNICODE],
                "floats": [0.1, math.inf],
                "empty": [],
            },
            events=[SpanEvent("event", 5, {"k": [1, 2]})],
            links=[SpanLink("c" * 32, "d" * 16, {"k": False})],
            resource={"service.name": "app"},
            sequence_start=3,
            sequence_end=2**40,
        )
        spans = [rich, *(make_span(attempt, number) for number in (3, 1, 2))]
        assert await store.add_spans(ref(attempt), spans[:2]) == 0
        assert await store.add_spans(ref(attempt), spans[2:]) == 0
        assert await spans_of(store, attempt) == spans

    async def test_an_attempt_ends_with_its_last_spans(self, store: Store) -> None:
        attempt = await start(store)
        report, spans = make_report(attempt), [make_span(attempt, number) for number in range(3)]
        assert await store.finish(report, spans)
        assert await store.finish(report, spans)  # repeated, as by a client without a response
        assert await spans_of(store, attempt) == spans
        ended = await store.attempt(attempt.attempt_id)
        assert (ended.status, ended.capture_errors) == (report.status, [])
        other = msgspec.structs.replace(report, outcome=Outcome.APP_ERROR)
        assert not await store.finish(other, [make_span(attempt, 3)])
        assert (await spans_of(store, attempt))[3].late
        unknown = msgspec.structs.replace(attempt, attempt_id="at-none")
        with pytest.raises(NotFoundError):
            await store.finish(make_report(unknown), [])

    @pytest.mark.parametrize("attributes", [{"letters": "\ud800"}, {"of another": "attempt"}])
    async def test_an_attempt_ends_whose_spans_cannot_be_stored(
        self, store: Store, attributes: dict[str, Any]
    ) -> None:
        attempt = await start(store)
        span = make_span(attempt, attributes=attributes)
        if "of another" in attributes:
            span = span.replace(attempt_id="at-another")
        assert await store.finish(make_report(attempt, reward=Reward(1.0)), [span])
        ended = await store.attempt(attempt.attempt_id)
        assert (ended.status, ended.reward) == (AttemptStatus.SUCCEEDED, Reward(1.0))
        [damage] = ended.capture_errors
        assert damage.startswith("spans could not be stored: ")
        assert await spans_of(store, attempt) == []

    async def test_late_spans_are_kept_and_marked(self, store: Store) -> None:
        attempt = await start(store)
        wrong_epoch = AttemptRef(attempt.attempt_id, attempt.epoch + 1)
        assert await store.add_spans(wrong_epoch, [make_span(attempt, 1)]) == 1
        assert await store.add_spans(ref(attempt), [make_span(attempt, 2, late=True)]) == 1
        span = make_span(attempt, 3)
        assert await store.add_spans(ref(attempt), [span, span]) == 0
        await store.report([make_report(attempt)])
        assert await store.add_spans(ref(attempt), [span, make_span(attempt, 4)]) == 1
        assert [span.late for span in await spans_of(store, attempt)] == [True, True, False, True]

    async def test_spans_of_several_attempts(self, store: Store) -> None:
        await store.enqueue([make_rollout("a"), make_rollout("b")])
        first, second = [c.attempt for c in await store.claim("runner", 2, LEASE_S)]
        for attempt in (first, second):  # span ids are unique within an attempt only
            await store.add_spans(ref(attempt), [make_span(attempt)])
        ids = [second.attempt_id, "at-nobody", first.attempt_id, second.attempt_id]
        by_attempt = await store.spans(ids)
        assert by_attempt == {
            second.attempt_id: [make_span(second)],
            "at-nobody": [],
            first.attempt_id: [make_span(first)],
        }
        assert await store.spans([]) == {}

    async def test_spans_that_cannot_be_kept(self, store: Store) -> None:
        attempt = await start(store)
        unknown = AttemptRef("at-nobody", 1)
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.add_spans(unknown, [make_span(attempt, attempt_id="at-nobody")])
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.add_spans(unknown, [])
        with pytest.raises(DataError, match="at-other"):
            await store.add_spans(ref(attempt), [make_span(attempt, attempt_id="at-other")])
        bad: list[Any] = [object(), 2**70, "\ud800"]
        for value in bad:
            span = make_span(attempt, 1, attributes={"a": value})
            with pytest.raises(DataError, match="span 1"):
                await store.add_spans(ref(attempt), [span])
        assert await spans_of(store, attempt) == []

    # --- calls ----------------------------------------------------------------------------
    async def test_token_records_are_bit_exact(self, store: Store) -> None:
        attempt = await start(store)
        record = make_record(
            attempt,
            UNICODE,
            choice=2,
            policy=UNICODE,
            prompt_ids=[0, 1, 2**31 - 1, -1],
            response_ids=list(range(1000)),
            logprobs=[-0.1 * i for i in range(1000)],
            versions=[(3, 999), (4, 1)],
            sampling=Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=9, stop=("a", "b")),
            finish_reason=FinishReason.TOOL_CALLS,
            span_id="e" * 16,
            agent_path="team/%2F/writer",
            sequence_start=5,
            sequence_end=9,
            outcome=CallOutcome.ERROR,
            grammar="start: TEXT",
            grammar_library="llguidance 1.9.1",
        )
        empty = make_record(
            attempt, "empty", prompt_ids=[], response_ids=[], logprobs=[], versions=[]
        )
        call = StoredCall(span=make_span(attempt), records=[record, empty], epoch=attempt.epoch)
        assert await store.add_calls([call]) == [False]
        records = await records_of(store, attempt)
        assert records == [empty, record]
        assert records[1].logprob_data == record.logprob_data
        assert records[1].versions == [(3, 999), (4, 1)]

    async def test_records_by_sequence_call_and_choice(self, store: Store) -> None:
        attempt = await start(store)
        keys = [(2, "b", 1), (1, "z", 0), (2, "a", 0), (2, "b", 0), (10, "a", 1), (2, "é", 0)]
        for number, (sequence, call_id, choice) in enumerate(keys):
            record = make_record(attempt, call_id, choice=choice, sequence_start=sequence)
            span = make_span(attempt, number)
            await store.add_calls([StoredCall(span=span, records=[record], epoch=attempt.epoch)])
        records = await records_of(store, attempt)
        assert [(r.sequence_start, r.call_id, r.choice) for r in records] == sorted(keys)

    async def test_what_is_late_keeps_no_call_out(self, store: Store) -> None:
        """A call is stored even if a late span already has its span id.

        Span ids are not secret, so another sender can use one. The call's span replaces the late
        span.
        """
        attempt = await start(store)
        call = make_call(attempt)
        squatter = call.span.replace(name="something else", late=True)
        assert await store.add_spans(ref(attempt), [squatter]) == 1
        assert await store.add_calls([call]) == [False]
        assert await spans_of(store, attempt) == [call.span]
        assert await records_of(store, attempt) == call.records

    async def test_calls_of_several_attempts_in_one_batch(self, store: Store) -> None:
        await store.enqueue([make_rollout("a"), make_rollout("b")])
        first, second = [c.attempt for c in await store.claim("runner", 2, LEASE_S)]
        await store.report([make_report(second)])
        calls = [make_call(first), make_call(second), make_call(first, 2, epoch=99)]
        assert await store.add_calls(calls) == [False, True, True]
        by_attempt = await store.token_records([first.attempt_id, second.attempt_id])
        assert [record.late for record in by_attempt[first.attempt_id]] == [False, True]
        assert [record.late for record in by_attempt[second.attempt_id]] == [True]

    async def test_calls_that_cannot_be_kept(self, store: Store) -> None:
        attempt = await start(store)
        good = make_call(attempt)
        unknown = make_call(Attempt(attempt_id="at-nobody", rollout_id="x", number=1, epoch=1))
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.add_calls([good, unknown])
        mixed = StoredCall(span=good.span, records=unknown.records, epoch=1)
        with pytest.raises(DataError, match="at-nobody"):
            await store.add_calls([good, mixed])
        assert await records_of(store, attempt) == []
        assert await spans_of(store, attempt) == []
        assert await store.add_calls([]) == []

    @pytest.mark.parametrize("before", [CallOutcome.CANCELLED, CallOutcome.ERROR])
    async def test_a_later_try_replaces_a_cancelled_or_failed_call(
        self, store: Store, before: CallOutcome
    ) -> None:
        """A later try of a call that succeeds replaces the span and records of the failed try."""
        attempt = await start(store)
        first, last = make_try(attempt, before, 2), make_try(attempt, CallOutcome.OK, 4)
        other = make_call(attempt, 7)
        assert await store.add_calls([first, other]) == [False, False]
        assert await store.add_calls([first]) == [False]
        assert await store.add_calls([last, first]) == [False, False]  # the old one stays replaced
        again = make_try(attempt, CallOutcome.ERROR, 6)
        assert await store.add_calls([again]) == [False]
        # in the position of the first
        assert await spans_of(store, attempt) == [last.span, other.span]
        assert await records_of(store, attempt) == [*last.records, *other.records]

    async def test_tries_of_one_call_in_one_batch(self, store: Store) -> None:
        attempt = await start(store)
        first = make_try(attempt, CallOutcome.CANCELLED, 2)
        last = make_try(attempt, CallOutcome.OK, 4)
        assert await store.add_calls([first, last]) == [False, False]
        assert await spans_of(store, attempt) == [last.span]
        assert await records_of(store, attempt) == last.records

    async def test_a_late_try_replaces_nothing(self, store: Store) -> None:
        attempt = await start(store)
        first = make_try(attempt, CallOutcome.CANCELLED, 2)
        assert await store.add_calls([first]) == [False]
        await store.report([make_report(attempt)])
        assert await store.add_calls([make_try(attempt, CallOutcome.OK, 4)]) == [False]
        assert await spans_of(store, attempt) == [first.span]

    async def test_a_span_that_came_first_loses_no_tokens(self, store: Store) -> None:
        """The token records of a call are stored even if a span with the same id came first."""
        attempt = await start(store)
        call = make_call(attempt)
        early = call.span.replace(name="as the app saw it")
        assert await store.add_spans(ref(attempt), [early]) == 0
        assert await store.add_calls([call]) == [False]
        assert await spans_of(store, attempt) == [early]
        assert await records_of(store, attempt) == call.records

    async def test_mark_call(self, store: Store) -> None:
        attempt = await start(store)
        await store.add_calls([make_call(attempt, 1, choices=2), make_call(attempt, 2)])
        await store.add_calls([make_call(attempt, 3, choices=0)])  # of a frozen agent
        await store.mark_call(attempt.attempt_id, "call-3", CallOutcome.ERROR)
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.CANCELLED)
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.UNDELIVERED)
        await store.add_calls([make_call(attempt, 1, choices=2)])  # repeating resets nothing
        records = await records_of(store, attempt)
        undelivered, ok = CallOutcome.UNDELIVERED, CallOutcome.OK
        assert [record.outcome for record in records] == [undelivered, undelivered, ok]
        spans = await spans_of(store, attempt)
        assert [span.attributes.get(CALL_OUTCOME) for span in spans] == [
            "undelivered",
            None,
            "error",
        ]
        await store.report([make_report(attempt)])
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.OK)  # after its retry
        records = await records_of(store, attempt)
        assert {record.outcome for record in records} == {ok}

    async def test_mark_call_of_an_unknown_call(self, store: Store) -> None:
        attempt = await start(store)
        await store.add_calls([make_call(attempt)])
        with pytest.raises(NotFoundError):
            await store.mark_call(attempt.attempt_id, "call-2", CallOutcome.OK)
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.mark_call("at-nobody", "call-1", CallOutcome.OK)

    async def test_a_later_try_has_its_own_outcome(self, store: Store) -> None:
        """A later try of a call does not inherit the outcome that was marked for the failed try."""
        attempt = await start(store)
        first, last = (
            make_try(attempt, CallOutcome.CANCELLED, 2),
            make_try(attempt, CallOutcome.OK, 4),
        )
        await store.add_calls([first])
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.UNDELIVERED)
        assert await store.add_calls([last]) == [False]
        assert await spans_of(store, attempt) == [last.span]
        assert await records_of(store, attempt) == last.records

    async def test_a_try_that_is_not_stored_adds_no_records(self, store: Store) -> None:
        attempt = await start(store)
        first, later = make_try(attempt, CallOutcome.OK, 2), make_try(attempt, CallOutcome.ERROR, 4)
        records = [msgspec.structs.replace(record, choice=1) for record in later.records]
        await store.add_calls([first])
        later = StoredCall(span=later.span, records=records, epoch=attempt.epoch)
        assert await store.add_calls([later]) == [False]
        assert await records_of(store, attempt) == first.records

    async def test_a_record_that_is_late_stays_late(self, store: Store) -> None:
        attempt = await start(store)
        call = make_call(attempt)
        records = [msgspec.structs.replace(record, late=True) for record in call.records]
        late = StoredCall(span=call.span, records=records, epoch=attempt.epoch)
        assert await store.add_calls([late]) == [False]
        assert await records_of(store, attempt) == records

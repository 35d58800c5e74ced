"""Tests of model calls: token records, tries, and outcomes."""

from __future__ import annotations

import pytest

from lightspan.errors import DataError, NotFoundError
from lightspan.schema.records import Attempt
from lightspan.schema.semconv import CALL_OUTCOME
from lightspan.schema.token_records import CallOutcome, FinishReason, Sampling
from lightspan.stores.protocol import Store, StoredCall
from lightspan_testing.store_suite.base import (
    LEASE_S,
    UNICODE,
    StoreTests,
    make_call,
    make_record,
    make_report,
    make_rollout,
    make_span,
    make_try,
    ref,
    start,
)


class CallTests(StoreTests):
    """Calls are stored whole with their tokens; a later try replaces a failed one."""

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
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
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
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert [(r.sequence_start, r.call_id, r.choice) for r in records] == sorted(keys)

    async def test_what_is_late_keeps_no_call_out(self, store: Store) -> None:
        """Span ids of calls are not secret: another sender may have used one before."""
        attempt = await start(store)
        call = make_call(attempt)
        squatter = call.span.replace(name="something else", late=True)
        assert await store.add_spans(ref(attempt), [squatter]) == 1
        assert await store.add_calls([call]) == [False]
        assert (await store.spans([attempt.attempt_id]))[attempt.attempt_id] == [call.span]
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert records == call.records

    async def test_adding_a_call_twice(self, store: Store) -> None:
        attempt = await start(store)
        call = make_call(attempt, choices=3)
        assert await store.add_calls([call, call]) == [False, False]
        await store.report([make_report(attempt)])
        assert await store.add_calls([call, make_call(attempt, 2)]) == [False, True]
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert [span.late for span in spans] == [False, True]
        assert [(r.call_id, r.choice, r.late) for r in records] == [
            ("call-1", 0, False),
            ("call-1", 1, False),
            ("call-1", 2, False),
            ("call-2", 0, True),
        ]

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
        assert await store.token_records([attempt.attempt_id]) == {attempt.attempt_id: []}
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: []}
        assert await store.add_calls([]) == []

    @pytest.mark.parametrize("before", [CallOutcome.CANCELLED, CallOutcome.ERROR])
    async def test_a_later_try_replaces_a_cancelled_or_failed_call(
        self, store: Store, before: CallOutcome
    ) -> None:
        """The completion of a retry replaces the records of the previous try."""
        attempt = await start(store)
        first, last = make_try(attempt, before, 2), make_try(attempt, CallOutcome.OK, 4)
        other = make_call(attempt, 7)
        assert await store.add_calls([first, other]) == [False, False]
        assert await store.add_calls([first]) == [False]
        assert await store.add_calls([last, first]) == [False, False]  # the old one stays replaced
        again = make_try(attempt, CallOutcome.ERROR, 6)
        assert await store.add_calls([again]) == [False]
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert spans == [last.span, other.span]  # in the position of the first
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert records == [*last.records, *other.records]

    async def test_a_late_try_replaces_nothing(self, store: Store) -> None:
        attempt = await start(store)
        first = make_try(attempt, CallOutcome.CANCELLED, 2)
        assert await store.add_calls([first]) == [False]
        await store.report([make_report(attempt)])
        assert await store.add_calls([make_try(attempt, CallOutcome.OK, 4)]) == [False]
        assert (await store.spans([attempt.attempt_id]))[attempt.attempt_id] == [first.span]

    async def test_a_span_that_came_first_loses_no_tokens(self, store: Store) -> None:
        """A call brings its tokens even if its span was stored before on another way."""
        attempt = await start(store)
        call = make_call(attempt)
        early = call.span.replace(name="as the app saw it")
        assert await store.add_spans(ref(attempt), [early]) == 0
        assert await store.add_calls([call]) == [False]
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: [early]}
        assert await store.token_records([attempt.attempt_id]) == {attempt.attempt_id: call.records}

    async def test_tries_of_one_call_in_one_batch(self, store: Store) -> None:
        attempt = await start(store)
        first, last = (
            make_try(attempt, CallOutcome.CANCELLED, 2),
            make_try(attempt, CallOutcome.OK, 4),
        )
        assert await store.add_calls([first, last]) == [False, False]
        assert (await store.spans([attempt.attempt_id]))[attempt.attempt_id] == [last.span]
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert records == last.records

    async def test_mark_call(self, store: Store) -> None:
        attempt = await start(store)
        await store.add_calls([make_call(attempt, 1, choices=2), make_call(attempt, 2)])
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.CANCELLED)
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.UNDELIVERED)
        await store.add_calls([make_call(attempt, 1, choices=2)])  # repeating resets nothing
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        undelivered, ok = CallOutcome.UNDELIVERED, CallOutcome.OK
        assert [record.outcome for record in records] == [undelivered, undelivered, ok]
        spans = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert [span.attributes.get(CALL_OUTCOME) for span in spans] == ["undelivered", None]
        await store.report([make_report(attempt)])
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.OK)  # after its retry
        records = (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]
        assert {record.outcome for record in records} == {ok}

    async def test_mark_call_without_records(self, store: Store) -> None:
        """A call of a frozen agent has a span and no tokens."""
        attempt = await start(store)
        await store.add_calls([make_call(attempt, choices=0)])
        await store.mark_call(attempt.attempt_id, "call-1", CallOutcome.ERROR)
        [span] = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert span.attributes[CALL_OUTCOME] == "error"

    @pytest.mark.parametrize("call_id", ["call-2", "", UNICODE])
    async def test_mark_call_of_an_unknown_call(self, store: Store, call_id: str) -> None:
        attempt = await start(store)
        await store.add_calls([make_call(attempt)])
        await store.add_spans(ref(attempt), [make_span(attempt)])
        with pytest.raises(NotFoundError):
            await store.mark_call(attempt.attempt_id, call_id, CallOutcome.OK)
        with pytest.raises(NotFoundError, match="at-nobody"):
            await store.mark_call("at-nobody", "call-1", CallOutcome.OK)

"""Tests of spans."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from lightspan.errors import DataError, NotFoundError
from lightspan.schema.records import AttemptRef, AttemptStatus, Outcome
from lightspan.schema.reward import Reward
from lightspan.schema.spans import SpanEvent, SpanKind, SpanLink, SpanStatus
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    LEASE_S,
    NUL,
    UNICODE,
    StoreTests,
    make_report,
    make_rollout,
    make_span,
    ref,
    start,
)


class SpanTests(StoreTests):
    """Spans are stored once, whole and in order, and marked if late."""

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
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: spans}

    async def test_adding_a_span_twice(self, store: Store) -> None:
        attempt = await start(store)
        span = make_span(attempt)
        assert await store.add_spans(ref(attempt), [span, span]) == 0
        await store.report([make_report(attempt)])
        assert await store.add_spans(ref(attempt), [span, make_span(attempt, 1)]) == 1
        spans_after = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert [(one.span_id, one.late) for one in spans_after] == [
            (span.span_id, False),
            (make_span(attempt, 1).span_id, True),
        ]

    async def test_an_attempt_ends_with_its_last_spans(self, store: Store) -> None:
        attempt = await start(store)
        report, spans = make_report(attempt), [make_span(attempt, number) for number in range(3)]
        assert await store.finish(report, spans)
        assert await store.finish(report, spans)  # repeated, as by a client without a response
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: spans}
        ended = await store.attempt(attempt.attempt_id)
        assert (ended.status, ended.capture_errors) == (report.status, [])
        other = msgspec.structs.replace(report, outcome=Outcome.APP_ERROR)
        assert not await store.finish(other, [make_span(attempt, 3)])
        late = (await store.spans([attempt.attempt_id]))[attempt.attempt_id][3]
        assert late.late

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
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: []}

    async def test_nothing_ends_that_is_unknown(self, store: Store) -> None:
        attempt = msgspec.structs.replace(await start(store), attempt_id="at-none")
        with pytest.raises(NotFoundError):
            await store.finish(make_report(attempt), [])

    async def test_late_spans_are_kept_and_marked(self, store: Store) -> None:
        attempt = await start(store)
        wrong_epoch = AttemptRef(attempt.attempt_id, attempt.epoch + 1)
        assert await store.add_spans(wrong_epoch, [make_span(attempt, 1)]) == 1
        assert await store.add_spans(ref(attempt), [make_span(attempt, 2, late=True)]) == 1
        assert await store.add_spans(ref(attempt), [make_span(attempt, 3)]) == 0
        await store.report([make_report(attempt)])
        assert await store.add_spans(ref(attempt), [make_span(attempt, 4)]) == 1
        spans_after = (await store.spans([attempt.attempt_id]))[attempt.attempt_id]
        assert [span.late for span in spans_after] == [True, True, False, True]

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
        assert await store.spans([attempt.attempt_id]) == {attempt.attempt_id: []}

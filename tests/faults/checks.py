"""Check invariants that hold after any number of kills."""

from __future__ import annotations

from collections import Counter

from lightspan.schema import semconv as c
from lightspan.schema.records import Attempt, AttemptStatus, RolloutStatus
from lightspan.schema.reward import Reward
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores.protocol import Store


async def check_all(store: Store, rollout_ids: list[str]) -> None:
    """Check that every rollout has succeeded exactly once, and that no call is recorded twice."""
    states = await store.rollouts(rollout_ids)
    assert {state.status for state in states} == {RolloutStatus.SUCCEEDED}
    attempts = await store.attempts(rollout_ids)
    ends = Counter(a.rollout_id for a in attempts if a.status is AttemptStatus.SUCCEEDED)
    assert ends == dict.fromkeys(rollout_ids, 1)
    others = {a.status for a in attempts} - {AttemptStatus.SUCCEEDED}
    assert others <= {AttemptStatus.LOST}
    ids = [attempt.attempt_id for attempt in attempts]
    spans, records = await store.spans(ids), await store.token_records(ids)
    for attempt in attempts:
        check_calls(spans[attempt.attempt_id], records[attempt.attempt_id])
        if attempt.status is AttemptStatus.SUCCEEDED:
            check_success(attempt, spans[attempt.attempt_id], records[attempt.attempt_id])


def check_calls(spans: list[Span], records: list[TokenRecord]) -> None:
    """Check one gateway span per call id, one record per choice, and no sequence number twice."""
    calls = [span for span in spans if span.sequence_end is not None]
    assert max(Counter(span.attributes[c.CALL_ID] for span in calls).values(), default=1) == 1
    assert max(Counter((r.call_id, r.choice) for r in records).values(), default=1) == 1
    known = {span.span_id: span for span in calls}
    assert {record.span_id for record in records} <= set(known)
    ends = Counter(span.sequence_end for span in calls)
    assert max(ends.values(), default=1) == 1


def check_success(attempt: Attempt, spans: list[Span], records: list[TokenRecord]) -> None:
    """Check that both answers were right, and that both are recorded completely."""
    assert (attempt.reward, attempt.capture_errors) == (Reward(1.0), [])
    llm = [span for span in spans if span.kind is SpanKind.LLM]
    assert len(llm) == len(records) == 2
    assert {record.call_id for record in records} == {s.attributes[c.CALL_ID] for s in llm}
    fine = {CallOutcome.OK, CallOutcome.RESAMPLED}
    assert {record.outcome for record in records} <= fine
    assert all(sum(n for _, n in r.versions) == len(r.response_ids) for r in records)
    assert [span.name for span in spans].count("attempt") == 1

"""Fixtures and builders for the tests of a store."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import msgspec
import pytest

from lightspan.schema.images import Image
from lightspan.schema.records import (
    Attempt,
    AttemptRef,
    AttemptStatus,
    Claim,
    Mode,
    Peer,
    PeerRole,
    Report,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.schema.semconv import CALL_ID, CALL_OUTCOME, PROTOCOL_VERSION
from lightspan.schema.spans import Span, SpanKind
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores.protocol import Store, StoredCall

UNICODE = "naïve 日本語 🙂 'quote\" %s ; -- \\ \t\n"
NUL = "a\x00b"
FINAL_ATTEMPTS = [status for status in AttemptStatus if status.final]
LEASE_S = 60.0
IMAGE = Image.of(b"\x89PNG\x00'\xff", "image/png")
"""The bytes of an image, as far as a store looks at them."""


class Clock:
    """A clock whose time changes only when tests advance it."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


def make_rollout(name: str = "ro-1", **fields: Any) -> Rollout:
    """Build a rollout with default fields.

    `fields` replace some of the defaults.
    """
    defaults = {"task": {"question": name}, "task_id": "task", **fields}
    return Rollout(rollout_id=name, **defaults)


def make_production(name: str = "ro-1", token: str = "token", **fields: Any) -> Claim:
    """Build a rollout that was recorded in production, with its running attempt.

    `fields` replace some of the rollout's defaults.
    """
    attempt = Attempt(
        attempt_id=f"at-{name}",
        rollout_id=name,
        number=1,
        epoch=1,
        runner_id="service",
        call_token=token,
        lease_until=math.inf,
        started_at=999_990.0,
    )
    return Claim(rollout=make_rollout(name, mode=Mode.PRODUCTION, **fields), attempt=attempt)


def make_span(attempt: Attempt, number: int = 0, **fields: Any) -> Span:
    """Build a span of the attempt.

    `number` distinguishes spans. `fields` replace some of the default fields.
    """
    defaults: dict[str, Any] = {
        "span_id": f"{number:016x}",
        "trace_id": "a" * 32,
        "name": f"span {number}",
        "rollout_id": attempt.rollout_id,
        "attempt_id": attempt.attempt_id,
    }
    return Span(**{**defaults, **fields})


def make_record(attempt: Attempt, call_id: str = "call-1", **fields: Any) -> TokenRecord:
    """Build a token record of the attempt.

    `fields` replace some of the default fields.
    """
    defaults: dict[str, Any] = {
        "attempt_id": attempt.attempt_id,
        "call_id": call_id,
        "choice": 0,
        "policy": "main",
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5],
        "logprobs": [-0.5, -1.25],
        "versions": [(1, 2)],
    }
    return TokenRecord.create(**{**defaults, **fields})


def make_peer(name: str, **fields: Any) -> Peer:
    """Build the announcement of a trainer or a runner (a peer) in a store.

    `fields` replace some of the default fields.
    """
    defaults = {
        "role": PeerRole.RUNNER,
        "app": "my_app:answer",
        "protocol": PROTOCOL_VERSION,
        "lightspan": "0.1.0",
    }
    return Peer(peer_id=name, **{**defaults, **fields})


def make_call(
    attempt: Attempt, number: int = 1, *, epoch: int | None = None, choices: int = 1
) -> StoredCall:
    """Build a model call of the attempt with one token record per choice.

    Args:
        attempt: the attempt.
        number: number in the call's id.
        epoch: the epoch that the sender gives; None for the attempt's own. The store treats a write
            with another epoch as late.
        choices: number of choices.
    """
    call_id = f"call-{number}"
    span = make_span(
        attempt, 0xCA11_0000 + number, kind=SpanKind.LLM, attributes={CALL_ID: call_id}
    )
    records = [
        make_record(attempt, call_id, choice=choice, sequence_start=number)
        for choice in range(choices)
    ]
    return StoredCall(span=span, records=records, epoch=attempt.epoch if epoch is None else epoch)


def make_try(attempt: Attempt, outcome: CallOutcome, sequence_end: int) -> StoredCall:
    """Build the model call `call-1` of the attempt, as one of several tries to make it.

    Args:
        attempt: the attempt.
        outcome: outcome of this try.
        sequence_end: sequence number at which this try ends.
    """
    call = make_call(attempt)
    attributes = {**call.span.attributes, CALL_OUTCOME: outcome.value}
    span = call.span.replace(attributes=attributes, sequence_end=sequence_end)
    records = [
        msgspec.structs.replace(record, outcome=outcome, sequence_end=sequence_end)
        for record in call.records
    ]
    return StoredCall(span=span, records=records, epoch=call.epoch)


def make_report(
    attempt: Attempt, status: AttemptStatus = AttemptStatus.SUCCEEDED, **fields: Any
) -> Report:
    """Build a report that ends the attempt.

    `fields` are further fields of the report.
    """
    return Report(
        **{"attempt_id": attempt.attempt_id, "epoch": attempt.epoch, "status": status, **fields}
    )


def ref(attempt: Attempt) -> AttemptRef:
    """Return the attempt's id and epoch, by which a runner names the attempt."""
    return AttemptRef(attempt.attempt_id, attempt.epoch)


async def claim_one(store: Store, run_id: str | None = None) -> Attempt:
    """Claim the oldest queued rollout and return its attempt.

    If `run_id` is None, it may belong to any run.
    """
    [claim] = await store.claim("runner", 1, LEASE_S, run_id)
    return claim.attempt


async def start(store: Store, name: str = "ro-1", **fields: Any) -> Attempt:
    """Enqueue a rollout, claim it, and return its attempt.

    The queue must be empty before.
    """
    await store.enqueue([make_rollout(name, **fields)])
    return await claim_one(store)


async def status_of(store: Store, name: str = "ro-1") -> RolloutStatus:
    """Return the rollout's status."""
    return (await state_of(store, name)).status


async def state_of(store: Store, name: str = "ro-1") -> RolloutState:
    """Return the rollout's state."""
    [state] = await store.rollouts([name])
    return state


async def spans_of(store: Store, attempt: Attempt) -> list[Span]:
    """Return the attempt's spans."""
    return (await store.spans([attempt.attempt_id]))[attempt.attempt_id]


async def records_of(store: Store, attempt: Attempt) -> list[TokenRecord]:
    """Return the attempt's token records."""
    return (await store.token_records([attempt.attempt_id]))[attempt.attempt_id]


async def content_of(store: Store, *attempts: Attempt) -> list[Any]:
    """Return everything that can be read from a store, to compare it later.

    Spans and token records are read only for `attempts`.
    """
    ids = [attempt.attempt_id for attempt in attempts]
    states = await store.rollouts()
    return [
        states,
        await store.count(),
        await store.watch(),
        await store.summaries(),
        await store.attempts([state.rollout.rollout_id for state in states]),
        await store.spans(ids),
        await store.token_records(ids),
        await store.policy_versions("sql"),
        await store.peers(),
        await store.images([IMAGE.digest]),
    ]


class StoreTests:
    """Hooks and fixtures that every group of store tests inherits."""

    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def make_store(self, name: str, clock: Clock) -> Store:
        """Return an unopened store.

        If the store is durable, a store with the same `name` must have the same content.
        """
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def name(self) -> str:
        return self.new_name()

    def new_name(self) -> str:
        """Return a name that no other store of this session has."""
        return f"store-{next(self._numbers)}"

    @pytest.fixture
    async def store(self, name: str, clock: Clock) -> AsyncIterator[Store]:
        async with self.make_store(name, clock) as store:
            yield store

    @pytest.fixture
    async def stores(self, name: str, clock: Clock) -> AsyncIterator[list[Store]]:
        """Yield two open stores with the same content.

        The test is skipped if two stores of this kind cannot share their content.
        """
        first, second = self.make_store(name, clock), self.make_store(name, clock)
        if not first.capabilities.multi_process:
            pytest.skip("not shared between processes")
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(store) for store in (first, second)]

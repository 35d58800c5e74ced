"""Tests of repeated writes with idempotency keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lightspan.schema.prompts import PromptTemplate
from lightspan.schema.records import AttemptStatus, new_id
from lightspan.schema.reward import Reward
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan_testing.store_suite.base import (
    IMAGE,
    LEASE_S,
    Clock,
    StoreTests,
    content_of,
    make_call,
    make_peer,
    make_production,
    make_report,
    make_rollout,
    make_span,
    make_try,
    ref,
    start,
)


class RetryTests(StoreTests):
    """Test that a client that got no response can repeat its request.

    The repeated request does nothing twice, and nothing is lost.
    """

    # --- claims ---------------------------------------------------------------------------
    @pytest.mark.parametrize(("slots", "later"), [(3, 1), (3, 0), (40, 2), (3, 9)])
    async def test_a_claim_asked_again_for_another_number(
        self, store: Store, slots: int, later: int
    ) -> None:
        """A repeated claim returns the rollouts of the first, even if it asks for another number.

        If it returned fewer, some rollouts would be claimed but never run. If it returned more,
        they would be a new claim.
        """
        await store.enqueue([make_rollout(f"ro-{i:02}") for i in range(slots + 9)])
        request_id = new_id("claim")
        claims = await store.claim("runner", slots, LEASE_S, request_id=request_id)
        before = await store.watch()
        assert await store.claim("runner", later, LEASE_S, request_id=request_id) == claims
        assert await store.watch() == before

    async def test_asking_again_extends_the_leases(self, store: Store, clock: Clock) -> None:
        """A repeated claim extends the leases of the rollouts that were claimed.

        A rollout that must run alone is still marked as such in the response.
        """
        attempt = await start(store)
        await store.report([make_report(attempt, AttemptStatus.LOST, alone=True)])
        await store.enqueue([make_rollout("ro-2")])
        request_id = new_id("claim")
        await store.claim("runner", 2, LEASE_S, request_id=request_id)
        clock.advance(LEASE_S - 1)
        [claim] = await store.claim("runner", 2, LEASE_S, request_id=request_id)
        assert (claim.rollout.rollout_id, claim.alone) == ("ro-1", True)
        clock.advance(LEASE_S - 1)
        assert await store.expire() == 0
        assert await store.attempt(claim.attempt.attempt_id) == claim.attempt

    async def test_what_is_over_of_a_claim_is_left_out(self, store: Store) -> None:
        await store.enqueue([make_rollout(f"ro-{i}") for i in range(300)])
        request_id = new_id("claim")
        claims = await store.claim("runner", 300, LEASE_S, request_id=request_id)
        await store.report([make_report(claims[0].attempt), make_report(claims[150].attempt)])
        await store.cancel(["ro-1"])
        remaining = [claims[2], *claims[3:150], *claims[151:]]
        assert await store.claim("runner", 300, LEASE_S, request_id=request_id) == remaining

    async def test_an_attempts_id_does_not_tell_its_claims(self, store: Store) -> None:
        """An attempt's id does not reveal the request id of the claim that created the attempt.

        Apps know the attempt's id. With the request id, an app could repeat the runner's claim.
        """
        await store.enqueue([make_rollout()])
        request_id = new_id("claim")
        [claim] = await store.claim("runner", 1, LEASE_S, request_id=request_id)
        assert request_id[-16:] not in claim.attempt.attempt_id
        guess = "claim-" + claim.attempt.attempt_id.removeprefix("at-")
        assert await store.claim("runner", 1, LEASE_S, request_id=guess) == []

    # --- everything else ------------------------------------------------------------------

    async def test_every_write_can_be_repeated(self, store: Store) -> None:
        """A write that is repeated returns its first result and changes nothing.

        This holds if it is repeated at once, and after other writes.
        """
        done: list[tuple[Callable[[], Awaitable[Any]], Any]] = []

        async def write(operation: Callable[[], Awaitable[Any]], *, later: bool = True) -> Any:
            answer = await operation()
            assert await operation() == answer
            if later:
                done.append((operation, answer))
            return answer

        template: dict[str, Any] = {"prompt": PromptTemplate(template="x")}
        await write(lambda: store.put_resources(template))
        versions = new_id("version")
        await write(lambda: store.allot_version("sql", "run", 1, request_id=versions))
        await write(lambda: store.enqueue([make_rollout("ro-1"), make_rollout("ro-2")]))
        production = make_production("ro-3")
        await write(lambda: store.start([production]))
        claiming = new_id("claim")
        claims = await write(
            lambda: store.claim("runner", 2, LEASE_S, request_id=claiming), later=False
        )
        first, second = (claim.attempt for claim in claims)
        await write(lambda: store.heartbeat([ref(first), ref(second)], LEASE_S), later=False)
        await write(lambda: store.add_spans(ref(first), [make_span(first, i) for i in range(3)]))
        cancelled = make_try(first, CallOutcome.CANCELLED, 1)
        await write(lambda: store.add_calls([cancelled]))
        await write(lambda: store.add_calls([make_try(first, CallOutcome.OK, 2)]))
        await write(lambda: store.add_calls([make_call(second, 2, choices=2)]))
        await write(lambda: store.add_images(ref(first), [IMAGE]))
        await write(lambda: store.mark_call(first.attempt_id, "call-1", CallOutcome.UNDELIVERED))
        await write(lambda: store.mark_damaged(first.attempt_id, "reason"))
        await write(lambda: store.announce(make_peer("runner-1")))
        scored = make_report(first, reward=Reward(0.5))
        await write(lambda: store.report([scored]))
        await write(lambda: store.report([make_report(production.attempt)]))
        before = await content_of(store, first, second)
        for operation, answer in done:
            assert await operation() == answer
        assert await content_of(store, first, second) == before

"""Test that a runner without work waits until the store reports some."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from lightspan.errors import StoreError
from lightspan.runners.timings import RunnerTimings
from lightspan.schema.records import Claim, RolloutStatus
from lightspan.stores.memory import MemoryStore
from lightspan_testing.wait import until
from packages.core.tests.runners.runs import apps, enqueue, finished, running

pytestmark = pytest.mark.usefixtures("clean")


class Observed(MemoryStore):
    """A store that stores the requests of a runner."""

    says_work = False
    """Whether the store reports work although there is none."""
    fails = 0
    """Number of further requests for work that fail."""
    refused_claims = 0
    """Number of further claims that fail."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[object] = []

    async def claim(self, *args: Any, **named: Any) -> list[Claim]:
        if self.refused_claims:
            self.refused_claims -= 1
            raise StoreError("out of reach")
        claims = await super().claim(*args, **named)
        self.requests.append([claim.rollout.rollout_id for claim in claims])
        return claims

    async def await_work(
        self, run_ids: Sequence[str] | None = None, *, timeout_s: float = 0.0
    ) -> bool:
        self.requests.append(("work of", run_ids, timeout_s))
        if self.fails:
            self.fails -= 1
            raise StoreError("out of reach")
        return self.says_work or await super().await_work(run_ids, timeout_s=timeout_s)


@pytest.fixture
async def observed() -> AsyncIterator[Observed]:
    async with Observed() as store:
        yield store


async def test_an_idle_runner_claims_when_it_is_told_of_work(observed: Observed) -> None:
    async with running(observed, apps.returns):
        await until(lambda: len(observed.requests) == 2)
        await enqueue(observed, [{"reward": 1.0}])
        [state] = await finished(observed)
    assert state.status is RolloutStatus.SUCCEEDED
    assert observed.requests[:3] == [[], ("work of", None, 15.0), ["ro-0"]]


async def test_leases_that_ran_out_are_looked_at_now_and_then(observed: Observed) -> None:
    """Check the wait for work: 20 s with a long lease, else half of the lease."""
    async with running(observed, apps.returns, lease_s=600.0):
        await until(lambda: len(observed.requests) == 2)
    async with running(observed, apps.returns, lease_s=0.2):
        await until(lambda: len(observed.requests) >= 5)
    assert observed.requests[:2] == [[], ("work of", None, 20.0)]
    assert observed.requests[2:5] == [[], ("work of", None, 0.1), []]


async def test_work_that_is_not_to_be_had_is_not_asked_for_without_a_pause(
    observed: Observed,
) -> None:
    """Check the pause after work that this runner cannot claim.

    An example is a rollout that must run alone while this runner is busy.
    """
    timings = RunnerTimings(claim_pause_s=3600.0)
    observed.says_work = True
    async with running(observed, apps.returns, timings=timings) as runner:
        await until(lambda: len(observed.requests) == 3)
        runner.work_for(["b"])  # ends the pause
        await until(lambda: len(observed.requests) == 6)
    assert observed.requests == [
        *([], ("work of", None, 15.0), []),
        *([], ("work of", ["b"], 15.0), []),
    ]


async def test_a_store_that_cannot_say_is_claimed_from_all_the_same(observed: Observed) -> None:
    observed.fails = 1
    async with running(observed, apps.returns):
        await until(lambda: len(observed.requests) == 5)
    work = ("work of", None, 15.0)
    assert observed.requests == [[], work, [], [], work]


async def test_a_store_that_is_away_is_asked_less_and_less_often(
    observed: Observed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the longest pauses of twelve refused claims, which one line of the log names."""
    longest: list[float] = []
    monkeypatch.setattr("random.uniform", lambda low, high: longest.append(high) or 0.0)
    observed.refused_claims = 12
    async with running(observed, apps.returns):
        await until(lambda: len(observed.requests) == 2)
    assert observed.requests == [[], ("work of", None, 15.0)]
    assert longest[:12] == pytest.approx([*(0.03 * 2**n for n in range(1, 9)), *[7.68] * 4])
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if "cannot claim" in text] == [
        "the runner cannot claim: out of reach"
    ]

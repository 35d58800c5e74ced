"""The Store protocol: what joins the agents' world and the learner's.

Async only, batch first, idempotent by ids that the caller makes. Implementations: memory, SQLite
and PostgreSQL (`lightspan.stores`); each passes `lightspan_testing.StoreSuite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

import msgspec

from lightspan.errors import LightspanError
from lightspan.schema.records import (
    Attempt,
    AttemptRef,
    Claim,
    Mode,
    Peer,
    Report,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.schema.resources import NamedResources
from lightspan.schema.spans import Span
from lightspan.schema.token_records import CallOutcome, TokenRecord

RETRY_BACKOFF_S: Final = (0.1, 0.5, 2.0, 8.0, 30.0)
"""Between the tries to write to a store that is out of reach, in whoever goes on without it."""
PRUNED_AT_ONCE: Final = 1_000
"""Rollouts that one call of `Store.prune` forgets unless told otherwise."""
PEER_KEPT_S: Final = 86_400.0
"""How long a peer that is silent is remembered."""


class StoreCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a store promises beyond the protocol."""

    durable: bool
    """What was acknowledged survives `kill -9` of any process."""
    multi_process: bool
    """Several processes may open it at once."""
    power_loss: bool = False
    """What was acknowledged survives a power loss too."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What `Store.watch` saw: rollouts whose status changed after a cursor, oldest change first."""

    cursor: int
    rollouts: list[RolloutState]


class PolicyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a policy. Versions are allotted by the store and never reused."""

    policy: str
    version: int
    run_id: str = ""
    step: int = 0


class StoredCall(msgspec.Struct, frozen=True, kw_only=True):
    """One model call as the gateway writes it: its span, and a token record per choice."""

    span: Span
    records: list[TokenRecord]
    epoch: int


@runtime_checkable
class Store(Protocol):
    """Rollouts, attempts, spans and token records, kept for runners, gateway and learner.

    Every method may raise `StoreClosedError`, and `DataError` for a number that no store can keep
    or count with: NaN or infinity, a negative one, an integer of 2**63 or more.

    Every write may be repeated, as by whoever got no answer and does not know whether it was done.
    Most go by ids in what is written; those that make ids themselves (`claim`, `allot_version`)
    take a `request_id`, as `records.new_id` makes it. What a repeated write answers is what it
    answered at first, but for `cancel`, `expire` and `prune`, which count what was left to do.

    Time is the store's own, because the clocks of runners differ: the machine's for memory and
    SQLite, the server's for PostgreSQL. A machine that was suspended may find its leases lost,
    which uses up a try. A write under a lost epoch, or to a sealed attempt, never changes state,
    reward or seal; its spans and token records are kept, marked `late`.
    """

    @property
    def capabilities(self) -> StoreCapabilities: ...

    @property
    def url(self) -> str:
        """What `open_store` takes to open the same store; `memory:` cannot be shared."""
        ...

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Idempotent. Waits for writes under way."""
        ...

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- resources and policies -----------------------------------------------------------
    async def put_resources(self, resources: NamedResources) -> str:
        """Keep the resources and return their id (equal content: equal id)."""
        ...

    async def get_resources(self, resources_id: str) -> NamedResources:
        """Raises `NotFoundError`."""
        ...

    async def allot_version(
        self, policy: str, run_id: str = "", step: int = 0, *, request_id: str | None = None
    ) -> int:
        """The policy's next version, 1 first; never the same twice, whoever asks.

        The same `request_id` asked again for the same policy gives the same version. Without one
        whoever got no answer asks for another version, and one is passed over.
        """
        ...

    async def policy_versions(self, policy: str) -> list[PolicyVersion]: ...

    # --- rollouts -------------------------------------------------------------------------
    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Queue them in order. Repeating an equal rollout is a no-op.

        Raises:
            ConflictError: an id is known with other content; nothing is queued then.
            IllegalMoveError: a rollout of `Mode.PRODUCTION`, which nobody may run again.
        """
        ...

    async def start(self, claims: Sequence[Claim]) -> None:
        """Keep rollouts of `Mode.PRODUCTION` whose attempt runs already, made by the caller.

        They are never queued, so no runner can claim them, and no lease of theirs runs out; spans
        and a report follow as for any attempt. Repeating one is a no-op.

        Raises:
            ConflictError: a rollout id is known with other content; nothing is started then.
            IllegalMoveError: a rollout of another mode, or an attempt that is not the rollout's
                first, running one.
        """
        ...

    async def claim(
        self,
        runner_id: str,
        slots: int,
        lease_s: float,
        run_id: str | None = None,
        idle: bool = True,
        *,
        request_id: str | None = None,
    ) -> list[Claim]:
        """At most `slots` queued rollouts (oldest first), each with a new running attempt.

        The same `request_id` asked again gives the same claim, with its leases extended, but for
        attempts that are over by now; only if there was nothing to claim it is a new one. So
        whoever got no answer strands nothing by asking again. Who has the id has the claim: it is
        in no attempt id, and nobody else needs to know it.

        Expired leases are lost first. `run_id` limits the claim to one run's rollouts. A rollout
        that is queued again keeps its place; one that is to be run alone (`Report.alone`) comes
        first and is claimed alone, by a runner that has nothing under way (`idle`).

        Raises:
            ConflictError: another runner has claimed under this `request_id`.
            DataError: a `request_id` that `records.new_id` does not make.
        """
        ...

    async def await_work(
        self, run_ids: Sequence[str] | None = None, *, timeout_s: float = 0.0
    ) -> bool:
        """Whether one of these runs (None: any) has a queued rollout; waits up to `timeout_s` for
        one.

        For runners that found nothing to claim. It begins nothing, so that who is gone before the
        answer strands nothing; whoever claims first has the rollout. A lease that ran out is no
        queued rollout until somebody claims or expires, so who waits claims now and then all the
        same.
        """
        ...

    async def heartbeat(self, attempts: Sequence[AttemptRef], lease_s: float) -> list[AttemptRef]:
        """Extend the leases. Returns those that are not this writer's any more (stop them).

        A lease that ran out is lost when somebody claims or expires, not before: until then its
        runner may still renew it or report.
        """
        ...

    async def report(self, reports: Sequence[Report]) -> list[bool]:
        """End attempts, per report: True if it is now (or already was, by an equal report) in
        force, False if the epoch was lost or the attempt is sealed otherwise.

        A `lost` attempt queues its rollout again while tries are left (`records`); with
        `counts=False` it uses up none, at most five times per rollout, and is run alone from the
        third time on. A report with a
        status that is not final raises `IllegalMoveError`, an unknown attempt `NotFoundError`;
        nothing of the batch is written then.
        """
        ...

    async def finish(self, report: Report, spans: Sequence[Span]) -> bool:
        """Keep an attempt's last spans, then end it, as `add_spans` and `report` do one after the
        other; True if the report is in force.

        Spans that cannot be stored keep no attempt from ending: it is damaged then.
        """
        try:
            await self.add_spans(AttemptRef(report.attempt_id, report.epoch), spans)
        except LightspanError as error:
            capture_errors = [*report.capture_errors, f"spans could not be stored: {error}"]
            report = msgspec.structs.replace(report, capture_errors=capture_errors)
        [in_force] = await self.report([report])
        return in_force

    async def expire(self) -> int:
        """Lose every attempt whose lease ran out; returns how many, of this time."""
        ...

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Cancel those that have not ended, running attempts too; returns how many, of this time.

        Raises:
            NotFoundError: one of them is unknown; nothing is cancelled then.
        """
        ...

    async def rollouts(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        run_id: str | None = None,
        mode: Mode | None = None,
        step: int | None = None,
        status: Sequence[RolloutStatus] | None = None,
        limit: int | None = None,
    ) -> list[RolloutState]:
        """Rollouts that match every filter given, in the order in which they were enqueued.

        Raises:
            NotFoundError: one of `rollout_ids` is unknown.
        """
        ...

    async def watch(
        self, cursor: int = 0, *, run_id: str | None = None, timeout_s: float = 0.0
    ) -> Changes:
        """Status changes after `cursor`; waits up to `timeout_s` for the first one.

        Level-triggered: a missed notification costs time, never a change.
        """
        ...

    async def count(self, run_id: str | None = None) -> dict[RolloutStatus, int]:
        """How many rollouts are in each status (statuses with none are left out)."""
        ...

    async def prune(self, older_than_s: float, limit: int = PRUNED_AT_ONCE) -> int:
        """Forget at most `limit` rollouts that ended more than `older_than_s` seconds ago, oldest
        first, with their attempts and all that was recorded of these; returns how many, of this
        time: less than `limit` if no more are left.

        The two rollouts that came and that moved last are kept, whenever that was: from them it is
        counted on. What is resources' and policies' stays.

        Raises:
            DataError: `older_than_s` is no number of seconds, or `limit` is not at least 1.
        """
        ...

    # --- who works with it ----------------------------------------------------------------
    async def announce(self, peer: Peer) -> None:
        """Keep what a peer says of itself, in place of what it said before. A peer repeats itself
        every few seconds, or it counts as gone."""
        ...

    async def withdraw(self, peer_id: str) -> None:
        """Forget a peer. Idempotent."""
        ...

    async def peers(self) -> list[Peer]:
        """Every peer of the last day by its id, `silent_s` filled in."""
        ...

    # --- attempts and what they did -------------------------------------------------------
    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        """Every attempt of these rollouts, by rollout as given, then by number."""
        ...

    async def attempt(self, attempt_id: str) -> Attempt:
        """Raises `NotFoundError`."""
        ...

    async def claim_of_token(self, call_token: str) -> Claim | None:
        """The rollout and attempt that a call token opens; None for a token of no attempt."""
        ...

    async def mark_damaged(self, attempt_id: str, reason: str) -> None:
        """Add a capture error. Allowed on sealed attempts: it only ever forbids training."""
        ...

    async def add_spans(self, attempt: AttemptRef, spans: Sequence[Span]) -> int:
        """Keep spans (repeating one is a no-op); returns how many of those kept are late.

        Raises:
            DataError: a span is another attempt's, or holds what cannot be stored.
            NotFoundError: the attempt is unknown.
        """
        ...

    async def add_calls(self, calls: Sequence[StoredCall]) -> list[bool]:
        """Keep model calls atomically, each with its token records; per call, True if late.

        Repeating a call is a no-op, but for one recorded as cancelled or failed: a later try of it
        (the same span id, a larger `sequence_end`) replaces its span, records and mark, unless that
        one is late. When this returns, they survive what the store survives. Raises as
        `add_spans` does; nothing of the batch is written then.
        """
        ...

    async def mark_call(self, attempt_id: str, call_id: str, outcome: CallOutcome) -> None:
        """Change what became of a call (a failed delivery, or its retry that succeeded).

        Token records say it in `outcome`, spans in `lightspan.call.outcome`. Allowed on sealed
        attempts: the answer may fail to arrive when the app has already returned. Raises
        `NotFoundError`.
        """
        ...

    async def spans(self, attempt_ids: Sequence[str]) -> dict[str, list[Span]]:
        """Spans per attempt, in the order in which they arrived; empty where there are none."""
        ...

    async def token_records(self, attempt_ids: Sequence[str]) -> dict[str, list[TokenRecord]]:
        """Token records per attempt, by (sequence_start, call_id, choice)."""
        ...


class StorePlugin(Protocol):
    """The stores of a URL scheme: a module or an object that an entry point of `lightspan.stores`
    names; the entry point's name is the scheme."""

    IS_SHARED: bool
    """Whether processes on several machines can open the same store."""

    def make_store(self, url: str, *, create: bool) -> Store:
        """Return the store of a URL, not open.

        Args:
            url: with its scheme in lower case.
            create: whether an empty store is made where there is none.

        Raises:
            ConfigError: the URL cannot be read.
        """
        ...

    def public_url(self, url: str) -> str:
        """Return the URL without what is secret, which this process keeps (`keep_secrets`).

        Raises:
            ConfigError: the URL cannot be read.
        """
        ...

    def take_credentials(self, url: str) -> None:
        """Keep the credentials that the environment has for a URL, and remove them there, so that
        an app that is loaded later does not find them.

        Raises:
            ConfigError: a variable that the URL names is not set.
        """
        ...

    def relay_url(self, url: str) -> str:
        """Return where the store's server relays model calls to the gateways of its trainings;
        empty for a store without a server."""
        ...

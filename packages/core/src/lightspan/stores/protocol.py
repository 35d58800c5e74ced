"""Define the `Store` protocol, by which runners, gateway and learner exchange data.

The methods are asynchronous and take batches. They are idempotent: the caller makes the ids, and
may repeat a call with the same ids. Every implementation passes `lightspan_testing.StoreSuite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, Self, runtime_checkable

import msgspec

from lightspan.errors import LightspanError
from lightspan.schema.images import Image
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
    RolloutSummary,
)
from lightspan.schema.resources import NamedResources
from lightspan.schema.spans import Span
from lightspan.schema.token_records import CallOutcome, TokenRecord

RETRY_BACKOFF_S: Final = (0.1, 0.5, 2.0, 8.0, 30.0)
"""Seconds between tries to write to an unreachable store. Callers go on with their work
meanwhile."""
PRUNED_AT_ONCE: Final = 1_000
"""Default limit of `Store.prune`, in rollouts."""
SEARCH_LIMIT: Final = 50
"""Default limit of `Store.search`, in attempts."""
PEER_KEPT_S: Final = 86_400.0
"""Seconds after a peer's last announcement at which the peer is deleted."""


class StoreCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The guarantees that a store gives in addition to those of `Store`."""

    durable: bool
    """Whether acknowledged writes survive `kill -9` of any process."""
    multi_process: bool
    """Whether several processes may open the store at once."""
    power_loss: bool = False
    """Whether acknowledged writes survive a power loss too."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts whose status changed after a cursor (`Store.watch`), the oldest change first."""

    cursor: int
    """The cursor for the next call."""
    rollouts: list[RolloutState]


class Summaries(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts with their latest attempts (`Store.summaries`)."""

    cursor: int
    """The cursor for the next call, as in `Changes`."""
    rows: list[RolloutSummary]


class PolicyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a policy. The store allots versions and never reuses one."""

    policy: str
    version: int
    run_id: str = ""
    step: int = 0


class StoredCall(msgspec.Struct, frozen=True, kw_only=True):
    """A model call as the gateway writes it: its span, and a token record per choice."""

    span: Span
    records: list[TokenRecord]
    epoch: int


@runtime_checkable
class Store(Protocol):
    """A store of rollouts, attempts, spans and token records.

    Every method may raise `StoreClosedError`.

    A write of many items is made in parts of about a hundred. If a part raises an error, nothing of
    it is written, and the parts before it stay.

    A caller that got no answer may repeat a write. The store recognises the repetition by the ids
    in the arguments and returns the first result again. The methods `claim` and `allot_version`
    make ids themselves, so they take a `request_id`, which `records.new_id` makes. The methods
    `cancel`, `expire` and `prune` return the number of objects that the repetition changed, not the
    first result.

    Time is the store's own, because the clocks of runners differ: the machine's for memory and
    SQLite, the server's for PostgreSQL. If the machine was suspended, leases may have expired
    meanwhile. Their attempts are lost, which uses up a try.

    An attempt is *sealed* when it has ended. A write to a sealed attempt never changes its status
    or reward. Nor does a write with another epoch than the attempt's. The spans and token records
    of such a write are stored with the mark `late`.
    """

    @property
    def capabilities(self) -> StoreCapabilities: ...

    @property
    def url(self) -> str:
        """The URL with which `open_store` opens the same store.

        No other process can open the store of a `memory:` URL.
        """

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Wait for the running writes, then close the store. Idempotent."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- resources and policies -----------------------------------------------------------
    async def put_resources(self, resources: NamedResources) -> str:
        """Store resources and return their id, a hash of their content."""

    async def get_resources(self, resources_id: str) -> NamedResources:
        """Return the resources with an id; raise `NotFoundError` if there are none."""

    async def allot_version(
        self, policy: str, run_id: str = "", step: int = 0, *, request_id: str | None = None
    ) -> int:
        """Allot the next version of a policy, from 1 on, and return it.

        A repeated request with the same `request_id` for the same policy gets the same version.
        Without a `request_id`, a repeated request gets a new version, and the first one stays
        unused.
        """

    async def policy_versions(self, policy: str) -> list[PolicyVersion]: ...

    # --- rollouts -------------------------------------------------------------------------
    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Queue rollouts in order. Repeating an equal rollout is a no-op.

        Raises:
            ConflictError: an id is stored with different content.
        """

    async def start(self, claims: Sequence[Claim]) -> None:
        """Store rollouts of `Mode.PRODUCTION` with their attempts, which are already running.

        A claim is a rollout with one attempt.

        The rollouts are never queued, so no runner can claim them, and their leases do not expire.
        The caller then writes spans and a report as for any attempt. Repeating an equal claim is a
        no-op.

        Raises:
            ConflictError: a rollout id is stored with different content.
            IllegalMoveError: a rollout has another mode, or its attempt is not running or not its
                first.
        """

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
        """Claim at most `slots` queued rollouts, oldest first, each with a new running attempt.

        Expired leases are ended first. A rollout that is queued again keeps its place. A rollout
        that must run alone in its process (`Report.alone`) comes first and is the only rollout of
        its claim.

        A caller that got no answer repeats its request with the same `request_id`. It gets the same
        claim, with extended leases and without the attempts that have ended since. If the first
        request found nothing to claim, the repeated request is a new claim. An app cannot repeat
        the claim of its runner, because it cannot derive the `request_id` from the ids of the
        attempts.

        Args:
            runner_id: id of the runner that claims.
            slots: maximum number of rollouts.
            lease_s: seconds after which the attempts are lost without a `heartbeat`.
            run_id: the run whose rollouts to claim; None for any run.
            idle: whether the runner has no attempt under way. Only an idle runner gets a rollout
                that must run alone.
            request_id: id by which a repeated request is recognised; None if the caller will not
                repeat it.
        """

    async def await_work(
        self, run_ids: Sequence[str] | None = None, *, timeout_s: float = 0.0
    ) -> bool:
        """Wait until a rollout is queued; return whether there is one.

        Runners call it after `claim` returned nothing. It claims nothing, so no rollout is lost if
        the caller disconnects before the answer. An expired lease queues its rollout only at the
        next `claim` or `expire`, so a waiting runner must also call `claim` from time to time.

        Args:
            run_ids: the runs whose rollouts count; None for any run.
            timeout_s: maximum seconds to wait.
        """

    async def heartbeat(self, attempts: Sequence[AttemptRef], lease_s: float) -> list[AttemptRef]:
        """Extend the leases of attempts; return those attempts that the caller must stop.

        It must stop an attempt that has ended or that has another epoch by now. An attempt whose
        lease expired is lost at the next `claim` or `expire` of any caller. Until then its runner
        may still extend the lease or report.
        """

    async def report(self, reports: Sequence[Report]) -> list[bool]:
        """End attempts; return for each report whether the attempt has ended as the report says.

        It is also True if an equal report had ended the attempt. It is False if a different report
        ended the attempt, or if the attempt has another epoch by now.

        A report of status `lost` queues the rollout again while tries are left (`records`). With
        `counts=False` it uses up no try, at most five times per rollout. From the third such report
        on, the rollout runs alone in its process.

        Raises:
            IllegalMoveError: a status is not final.
            NotFoundError: an attempt is unknown.
        """

    async def finish(self, report: Report, spans: Sequence[Span]) -> bool:
        """Store an attempt's last spans (`add_spans`), then end the attempt by `report`.

        Return whether the attempt ended with this report or an equal report. If the spans cannot be
        stored, the attempt ends all the same, with a capture error.
        """
        try:
            await self.add_spans(AttemptRef(report.attempt_id, report.epoch), spans)
        except LightspanError as error:
            capture_errors = [*report.capture_errors, f"spans could not be stored: {error}"]
            report = msgspec.structs.replace(report, capture_errors=capture_errors)
        [in_force] = await self.report([report])
        return in_force

    async def expire(self) -> int:
        """End every attempt whose lease expired; return how many this call ended."""

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        """Cancel the rollouts that have not ended, and their running attempts.

        Returns:
            The number of rollouts that this call cancelled.

        Raises:
            NotFoundError: a rollout is unknown.
        """

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
        """Return the rollouts that match all filters, in the order in which they were enqueued.

        A filter of None matches every rollout. `limit=None` sets no limit.

        Raises:
            NotFoundError: one of `rollout_ids` is unknown.
        """

    async def summaries(
        self,
        run_id: str | None = None,
        *,
        after: int = 0,
        before: int | None = None,
        mode: Mode | None = None,
        newest: bool = False,
        limit: int | None = None,
    ) -> Summaries:
        """Return the rollouts that match all filters, each with its latest attempt.

        A caller that passes `Summaries.cursor` as the next `after` gets exactly the rollouts that
        changed since, each once. A change that this call misses is returned by a later call.

        Args:
            run_id: the run of the rollouts; None for any run.
            after: `Summaries.cursor` of the last call, or `Changes.cursor`; 0 for all rollouts.
            before: only rollouts with a smaller `RolloutSummary.position`; None for all. The next
                page of `newest` is the one before the last row's position.
            mode: the mode of the rollouts; None for any mode.
            newest: whether to return the rollout enqueued last first. Otherwise the oldest change
                comes first.
            limit: maximum number of rows; None for all. If `newest` is False, the cursor is then
                that of the last row. If it is True, rows beyond the limit are not returned by a
                later call with the cursor.
        """

    async def search(
        self,
        text: str,
        run_id: str | None = None,
        *,
        before: str | None = None,
        limit: int = SEARCH_LIMIT,
    ) -> list[str]:
        """Return the ids of the attempts that have a span with a text, the newest attempt first.

        The text is looked for in the names, ids, status messages and events of spans, and in the
        keys and values of their attributes, with upper and lower case as stored. Messages are
        attributes in JSON: there the text is looked for as JSON writes it, too. Not searched are
        tasks, token records, and outcomes that changed later (`mark_call`).

        Args:
            text: the text, of at least one character.
            run_id: the run of the attempts; None for any run.
            before: only attempts that are older than this attempt, such as the last of the previous
                page; None for all.
            limit: maximum number of ids, at least 1.

        Raises:
            DataError: the text is empty or no valid Unicode.
            NotFoundError: the attempt `before` is unknown.
        """

    async def watch(
        self, cursor: int = 0, *, run_id: str | None = None, timeout_s: float = 0.0
    ) -> Changes:
        """Return the status changes after `cursor`; wait up to `timeout_s` seconds for the first.

        A change that this call misses is returned by a later call.

        Args:
            cursor: `Changes.cursor` of the last call; 0 for all changes.
            run_id: the run whose rollouts to return; None for any run.
            timeout_s: maximum seconds to wait.
        """

    async def count(self, run_id: str | None = None) -> dict[RolloutStatus, int]:
        """Return the number of rollouts per status, without statuses that no rollout has.

        Args:
            run_id: the run whose rollouts to count; None for all runs.
        """

    async def prune(self, older_than_s: float, limit: int = PRUNED_AT_ONCE) -> int:
        """Delete at most `limit` rollouts that ended more than `older_than_s` seconds ago.

        The rollouts enqueued first are deleted first, with their attempts and everything recorded
        of the attempts. Two rollouts are always kept, because the store continues to count from
        their numbers: the one that was enqueued last and the one that changed last. Resources and
        policies are kept too.

        Returns:
            The number of rollouts that this call deleted: less than `limit` if no more are left.
        """

    # --- peers ----------------------------------------------------------------------------
    async def announce(self, peer: Peer) -> None:
        """Store the announcement of a peer, in place of its earlier one.

        A peer is a process that uses the store. It announces itself every few seconds. A peer that
        stops doing so counts as gone.
        """

    async def withdraw(self, peer_id: str) -> None:
        """Delete a peer, a process that used the store (`announce`). Idempotent."""

    async def peers(self) -> list[Peer]:
        """Return the processes that announced themselves in the last day, sorted by id.

        The field `silent_s` of each is set to the seconds since its last announcement.
        """

    # --- attempts, spans and calls --------------------------------------------------------
    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        """Return all attempts of rollouts, in the order of `rollout_ids`, then by number."""

    async def attempt(self, attempt_id: str) -> Attempt:
        """Return an attempt; raise `NotFoundError` if it is unknown."""

    async def claim_of_token(self, call_token: str) -> Claim | None:
        """Return the rollout and attempt to which a call token belongs; None for an unknown token.

        An attempt's model calls are authenticated by its `call_token`.
        """

    async def mark_damaged(self, attempt_id: str, reason: str) -> None:
        """Add the capture error `reason` to an attempt, which excludes the attempt from training.

        The attempt may have ended already.
        """

    async def add_spans(self, attempt: AttemptRef, spans: Sequence[Span]) -> int:
        """Store spans; return how many of them are late. Repeating a span is a no-op.

        A span is late if the attempt has ended, or if the argument `attempt` has another epoch
        than the stored attempt.

        A new span of feedback (`semconv.is_feedback`) counts as a change of its rollout: `watch`
        and `summaries` return the rollout again.

        Raises:
            DataError: a span is another attempt's, or has a value that cannot be stored.
            NotFoundError: the attempt is unknown.
        """

    async def add_calls(self, calls: Sequence[StoredCall]) -> list[bool]:
        """Store model calls with their token records; return for each call whether it is late.

        Repeating a call is a no-op, unless the stored call was cancelled or failed. Then a retry
        replaces its span, records and outcome. A retry has the same span id and a larger
        `sequence_end`, and must not be late.

        Raises:
            DataError: as in `add_spans`.
            NotFoundError: as in `add_spans`.
        """

    async def add_images(self, attempt: AttemptRef, images: Sequence[Image]) -> None:
        """Store the images of an attempt's calls, each once by its digest.

        A caller writes them before the spans and token records that refer to them. Repeating an
        image is a no-op. An image is deleted with the last attempt that has it (`prune`).

        Raises:
            NotFoundError: the attempt is unknown.
        """

    async def images(self, digests: Sequence[str]) -> dict[str, Image]:
        """Return the stored images among `digests`."""

    async def mark_call(self, attempt_id: str, call_id: str, outcome: CallOutcome) -> None:
        """Change the outcome of a stored call, because its delivery failed or a retry succeeded.

        This changes the field `outcome` of the token records and the span's attribute
        `lightspan.call.outcome`. The attempt may have ended, because a delivery may fail after the
        app has returned.

        Raises:
            NotFoundError: the call is unknown.
        """

    async def spans(self, attempt_ids: Sequence[str]) -> dict[str, list[Span]]:
        """Return the spans of each attempt, in the order in which they arrived."""

    async def token_records(self, attempt_ids: Sequence[str]) -> dict[str, list[TokenRecord]]:
        """Return the token records of each attempt, sorted by (sequence_start, call_id, choice)."""


class StorePlugin(Protocol):
    """The plugin that makes the stores of one URL scheme.

    It is a module or an object. An entry point in the group `lightspan.stores` refers to it and has
    the scheme as its name.
    """

    IS_SHARED: bool
    """Whether processes on several machines can open the same store."""

    def make_store(self, url: str, *, create: bool) -> Store:
        """Return the store of a URL, not open.

        A store that can be opened for reading only has an attribute `read_only`, a bool that is set
        before `open`. Each of its methods that write then raises `StoreError`.

        Args:
            url: the URL, with its scheme in lower case.
            create: whether opening the store may create it, if it does not exist.

        Raises:
            ConfigError: the URL cannot be read.
        """

    def public_url(self, url: str) -> str:
        """Return the URL without its secrets, which stay in this process (`keep_secrets`).

        Raises:
            ConfigError: the URL cannot be read.
        """

    def take_credentials(self, url: str) -> None:
        """Move a URL's credentials from environment variables to the memory of this process.

        Apps that are loaded later cannot read them there.

        Raises:
            ConfigError: a variable that the URL names is not set.
        """

    def relay_url(self, url: str) -> str:
        """Return the base URL for model calls of runners that cannot reach the trainer's machine.

        The store's server forwards these calls to the gateway of the training. The result is empty
        if the store has no server.
        """

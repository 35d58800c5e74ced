"""The tables of a SQL store: `WriteTables` for the state machine, `ReadTables` for queries.

Each store subclasses both for its database, and replaces the queries that its database does
differently.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Final

from lightspan.errors import NotFoundError
from lightspan.schema.images import Image
from lightspan.schema.records import (
    Attempt,
    AttemptStatus,
    Claim,
    Peer,
    Rollout,
    RolloutState,
    RolloutStatus,
)
from lightspan.schema.resources import NamedResources, decode_resources
from lightspan.schema.spans import Span
from lightspan.schema.token_records import CallOutcome, TokenRecord
from lightspan.stores import _encoding, _state_machine
from lightspan.stores._leases import attempt_of_token
from lightspan.stores._sql import rows as codec
from lightspan.stores._sql.queries import named_queries, queries_of_one
from lightspan.stores._state_machine import Progress, check_known, find_attempts
from lightspan.stores.protocol import PEER_KEPT_S, Changes, PolicyVersion, Summaries

_AFTER_RUN: Final = frozenset({RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.LOST})
"""Statuses that a rollout gets only from `running`. The column `queued` is 0 already then."""

_ROLLOUT: Final = 20
"""Bits of an attempt's position below those of its rollout's position."""
_FILTERS: Final = {
    "rollout_ids": "rollout_id IN (:rollout_ids...)",
    # Makes SQLite sort a list of positions instead of rows with their tasks.
    "run_id": "position IN (SELECT position FROM rollouts WHERE run_id = :run_id)",
    "mode": "mode = :mode",
    "step": "step = :step",
    "status": "status IN (:status...)",
    "cursor": "change > :cursor",
    "watched_run": "run_id = :watched_run",
    "before": "position < :before",
}


@dataclass(slots=True)
class Ends:
    """The number of the last status change and the position of the last rollout in a store.

    The next change and the next rollout get the next numbers.
    """

    change: int
    """Number of the last status change."""
    position: int
    """Position of the last rollout."""


class SQLTables(ABC):
    """A connection that runs queries by their names."""

    package: ClassVar[str]
    """Package with the queries of this database."""
    filters: ClassVar[Mapping[str, str]] = _FILTERS

    @abstractmethod
    def now(self) -> float:
        """Return the store's time, in seconds since the epoch."""

    def _queries(self) -> Mapping[str, str]:
        return named_queries(self.package, self._translate)

    @staticmethod
    @abstractmethod
    def _translate(query: str) -> str:
        """Translate a shared query (`queries`) to the SQL dialect of the database."""

    @abstractmethod
    def _run(self, query: str, values: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        """Run a query and return its rows."""

    @abstractmethod
    def _list(self, values: Sequence[str] | Sequence[int]) -> Any:
        """Convert a list to the one value that stands for it in a query with `IN (?...)`."""

    def _pack_text(self, text: str) -> Any:
        """Convert a text of any characters to a value of a query."""
        return text

    def _read_text(self, value: Any) -> str:
        return str(value)

    def _execute(self, name: str, *values: Any) -> list[Any]:
        return self._run(self._queries()[name], values)

    def _execute_for(self, name: str, ids: Sequence[str]) -> list[Any]:
        """Run the query `name`, whose only value is a list of ids.

        For a single id, a cheaper form of the query is used.
        """
        if len(ids) == 1:
            return self._run(queries_of_one(self.package, self._translate)[name], ids)
        return self._execute(name, self._list(ids))

    def _read_attempt(self, row: Sequence[Any]) -> Attempt:
        return codec.read_attempt(row, self._read_text)

    def bodies(self, rollout_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the packed rollouts by id, without unknown ids."""
        return dict(self._execute_for("bodies", rollout_ids))

    def attempts_by_id(self, attempt_ids: Sequence[str]) -> dict[str, Attempt]:
        """Return the attempts by id, without unknown ids."""
        rows = self._execute_for("attempts_by_id", attempt_ids)
        return {row[0]: self._read_attempt(row) for row in rows}

    def dequeue(
        self, limit: int, run_id: str | None, *, is_idle: bool
    ) -> list[tuple[Progress, Rollout]]:
        """Return the oldest queued rollouts, at most `limit`. The caller must start all of them.

        Args:
            limit: maximum number of rollouts.
            run_id: the run of the rollouts; None for any run.
            is_idle: whether the runner runs no attempt. If so, and if a rollout that must run alone
                is queued, only that rollout is returned.
        """
        if limit <= 0:
            return []
        if run_id is None:  # most stores have one run, whose own query does less
            [(first, last)] = self._execute("ends_of_runs")
            run_id = first if first == last else None
        query = self._queries()["queued" if run_id is None else "queued_of_run"]
        values = {"limit": limit, "run_id": run_id, "queued": codec.QUEUED}
        alone = self._run(query, {**values, "limit": 1, "queued": codec.ALONE}) if is_idle else []
        rows = alone or self._run(query, values)
        return [(codec.read_progress(row[:-1]), _encoding.unpack_rollout(row[-1])) for row in rows]


class WriteTables(SQLTables):
    """The tables that a writer changes, inside a transaction that the caller begins and commits."""

    moved = False
    """Whether this transaction changed the status of a rollout."""

    @abstractmethod
    def _current_ends(self) -> Ends:
        """Return the last numbers of status changes and rollouts, for the caller to increase."""

    @abstractmethod
    def _insert(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        """Run the insert query `name` for each row of values; return how many rows were new."""

    @abstractmethod
    def _update(self, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run the query `name` for each row of values."""

    def put_resources(self, items: Sequence[tuple[str, bytes]]) -> list[None]:
        self._insert("put_resources", items)
        return [None] * len(items)

    def allot_versions(self, items: Sequence[tuple[str, str, int, str | None]]) -> list[int]:
        """Allot a version number to each item; return the numbers in order.

        An item is a (policy, run id, step, request id). A request id that was used before gets the
        same number again. An item whose request id is None always gets a new number.
        """
        return [self._allot_version(*item) for item in items]

    def _allot_version(self, policy: str, run_id: str, step: int, request_id: str | None) -> int:
        if request_id is not None:
            for (version,) in self._execute("allotted_version", policy, request_id):
                return int(version)
        version = int(self._execute("last_version", policy)[0][0]) + 1
        self._insert("insert_version", [(policy, version, run_id, step, request_id)])
        return version

    def add_spans(self, items: Sequence[_encoding.PackedSpan]) -> list[bool]:
        """Store the spans that are new; return for each span whether the stored one is late.

        A span is late if it arrived after the end of its attempt, or from a runner that had lost
        the attempt.
        """
        attempts = self._attempt_keys([*{item.attempt_id for item in items}])
        rows = [codec.span_row(attempts[item.attempt_id], item) for item in items]
        for (place, span_id, *_), item in zip(rows, items, strict=True):
            if item.feedback and not self._execute("span_is_late", place, span_id):
                self._execute("put_outcome", place, *item.feedback)
                _state_machine.touch(self, [item.attempt_id])
        if self._insert("insert_spans", rows) == len(rows):
            return [bool(late) for _, _, _, late, _ in rows]
        return [bool(self._execute("span_is_late", row[0], row[1])[0][0]) for row in rows]

    def add_calls(self, items: Sequence[_encoding.PackedCall]) -> list[bool]:
        """Store the calls whose spans are new; return for each call whether the stored one is late.

        `add_spans` explains late.
        """
        attempts = self._attempt_keys([item.span.attempt_id for item in items])
        spans = [codec.span_row(attempts[item.span.attempt_id], item.span) for item in items]
        if self._insert("insert_spans", spans) < len(spans):
            return [self._add_call_again(attempts[item.span.attempt_id], item) for item in items]
        rows = [row for c in items for row in codec.record_rows(attempts[c.span.attempt_id], c)]
        self._insert("insert_records", rows)
        return [bool(late) for _, _, _, late, _ in spans]

    def _add_call_again(self, attempt: codec.AttemptKey, call: _encoding.PackedCall) -> bool:
        """Store a call whose span id is already stored; return whether the stored call is late.

        The call replaces the stored one if it is a later try (`_encoding.supersedes`). Otherwise
        only missing token records are added.
        """
        position, span_id, call_id, late, body = codec.span_row(attempt, call.span)
        [(stored_late, stored_body)] = self._execute("span_of", position, span_id)
        if stored_body != body:
            if _encoding.supersedes(call.span, late, stored_body, bool(stored_late)):
                self._execute("drop_records", position, call_id)
                self._execute("drop_outcome", position, call_id)
                self._execute("replace_span", late, body, position, span_id)
                stored_late = late
            elif self._execute("has_records", position, call_id):
                return bool(stored_late)
        self._insert("insert_records", codec.record_rows(attempt, call))
        return bool(stored_late)

    def add_images(self, items: Sequence[_encoding.PackedImage]) -> list[None]:
        """Store the images that are new, and which attempts have them."""
        attempts = self._attempt_keys([*{item.attempt_id for item in items}])
        images = {item.image.digest: item.image for item in items}
        rows = [(digest, image.media_type, image.data) for digest, image in images.items()]
        uses = {(item.image.digest, attempts[item.attempt_id].position) for item in items}
        self._insert("insert_images", sorted(rows))  # all writers lock rows in one order
        self._insert("insert_attempt_images", sorted(uses))
        return [None] * len(items)

    def put_peers(self, items: Sequence[tuple[str, float, bytes]]) -> list[None]:
        """Store announcements of processes that use the store (`Peer`).

        Each item is a (process's id, time of the announcement, encoded `Peer`).
        """
        for peer_id, seen_at, body in items:
            self._execute("forget_peers", seen_at - PEER_KEPT_S)
            self._execute("put_peer", peer_id, seen_at, body)
        return [None] * len(items)

    def drop_peers(self, peer_ids: Sequence[str]) -> list[None]:
        for peer_id in peer_ids:
            self._execute("drop_peer", peer_id)
        return [None] * len(peer_ids)

    def _attempt_keys(self, attempt_ids: Sequence[str]) -> dict[str, codec.AttemptKey]:
        attempts = {
            attempt_id: codec.AttemptKey(position, epoch, AttemptStatus(status).final)
            for attempt_id, position, epoch, status in self._writer_rows(attempt_ids)
        }
        check_known("attempt", attempt_ids, attempts)
        return attempts

    def _writer_rows(self, attempt_ids: Sequence[str]) -> list[Any]:
        """Return id, position, epoch and status of the attempts that exist.

        No other transaction can change these attempts until this transaction ends.
        """
        return self._execute_for("writers", attempt_ids)

    def mark_calls(self, items: Sequence[tuple[str, str, CallOutcome]]) -> list[None]:
        for attempt_id, call_id, outcome in items:
            position = self._attempt_keys([attempt_id])[attempt_id].position
            values = {"attempt": position, "call_id": call_id}
            if not (call_id and self._run(self._queries()["has_call"], values)[0][0]):
                raise NotFoundError(f"this store has no call {call_id!r} of attempt {attempt_id!r}")
            self._execute("put_outcome", position, call_id, str(outcome))
        return [None] * len(items)

    def prune(self, before: float, limit: int) -> int:
        """Delete at most `limit` rollouts that ended before the time `before`; return how many."""
        ended = self._execute("prunable", before, limit)
        if not ended:
            return 0
        rollout_ids = self._list([rollout_id for _, rollout_id in ended])
        attempt_ids = [row[0] for row in self._execute("attempts_of_rollouts", rollout_ids)]
        attempts = self._list([position for _, position, *_ in self._writer_rows(attempt_ids)])
        # The attempts go first: deleting them waits for writers that add to one of them.
        self._execute("prune_attempts", self._list(attempt_ids))
        images = self._list([row[0] for row in self._execute("images_of_attempts", attempts)])
        for name in ("prune_spans", "prune_records", "prune_outcomes", "prune_attempt_images"):
            self._execute(name, attempts)
        self._execute("prune_images", images)  # those that no other attempt has
        positions = self._list([position for position, _ in ended])
        for name in ("prune_bodies", "prune_rollouts"):
            self._execute(name, positions)
        return len(ended)

    # --- changes of status ----------------------------------------------------------------
    def next_change(self) -> int:
        """Return the number of the next status change, for the cursor of `Store.watch`."""
        ends = self._current_ends()
        ends.change += 1
        self.moved = True
        return ends.change

    def insert_rollouts(self, rows: Sequence[tuple[_encoding.PackedRollout, Progress]]) -> None:
        ends = self._current_ends()
        numbered = list(enumerate(rows, ends.position + 1))
        ends.position += len(rows)
        self._insert("insert_rollouts", [codec.rollout_row(n, *row) for n, row in numbered])
        self._insert("insert_bodies", [(n, new.body) for n, (new, _) in numbered])

    def progress(self, rollout_ids: Sequence[str]) -> dict[str, Progress]:
        """Return the progress of rollouts by id, without unknown ids."""
        rows = self._execute_for("progress", rollout_ids)
        return {row[0]: codec.read_progress(row) for row in rows}

    def update_rollouts(self, rows: Sequence[Progress]) -> None:
        reported = [row for row in rows if row.status in _AFTER_RUN]
        others = [row for row in rows if row.status not in _AFTER_RUN]
        self._update("update_rollouts", [codec.progress_row(row) for row in reported])
        self._update("update_queue", [codec.queue_row(row) for row in others])

    def insert_attempts(self, rows: Sequence[Attempt]) -> None:
        self._insert("insert_attempts", [codec.attempt_row(row, self._pack_text) for row in rows])

    def update_attempts(self, rows: Sequence[Attempt]) -> None:
        changes = [(*codec.attempt_changes(row, self._pack_text), row.attempt_id) for row in rows]
        self._update("update_attempts", changes)

    def expired(self, now: float, limit: int) -> list[Attempt]:
        """Return running attempts whose lease ended by `now` (store time), earliest end first."""
        return [self._read_attempt(row) for row in self._execute("expired", now, limit)]


class ReadTables(SQLTables):
    """The tables that a reader queries. It sees what was last committed."""

    def resources(self, resources_id: str) -> NamedResources:
        rows = self._execute("get_resources", resources_id)
        if not rows:
            raise NotFoundError(f"this store has no resources {resources_id!r}")
        return decode_resources(rows[0][0])

    def policy_versions(self, policy: str) -> list[PolicyVersion]:
        return [
            PolicyVersion(policy=name, version=version, run_id=run_id, step=step)
            for name, version, run_id, step in self._execute("policy_versions", policy)
        ]

    def peers(self) -> list[Peer]:
        now = self.now()
        rows = self._execute("peers", now - PEER_KEPT_S)
        return [_encoding.unpack_peer(body, now - seen_at) for seen_at, body in rows]

    def rollouts(
        self, rollout_ids: Sequence[str] | None, limit: int | None, filters: dict[str, Any]
    ) -> list[RolloutState]:
        """Return the rollouts that match all filters, in the order in which they were enqueued.

        Args:
            rollout_ids: the ids to return; None for any.
            limit: maximum number of rollouts; None for no limit.
            filters: the value that each column must have; None for any value.

        Raises:
            NotFoundError: one of `rollout_ids` is unknown.
        """
        if rollout_ids is not None:
            filters = {**filters, "rollout_ids": self._list(rollout_ids)}
            self.check_rollouts(rollout_ids)
        if filters.get("status") is not None:
            filters = {**filters, "status": self._list([str(s) for s in filters["status"]])}
        return self._states(filters, "position", limit)

    def changes(self, cursor: int, run_id: str | None) -> Changes:
        """Return all status changes after `cursor`.

        Args:
            run_id: the run whose rollouts to return; None for any run.
        """
        # Read the last number first: a rollout that moves between the two queries is returned again
        # by the next call, never missed.
        last = int(self._execute("last_change")[0][0])
        if last <= cursor:
            return Changes(cursor=cursor, rollouts=[])
        states = self._states({"cursor": cursor, "watched_run": run_id}, "change", None)
        return Changes(cursor=max([last, *(state.change for state in states)]), rollouts=states)

    def summaries(self, filters: dict[str, Any], limit: int, *, newest: bool) -> Summaries:
        """Return at most `limit` rollouts that match all filters, with their latest attempts.

        Args:
            filters: the value of each filter; None for any value.
            limit: maximum number of rows.
            newest: whether to return the rollout enqueued last first, or else the oldest change.
        """
        order = "position DESC" if newest else "change"
        # Read the last number first, as in `changes`.
        last = int(self._execute("last_change")[0][0])
        rollouts, values = self._filtered("SELECT * FROM rollouts", filters, order, limit)
        query = self._queries()["summaries"].replace("FROM rollouts", f"FROM ({rollouts}) rollouts")
        rows = [codec.read_summary(row, self._read_text) for row in self._run(query, values)]
        # The database would sort rows with their tasks.
        rows.sort(key=attrgetter("position" if newest else "change"), reverse=newest)
        if not newest and rows:
            last = rows[-1].change if len(rows) == limit else max(last, rows[-1].change)
        return Summaries(cursor=max(last, filters["cursor"] or 0), rows=rows)

    def place_of(self, attempt_id: str) -> int:
        """Return the number that orders attempts; raise `NotFoundError` for an unknown attempt."""
        places = {row[0]: int(row[1]) for row in self._execute_for("writers", [attempt_id])}
        check_known("attempt", [attempt_id], places)
        return places[attempt_id]

    def search(
        self, texts: tuple[bytes, bytes], run_id: str | None, before: int, size: int
    ) -> tuple[list[str], int]:
        """Search the spans of the `size` newest rollouts for texts, up to an attempt.

        Args:
            texts: two forms of the text, of which a span must have one.
            run_id: the run of the rollouts; None for any run.
            before: number (`place_of`) of an attempt; only older attempts are searched.
            size: maximum number of rollouts.

        Returns:
            The ids of the attempts, the newest first, and the number before which to search next;
            0 if no rollouts are left.
        """
        filters = {"before": ((before - 1) >> _ROLLOUT) + 1, "watched_run": run_id}
        query = self._filtered(self._queries()["positions"], filters, "position DESC", size)
        rollouts = [int(position) for (position,) in self._run(*query)]
        if not rollouts:
            return [], 0
        first, last = rollouts[-1] << _ROLLOUT, min(before, (rollouts[0] + 1) << _ROLLOUT)
        members = None if run_id is None else self._list(rollouts)
        values: dict[str, Any] = {"first": first, "last": last, "rollouts": members}
        values |= {"text": texts[0], "json": texts[1]}
        places = [place for (place,) in self._run(self._queries()["search"], values)]
        owners = self._list([place >> _ROLLOUT for place in places])
        ids = dict(self._execute("attempts_at", owners) if places else ())
        return [ids[place] for place in places], first

    def _states(self, filters: dict[str, Any], order: str, limit: int | None) -> list[RolloutState]:
        query = self._filtered(self._queries()["states"], filters, order, limit)
        return [codec.read_state(row) for row in self._run(*query)]

    def _filtered(
        self, query: str, filters: dict[str, Any], order: str, limit: int | None
    ) -> tuple[str, dict[str, Any]]:
        """Return a query of rollouts with filters, order and limit, and its values."""
        values = {name: value for name, value in filters.items() if value is not None}
        if values:
            conditions = " AND ".join(self.filters[name] for name in values)
            query += self._translate(f" WHERE {conditions}")
        query += f" ORDER BY {order}"
        return query if limit is None else f"{query} LIMIT {limit:d}", values

    def queued_runs(self) -> set[str]:
        """Return the ids of the runs that have a queued rollout."""
        return {run_id for (run_id,) in self._execute("queued_runs")}

    def count(self, run_id: str | None) -> dict[RolloutStatus, int]:
        rows = self._execute("count") if run_id is None else self._execute("count_of_run", run_id)
        return {RolloutStatus(status): number for status, number in rows}

    def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        rows = self._execute("attempts_of_rollouts", self._list(rollout_ids))
        return [self._read_attempt(row) for row in rows]

    def attempt(self, attempt_id: str) -> Attempt:
        return find_attempts(self, [attempt_id])[attempt_id]

    def check_rollouts(self, rollout_ids: Sequence[str]) -> None:
        """Raise `NotFoundError` unless all rollouts are stored."""
        stored = {row[0]: row for row in self._execute("known_rollouts", self._list(rollout_ids))}
        check_known("rollout", rollout_ids, stored)

    def claim_of_token(self, call_token: str) -> Claim | None:
        for attempt in self.attempts_by_id([attempt_of_token(call_token)]).values():
            # A comparison that stops at the first difference would leak the token by its time.
            if not secrets.compare_digest(attempt.call_token.encode(), call_token.encode()):
                return None
            body = self.bodies([attempt.rollout_id])[attempt.rollout_id]
            return Claim(rollout=_encoding.unpack_rollout(body), attempt=attempt)
        return None

    def spans(self, attempt_ids: Sequence[str]) -> dict[str, list[Span]]:
        spans: dict[str, list[Span]] = {attempt_id: [] for attempt_id in attempt_ids}
        for attempt_id, body, late, outcome in self._execute("spans", self._list(list(spans))):
            spans[attempt_id].append(_encoding.unpack_span(body, bool(late), outcome))
        return spans

    def token_records(self, attempt_ids: Sequence[str]) -> dict[str, list[TokenRecord]]:
        records: dict[str, list[TokenRecord]] = {attempt_id: [] for attempt_id in attempt_ids}
        rows = self._execute("token_records", self._list(list(records)))
        for attempt_id, head, *arrays, late, outcome in rows:
            records[attempt_id].append(_encoding.unpack_record(head, arrays, bool(late), outcome))
        return records

    def images(self, digests: Sequence[str]) -> dict[str, Image]:
        rows = self._execute("images", self._list(digests))
        return {row[0]: Image(digest=row[0], media_type=row[1], data=row[2]) for row in rows}

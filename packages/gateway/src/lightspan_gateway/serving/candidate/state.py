"""The durable state of a comparison: its settings, its decision, and the attempts under way.

The state is a SQLite file. Each new attempt is written before it is answered, in the transaction
that reads the decision, so that a decision divides attempts exactly: those that began before it
keep their weights, also if the server is killed in between. Commands change the decision in the
same file.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lightspan.errors import ConfigError
from lightspan_gateway.serving.candidate.sides import Side, side_of

STATE_FILE: Final = "candidate.db"
"""Name of the file in the folder of the current run or model."""
RETENTION_S: Final = 30 * 86_400.0
"""Seconds after its last call for which the weights of an attempt or conversation are kept."""
_TOUCH_INTERVAL_S: Final = 3_600.0
"""Minimum seconds between two updates of the time of an attempt's last call."""
_LOCK_TIMEOUT_S: Final = 10.0
_PURGE_INTERVAL: Final = 1_000
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS comparisons (
  number INTEGER PRIMARY KEY, comparison TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS assignments (
  key BLOB PRIMARY KEY, digest TEXT NOT NULL, comparison TEXT NOT NULL, seen REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS begun (
  comparison TEXT NOT NULL, digest TEXT NOT NULL, attempts INTEGER NOT NULL,
  PRIMARY KEY (comparison, digest)) WITHOUT ROWID;
"""


class Decision(StrEnum):
    """The end of a comparison."""

    PROMOTED = "promoted"
    """The candidate answers all new attempts."""
    ROLLED_BACK = "rolled back"
    """The current weights answer all new attempts."""


class Weights(msgspec.Struct, frozen=True):
    """The weights of one side."""

    folder: str
    digest: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of candidate and current weights."""

    comparison_id: str
    salt: str
    share: float
    """Share of new attempts that the candidate answers, until the decision."""
    current: Weights
    candidate: Weights
    started_at: float
    """Seconds since the epoch, as `decided_at`."""
    decision: Decision | None = None
    """None until the decision."""
    decided_at: float | None = None
    reason: str = ""
    """Result of the comparison at the decision, for people."""

    @property
    def answering(self) -> Weights | None:
        """The weights of all new attempts; None if both sides answer."""
        if self.decision is None:
            return None
        return self.candidate if self.decision is Decision.PROMOTED else self.current

    def weights(self, side: Side) -> Weights:
        return self.candidate if side is Side.CANDIDATE else self.current


class Assignment(NamedTuple):
    """The weights that answer an attempt."""

    digest: str
    comparison_id: str
    """The comparison in which the attempt counts; empty if it began after the decision."""


class CandidateState:
    """The state in a file. Methods block for the file; each is atomic.

    Args:
        path: the file.
        create: whether a missing file is created.

    Raises:
        ConfigError: the file is missing and `create` is False, or it cannot be opened.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        if not create and not path.is_file():
            raise ConfigError(
                f"{path} does not exist: no candidate has been served there. Name the folder that "
                "`lightspan serve` serves, its --candidate-state, or the server's URL"
            )
        self._writes = 0
        self._pair: tuple[str, str] | None = None
        """Digests of the weights that this process serves; None before `begin`."""
        try:
            self._db = sqlite3.connect(
                path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            # survives `kill -9`; decisions use FULL to survive a power loss too
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise ConfigError(
                f"the state of the candidate cannot be kept in {path}: {error}; name a file on "
                "this machine's disk by --candidate-state"
            ) from error
        self._purge()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    # --- comparison -----------------------------------------------------------------------
    def latest(self) -> Comparison:
        """Return the latest comparison.

        Raises:
            ConfigError: there is none.
        """
        comparison = self._latest()
        if comparison is None:
            raise ConfigError(f"{self.path} has no comparison")
        return comparison

    def begin(self, current: Weights, candidate: Weights, share: float) -> Comparison:
        """Return the comparison of two weights, which continues after a restart.

        Another share of a comparison without a decision begins a new comparison, in which attempts
        keep their sides. A comparison with a decision stays decided.

        Args:
            current: the current weights.
            candidate: the candidate's weights.
            share: share of attempts that the candidate answers, from 0 to 1.

        Raises:
            ConfigError: both weights are equal, a comparison of others is not decided, or the
                current weights were replaced by a promoted candidate.
        """
        if current.digest == candidate.digest:
            raise ConfigError(
                f"--candidate {candidate.folder} answers with the same weights as "
                f"{current.folder}: there is nothing to compare"
            )
        with self._transaction():
            before, salt = self._latest(), secrets.token_hex(16)
            if before is not None:
                pairs = [
                    (before.current.digest, current.digest),
                    (before.candidate.digest, candidate.digest),
                ]
                if all(old == new for old, new in pairs):
                    if before.decision is not None or before.share == share:
                        self._pair = pairs[0][1], pairs[1][1]
                        return before
                    salt = before.salt
                elif before.decision is None:
                    raise ConfigError(
                        f"{self.path} has a comparison of {before.candidate.folder} with "
                        f"{before.current.folder} that is not decided: `lightspan candidate "
                        f"roll-back {self.path}` ends it"
                    )
                elif before.answering == before.candidate and pairs[0][0] == pairs[0][1]:
                    raise ConfigError(
                        f"{before.candidate.folder} was promoted in place of {current.folder}: "
                        f"serve it (`lightspan serve {before.candidate.folder} --candidate "
                        f"{candidate.folder}`), or end that by `lightspan candidate roll-back "
                        f"{self.path}`"
                    )
            comparison = Comparison(
                comparison_id=secrets.token_hex(4),
                salt=salt,
                share=share,
                current=current,
                candidate=candidate,
                started_at=time.time(),
            )
            self._db.execute(
                "INSERT INTO comparisons (comparison) VALUES (?)",
                (msgspec.json.encode(comparison).decode(),),
            )
            self._pair = current.digest, candidate.digest
            return comparison

    def decide(
        self, decision: Decision, reason: str = "", comparison_id: str | None = None
    ) -> Comparison:
        """Decide the latest comparison; return it. An equal decision changes nothing.

        Attempts that have begun keep their weights.

        Args:
            decision: the decision.
            reason: result of the comparison, for people.
            comparison_id: the comparison to which `reason` applies; None for the latest.

        Raises:
            ConfigError: there is no comparison, or `comparison_id` is not the latest.
        """
        self._db.execute("PRAGMA synchronous=FULL")
        try:
            with self._transaction():
                before = self.latest()
                if comparison_id not in (None, before.comparison_id):
                    raise ConfigError(
                        f"comparison {comparison_id!r} is not the latest, which is "
                        f"{before.comparison_id!r}: look at that first"
                    )
                if before.decision is decision:
                    return before
                comparison = msgspec.structs.replace(
                    before, decision=decision, decided_at=time.time(), reason=reason
                )
                self._db.execute(
                    "UPDATE comparisons SET comparison = ? "
                    "WHERE number = (SELECT max(number) FROM comparisons)",
                    (msgspec.json.encode(comparison).decode(),),
                )
                return comparison
        finally:
            self._db.execute("PRAGMA synchronous=NORMAL")

    def begun(self, comparison_id: str) -> dict[str, int]:
        """Return the attempts that began in a comparison: digest of the weights → number.

        Calls that nothing connects with others count as one attempt each.
        """
        rows = self._db.execute(
            "SELECT digest, attempts FROM begun WHERE comparison = ?", (comparison_id,)
        )
        return dict(rows.fetchall())

    # --- attempts -------------------------------------------------------------------------
    def assign(
        self, key: str | None, earlier: Sequence[bytes] = (), group: str | None = None
    ) -> Assignment:
        """Return the weights that answer a request, and remember those of a new attempt.

        Args:
            key: what identifies the attempt; None if nothing does.
            earlier: keys of the answered conversations that the request may continue, the longest
                first. A new attempt that continues one gets the same weights.
            group: what chooses the side of a request without `key`, such as a user; None to choose
                at random.

        Raises:
            ConfigError: another server began a comparison of other weights in the same file.
        """
        own = None if key is None else _hash(key)
        with self._transaction():
            comparison = self.latest()
            served = {comparison.current.digest, comparison.candidate.digest}
            if self._pair is not None and served != {*self._pair}:
                raise ConfigError(f"{self.path} is used by a server of other weights")
            if own is not None and (row := self._row(own, served)) is not None:
                return row
            answering = comparison.answering
            rows = (self._row(hash, served) for hash in earlier)
            row = continued = next((row for row in rows if row is not None), None)
            if continued is not None:
                # an attempt of another comparison was assigned with another share
                is_counted = answering is None
                is_counted &= continued.comparison_id == comparison.comparison_id
                row = Assignment(continued.digest, continued.comparison_id if is_counted else "")
            elif answering is not None:
                row = Assignment(answering.digest, "")
            else:
                side_key = key or group or secrets.token_hex(16)
                side = side_of(side_key, comparison.salt, comparison.share)
                row = Assignment(comparison.weights(side).digest, comparison.comparison_id)
            if own is not None:
                self._put(own, row)
            if row.comparison_id and (own is not None or continued is None):
                self._db.execute(
                    "INSERT INTO begun VALUES (?, ?, 1) ON CONFLICT (comparison, digest) "
                    "DO UPDATE SET attempts = attempts + 1",
                    (row.comparison_id, row.digest),
                )
            return row

    def assigned(self, comparison_id: str, keys: Iterable[str]) -> dict[str, str]:
        """Return the attempts that count in a comparison: key → digest of the weights.

        Attempts that are not known, or were last called more than `RETENTION_S` ago, are missing.

        Args:
            comparison_id: the comparison.
            keys: what identifies each attempt (`sides.attempt_key`).
        """
        query = "SELECT digest FROM assignments WHERE key = ? AND comparison = ?"
        rows = {
            key: self._db.execute(query, (_hash(key), comparison_id)).fetchone() for key in keys
        }
        return {key: row[0] for key, row in rows.items() if row is not None}

    def remember(self, conversations: Sequence[bytes], assignment: Assignment) -> None:
        """Remember which weights answered conversations (`sides.conversation_keys`)."""
        with self._transaction():
            for hash in conversations:
                self._put(hash, assignment)

    def _row(self, hash: bytes, served: set[str]) -> Assignment | None:
        """Return the weights of an attempt or conversation; None if they are not served now."""
        row = self._db.execute(
            "SELECT digest, comparison, seen FROM assignments WHERE key = ?", (hash,)
        ).fetchone()
        if row is None or row[0] not in served:
            return None
        if (now := time.time()) - row[2] > _TOUCH_INTERVAL_S:
            self._db.execute("UPDATE assignments SET seen = ? WHERE key = ?", (now, hash))
        return Assignment(row[0], row[1])

    def _put(self, hash: bytes, assignment: Assignment) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO assignments VALUES (?, ?, ?, ?)",
            (hash, *assignment, time.time()),
        )
        self._writes += 1
        if self._writes % _PURGE_INTERVAL == 0:
            self._purge()

    def _purge(self) -> None:
        self._db.execute("DELETE FROM assignments WHERE seen < ?", (time.time() - RETENTION_S,))

    # --- file -----------------------------------------------------------------------------
    def _latest(self) -> Comparison | None:
        row = self._db.execute(
            "SELECT comparison FROM comparisons ORDER BY number DESC LIMIT 1"
        ).fetchone()
        return None if row is None else msgspec.convert(json.loads(row[0]), Comparison)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run a block in one transaction, which other processes see whole or not at all."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()[:16]

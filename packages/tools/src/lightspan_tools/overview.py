"""Count the calls of a run or of a store of production, and list its rollouts or attempts.

Up to `MAX_READ` rollouts are all read. Of more, only the rows that the table shows are read, unless
the order or the filter of the table needs all of them or the caller asks for it. Everything is read
in parts of `PART` rollouts, so the memory does not depend on their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean
from typing import Any, Final

import msgspec

from lightspan.algorithms.recorded_attempts import (
    Query,
    RecordedAttempt,
    read_attempts,
    score_of_attempt,
)
from lightspan.errors import DataError
from lightspan.lightning.episode import Call, Episode
from lightspan.lightning.rows import row_shares
from lightspan.lightning.transitions import trained_transitions
from lightspan.schema.records import AttemptStatus, Mode, Outcome, RolloutStatus, RolloutSummary
from lightspan.schema.spans import SpanKind
from lightspan.schema.token_records import CallOutcome
from lightspan.stores.protocol import Store
from lightspan_tools.merge_diagnostics import Break, Decode, exchanges_of, read_merging
from lightspan_tools.pagination import Columns, Page, TableRow, shown_rows
from lightspan_tools.rollout_view import RolloutView, ViewReader
from lightspan_tools.sampling_overrides import overrides_of

MAX_READ: Final = 5_000
"""Number of rollouts up to which the calls of all are counted."""
PART: Final = 256
"""Rollouts that are in memory at once."""
_EVERY: Final = 2**31 - 1
"""More attempts than a store has."""


@dataclass
class Overview:
    """Counts of calls, and the rows of a table of rollouts or attempts."""

    rows: list[TableRow]
    """All rows, the oldest first. Those that were not read have no reward and no agents."""
    read: int = 0
    """Number of rows that were read, whose calls are counted."""
    agents: Counter[str] = field(default_factory=Counter)
    """Agent path → number of calls."""
    calls: Counter[str] = field(default_factory=Counter)
    """What became of calls (`Coverage.counts`), or in production their outcomes → their number."""
    overridden: Counter[str] = field(default_factory=Counter)
    """Field of the request that training overrode → number of calls."""
    services: Counter[str] = field(default_factory=Counter)
    """Service → number of attempts, in a store of production."""
    others: int = 0
    """Number of rollouts of trainings in a store of production."""
    url: str = ""
    """URL of a store of production, without its password."""
    failure: str = ""
    """Message of the newest failed rollout of training; empty unless the latest step failed."""
    forks: int = 0
    """Number of rollouts of a run that are forks: they repeat another one up to a call."""
    one_row: dict[str, list[float]] = field(default_factory=dict)
    """Agent path → per rollout with several of its calls, the share of them that is in one row."""
    breaks: list[Break] = field(default_factory=list)
    """Calls that continue a conversation but begin a new row."""
    first_trained_step: int | None = None
    """First step of which the store has rollouts of training; None if it has none."""

    @property
    def is_whole(self) -> bool:
        """Whether the calls of all rows are counted."""
        return self.read == len(self.rows)

    @property
    def one_row_means(self) -> dict[str, float]:
        """Agent path → mean share of its calls in a rollout that are in one row."""
        return {path: fmean(shares) for path, shares in sorted(self.one_row.items())}

    @property
    def breaks_by_cause(self) -> Counter[str]:
        """Cause → number of calls that continue a conversation but begin a new row."""
        return Counter(str(each.cause) for each in self.breaks)

    @property
    def scope(self) -> str:
        """What the counts of calls cover, as a part of a sentence; empty for all rows."""
        return "" if self.is_whole else f", of the {self.read} shown"


async def run_overview(
    reader: ViewReader, store: Store, run_id: str | None, page: Page, decode: Decode
) -> Overview:
    """Return the overview of a run's rollouts. Those that no runner ever started are left out."""
    summaries = (await store.summaries(run_id, newest=True)).rows[::-1]
    summaries = [row for row in summaries if row.attempt_id is not None]
    rows = await _rows(store, summaries, run_id, page, [row.rollout_id for row in summaries])
    overview = Overview(rows, forks=sum(row.fork is not None for row in summaries))
    overview.first_trained_step = min(
        (reader.step_of(s.group_id, s.step) for s in summaries if s.mode is Mode.TRAIN),
        default=None,
    )
    wanted = _wanted(rows, page)
    full: dict[str, TableRow] = {}
    for start in range(0, len(wanted), PART):
        states = await store.rollouts([row.row_id for row in wanted[start : start + PART]])
        views = await reader.read(states)
        transitions = [t for v in views for t in trained_transitions(v.episode, v.coverage)]
        exchanges = exchanges_of(view.coverage for view in views)
        overview.breaks += read_merging(transitions, exchanges, decode).breaks
        for path, shares in row_shares(transitions).items():
            overview.one_row.setdefault(path, []).extend(shares)
        for view in views:
            overview.read += 1
            overview.calls.update(view.coverage.counts())
            calls = [c for c in view.episode.calls if c.outcome is not CallOutcome.REPLAYED]
            overview.agents.update(call.agent_path for call in calls)
            overview.overridden.update(
                key for call in calls if call.span for key in overrides_of(call.span.attributes)
            )
            row = row_of(view)
            full[row.row_id] = row
    overview.rows = _merged(rows, full)
    return overview


async def newest_failure(store: Store, run_id: str | None) -> str:
    """Return the message of the newest failed rollout of a run's training; empty if there is none.

    Rollouts are read in parts until one that failed is found.
    """
    before = None
    while True:
        page = await store.summaries(
            run_id, mode=Mode.TRAIN, newest=True, before=before, limit=PART
        )
        for row in page.rows:
            if row.status is RolloutStatus.FAILED and row.message:
                return row.message
        if len(page.rows) < PART:
            return ""
        before = page.rows[-1].position


async def production_overview(store: Store, query: Query, page: Page) -> Overview:
    """Return the overview of the attempts of production that match `query`."""
    # The total is read first, so that attempts recorded meanwhile do not count as trainings'.
    total = sum((await store.count()).values())
    production = (await store.summaries(mode=Mode.PRODUCTION, newest=True)).rows[::-1]
    selected = [row for row in production if query.service in (None, row.run_id)]
    if production and not selected:
        names = ", ".join(sorted({row.run_id for row in production}))
        raise DataError(f"no attempt is of the service {query.service!r}; there are: {names}")
    summaries = [row for row in selected if query.matches(row)]
    ids = {str(row.attempt_id): row.rollout_id for row in summaries}
    rows = await _rows(store, summaries, query.service, page, list(ids))
    overview = Overview(rows, others=max(0, total - len(production)), url=store.url)
    overview.services.update(row.run_id for row in summaries)
    full: dict[str, TableRow] = {}
    wanted = [ids[row.row_id] for row in _wanted(rows, page)]
    async for recorded in read_attempts(store, query, wanted):
        overview.read += 1
        calls = _distinct(recorded.episode)
        overview.calls.update(str(call.outcome) for call in calls)
        overview.agents.update(call.agent_path for call in calls)
        row = production_row_of(recorded)
        full[row.row_id] = row
    overview.rows = _merged(rows, full)
    return overview


async def _rows(
    store: Store,
    summaries: Sequence[RolloutSummary],
    run_id: str | None,
    page: Page,
    ids: Sequence[str],
) -> list[TableRow]:
    """Return a row for each summary, with what is known without reading spans."""
    found = None
    if page.grep is not None:
        found = set(await store.search(page.grep, run_id, limit=_EVERY))
    return [
        TableRow(
            row_id=row_id,
            status=_status_of(row),
            reward=None,
            has_text=found is None or row.attempt_id in found,
        )
        for row_id, row in zip(ids, summaries, strict=True)
    ]


def _status_of(row: RolloutSummary) -> str:
    """Return the status of a rollout; `timeout` for one that failed because its time ran out."""
    has_failed = row.mode is Mode.PRODUCTION or row.status is RolloutStatus.FAILED
    is_timeout = has_failed and row.outcome is Outcome.TIMEOUT
    return str(AttemptStatus.TIMEOUT if is_timeout else row.status)


def status_of(view: RolloutView) -> str:
    """Return the status of a rollout.

    It is `timeout` for one that failed because its time ran out, and `departed` for a fork that did
    not repeat the recorded attempt.
    """
    if view.episode.departed:
        return "departed"
    is_late = view.episode.status is AttemptStatus.TIMEOUT
    is_failed = view.state.status is RolloutStatus.FAILED
    return str(view.episode.status if is_late and is_failed else view.state.status)


def _wanted(rows: Sequence[TableRow], page: Page) -> Sequence[TableRow]:
    """Return the rows to read: all, or those that the table shows."""
    needs_all = page.is_whole or page.sort != "step" or page.agent is not None
    return rows if needs_all or len(rows) <= MAX_READ else shown_rows(rows, page)


def _merged(rows: Sequence[TableRow], full: dict[str, TableRow]) -> list[TableRow]:
    return [
        msgspec.structs.replace(full[row.row_id], has_text=row.has_text)
        if row.row_id in full
        else row
        for row in rows
    ]


def row_of(view: RolloutView) -> TableRow:
    """Return the row of a rollout in the table of a run."""
    rollout = view.state.rollout
    return TableRow(
        row_id=rollout.rollout_id,
        status=status_of(view),
        reward=view.episode.reward,
        agents=Counter(call.agent_path for call in view.episode.calls),
        before=f"{'fork' if rollout.fork else rollout.mode:<5}  {view.step:>4}  ",
        after=f"{len(view.coverage.trained):>7}  ",
        columns=Columns(
            mode=str(rollout.mode),
            step=view.step,
            trained=len(view.coverage.trained),
            fork_of=rollout.fork.rollout_id if rollout.fork else "",
        ),
    )


def _distinct(episode: Episode) -> list[Call]:
    """Return the calls of an episode, one entry for a call with several choices."""
    return list({call.call_id: call for call in episode.calls}.values())


def production_row_of(recorded: RecordedAttempt) -> TableRow:
    """Return the row of an attempt in the table of a store of production."""
    state, attempt, episode = recorded
    # Local time, to compare with the service's own log.
    began = datetime.fromtimestamp(attempt.started_at).isoformat(" ", "seconds")  # noqa: DTZ006
    damaged = "damaged" if episode.capture_errors else ""
    return TableRow(
        row_id=attempt.attempt_id,
        status=str(episode.status),
        reward=score_of_attempt(episode),
        agents=Counter(call.agent_path for call in _distinct(episode)),
        before=f"{state.rollout.run_id:<20}  {began:<19}  ",
        after=f"{seconds_of(episode):>7.2f}  {damaged:<7}  ",
        columns=Columns(
            service=state.rollout.run_id,
            started_at=attempt.started_at,
            seconds=seconds_of(episode),
            damaged=bool(damaged),
        ),
    )


def seconds_of(episode: Episode) -> float:
    """Return the seconds from when the first span started until the last span ended.

    Rewards are recorded as spans too. They are ignored, because feedback may arrive days later.
    """
    spans = [span for span in episode.spans if span.kind is not SpanKind.REWARD]
    if not spans:
        return 0.0
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9


def pruned_text(lines: Sequence[Mapping[str, Any]], first: int | None) -> str:
    """Return which steps' rollouts are no longer stored (see `lightspan prune`); empty if all are.

    Args:
        lines: lines of the run's metrics.
        first: first step with stored rollouts of training; None if there is none.
    """
    train = (line for line in lines if line.get("kind") == "train")
    steps = {int(line["step"]) for line in train if line.get("rollouts")}
    pruned = {step for step in steps if first is None or step < first}
    if not pruned:
        return ""
    return (
        f"rollouts of steps {min(pruned)} to {max(pruned)} are no longer in the store, as after "
        "lightspan prune"
    )

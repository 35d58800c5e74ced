"""Tables of rollouts or attempts, by pages and with short ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from lightspan.errors import ConfigError
from lightspan.schema.routing import matches

Sort = Literal["step", "reward", "agent"]
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
_MIN_LENGTH: Final = 8
"""Minimum length of a short id, in characters."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Which rows of a table are shown, and in which order."""

    sort: Sort = "step"
    """`step`: the last rows, in the order of steps; `reward`: unscored rows, then the lowest first;
    `agent`: by the names of the agents that called a model."""
    limit: int = 20
    """Maximum number of rows; 0 for all."""
    status: str | None = None
    """Status of the rows; None for any status."""
    agent: str | None = None
    """Pattern as in `optimize=`, of which a row has an agent; None for any agents."""
    grep: str | None = None
    """Text that a recorded span of the row has (`Store.search`); None for any."""
    is_whole: bool = False
    """Whether the counts above the table cover all rows, however many there are."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"the limit is a number of rows, or 0 for all, not {self.limit}")


class Columns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Further columns of a row, for programs. None where a table has no such column."""

    mode: str | None = None
    step: int | None = None
    trained: int | None = None
    """Number of trained calls."""
    service: str | None = None
    started_at: float | None = None
    seconds: float | None = None
    """Seconds from the first span until the last."""
    damaged: bool | None = None
    fork_of: str = ""
    """Id of the rollout that this one repeats up to a call; empty if it repeats none."""


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a table: a rollout or an attempt."""

    row_id: str
    status: str
    reward: float | None
    agents: Mapping[str, int] = {}
    """Agent path → number of calls."""
    before: str = ""
    """Text of further columns between id and status."""
    after: str = ""
    """Text of further columns after the number of calls."""
    columns: Columns = Columns()
    """What `before` and `after` show."""
    has_text: bool = True
    """Whether a span has the text of `Page.grep`, or none is searched for."""


def table_lines(
    rows: Sequence[TableRow], page: Page, what: str, before: str = "", after: str = ""
) -> Iterator[str]:
    """Yield the header and the rows of a table that `page` selects.

    Args:
        rows: all rows.
        page: which rows to show.
        what: name of a row, such as "rollout", to which "s" is appended for the plural.
        before: header of the columns in `TableRow.before`.
        after: header of the columns in `TableRow.after`.
    """
    statuses = Counter(row.status for row in rows)
    if page.status is not None and page.status not in statuses:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(statuses.items()))
        yield f"no {what} is {page.status}; there are: {counts or 'none'}"
        return
    matching = matching_rows(rows, page)
    if not matching and (page.agent or page.grep):
        yield f"no {what} of {len(rows)} has such an agent or text"
        return
    shown = _select(matching, page)
    names = short_ids([row.row_id for row in rows], [row.row_id for row in shown])
    width = max([len(what), *(len(names[row.row_id]) for row in shown)])
    yield f"{what:<{width}}  {before}status     reward  calls  {after}agents".rstrip()
    for row in shown:
        reward = "-" if row.reward is None else f"{row.reward:.6g}"
        yield (
            f"{names[row.row_id]:<{width}}  {row.before}{row.status:<9}  {reward:>6}  "
            f"{sum(row.agents.values()):>5}  {row.after}{', '.join(sorted(row.agents))}"
        ).rstrip()
    if len(shown) < len(matching):
        part = {"step": "last", "reward": "lowest", "agent": "first"}[page.sort]
        yield (
            f"the {part} {len(shown)} of {len(matching)} {what}s; "
            "--limit 0 shows all, --sort reward|step|agent and --status choose others"
        )


def shown_rows(rows: Sequence[TableRow], page: Page) -> list[TableRow]:
    """Return the rows that a table shows, in its order."""
    return _select(matching_rows(rows, page), page)


def matching_rows(rows: Sequence[TableRow], page: Page) -> list[TableRow]:
    """Return the rows that pass the filters of `page`."""
    return [
        row
        for row in rows
        if page.status in (None, row.status)
        and row.has_text
        and (page.agent is None or any(matches(page.agent, agent) for agent in row.agents))
    ]


def _select(rows: Sequence[TableRow], page: Page) -> list[TableRow]:
    """Return the rows that `page` selects, in its order."""
    number = page.limit or len(rows)
    if page.sort == "step":
        return list(rows[-number:])
    if page.sort == "agent":
        return sorted(rows, key=lambda row: sorted(row.agents))[:number]
    return sorted(rows, key=_reward_order)[:number]


def _reward_order(row: TableRow) -> tuple[bool, float]:
    """Return a sort key: rewards in ascending order.

    A rollout of a training without a reward has gone wrong, and comes first. An attempt of
    production without one is merely unrated, and comes last.
    """
    is_production = row.columns.service is not None
    return (row.reward is None) is is_production, row.reward or 0.0


def short_ids(ids: Collection[str], wanted: Collection[str] | None = None) -> dict[str, str]:
    """Shorten ids to suffixes that are unique among all; return id → suffix.

    Only the ids of `wanted` are in the result; None for all.

    The suffixes are as short as possible, but have at least `_MIN_LENGTH` characters. They all have
    the same length, unless `_suffix` lengthens one.
    """
    names = set(ids)
    longest = max(map(len, names), default=0)
    lengths = range(_MIN_LENGTH, longest)
    length = next((n for n in lengths if len({name[-n:] for name in names}) == len(names)), longest)
    return {name: _suffix(name, length) for name in (names if wanted is None else wanted)}


def _suffix(name: str, length: int) -> str:
    """Return the last `length` characters of `name`, or more if they begin with `-`.

    A suffix such as `-0-1` would look like an option on the command line.
    """
    while length < len(name) and name[-length] == "-":
        length += 1
    return name[-length:]

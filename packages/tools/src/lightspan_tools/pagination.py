"""Tables of rollouts or attempts, by pages and with short ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from lightspan.errors import ConfigError

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

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"the limit is a number of rows, or 0 for all, not {self.limit}")


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of a table: a rollout or an attempt."""

    row_id: str
    status: str
    reward: float | None
    agents: Mapping[str, int] = field(default_factory=dict)
    """Agent path → number of calls."""
    before: str = ""
    """Text of further columns between id and status."""
    after: str = ""
    """Text of further columns after the number of calls."""


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
    matching = [row for row in rows if page.status in (None, row.status)]
    shown = _select(matching, page)
    names = short_ids([row.row_id for row in rows])
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


def _select(rows: Sequence[TableRow], page: Page) -> list[TableRow]:
    """Return the rows that `page` selects, in its order."""
    number = page.limit or len(rows)
    if page.sort == "step":
        return list(rows[-number:])
    if page.sort == "agent":
        return sorted(rows, key=lambda row: sorted(row.agents))[:number]
    return sorted(rows, key=lambda row: (row.reward is not None, row.reward or 0.0))[:number]


def short_ids(ids: Collection[str]) -> dict[str, str]:
    """Shorten ids to suffixes that are still unique; return id → suffix.

    The suffixes are as short as possible, but have at least `_MIN_LENGTH` characters. They all have
    the same length, unless `_suffix` lengthens one.
    """
    names = set(ids)
    longest = max(map(len, names), default=0)
    lengths = range(_MIN_LENGTH, longest)
    length = next((n for n in lengths if len({name[-n:] for name in names}) == len(names)), longest)
    return {name: _suffix(name, length) for name in names}


def _suffix(name: str, length: int) -> str:
    """Return the last `length` characters of `name`, or more if they begin with `-`.

    A suffix such as `-0-1` would look like an option on the command line.
    """
    while length < len(name) and name[-length] == "-":
        length += 1
    return name[-length:]

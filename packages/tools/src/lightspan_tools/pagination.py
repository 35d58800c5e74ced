"""A page of a long table: which rollouts or attempts, in which order, under which short ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from lightspan.errors import ConfigError

Sort = Literal["step", "reward", "agent"]
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
_MIN_LENGTH: Final = 8
"""Characters of a short id."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What of a table is shown."""

    sort: Sort = "step"
    """`step`: as it was run, the end of it; `reward`: the lowest first, and before it what has
    none; `agent`: by the names of the agents that called a model."""
    limit: int = 20
    """Rows; 0 for all."""
    status: str | None = None
    """Only rows that ended so, or are in that state."""

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError(f"the limit is a number of rows, or 0 for all, not {self.limit}")


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A rollout or an attempt."""

    row_id: str
    status: str
    reward: float | None
    agents: Mapping[str, int] = field(default_factory=dict)
    """Agent path → its calls."""
    before: str = ""
    """What is shown between id and status."""
    after: str = ""
    """What is shown after the calls' number."""


def table_lines(
    rows: Sequence[TableRow], page: Page, what: str, before: str = "", after: str = ""
) -> Iterator[str]:
    """The page, under a line that names the columns.

    Args:
        what: a row is; its plural has an s.
        before, after: the names of the rows' own columns.
    """
    known = Counter(row.status for row in rows)
    if page.status is not None and page.status not in known:
        had = ", ".join(f"{name} {count}" for name, count in sorted(known.items())) or "none"
        yield f"no {what} is {page.status}; there are: {had}"
        return
    matching = [row for row in rows if page.status in (None, row.status)]
    shown = _shown(matching, page)
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


def _shown(rows: Sequence[TableRow], page: Page) -> list[TableRow]:
    """The rows that are shown, in their order."""
    number = page.limit or len(rows)
    if page.sort == "step":
        return list(rows[-number:])
    if page.sort == "agent":
        return sorted(rows, key=lambda row: sorted(row.agents))[:number]
    return sorted(rows, key=lambda row: (row.reward is not None, row.reward or 0.0))[:number]


def short_ids(ids: Collection[str]) -> dict[str, str]:
    """Return id → an end of it of a few characters or more, that is no other id's."""
    names = set(ids)
    longest = max(map(len, names), default=0)
    lengths = range(_MIN_LENGTH, longest)
    length = next((n for n in lengths if len({name[-n:] for name in names}) == len(names)), longest)
    return {name: _end(name, length) for name in names}


def _end(name: str, length: int) -> str:
    """Return the end of an id; a longer one where it would be read as an option (`-0-1`)."""
    while length < len(name) and name[-length] == "-":
        length += 1
    return name[-length:]

"""SQL queries as data: render them as SQL, and make mistakes in them.

With a structure, a demonstration can contain one well-defined mistake, and the generator can check
that no mistake gives the right answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Aggregate = Literal["avg", "sum", "min", "max"]
Operator = Literal[">", ">=", "<", "<=", "="]


@dataclass(frozen=True)
class Condition:
    """The SQL condition `column operator value`; a `str` value is text."""

    column: str
    operator: Operator
    value: int | str
    quoted: bool = True
    """Whether a text value is in quotes; False is a mistake."""

    def sql(self) -> str:
        """Return the condition as SQL, without WHERE."""
        value = f"'{self.value}'" if isinstance(self.value, str) and self.quoted else self.value
        return f"{self.column} {self.operator} {value}"


@dataclass(frozen=True)
class Query:
    """A SELECT of one table, or of a table joined with the table that it references."""

    table: str
    column: str = "*"
    """Column to show or aggregate; `*` is used to count rows."""
    aggregate: Aggregate | Literal["count"] | None = None
    distinct: bool = False
    parent: str | None = None
    """Table to join, which `table` references by its column `<parent>_id`; None for no join."""
    condition: Condition | None = None
    group: str | None = None
    order: str | None = None
    descending: bool = False
    limit: int | None = None

    @property
    def ordered(self) -> bool:
        """Whether the order of rows belongs to the answer."""
        return self.order is not None

    def sql(self) -> str:
        """Return the query as one line of SQL."""
        parts = [f"SELECT {self._selection()} FROM {self.table}"]
        if self.parent:
            parts.append(f"JOIN {self.parent} ON {self.parent}_id = {self.parent}.id")
        if self.condition:
            parts.append(f"WHERE {self.condition.sql()}")
        if self.group:
            parts.append(f"GROUP BY {self.group}")
        if self.order:
            parts.append(f"ORDER BY {self.order}{' DESC' if self.descending else ''}")
        if self.limit:
            parts.append(f"LIMIT {self.limit}")
        return " ".join(parts)

    def _selection(self) -> str:
        shown = f"DISTINCT {self.column}" if self.distinct else self.column
        if self.aggregate:
            shown = f"{self.aggregate}({shown})"
        return f"{self.group}, {shown}" if self.group else shown


Mistake = Literal["quotes", "bound", "direction", "aggregate", "distinct", "condition", "limit"]
"""Kinds of mistakes: unquoted text; `>` for `>=` and the like; the opposite direction of an order;
the wrong aggregate; a missing DISTINCT; a missing WHERE; a missing LIMIT.
"""

_OTHER_BOUND: dict[Operator, Operator] = {">": ">=", ">=": ">", "<": "<=", "<=": "<", "=": ">="}
_OTHER_AGGREGATE: dict[str, Aggregate] = {"avg": "sum", "sum": "avg", "min": "max", "max": "min"}


def mistakes(query: Query) -> dict[Mistake, Query]:
    """Return each mistake that is possible in `query` → the query with this mistake."""
    spoilt: dict[Mistake, Query] = {}
    if query.condition:
        spoilt["condition"] = replace(query, condition=None)
        if isinstance(query.condition.value, str):
            unquoted = replace(query.condition, quoted=False)
            spoilt["quotes"] = replace(query, condition=unquoted)
        else:
            other = replace(query.condition, operator=_OTHER_BOUND[query.condition.operator])
            spoilt["bound"] = replace(query, condition=other)
    if query.order:
        spoilt["direction"] = replace(query, descending=not query.descending)
    if query.limit:
        spoilt["limit"] = replace(query, limit=None)
    if query.aggregate in _OTHER_AGGREGATE:
        spoilt["aggregate"] = replace(query, aggregate=_OTHER_AGGREGATE[query.aggregate])
    if query.distinct:
        spoilt["distinct"] = replace(query, distinct=False)
    return spoilt

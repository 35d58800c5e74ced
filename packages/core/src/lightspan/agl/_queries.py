"""Queries: what matches, and which part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from lightspan.agl._rollouts import PaginatedResult
from lightspan.errors import ConfigError

T = TypeVar("T")
Order = Literal["asc", "desc"]
Logic = Literal["and", "or"]
Conditions = list[Callable[[Any], bool]]


def exactly(name: str, value: str | None) -> Conditions:
    return [] if value is None else [lambda item: getattr(item, name) == value]


def contains(name: str, text: str | None) -> Conditions:
    return [] if text is None else [lambda item: text in (getattr(item, name) or "")]


def within(name: str, values: Sequence[Any] | None) -> Conditions:
    return [] if values is None else [lambda item: getattr(item, name) in values]


def matching(items: Sequence[T], conditions: Conditions, logic: Logic) -> list[T]:
    if not conditions:
        return list(items)
    together = all if logic == "and" else any
    return [item for item in items if together(holds(item) for holds in conditions)]


def page(
    items: Sequence[T], sort_by: str | None, order: Order, limit: int, offset: int
) -> PaginatedResult[T]:
    """A part of the items; those without a value of what they are sorted by come first.

    Raises:
        ConfigError: they have no field of that name.
    """
    if sort_by is not None:
        if items and not hasattr(items[0], sort_by):
            raise ConfigError(f"sort_by={sort_by!r}: {type(items[0]).__name__} has no such field")
        items = sorted(
            items,
            key=lambda item: ((value := getattr(item, sort_by)) is not None, value),
            reverse=order == "desc",
        )
    end = None if limit < 0 else offset + limit
    part = list(items[offset:end])
    return PaginatedResult(items=part, limit=limit, offset=offset, total=len(items))

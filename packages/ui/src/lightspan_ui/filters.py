"""Filter and sort rollouts by the parameters of an address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_args, get_type_hints

import msgspec

from lightspan.algorithms.recorded_attempts import parse_time, seconds_ago
from lightspan.errors import ConfigError
from lightspan.schema.routing import matches
from lightspan_ui.entries import Entry
from lightspan_ui.views import MAX_ROWS

Sort = Literal["newest", "oldest", "best", "worst", "longest", "tokens", "cost"]
GroupSort = Literal["newest", "spread", "flat", "worst", "best"]
T = TypeVar("T")
Predicate = Callable[[Entry], bool]

DEFAULT_ROWS: Final = 50
MAX_TEXT_FILTER: Final = 1_000
"""Maximum characters of a text to search for."""


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """The filters of an address; None for no filter."""

    text: str | None = None
    mode: str | None = None
    status: str | None = None
    outcome: str | None = None
    service: str | None = None
    agent: str | None = None
    user: str | None = None
    session: str | None = None
    tag: str | None = None
    rated: Literal["yes", "no"] | None = None
    task: str | None = None
    group: str | None = None
    step: int | None = None
    step_min: int | None = None
    step_max: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    since: str | None = None
    until: str | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    cost_min: float | None = None
    cost_max: float | None = None
    seconds_min: float | None = None
    seconds_max: float | None = None

    @property
    def needs_spans(self) -> bool:
        """Whether a filter reads what only the spans tell."""
        return any(getattr(self, name) is not None for name in _OF_SPANS)

    @property
    def has_age(self) -> bool:
        """Whether a filter is an age such as `2h`, which passes other rollouts as time goes on."""
        ages = (self.since, self.until)
        return any(seconds_ago(each) is not None for each in ages if each is not None)


class PageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which page of a table, and in which order."""

    sort: str = "newest"
    limit: int = DEFAULT_ROWS
    cursor: str = ""


_OF_SPANS: Final = (
    *("agent", "user", "session", "tag", "tokens_min", "tokens_max", "cost_min", "cost_max"),
)
SPAN_SORTS: Final = ("tokens", "cost")
"""Sorts that read what only the spans tell."""


def read_filters(query: Mapping[str, str]) -> Filters:
    """Return the filters in the parameters of an address; empty values are no filters.

    Raises:
        ConfigError: a value is invalid.
    """
    values = {name: query[name] for name in Filters.__struct_fields__ if query.get(name)}
    filters = _convert(values, Filters)
    if len(filters.text or "") > MAX_TEXT_FILTER:
        raise ConfigError(f"text: at most {MAX_TEXT_FILTER} characters can be searched for")
    for name in ("since", "until"):
        if values.get(name):
            time_of(values[name], name)
    return filters


def read_page(query: Mapping[str, str], sorts: object) -> PageOptions:
    """Return which page of a table the parameters of an address name.

    Args:
        query: the parameters.
        sorts: the type `Sort` or `GroupSort`.

    Raises:
        ConfigError: a value is invalid.
    """
    values = {name: query[name] for name in PageOptions.__struct_fields__ if query.get(name)}
    page = _convert(values, PageOptions)
    if page.sort not in get_args(sorts):
        raise ConfigError(f"sort={page.sort}: give one of {', '.join(get_args(sorts))}")
    if not 1 <= page.limit <= MAX_ROWS:
        raise ConfigError(f"limit={page.limit}: give 1 to {MAX_ROWS}")
    return page


def _convert(values: Mapping[str, str], kind: type[T]) -> T:
    hints = get_type_hints(kind)
    for name, value in values.items():
        try:
            number = msgspec.convert({name: value}, kind, strict=False)
            is_valid = getattr(number, name) == getattr(number, name)  # NaN is no number
        except msgspec.ValidationError:
            is_valid = False
        if not is_valid:
            raise ConfigError(f"{name}={value[:40]}: give {wanted_text(hints[name])}")
    return msgspec.convert(dict(values), kind, strict=False)


def wanted_text(hint: Any) -> str:
    """Describe the values that a parameter of a type accepts."""
    kinds = get_args(hint) or (hint,)
    if int in kinds:
        return "a whole number"
    if float in kinds:
        return "a number"
    return f"one of {', '.join(value for each in kinds for value in get_args(each))}"


def time_of(value: str, name: str) -> float:
    """Return a time in seconds since the epoch.

    Args:
        value: seconds since the epoch, an ISO time, or an age such as `2h`.
        name: name of the parameter, for the error message.

    Raises:
        ConfigError: the value is no time.
    """
    try:
        return float(value)
    except ValueError:
        return parse_time(value, name)


def predicates(filters: Filters) -> list[Predicate]:
    """Return the conditions that an entry must meet, without the search for text."""
    tests: list[Predicate] = []
    for name, test in _EQUAL.items():
        value = getattr(filters, name)
        if value is not None:
            tests.append(partial(test, value))
    for name, read in _NUMBERS.items():
        low, high = getattr(filters, f"{name}_min"), getattr(filters, f"{name}_max")
        if low is not None or high is not None:
            tests.append(partial(_is_between, read, low, high))
    since, until = filters.since, filters.until
    if since is not None or until is not None:
        low = None if since is None else time_of(since, "since")
        high = None if until is None else time_of(until, "until")
        tests.append(partial(_is_within, low, high))
    return tests


def _is_between(
    read: Callable[[Entry], float | None], low: float | None, high: float | None, entry: Entry
) -> bool:
    value = read(entry)
    if value is None:
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def _is_within(low: float | None, high: float | None, entry: Entry) -> bool:
    value = entry.started
    return (low is None or value >= low) and (high is None or value < high)


def _agent_matches(pattern: str, entry: Entry) -> bool:
    facts = entry.facts
    return facts is not None and any(
        path == pattern or matches(pattern, path) for path, _ in facts.agents
    )


_EQUAL: Final[Mapping[str, Callable[[Any, Entry], bool]]] = {
    "step": lambda value, entry: entry.step == value,
    "mode": lambda value, entry: entry.summary.mode == value,
    "status": lambda value, entry: entry.summary.status == value,
    "outcome": lambda value, entry: entry.summary.outcome == value,
    "service": lambda value, entry: entry.summary.run_id == value,
    "task": lambda value, entry: entry.summary.task_id == value,
    "group": lambda value, entry: entry.group == value,
    "rated": lambda value, entry: entry.is_rated == (value == "yes"),
    "user": lambda value, entry: entry.facts is not None and entry.facts.user == value,
    "session": lambda value, entry: entry.facts is not None and entry.facts.session == value,
    "tag": lambda value, entry: entry.facts is not None and value in entry.facts.tags,
    "agent": _agent_matches,
}
_NUMBERS: Final[Mapping[str, Callable[[Entry], float | None]]] = {
    "step": lambda entry: entry.step,
    "reward": lambda entry: entry.reward,
    "tokens": lambda entry: None if entry.facts is None else entry.facts.tokens,
    "cost": lambda entry: None if entry.facts is None else entry.facts.cost,
    "seconds": lambda entry: entry.seconds,
}

_LAST: Final = float("inf")
SORT_KEYS: Final[Mapping[str, Callable[[Entry], tuple[float, ...]]]] = {
    "newest": lambda entry: (-entry.summary.position,),
    "oldest": lambda entry: (entry.summary.position,),
    "best": lambda entry: (_descending(entry.reward), -entry.summary.position),
    "worst": lambda entry: (_ascending(entry.reward), -entry.summary.position),
    "longest": lambda entry: (_descending(entry.seconds), -entry.summary.position),
    "tokens": lambda entry: (_descending(entry.tokens), -entry.summary.position),
    "cost": lambda entry: (_descending(entry.cost), -entry.summary.position),
}
"""Sort → key of an entry. Entries without a value are last."""


def _descending(value: float | None) -> float:
    return _LAST if value is None else -value


def _ascending(value: float | None) -> float:
    return _LAST if value is None else value

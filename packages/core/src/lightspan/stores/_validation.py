"""What is checked of arguments before a store looks at them: numbers that no store can keep or
count with would fail as if it were damaged, or hold whoever asks for ever."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lightspan.errors import DataError
from lightspan.schema.records import Report
from lightspan.schema.reward import LARGEST, usable
from lightspan.schema.validation import is_number

LARGEST_INTEGER: Final = 2**63 - 1
"""That a column of a database takes."""
MAX_S: Final = 1e9
"""Of a lease, and of a wait for a change: some thirty years."""


def check_integer(name: str, value: object, low: int = 0) -> None:
    """Raise `DataError` unless it is an integer from `low` on that every store can keep."""
    if not isinstance(value, int) or not low <= value <= LARGEST_INTEGER:
        raise DataError(
            f"{name}={value!r:.100} is no integer from {low} to {LARGEST_INTEGER} (2**63 - 1): "
            "give one"
        )


def check_lease(lease_s: float, longest_s: float = MAX_S) -> None:
    """Raise `DataError` unless a lease may take so many seconds."""
    _check_seconds("lease_s", lease_s, longest_s)


def check_timeout(timeout_s: float) -> None:
    """Raise `DataError` unless somebody may wait so many seconds for a change."""
    _check_seconds("timeout_s", timeout_s, MAX_S)


def check_pruning(older_than_s: float, limit: int) -> None:
    """Raise `DataError` unless so many rollouts of that age can be forgotten."""
    _check_seconds("older_than_s", older_than_s, MAX_S)
    check_integer("limit", limit, 1)


def check_rewards(reports: Iterable[Report]) -> None:
    """Raise `DataError` for a reward that `parse_reward` would not give: it is no number to learn
    from, and NaN, which differs from itself, never equals its own report asked again."""
    for report in reports:
        if report.reward is None:
            continue
        numbers = {"value": report.reward.value, **report.reward.dimensions}
        for name, number in numbers.items():
            if number is not None and usable(number) is None:
                raise DataError(
                    f"the reward of attempt {report.attempt_id!r:.100} has {name!r:.100} = "
                    f"{number!r}: give a finite number of at most {LARGEST:g} in size, or none "
                    "(lightspan.schema.reward.parse_reward)"
                )


def _check_seconds(name: str, value: float, longest_s: float) -> None:
    if not is_number(value) or not 0 <= value <= longest_s:
        raise DataError(f"{name}={value!r} must be a finite number from 0 to {longest_s:g} seconds")

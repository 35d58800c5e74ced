"""Validate the arguments of a store's methods.

Without these checks, a number that does not fit into a column would look like a damaged store, and
an infinite timeout would block the caller forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lightspan.errors import DataError
from lightspan.schema.records import Report
from lightspan.schema.reward import LARGEST, usable
from lightspan.schema.validation import MAX_S, is_number

LARGEST_INTEGER: Final = 2**63 - 1
"""Largest integer that a column of a database can hold."""


def check_integer(name: str, value: object, low: int = 0) -> None:
    """Raise `DataError` unless the value is an integer from `low` to `LARGEST_INTEGER`."""
    if not isinstance(value, int) or not low <= value <= LARGEST_INTEGER:
        raise DataError(
            f"{name}={value!r:.100} must be an integer from {low} to {LARGEST_INTEGER} (2**63 - 1)"
        )


def check_seconds(name: str, value: float) -> None:
    """Raise `DataError` unless the value is a finite duration of at most `MAX_S` seconds."""
    if not is_number(value) or not 0 <= value <= MAX_S:
        raise DataError(f"{name}={value!r} must be a finite number from 0 to {MAX_S:g} seconds")


def check_rewards(reports: Iterable[Report]) -> None:
    """Raise `DataError` for a reward that `parse_reward` cannot return, such as NaN.

    NaN differs from itself, so a repeated report with NaN would never equal the first report.
    """
    for report in reports:
        if report.reward is None:
            continue
        for name, number in {"value": report.reward.value, **report.reward.dimensions}.items():
            if number is not None and usable(number) is None:
                raise DataError(
                    f"the reward of attempt {report.attempt_id!r:.100} has {name!r:.100} = "
                    f"{number!r}: give a finite number of at most {LARGEST:g} in size, or None "
                    "(lightspan.schema.reward.parse_reward)"
                )

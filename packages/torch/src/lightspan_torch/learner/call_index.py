"""Calls: which call sampled each looked-at token, for losses that look at whole calls."""

from __future__ import annotations

from collections.abc import Sequence

from lightspan.errors import DataError
from lightspan.lightning.rows import Row


def number_calls(rows: Sequence[Row], looked: Sequence[Sequence[int]], setting: str) -> list[int]:
    """The number of the call of each looked-at token, row after row. Calls are numbered from 0, in
    order, and no two rows share a number: a call of theirs is another one.

    Args:
        looked: of each row, the places of its looked-at tokens, rising.
        setting: what needs it, for the error.

    Raises:
        DataError: a row does not say, or not rightly, where its calls' tokens are.
    """
    numbers: list[int] = []
    first = 0
    for row, places in zip(rows, looked, strict=True):
        numbers += [first + call for call in _calls(row, places, setting)]
        first += len(row.responses)
    return numbers


def _calls(row: Row, places: Sequence[int], setting: str) -> list[int]:
    """Of each of these places, which of the row's calls it is of."""
    owners = [-1] * len(row.ids)
    end = 0
    for number, (start, length) in enumerate(row.responses):
        if start < end or length < 1 or start + length > len(row.ids):
            raise DataError(
                f"a row of rollout {row.rollout_id} has {len(row.ids)} ids and a call of {length} "
                f"of them from place {start}: not within it, or another call's (Row.responses)"
            )
        end = start + length
        owners[start:end] = [number] * length
    found = [owners[place] for place in places]
    if -1 in found:
        raise DataError(
            f"a row of rollout {row.rollout_id} does not say which call sampled its token "
            f"{places[found.index(-1)]} (Row.responses), which {setting} has to know: build rows "
            "with lightspan.lightning.build_rows"
        )
    return found

"""Map selected tokens to the calls that sampled them, for losses over whole calls."""

from __future__ import annotations

from collections.abc import Sequence

from lightspan.errors import DataError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Loss, PolicyLoss


def call_setting(loss: Loss) -> str:
    """Return the setting, as text, by which the loss of a token depends on the whole call.

    Empty if there is no such setting.
    """
    if not isinstance(loss, PolicyLoss):
        return ""
    if loss.form == "gspo":
        return "form='gspo'"
    if loss.importance_mask is not None:
        return "importance_mask"
    return "importance_level='sequence'" if loss.importance_level == "sequence" else ""


def number_calls(rows: Sequence[Row], selected: Sequence[Sequence[int]], setting: str) -> list[int]:
    """Return the number of the call to which each selected token belongs, row by row.

    Calls are numbered from 0 across all rows.

    Args:
        rows: the rows.
        selected: for each row, the ascending positions of its selected tokens.
        setting: the loss setting that needs whole calls, for the error message.

    Raises:
        DataError: a row's `responses` are invalid, or a selected token is in none of them.
    """
    numbers: list[int] = []
    first = 0
    for row, places in zip(rows, selected, strict=True):
        numbers += [first + call for call in _calls(row, places, setting)]
        first += len(row.responses)
    return numbers


def _calls(row: Row, places: Sequence[int], setting: str) -> list[int]:
    """Return, for each position in `places`, the index of the call in the row that contains it.

    Raises:
        DataError: `row.responses` are invalid, or a position is in none of them.
    """
    owners = [-1] * len(row.ids)
    end = 0
    for number, (start, length) in enumerate(row.responses):
        if start < end or length < 1 or start + length > len(row.ids):
            raise DataError(
                f"a row of rollout {row.rollout_id} has {len(row.ids)} ids and a call of {length} "
                f"of them from place {start}: outside the row, or overlapping another call "
                "(Row.responses)"
            )
        end = start + length
        owners[start:end] = [number] * length
    calls = [owners[place] for place in places]
    if -1 in calls:
        raise DataError(
            f"a row of rollout {row.rollout_id} has no call for its token "
            f"{places[calls.index(-1)]} (Row.responses), which {setting} needs: build rows with "
            "lightspan.lightning.build_rows"
        )
    return calls

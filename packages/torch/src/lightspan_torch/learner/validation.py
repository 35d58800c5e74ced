"""Validate a learner's rows and options, and order its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from lightspan.errors import ConfigError, DataError
from lightspan.lightning.rows import Row
from lightspan.protocols.learner import Loss, PolicyLoss

_CONTENTS: Final = attrgetter(
    *("ids", "rollout_id", "call_ids", "logprobs"),
    *("advantages", "weights", "constraints", "responses"),
)


def ordered(rows: Sequence[Row], indices: Iterable[int]) -> list[int]:
    """Sort indices of rows by the contents of the rows.

    Float sums depend on the order of their terms. Sorting makes results independent of the order of
    `rows`.
    """

    def contents(index: int) -> tuple[Any, ...]:
        row = rows[index]
        return *_CONTENTS(row), [image.key for image in row.images]

    return sorted(indices, key=contents)


def check_names(option: str, by_policy: Mapping[str, Any], models: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if an option has a key that is no policy of `models`.

    Args:
        option: name of the option, for the error message.
        by_policy: the option's value: policy → setting.
        models: policy → model.
    """
    unknown = sorted(set(by_policy) - set(models))
    if unknown:
        raise ConfigError(
            f"{option}= names unknown policies: {unknown}; there are {sorted(models)}"
        )


def check_loss(loss: Loss, old_logprobs: Sequence[Sequence[float]] | None) -> None:
    """Raise `ConfigError` if a loss needs `old_logprobs` but they are None."""
    if isinstance(loss, PolicyLoss) and loss.needs_old_logprobs and old_logprobs is None:
        name = "importance_mask" if loss.importance_cap is None else "importance_cap"
        raise ConfigError(
            f"{name}={getattr(loss, name)} needs the learner's scores before the update: "
            f"give old_logprobs, or {name}=None"
        )


def check_rows(rows: Iterable[Row], *, trained: bool) -> None:
    """Raise `DataError` if a row is invalid.

    Args:
        rows: the rows.
        trained: whether the rows are to be trained. Then a row whose first token is trained is
            invalid too, because nothing predicts that token.
    """
    for row in rows:
        size = len(row.ids)
        fields = ("mask", "advantages", "weights", "logprobs", "versions", "temperatures")
        for name in fields:
            if len(getattr(row, name)) != size:
                raise DataError(
                    f"a row of rollout {row.rollout_id} has {size} ids but "
                    f"{len(getattr(row, name))} {name}"
                )
        if size == 0:
            raise DataError(f"a row of rollout {row.rollout_id} has no tokens")
        if trained and row.mask[0]:
            raise DataError(f"the first token of a row of rollout {row.rollout_id} is masked True")
        if min(row.temperatures) <= 0:
            raise DataError(
                f"a row of rollout {row.rollout_id} has temperature {min(row.temperatures)}: "
                "greedily decoded tokens have no log-probabilities to train on"
            )
        _check_constraints(row)


def _check_constraints(row: Row) -> None:
    """Raise `DataError` if constraints of a row are out of order, overlap or end outside the row.

    A constraint is the grammar under which a range of tokens was sampled. It cannot include the
    first token of a row.
    """
    end = 1
    for constraint in row.constraints:
        start, count = constraint.start, constraint.length
        if start < end or count < 1 or start + count > len(row.ids):
            raise DataError(
                f"a row of rollout {row.rollout_id} has {len(row.ids)} ids and a grammar for "
                f"{count} of them from place {start}: outside the row, or overlapping another"
            )
        end = start + count

"""Masks: which tokens of the vocabulary those under a grammar were chosen from.

A call's grammar is replayed over its ids, which gives each token a mask. Masks stay packed, a bit
per token of the vocabulary, and each distinct one is held once: 200 calls of 33,000 tokens had 40.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightspan.errors import DataError, UnsupportedError
from lightspan.lightning.rows import Constraint, Row
from lightspan.schema.token_records import pack_ids
from lightspan_torch.engine.grammars import GrammarMismatchError, Grammars

REMEMBERED: Final = 2**28
"""Bytes of replayed calls and their masks that a policy keeps: those of a batch, by far."""


class Replays:
    """The calls of one policy under their grammars, each replayed once.

    Args:
        make_grammars: of the policy; called when the first call is replayed.
    """

    def __init__(self, make_grammars: Callable[[], Grammars]) -> None:
        self._make_grammars = make_grammars
        self._grammars: Grammars | None = None
        self._calls: dict[tuple[str, bytes], list[bytes]] = {}
        """(grammar, packed ids) → the masks of its tokens."""
        self._distinct: dict[bytes, bytes] = {}
        """Each mask → the one object that is kept of it."""
        self._bytes = 0

    def masks(self, grammar: str, ids: Sequence[int]) -> list[bytes]:
        """What each token was chosen from, packed: the lowest id first, set where allowed.

        Raises:
            DataError: the tokens do not follow the grammar, or it cannot be compiled here.
            ConfigError: the policy has no tokenizer.
        """
        try:
            key = grammar, pack_ids(ids)
            if key not in self._calls:
                self._remember(key, ids)
            return self._calls[key]
        # an id below 0, as only a damaged record has it, overflows
        except (GrammarMismatchError, UnsupportedError, OverflowError) as error:
            raise DataError(str(error)) from error

    def _remember(self, key: tuple[str, bytes], ids: Sequence[int]) -> None:
        if self._grammars is None:
            self._grammars = self._make_grammars()
        masks = [mask.tobytes() for mask in self._grammars.masks(key[0], ids)]
        if self._bytes > REMEMBERED:
            self._calls.clear()
            self._distinct.clear()
            self._bytes = 0
        before = len(self._distinct)
        self._calls[key] = [self._distinct.setdefault(mask, mask) for mask in masks]
        new = len(self._distinct) - before
        self._bytes += new * 4 * self._grammars.words + 8 * len(masks) + len(key[1])


class MaskTable(NamedTuple):
    """The masks of N tokens, M of them distinct."""

    distinct: Tensor
    """[M, bytes] packed as `Replays.masks` gives them; the first allows every token."""
    which: Tensor
    """[N] the token's mask."""


def mask_table(
    rows: Sequence[Row],
    looked: Sequence[Sequence[int]],
    replays: Replays,
    device: torch.device,
) -> MaskTable:
    """The masks of these places of the rows.

    Raises:
        DataError: tokens do not follow their grammar.
    """
    numbers: dict[bytes, int] = {}
    which: list[int] = []
    for row, places in zip(rows, looked, strict=True):
        of_row = [0] * len(row.ids)
        for constraint in row.constraints:
            masks = _replayed(row, constraint, replays)
            of_row[constraint.start : constraint.start + constraint.length] = [
                numbers.setdefault(mask, len(numbers) + 1) for mask in masks
            ]
        which += [of_row[place] for place in places]
    size = max(map(len, numbers), default=1)
    table = np.full((len(numbers) + 1, size), 255, np.uint8)
    for mask, number in numbers.items():
        table[number] = np.frombuffer(mask, np.uint8)
    return MaskTable(
        torch.from_numpy(table).to(device), torch.tensor(which, dtype=torch.int64, device=device)
    )


def forbidden(packed: Tensor, vocabulary: int) -> Tensor:
    """[n, vocabulary] of [n, bytes]: True where a token is not allowed."""
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=packed.device)
    return (packed[:, :, None].bitwise_and(bits) == 0).flatten(1)[:, :vocabulary]


def _replayed(row: Row, constraint: Constraint, replays: Replays) -> list[bytes]:
    start, end = constraint.start, constraint.start + constraint.length
    try:
        return replays.masks(constraint.grammar, row.ids[start:end])
    except DataError as error:
        calls = ", ".join(f"{call_id}/{choice}" for call_id, choice in row.call_ids)
        raise DataError(
            f"a row of rollout {row.rollout_id} (call {calls or 'unknown'}): its tokens {start} to "
            f"{end - 1} do not follow their grammar: {error}"
        ) from error

"""Grammar masks: which tokens of the vocabulary the grammar allowed at each sampled token.

They are computed again from a call's grammar and its token ids. A mask has one bit for each token
of the vocabulary. Equal masks are stored once, which saves memory: 200 calls with 33,000 tokens had
40 distinct masks.
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

MAX_CACHE_BYTES: Final = 2**28
"""When the cached masks of a policy exceed this many bytes, the cache is emptied. The calls of a
batch need much less."""


class Replays:
    """Computes the grammar masks of one policy's calls from their tokens, and caches them.

    Args:
        make_grammars: returns the policy's grammars; called when they are first needed.
    """

    def __init__(self, make_grammars: Callable[[], Grammars]) -> None:
        self._make_grammars = make_grammars
        self._grammars: Grammars | None = None
        self._calls: dict[tuple[str, bytes], list[bytes]] = {}
        """(grammar, packed ids) → the mask at each id."""
        self._distinct: dict[bytes, bytes] = {}
        """Mask → the same mask as an object that all equal masks share."""
        self._bytes = 0

    def masks(self, grammar: str, ids: Sequence[int]) -> list[bytes]:
        """Return the mask of allowed tokens at each token of a call.

        A mask has one bit for each token of the vocabulary, which is set if the token is allowed.
        The lowest bit of the first byte is token 0.

        Args:
            grammar: grammar of the call.
            ids: the sampled tokens of the call.

        Raises:
            DataError: the tokens do not follow the grammar, or the grammar cannot be compiled.
            ConfigError: the policy has no tokenizer.
        """
        try:
            key = grammar, pack_ids(ids)
            if key not in self._calls:
                self._add(key, ids)
            return self._calls[key]
        # an id below 0, in a damaged record, overflows
        except (GrammarMismatchError, UnsupportedError, OverflowError) as error:
            raise DataError(str(error)) from error

    def _add(self, key: tuple[str, bytes], ids: Sequence[int]) -> None:
        if self._grammars is None:
            self._grammars = self._make_grammars()
        masks = [mask.tobytes() for mask in self._grammars.masks(key[0], ids)]
        if self._bytes > MAX_CACHE_BYTES:
            self._calls.clear()
            self._distinct.clear()
            self._bytes = 0
        before = len(self._distinct)
        self._calls[key] = [self._distinct.setdefault(mask, mask) for mask in masks]
        new = len(self._distinct) - before
        self._bytes += new * 4 * self._grammars.words + 8 * len(masks) + len(key[1])


class MaskTable(NamedTuple):
    """The grammar masks of N tokens. Each of the M distinct masks is stored once."""

    distinct: Tensor
    """[M, bytes] masks, packed as by `Replays.masks`. The first mask allows every token."""
    which: Tensor
    """[N] index of the token's mask in `distinct`."""


def mask_table(
    rows: Sequence[Row],
    selected: Sequence[Sequence[int]],
    replays: Replays,
    device: torch.device,
) -> MaskTable:
    """Return the masks of the selected tokens, row by row.

    A token that was sampled without a grammar gets the mask that allows every token.

    Args:
        rows: the rows.
        selected: for each row, the positions of its selected tokens.
        replays: cache of the masks of the policy's calls.
        device: device of the tensors.

    Raises:
        DataError: tokens do not follow their grammar.
    """
    numbers: dict[bytes, int] = {}
    which: list[int] = []
    for row, places in zip(rows, selected, strict=True):
        row_numbers = [0] * len(row.ids)
        for constraint in row.constraints:
            masks = _replayed(row, constraint, replays)
            row_numbers[constraint.start : constraint.start + constraint.length] = [
                numbers.setdefault(mask, len(numbers) + 1) for mask in masks
            ]
        which += [row_numbers[place] for place in places]
    size = max(map(len, numbers), default=1)
    table = np.full((len(numbers) + 1, size), 255, np.uint8)
    for mask, number in numbers.items():
        table[number] = np.frombuffer(mask, np.uint8)
    return MaskTable(
        torch.from_numpy(table).to(device), torch.tensor(which, dtype=torch.int64, device=device)
    )


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

"""How models take the positions of tokens, as far as their code differs.

Rotary embeddings of the kinds `longrope` (Phi-3) and `dynamic` scale all positions by the largest
one of the batch. Sequences that are computed together would then change each other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FIRST = 4
"""Number of tokens whose logits are compared."""


def takes_cache_position(model: Any) -> bool:
    """Return whether a model's forward pass has the argument `cache_position`.

    With the first versions of transformers 5, some models (Ministral 3) scale their queries by it,
    and count from 0 if they get none.
    """
    return _has_cache_position(type(model).forward)


@functools.cache
def _has_cache_position(forward: Callable[..., Any]) -> bool:
    return "cache_position" in inspect.signature(forward).parameters


@torch.no_grad()
def exact_length(model: Any, length: int) -> int:
    """Return the largest length, at most `length`, that does not change the logits of first tokens.

    Args:
        model: the model, with transformers' own attention.
        length: maximum number of tokens of a sequence.
    """
    if length <= _FIRST + 1 or not _changes(model, length):
        return length
    low, high = _FIRST + 1, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _changes(model, middle) else (middle, high)
    _first_logits(model, low)  # the buffers are those of short sequences again
    return low


def _changes(model: Any, length: int) -> bool:
    """Return whether a sequence of `length` tokens computes its first tokens otherwise."""
    near, before = _first_logits(model, _FIRST + 1)
    far, after = _first_logits(model, length)
    # rounding of 16 bits hides the change of the logits, but not that of the frequencies
    if any(not torch.equal(before[name], after[name]) for name in before):
        return True
    tolerance = 1e-5 if model.dtype == torch.float32 else 0.02
    return not bool(torch.dist(near, far) <= tolerance * near.norm())


def _first_logits(model: Any, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a few tokens, the last of which has the position `length` - 1.

    Returns:
        The logits of all but the last, and copies of the model's frequencies of positions.
    """
    ids = torch.arange(1, _FIRST + 2, device=model.device)[None]
    positions = torch.tensor([[*range(_FIRST), length - 1]], device=model.device)
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    frequencies = {
        name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name
    }
    return logits[0, :_FIRST].float(), frequencies

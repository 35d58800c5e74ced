"""The learner's memory: what its weights are kept in, and what to lower when it runs out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from lightspan.engines.memory import explained
from lightspan.learners import LoRA
from lightspan.lightning.rows import Row


def default_dtype(device: str | torch.device, lora: LoRA | None) -> torch.dtype:
    """Of the learner's weights, unless it is given.

    float32, so that steps of 1e-6 are not rounded away: bfloat16 has eight bits of precision. Under
    adapters on a GPU the weights do not move, so they are bfloat16 there; the adapters stay float32
    (PEFT keeps them so). Not yet run on a GPU.
    """
    if lora is not None and torch.device(device).type == "cuda":
        return torch.bfloat16
    return torch.float32


def room(
    doing: str, rows: Sequence[Row], *, device: torch.device, token_budget: int, full: bool
) -> AbstractContextManager[None]:
    """Answer an out-of-memory error with the settings to lower.

    Args:
        doing: "updating" or "scoring".
        rows: what is computed.
        token_budget: of the learner.
        full: whether full weights are trained.

    Raises:
        OutOfMemoryError: in place of torch's.
    """
    longest = max((len(row.ids) for row in rows), default=0)
    return explained(
        f"the learner, {doing} on {device} with rows of up to {longest:,} tokens,",
        lambda: _advice(token_budget, longest, full),
    )


def _advice(token_budget: int, longest: int, full: bool) -> str:
    """What to lower, and in which order it helps."""
    first = (
        f'Lower token_budget, now {token_budget}: learner_options={{"token_budget": '
        f"{max(1, token_budget // 2)}}}"
    )
    if longest >= token_budget:
        first += (
            f" (a single row may exceed it: the longest has {longest:,} tokens; "
            f"LightningRL(max_length={max(1, longest // 2)}) leaves such calls out)"
        )
    rest = ["a shorter max_tokens or max_length"]
    if full:
        rest.append("adapters instead of full weights (lora=LoRA())")
    rest.append('a smaller key-value cache (engine_options={"num_blocks": …})')
    return f"{first}. If that is not enough: {', '.join(rest)}, or a smaller model"


__all__ = ["default_dtype", "room"]

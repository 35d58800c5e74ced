"""Number of tokens in one forward pass, and advice when memory runs out."""

from __future__ import annotations

from typing import Final

import torch

TOKEN_BUDGETS: Final = {"cpu": 2048, "cuda": 4096}
"""Device type → maximum number of tokens in one forward pass. A CPU is fastest while a pass fits
into its cache. A GPU is limited by activations: about 5 GiB per 1,000 tokens for 1.5 B parameters.
Not yet run on a GPU."""


def default_token_budget(device: str) -> int:
    """Return the default maximum number of tokens in one forward pass, padding included."""
    return TOKEN_BUDGETS.get(torch.device(device).type, 16_384)


def advice(token_budget: int, longest: int, full: bool) -> str:
    """Return advice on which settings to lower when memory runs out, the most effective first.

    Args:
        token_budget: maximum number of tokens in one forward pass, padding included.
        longest: number of tokens of the longest row.
        full: whether full weights are trained, not LoRA adapters.
    """
    first = (
        f"Lower token_budget, now {token_budget}: "
        f"learner=Torch(token_budget={max(1, token_budget // 2)})"
    )
    if longest >= token_budget:
        first += (
            f" (a single row may exceed it: the longest has {longest:,} tokens; "
            f"LightningRL(max_length={max(1, longest // 2)}) leaves such calls out)"
        )
    rest = ["a shorter max_tokens or max_length"]
    if full:
        rest.append("adapters instead of full weights (lora=LoRA())")
    rest.append("a smaller key-value cache (engine=Transformers(num_blocks=…))")
    return f"{first}. If that is not enough: {', '.join(rest)}, or a smaller model"

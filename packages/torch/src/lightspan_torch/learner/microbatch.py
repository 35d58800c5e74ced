"""Number of tokens in one forward pass, and advice when memory runs out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

TOKEN_BUDGETS: Final = {"cpu": 2048, "cuda": 4096}
"""Device type → maximum number of tokens in one forward pass. A CPU is fastest while a pass fits
into its cache. A GPU is limited by activations: about 5 GiB per 1,000 tokens for 1.5 B parameters.
Not yet run on a GPU."""
MIN_CPU_BUDGET: Final = 256
"""Minimum of the default on a CPU, where smaller passes cost more time."""
CPU_ACTIVATIONS: Final = 2**29
"""Maximum bytes of a pass's activations on a CPU, by `activation_bytes`; measured by
`benchmarks/learner_memory.py`."""


def default_token_budget(device: str, models: Iterable[Any] = ()) -> int:
    """Return the default maximum number of tokens in one forward pass, padding included.

    Args:
        device: the learner's device.
        models: transformers models that are trained; on a CPU, large ones get fewer tokens.
    """
    most = TOKEN_BUDGETS.get(torch.device(device).type, 16_384)
    sizes = [activation_bytes(model.config) for model in models]
    if torch.device(device).type != "cpu" or not sizes:
        return most
    return max(MIN_CPU_BUDGET, min(most, CPU_ACTIVATIONS // max(sizes) // 64 * 64))


def activation_bytes(config: Any) -> int:
    """Estimate the bytes that a token needs until the backward pass, in float32.

    The factors are those of a model with a gated MLP and LoRA on all layers.

    Args:
        config: configuration of a transformers model.
    """
    text = config.get_text_config()
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    return int(4 * text.num_hidden_layers * (12 * hidden + 7 * inner))


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

"""An estimate of what a learner holds, from its parameters alone."""

from __future__ import annotations

from typing import Final

FLOAT32_BYTES: Final = 4
OPTIMIZER_STATES: Final = 2
"""Numbers that AdamW keeps for each trained parameter; Muon keeps fewer."""


def training_memory(
    parameters: int, lora: int, *, weight_bytes: int, reference: bool
) -> dict[str, int]:
    """Return part → bytes, without activations and logits.

    Args:
        parameters: of the model.
        lora: parameters of LoRA beside them, in float32; 0: the model's own are trained.
        weight_bytes: of a parameter of the model.
        reference: whether the starting weights are kept for a KL term. Under LoRA they are there.
    """
    weights = parameters * weight_bytes
    trained = lora * FLOAT32_BYTES or weights
    parts = {
        "learner weights": weights + lora * FLOAT32_BYTES,
        "gradients": trained,
        "optimiser states": OPTIMIZER_STATES * trained,
    }
    if reference and not lora:
        parts["reference copy"] = weights
    return parts

"""Estimate a learner's memory from its number of parameters."""

from __future__ import annotations

from typing import Final

FLOAT32_BYTES: Final = 4
OPTIMIZER_STATES: Final = 2
"""Number of values that AdamW stores per trained parameter; Muon stores fewer."""


def training_memory(
    parameters: int, lora: int, *, weight_bytes: int, reference: bool
) -> dict[str, int]:
    """Estimate a learner's memory, without activations and logits: name of a part → bytes.

    Args:
        parameters: number of parameters of the model.
        lora: number of LoRA parameters (float32); 0 if the model's own parameters are trained.
        weight_bytes: bytes of a parameter of the model.
        reference: whether the loss has a KL term, which needs the initial weights. Without LoRA,
            they are a copy in memory. With LoRA, they are the frozen weights.
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

"""The model with the size of a pretrained one, on which `engine.py` and `step.py` measure."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def pretrained_shape() -> Any:
    """Return a model with random weights and the layers of SmolLM2-135M."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2_048,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()

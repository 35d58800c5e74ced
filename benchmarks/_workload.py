"""The model that engine and step are measured on at the size of a pretrained one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def pretrained_shape() -> Any:
    """A random model with the layers of SmolLM2-135M."""
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

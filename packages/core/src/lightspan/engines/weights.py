"""Weights as they are: what two names share, and their hash."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def without_aliases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights once, under their first name."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept


def hash_weights(state: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values; tied weights count once."""
    digest = hashlib.sha256()
    for name, tensor in sorted(without_aliases(state).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(octets.numpy().tobytes())
    return digest.hexdigest()

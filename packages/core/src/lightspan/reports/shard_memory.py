"""What verl's ranks take: each has its shard of everything, and whole only what it computes with.

With R ranks, P parameters of a policy, of which T are trained, and w bytes per number of a pass:

| part of each rank | bytes |
|---|---|
| shards | 4 · P / R per policy (LoRA: and 4 · T / R); 8 · T / R for the optimiser |
| starting weights (KL, without LoRA) | 4 · P / R |
| gradients | 4 · T / R, while updating |
| gathered | w · two layers, embeddings and head; of what is trained 4 bytes more, for gradients |
| activations | tokens of a pass · what autograd keeps of a token · w (checkpointing: one layer's) |
| logits | tokens · vocabulary · 2 w; trained positions · vocabulary · 4 · 4 |
| process | `PROCESS`, in the host's memory |

Beside them, in the host's memory: the whole model while it is loaded, on each rank where embeddings
are tied, else on the first; shards that are offloaded, between passes; while publishing the whole
weights of a policy on the first rank, where they are handed over, and in the trainer; with Ray the
process that drives the ranks, and a cluster of its own. The tests compare two ranks on a CPU with
this; what it says of a GPU is not yet run on one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightspan.learners.verl.description import Verl
from lightspan.reports.forecast import (
    FLOAT32,
    LOGIT_COPIES,
    MemoryPart,
    ModelShape,
    PolicySize,
    kept_per_token,
    on_device,
)

PROCESS: Final = 800_000_000
"""Of a rank that has next to no model: verl 0.9.1, torch 2.13 on a CPU, as measured."""
STEWARD: Final = 500_000_000
"""Of the process that drives ranks in Ray."""
CLUSTER: Final = 450_000_000
"""Of a Ray cluster without a dashboard, its workers apart."""
_STATES: Final = 2
"""Numbers that AdamW keeps for each that is trained."""
_GATHERED: Final = 2
"""Layers that are whole at once: the one that computes, and the next."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What the memory of verl's ranks depends on."""

    description: Verl
    policies: Mapping[str, PolicySize]
    devices: Sequence[str]
    """Of each rank."""
    tokens: int
    """Of one pass of a rank, at most."""
    trained_share: float
    kl: bool = False
    beside: frozenset[str] = frozenset()
    """Policies that the engine takes as LoRA."""

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"

    @property
    def width(self) -> int:
        """Bytes of a number in a pass."""
        dtype = self.description.dtype or ("bfloat16" if self.on_gpu else "float32")
        return FLOAT32 if dtype == "float32" else 2


def shard_memory(sharding: Sharding) -> list[MemoryPart]:
    """The parts of the module's table."""
    parts = []
    for rank, device in enumerate(sharding.devices):
        parts.append(_host(f"rank {rank}: process", PROCESS))
        parts += on_device(device, _of_rank(sharding, rank))
        parts += _offloaded(sharding, rank)
        parts += _loading(sharding, rank)
    if sharding.description.ray:
        parts.append(_host("Ray: the process that drives the ranks", STEWARD))
    if sharding.description.ray is True:
        parts.append(_host("Ray: its cluster", CLUSTER))
    size = max(_published(sharding, name) for name in sharding.policies)
    notes = {
        "rank 0: whole weights": "put together to be published",
        "handed over": "in /dev/shm, or the temporary folder",
        "publishing": "one copy of the weights on its way to the engine",
    }
    return parts + [_host(name, size, note=note, publishing=True) for name, note in notes.items()]


def _host(name: str, size: int, *, note: str = "", publishing: bool = False) -> MemoryPart:
    when = "publishing" if publishing else "always"
    return MemoryPart(name=name, bytes=size, place="host", when=when, note=note)  # type: ignore[arg-type]


def _of_rank(sharding: Sharding, rank: int) -> list[MemoryPart]:
    sizes = list(sharding.policies.values())
    weights = sum(_weights(sharding, size) for size in sizes)
    optimizer = sum(_share(sharding, _STATES * FLOAT32 * size.trained) for size in sizes)
    gradients = sum(_share(sharding, FLOAT32 * size.trained) for size in sizes)
    held = weights + optimizer
    away = sum(_offload(sharding)) if sharding.on_gpu else 0
    passes = gradients + _gathered(sharding) + _activations(sharding) + _logits(sharding)
    return [
        MemoryPart(
            name=f"rank {rank}: shards",
            bytes=held - away,
            place="device",
            note=f"weights and optimiser, 1/{sharding.ranks} of each",
        ),
        MemoryPart(
            name=f"rank {rank}: passes",
            bytes=passes + away,
            place="device",
            when="updating",
            note=f"gradients, whole layers, activations of {sharding.tokens:,} tokens",
        ),
    ]


def _offload(sharding: Sharding) -> tuple[int, int]:
    """Bytes of a rank's weights, and of its optimiser, that are away between passes."""
    sizes = list(sharding.policies.values())
    weights = sum(_weights(sharding, size) for size in sizes)
    optimizer = sum(_share(sharding, _STATES * FLOAT32 * size.trained) for size in sizes)
    chosen = sharding.description
    return (weights if chosen.param_offload else 0, optimizer if chosen.optimizer_offload else 0)


def _offloaded(sharding: Sharding, rank: int) -> list[MemoryPart]:
    size = sum(_offload(sharding)) if sharding.on_gpu else 0
    return [_host(f"rank {rank}: offloaded", size, note="between passes")] if size else []


def _loading(sharding: Sharding, rank: int) -> list[MemoryPart]:
    """The whole of a model, as it is read, of the policy that has the largest."""
    shapes = [size.shape for size in sharding.policies.values() if size.shape.tied or rank == 0]
    size = max((FLOAT32 * shape.parameters for shape in shapes), default=0)
    name = f"rank {rank}: loading"
    note = "the whole model, before it is sharded"
    part = MemoryPart(name=name, bytes=size, place="host", when="loading", note=note)
    return [part] if size else []


def _share(sharding: Sharding, size: int) -> int:
    return math.ceil(size / sharding.ranks)


def _weights(sharding: Sharding, size: PolicySize) -> int:
    """Bytes of a rank's shard of a policy: each has its own model, in float32."""
    whole = FLOAT32 * size.shape.parameters
    if size.lora is not None:
        return _share(sharding, whole + FLOAT32 * size.trained)
    return _share(sharding, 2 * whole if sharding.kl else whole)


def _outside(shape: ModelShape) -> int:
    """Parameters of embeddings and head."""
    return shape.vocabulary * shape.hidden * (1 if shape.tied else 2)


def _gathered(sharding: Sharding) -> int:
    """Bytes of what is whole at once, of the policy that has most of it."""
    found = []
    for size in sharding.policies.values():
        outside = _outside(size.shape)
        layer = max(0, size.shape.parameters - outside) // size.shape.layers
        weights = sharding.width * (outside + _GATHERED * layer)
        gradients = FLOAT32 * (outside + layer) if size.lora is None else 0
        found.append(weights + gradients)
    return max(found)


def _activations(sharding: Sharding) -> int:
    kept = []
    for size in sharding.policies.values():
        shape = size.shape
        if sharding.description.gradient_checkpointing:
            within = kept_per_token(shape) // shape.layers
            kept.append(shape.layers * shape.hidden + within)
        else:
            kept.append(kept_per_token(shape))
    return sharding.tokens * max(kept) * sharding.width


def _logits(sharding: Sharding) -> int:
    vocabulary = max(size.shape.vocabulary for size in sharding.policies.values())
    positions = math.ceil(sharding.tokens * min(1.0, sharding.trained_share))
    whole = 2 * sharding.width * sharding.tokens
    return vocabulary * (whole + positions * FLOAT32 * LOGIT_COPIES)


def _published(sharding: Sharding, policy: str) -> int:
    size = sharding.policies[policy]
    return FLOAT32 * (size.trained if policy in sharding.beside else size.shape.parameters)

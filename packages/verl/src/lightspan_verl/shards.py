"""One rank's part of a policy's checkpoint, as a safetensors file.

A tensor is divided along its first dimension. Each file stores which part of each tensor it has. So
a checkpoint can be read by another number of ranks than wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightspan.errors import CheckpointError


class Shard(NamedTuple):
    """One rank's part of a tensor."""

    local: Tensor
    start: int
    """Index in the whole tensor's first dimension at which the part begins."""
    size: int
    """Size of the whole tensor's first dimension; -1 for a tensor that every rank has as a
    whole."""


def shard_of(tensor: Any, rank: int, ranks: int) -> Shard:
    """Return one rank's part of a tensor.

    FSDP2 splits the first dimension into parts of ceil(size / ranks).

    Args:
        tensor: an FSDP2 tensor, or a plain tensor that every rank has as a whole.
        rank: number of this rank, from 0.
        ranks: number of ranks.
    """
    if not hasattr(tensor, "to_local"):
        return Shard(tensor, 0, -1)
    size = tensor.shape[0]
    step = -(-size // ranks)
    return Shard(tensor.to_local(), min(rank * step, size), size)


def write(path: Path, shards: Mapping[str, Shard]) -> None:
    """Write the shards of one rank into a file."""
    from safetensors.torch import save_file

    tensors = {name: shard.local.detach().cpu().contiguous() for name, shard in shards.items()}
    places = {name: [shard.start, shard.size] for name, shard in shards.items()}
    save_file(tensors, path, metadata={"places": json.dumps(places)})


class SavedShards:
    """The files of one policy in a checkpoint, each written by one rank.

    Args:
        folder: the checkpoint's folder.
        number: number of the policy in the checkpoint.

    Raises:
        CheckpointError: the checkpoint lacks the policy or cannot be read.
    """

    def __init__(self, folder: Path, number: int) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        paths = sorted(folder.glob(f"policy-{number}-rank-*.safetensors"))
        if not paths:
            raise CheckpointError(f"the checkpoint {folder} has no weights of policy {number}")
        try:
            self._files: list[Any] = [safe_open(str(path), framework="pt") for path in paths]
            self._places = [json.loads(file.metadata()["places"]) for file in self._files]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {folder}: {error}; delete it, and training resumes "
                "from the one before it"
            ) from error

    @property
    def names(self) -> set[str]:
        """Names of all tensors of the policy."""
        return set(self._places[0])

    @torch.no_grad()
    def read(self, name: str, into: Shard) -> None:
        """Read a rank's part of a tensor from the checkpoint.

        Args:
            name: name of the tensor.
            into: the part, which is filled.

        Raises:
            CheckpointError: the tensor or a part of it is missing, or it has another size.
        """
        if into.size < 0:
            self._check(name, self._places[0], into)
            into.local.copy_(self._files[0].get_tensor(name))
            return
        count = 0
        for part, start in self._parts(name, into):
            into.local[start : start + len(part)].copy_(part)
            count += len(part)
        if count != into.local.shape[0]:
            raise CheckpointError(
                f"the checkpoint {self._folder} has {count} of {into.local.shape[0]} places of "
                f"{name}: files of it are missing"
            )

    def _parts(self, name: str, into: Shard) -> Iterator[tuple[Tensor, int]]:
        """Yield each piece of `into` that one of the files contains, and its offset in `into`."""
        for file, places in zip(self._files, self._places, strict=True):
            self._check(name, places, into)
            first = places[name][0]
            stored = file.get_slice(name)
            low = max(first, into.start)
            high = min(first + stored.get_shape()[0], into.start + into.local.shape[0])
            if low < high:
                yield stored[low - first : high - first], low - into.start

    def _check(self, name: str, places: Mapping[str, list[int]], into: Shard) -> None:
        if name not in places or places[name][1] != into.size:
            here = f"{places[name][1]} places" if name in places else "nothing"
            raise CheckpointError(
                f"the checkpoint {self._folder} belongs to another model: it has {here} of {name}"
            )

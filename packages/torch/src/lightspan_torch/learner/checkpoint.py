"""A learner's checkpoint folder: tensor files, and a manifest of policies and settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from lightspan.errors import CheckpointError

FORMAT: Final = 1
"""Version of the checkpoint's layout."""


def check_manifest(folder: Path, manifest: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a checkpoint has other policies or settings than the learner.

    Args:
        folder: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        own: the learner's manifest.
    """
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {manifest.get('format')}; this version of "
            f"lightspan reads format {FORMAT}"
        )

    def check(what: str, theirs: Any, ours: Any) -> None:
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint {folder} has the {what} {theirs}; this run has {ours}"
            )

    check("policies", sorted(manifest["policies"]), sorted(own["policies"]))
    check("optimizer", manifest["optimizer"]["name"], own["optimizer"]["name"])
    if "critic" not in own and "critic" in manifest:
        raise CheckpointError(
            f"the checkpoint {folder} has a critic; this run has none: give critic=Critic()"
        )
    for policy, entry in manifest["policies"].items():
        check(f"LoRA settings of policy {policy}", entry["lora"], own["policies"][policy]["lora"])
        if entry["frozen"] != own["policies"][policy]["frozen"]:
            raise CheckpointError(
                f"the adapters in {folder} were trained on other weights of policy {policy} "
                "than this run starts from"
            )


def compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached contiguous tensors, as safetensors requires."""
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint's file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; delete its checkpoint, and training resumes from the "
            "one before it"
        ) from error

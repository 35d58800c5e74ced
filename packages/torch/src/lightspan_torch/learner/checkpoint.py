"""A learner's checkpoint in its folder: tensors, and the manifest that says whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from lightspan.errors import CheckpointError

FORMAT: Final = 1
"""Version of the checkpoint's layout."""


def check_manifest(folder: Path, manifest: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for a checkpoint of other policies or settings.

    Args:
        manifest: the checkpoint's.
        own: the learner's.
    """
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} has format {manifest.get('format')}; this version of "
            f"lightspan reads {FORMAT}"
        )
    if set(manifest["policies"]) != set(own["policies"]):
        raise CheckpointError(
            f"the checkpoint {folder} has the policies {sorted(manifest['policies'])}; this "
            f"run has {sorted(own['policies'])}"
        )
    if manifest["optimizer"]["name"] != own["optimizer"]["name"]:
        raise CheckpointError(
            f"the checkpoint {folder} was made by optimizer "
            f"{manifest['optimizer']['name']}; this run has {own['optimizer']['name']}"
        )
    if "critic" not in own and "critic" in manifest:
        raise CheckpointError(
            f"the checkpoint {folder} has a critic; this run has none: give critic=Critic()"
        )
    for policy, entry in manifest["policies"].items():
        if entry["lora"] != own["policies"][policy]["lora"]:
            raise CheckpointError(
                f"the checkpoint {folder} has lora={entry['lora']} for policy {policy}; this "
                f"run has {own['policies'][policy]['lora']}"
            )
        if entry["frozen"] != own["policies"][policy]["frozen"]:
            raise CheckpointError(
                f"the adapters in {folder} were trained on other weights of policy {policy} "
                "than this run starts from"
            )


def compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them."""
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of a checkpoint.

    Raises:
        CheckpointError: they cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; delete the checkpoint that it belongs to, and training "
            "goes on from the one before it"
        ) from error

"""Read and write a learner's checkpoint folder.

The folder contains tensor files and a manifest: a JSON file with the policies and settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from lightspan.errors import CheckpointError

FORMAT: Final = 1
"""Version of the checkpoint's file layout."""
MANIFEST: Final = "learner.json"


def check_manifest(folder: Path, manifest: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the learner cannot load a checkpoint.

    The checkpoint and the learner must have the same policies, optimizer, LoRA settings and frozen
    weights.

    Args:
        folder: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        own: the manifest that the learner would write.
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


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Create a checkpoint's folder, and yield to the `with` block that writes into it.

    Raises:
        CheckpointError: the folder cannot be created, or writing in the `with` block fails.
    """
    from safetensors import SafetensorError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:  # a full disk raises either
        raise CheckpointError(
            f"cannot write the checkpoint {folder}: {error}; check the disk, then continue "
            "from the checkpoint before it with resume=True (--resume)"
        ) from error


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest. Call this last, because the manifest marks the checkpoint as complete."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


@contextmanager
def reading(folder: Path) -> Iterator[Any]:
    """Yield a checkpoint's manifest to the `with` block.

    Raises:
        CheckpointError: the manifest cannot be read, or the `with` block raises an error that a
            damaged checkpoint causes, such as `KeyError`.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {folder}: {error}") from error
    try:
        yield manifest
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {folder} is damaged ({type(error).__name__}: {error}): delete it, "
            "and training resumes from the one before it"
        ) from error


def compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors detached and contiguous, as safetensors requires."""
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file of a checkpoint.

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

"""How many parameters a model has, without loading it. Loads no torch."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Final

from lightspan.engines.hub import TIMEOUT_S, cached_folder, check_model_path
from lightspan.errors import ModelError

LARGEST_HEADER: Final = 100_000_000
"""Bytes, as safetensors itself bounds it."""


def count_parameters(model: str | Path) -> int:
    """The parameters of a model: a folder's by the headers of its safetensors files, in which no
    weight is read. Of a name on the hub its cache is looked at; what that does not hold whole, the
    hub is asked about: nothing is fetched.

    Raises:
        ModelError: that cannot be known, and why.
    """
    name = check_model_path(model)
    folder = Path(name) if Path(name).is_dir() else cached_folder(name)
    files = [] if folder is None else _files(folder)
    if files:
        return sum(map(_in_file, files))
    if Path(name).is_dir():
        raise ModelError(f"the folder {name} has not all weights as safetensors files")
    return _on_hub(name)


def _files(folder: Path) -> list[Path]:
    """The files of the weights; none unless all are there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        return [single] if single.is_file() else []
    try:
        files = {
            folder / str(file) for file in json.loads(index.read_bytes())["weight_map"].values()
        }
    except (ValueError, KeyError, AttributeError, OSError):
        return []
    return sorted(files) if all(file.is_file() for file in files) else []


def _in_file(file: Path) -> int:
    """A safetensors file: eight bytes with the length of a JSON header, which has each tensor's
    shape."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, LARGEST_HEADER)))
        return sum(
            math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file} is no whole safetensors file: {error}") from error


def _on_hub(name: str) -> int:
    if "/" not in name:
        raise ModelError(f"{name!r} is neither a folder nor `owner/name` on the hub")
    try:
        from huggingface_hub import HfApi

        known = HfApi().model_info(name, timeout=TIMEOUT_S).safetensors
    except Exception as error:  # the hub's client uses one HTTP library or another: any may raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"the hub cannot be asked about {name}: {why}") from error
    if known is None or not known.total:
        raise ModelError(f"the hub does not say how many parameters {name} has")
    return int(known.total)

"""The size of a model, without loading it."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, Final

from lightspan.errors import ModelError
from lightspan.protocols.engine import ModelSize
from lightspan_torch.engine.hub import TIMEOUT_S, cached_folder, check_model_path

LARGEST_HEADER: Final = 100_000_000
"""Bytes, as safetensors itself bounds it."""


def model_size(model: str) -> ModelSize:
    """Return the size of a model folder, or of a hub model whose configuration is on this machine.

    Only the configuration is read, and nothing is fetched.

    Raises:
        ModelError: the configuration is not here, or does not describe a causal language model.
    """
    from transformers import AutoConfig

    name = check_model_path(model)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"the configuration of {name} is not on this machine: fetch it (`hf download {name} "
            "config.json`), or give a model folder"
        ) from error
    return size_of_config(config, name)


def size_of_config(config: Any, name: str = "the model") -> ModelSize:
    """Return the size that a transformers configuration describes.

    Raises:
        ModelError: it does not describe a causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from lightspan_torch.engine.tokenizer import context_length

    try:
        with torch.device("meta"):  # shapes without memory
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, trust_remote_code=False
            )
    except Exception as error:
        raise ModelError(f"the size of {name} is not known: {error}") from error
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    head_size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        weight_bytes=int(getattr(getattr(config, "dtype", None), "itemsize", None) or 4),
        cache_values=2 * int(text.num_hidden_layers) * kv_heads * head_size,
        lora_values=sum(m.in_features + m.out_features for m in linear),
        context=context_length(config),
    )


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

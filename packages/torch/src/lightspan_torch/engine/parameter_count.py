"""Determine a model's size without loading its weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lightspan.errors import ModelError
from lightspan.protocols.engine import ModelSize
from lightspan_torch.engine.hub import TIMEOUT_S, cached_folder, check_model_path


def model_size(model: str) -> ModelSize:
    """Return the size of a model, computed from its configuration in a folder or the hub's cache.

    Raises:
        ModelError: the configuration is missing or does not describe a causal language model.
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
    """Return the size of the model that a transformers configuration describes.

    Raises:
        ModelError: the configuration does not describe a causal language model.
    """
    import torch

    from lightspan_torch.engine.tokenizer import context_length
    from lightspan_torch.engine.weights import auto_class

    try:
        with torch.device("meta"):  # shapes without memory
            model: Any = auto_class(config).from_config(config, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"cannot determine the size of {name}: {error}") from error
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
    """Return the number of parameters of a model.

    It is read from the headers of the safetensors files in a folder or in the hub's cache. For a
    hub model that is not completely cached, the hub is asked for it. No file is fetched.

    Args:
        model: folder, or name on the hub.

    Raises:
        ModelError: the number cannot be determined.
    """
    name = check_model_path(model)
    folder = Path(name) if Path(name).is_dir() else cached_folder(name)
    files = [] if folder is None else _files(folder)
    if files:
        return sum(map(_count_in_file, files))
    if Path(name).is_dir():
        raise ModelError(f"the folder {name} has not all weights as safetensors files")
    return _count_on_hub(name)


def _files(folder: Path) -> list[Path]:
    """Return a model's safetensors files; an empty list unless all files are there."""
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


def _count_in_file(file: Path) -> int:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as tensors:
            names = tensors.keys()
            return sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is no complete safetensors file: {error}") from error


def _count_on_hub(name: str) -> int:
    if "/" not in name:
        raise ModelError(f"{name!r} is neither a folder nor `owner/name` on the hub")
    try:
        from huggingface_hub import HfApi

        metadata = HfApi().model_info(name, timeout=TIMEOUT_S).safetensors
    except Exception as error:  # the exception type depends on the client's HTTP library
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"cannot get the size of {name} from the hub: {reason}") from error
    if metadata is None or not metadata.total:
        raise ModelError(f"the hub has no parameter count of {name}")
    return int(metadata.total)

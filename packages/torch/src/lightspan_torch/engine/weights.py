"""Load, hash and replace a model's weights."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.utils import logging as transformers_logging

from lightspan.errors import ConfigError, ModelError, OutOfMemoryError
from lightspan.schema.validation import check_device_name
from lightspan_torch.engine.hub import cannot_load, locate
from lightspan_torch.engine.oom import allocation, is_out_of_memory
from lightspan_torch.vision.processor import takes_images


def without_aliases(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict in which tied weights appear once, under their first name."""
    pointers: set[int] = set()
    weights = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in pointers or tensor.numel() == 0:  # empty tensors share 0
            pointers.add(tensor.data_ptr())
            weights[name] = tensor
    return weights


def hash_weights(state: dict[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values of weights; tied weights count once."""
    digest = hashlib.sha256()
    for name, tensor in sorted(without_aliases(state).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(octets.numpy().tobytes())
    return digest.hexdigest()


def load_model(
    source: Any, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> Any:
    """Load a model, or copy a model that is loaded already. The result is in evaluation mode.

    Runs no remote code and reads no pickle (safetensors only).

    Args:
        source: folder, name on the hub, or loaded model.
        device: the model's device.
        dtype: data type of the weights; None to keep the data type of `source`.

    Raises:
        ConfigError: the device is unknown, or it is a GPU and the machine has none.
        ModelError: the model does not exist, cannot be fetched or cannot be read.
        OutOfMemoryError: the model does not fit into memory.
    """
    check_device(device)
    if isinstance(source, torch.nn.Module):
        return _exact(_moved(copy.deepcopy(source), device, dtype, "the model").eval())
    from transformers import AutoConfig

    origin = locate(source, "weights")
    try:
        with without_bars():
            config = AutoConfig.from_pretrained(origin.folder, trust_remote_code=False)
            model = auto_class(config).from_pretrained(
                origin.folder, dtype=dtype or "auto", trust_remote_code=False, use_safetensors=True
            )
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(_too_large(origin.name, "cpu", error)) from error
        raise cannot_load("weights", origin, error) from error
    model.name_or_path = model.config._name_or_path = origin.name
    return _exact(_moved(model, device, None, origin.name).eval())


def auto_class(config: Any) -> Any:
    """Return the class of transformers that loads or makes models of a configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def set_text_attention(model: Any, name: str) -> None:
    """Set the attention of a model's text part. A vision part keeps its own."""
    config, text = model.config, model.config.get_text_config()
    keys = [key for key in config.sub_configs if getattr(config, key) is text]
    model.set_attn_implementation({keys[0]: name} if keys else name)


def text_attention(model: Any) -> str:
    """Return the name of the attention of a model's text part."""
    return str(model.config.get_text_config()._attn_implementation)


@torch.no_grad()
def _exact(model: Any) -> Any:
    """Replace the attention `sdpa` by `eager` in a model whose scores are capped or have sinks.

    The first versions of transformers 5 choose `sdpa` for Gemma 2, which drops the cap in silence.
    """
    if getattr(model, "config", None) is None or text_attention(model) != "sdpa":
        return model
    if not getattr(model, "_supports_attention_backend", False):
        return model
    dropped: set[str] = set()
    sdpa: Any = AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]

    def attention(*tensors: Any, **options: Any) -> tuple[Tensor, None]:
        for name in ("softcap", "s_aux"):
            if options.pop(name, None) is not None:
                dropped.add(name)
        output: tuple[Tensor, None] = sdpa(*tensors, **options)
        return output

    AttentionInterface.register("lightspan_probe", attention)
    try:
        set_text_attention(model, "lightspan_probe")
        model(input_ids=torch.tensor([[1]], device=model.device), use_cache=False)
    except (AttributeError, TypeError, ValueError):  # it needs a mask, which is made for sdpa alone
        dropped.clear()
    finally:
        set_text_attention(model, "eager" if dropped else "sdpa")
    return model


class SharedModels:
    """Loads each model once; policies that use the same model share its weights.

    Args:
        load: loads a model from a folder, a hub name or a loaded model.
    """

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load = load
        self._models: dict[Any, Any] = {}

    def load(self, source: Any) -> Any:
        """Return a new model that shares its tensors with the other models loaded from `source`."""
        key = source if isinstance(source, torch.nn.Module) else str(source)
        if key not in self._models:
            self._models[key] = self._load(source)
        model = self._models[key]
        tensors = itertools.chain(model.parameters(), model.buffers())
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def check_device(device: str | torch.device) -> None:
    """Raise `ConfigError` if torch cannot use a device."""
    check_device_name(str(device))
    if str(device).startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device={str(device)!r}: torch {torch.__version__} sees no CUDA GPU on this machine; "
            'use device="cpu", or a build of torch with CUDA where there is one'
        )


def numerics(models: Iterable[Any]) -> str:
    """Return the `numerics` of an engine or learner of this package (`EngineCapabilities`).

    Args:
        models: its transformers models.
    """
    kinds = sorted({f"{model.device.type} {model.dtype}" for model in models})
    return f"lightspan_torch {', '.join(kinds)}"


def avoid_cudnn_attention(device: str | torch.device) -> None:
    """Let torch compute attention on a GPU without cuDNN, in the whole process.

    cuDNN builds a plan for each new shape, for half a second each on some GPUs, and the shapes here
    differ from step to step.
    """
    if torch.device(device).type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def _moved(model: Any, device: str | torch.device, dtype: torch.dtype | None, name: str) -> Any:
    """Move a model to `device` and convert it to `dtype`.

    Args:
        model: the model.
        device: the device.
        dtype: data type of the weights; None to keep it.
        name: name of the model, for the error message.

    Raises:
        OutOfMemoryError: the model does not fit into the device's memory.
    """
    try:
        return model.to(device=device, dtype=dtype)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(_too_large(name, device, error)) from error


def _too_large(name: str, device: str | torch.device, error: BaseException) -> str:
    return (
        f"the weights of {name} do not fit into the memory of {device}{allocation(error)}: use a "
        "smaller model, another device, or lora=LoRA() so that the learner holds less "
        "(docs/guides/gpu.md says what fits where)"
    )


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Disable transformers' progress bars in the `with` block; they would garble other output."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def weight_change(model: Any, weights: Mapping[str, Any], policy: str) -> Callable[[], None]:
    """Check weights, and return a function that copies them into the model.

    Raises:
        ModelError: names or shapes differ from the model's.
    """
    own = model.state_dict()
    unknown = sorted(set(weights) - set(own))
    if unknown:
        raise ModelError(f"weights for policy {policy} have unknown names: {unknown[:5]}")
    pointers = {own[name].data_ptr() for name in weights}
    missing = [name for name, tensor in own.items() if tensor.data_ptr() not in pointers]
    if missing:
        raise ModelError(f"weights for policy {policy} lack {len(missing)} names: {missing[:5]}")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ModelError(
                f"weight {name} of policy {policy} has shape {tuple(tensor.shape)}; the model's "
                f"is {tuple(own[name].shape)}"
            )

    def change() -> None:
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    return change

"""Weights as files in shared memory, which servers on this machine read.

Each engine has a folder that only its user can read. It is removed when the engine is closed. If
the trainer was killed, the next engine that starts removes it.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightspan.errors import ConfigError, EngineError, EngineMemoryError, ModelError
from lightspan.protocols.engine import LoRAWeights
from lightspan_torch.engine.hub import cannot_load, locate
from lightspan_torch.engine.tokenizer import context_length
from lightspan_torch.tempdirs import OwnedTempDir
from lightspan_vllm.images import SERVED

PREFIX: Final = "lightspan-weights-"
LABEL: Final = "lightspan-"
"""Prefix of all weight labels and LoRA names that lightspan gives."""
HEAD: Final = "lm_head.weight"
EMBEDDINGS: Final = "model.embed_tokens.weight"
BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
FILE_TYPES: Final[Mapping[str, str]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Data type in safetensors files → torch's name for it."""
_EMBEDDINGS: Final = re.compile(r"\bembed_tokens\.weight$")
_LINEAR: Final = ("_proj", "query_key_value", "Wqkv")
"""Name endings of linear layers in models that vLLM serves with LoRA."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The files of one version of a policy's whole weights."""

    version: int
    label: str
    """Unique name of the weights, by which a server reports that it has loaded them."""
    files: tuple[str, ...]
    aliases: Mapping[str, str]
    """Name of a weight that is not in the files → name of the equal weight that is."""
    temporary: Path | None = None
    """The file that `remove` deletes; None if `files` are the model's own."""

    def remove(self) -> None:
        """Delete the temporary file, if there is one."""
        if self.temporary is not None:
            self.temporary.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class LoRAFiles:
    """The files of one version of a policy's LoRA weights."""

    version: int
    name: str
    """Unique name of the LoRA on servers, so that keys and values of another LoRA are never
    reused."""
    folder: Path

    def remove(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


class TargetWeights(NamedTuple):
    """The newest weights, which all servers of a pool must load."""

    weights: Weights
    lora: Mapping[str, LoRAFiles] = {}
    """Policy → its LoRA; empty for a policy with whole weights."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """What a server must serve: a model, read from its folder, and LoRA of policies."""

    name: str
    """The model as the user named it."""
    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Weight name → shape; of tied weights, only the embeddings."""
    dtype: str
    context: int
    vocabulary: int
    hidden: int
    layers: int
    tied: bool
    heads: int = 0
    """Number of attention heads; 0 if unknown."""
    tensor_parallel: int | None = None
    """Number of devices that must share the model; None if any number is accepted."""
    on_gpu: bool = False
    """Whether the server must use GPUs."""
    lora_rank: int = 0
    """Maximum rank of the policies' LoRA; 0 if the server serves whole weights."""
    loras: int = 0
    """Number of LoRA policies, including those whose weights never change; 0 for whole weights."""
    family: str = ""
    """Type of the model's configuration, if vLLM gets images for it (`images.SERVED`); else ""."""
    vision: frozenset[str] = frozenset()
    """Names of the weights of the vision part of such a model."""
    embeddings: tuple[str, str] = (EMBEDDINGS, EMBEDDINGS)
    """Name of the embeddings' weight in updates, and in the model's files."""

    @classmethod
    def of(cls, model: Any, *, dtype: str | None, context: int | None) -> ServerSpec:
        """Read the specification from a model's files.

        Args:
            model: folder, or name on the hub.
            dtype: data type of the served weights; None for the data type in the files.
            context: context length in tokens, not more than that of the model; None for that of the
                model.

        Raises:
            ConfigError: `model` is a loaded model, which other processes cannot read.
            ModelError: the model does not exist or cannot be read.
        """
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(
                "vLLM loads models in another process: give the folder or the hub's name, not a "
                f"loaded {type(model).__name__}"
            )
        from transformers import AutoConfig

        origin = locate(os.fspath(model), "weights")
        try:
            config = AutoConfig.from_pretrained(origin.folder, trust_remote_code=False)
            shapes, saved_as = _read_shapes(origin.folder)
        except Exception as error:
            raise cannot_load("weights", origin, error) from error
        text = config.get_text_config()
        own = context_length(config)
        tied = bool(getattr(text, "tie_word_embeddings", False))
        of_images: dict[str, Any] = {}
        if config.model_type in SERVED:
            saved = next(filter(_EMBEDDINGS.search, sorted(shapes)), EMBEDDINGS)
            shapes, vision, embeddings = _vision_weights(config)
            of_images = {
                "family": config.model_type,
                "vision": vision,
                "embeddings": (embeddings, saved),
            }
        if tied:
            shapes.pop(HEAD, None)
            if not of_images and EMBEDDINGS not in shapes:
                raise ModelError(
                    f"{origin.name} ties its output layer to its embeddings but has no weight "
                    f"{EMBEDDINGS}: lightspan does not know vLLM's name of it for "
                    f"{type(config).__name__}; use the embedded engine"
                )
        return cls(
            name=origin.name,
            folder=origin.folder,
            shapes=shapes,
            dtype=dtype or saved_as,
            context=own if context is None else min(own, context),
            vocabulary=int(text.vocab_size),
            hidden=int(text.hidden_size),
            layers=int(text.num_hidden_layers),
            tied=tied,
            heads=int(getattr(text, "num_attention_heads", 0)),
            **of_images,
        )

    @property
    def aliases(self) -> dict[str, str]:
        """For a tied output layer: the layer's name → the name of the embeddings, which it shares.

        Empty if the output layer is not tied. Servers get the embeddings under both names. A server
        that got only the embeddings would keep its old output layer.
        """
        return {HEAD: self.embeddings[0]} if self.tied else {}

    @property
    def bytes(self) -> int:
        """Size of the served weights, in bytes."""
        return BYTES[self.dtype] * sum(map(math.prod, self.shapes.values()))

    def as_saved(self, version: int) -> Weights:
        """Describe the model's own files as version `version` of a policy's weights.

        With LoRA, `files` of the result is empty, because the servers load the model when they
        start.
        """
        if self.lora_rank:
            return Weights(version=version, label=_label(version), files=(), aliases={})
        files = tuple(str(path) for path in _files(self.folder))
        aliases = {HEAD: self.embeddings[1]} if self.tied else {}
        return Weights(version=version, label=_label(version), files=files, aliases=aliases)

    def zero_lora(self) -> LoRAWeights:
        """Return LoRA weights that leave the model's output unchanged.

        A policy needs them before its first update. Otherwise its calls would name no LoRA. In vLLM
        on a CPU, such a call gets the LoRA in vLLM's last slot if other calls of its batch name
        one.

        Raises:
            ModelError: no layer of the model is known to support LoRA in vLLM.
        """
        import torch

        # attention first, because expert layers may be served differently
        for name in sorted(self.shapes, key=lambda name: ("attn" not in name, name)):
            shape = self.shapes[name]
            layer = name.removesuffix(".weight")
            if len(shape) == 2 and layer.endswith(_LINEAR) and name not in self.vision:
                outputs, inputs = shape
                pair = (torch.zeros(1, inputs), torch.zeros(outputs, 1))
                return LoRAWeights(rank=1, scale=1.0, layers={layer: pair})
        raise ModelError(
            f"{self.name} has no layer whose name ends in {' or '.join(_LINEAR)}: lightspan does "
            "not know its LoRA layers in vLLM; have it served merged, with VLLM(merge=True)"
        )

    def check_lora(self, weights: LoRAWeights, policy: str) -> None:
        """Raise `ModelError` if LoRA weights have layers of the vision part.

        Args:
            weights: the LoRA weights.
            policy: the policy's name, for the error message.
        """
        layers = sorted(layer for layer in weights.layers if f"{layer}.weight" in self.vision)
        if layers:
            raise ModelError(
                f"LoRA weights for policy {policy} change the vision part, which vLLM does not "
                f"serve so: {layers[:5]}; adapt the text part alone, or have whole weights served "
                "with VLLM(merge=True)"
            )

    def check(self, weights: Mapping[str, Any], policy: str) -> None:
        """Raise `ModelError` if names or shapes of weights differ from the model's.

        Args:
            weights: weight name → tensor.
            policy: the policy's name, for the error message.
        """
        unknown = sorted(set(weights) - set(self.shapes) - set(self.aliases))
        if unknown:
            raise ModelError(f"weights for policy {policy} have unknown names: {unknown[:5]}")
        missing = sorted(set(self.shapes) - set(weights))
        if missing:
            raise ModelError(
                f"weights for policy {policy} lack {len(missing)} names: {missing[:5]}"
            )
        for name, shape in self.shapes.items():
            if tuple(weights[name].shape) != shape:
                raise ModelError(
                    f"weight {name} of policy {policy} has shape {tuple(weights[name].shape)}; the "
                    f"model's is {shape}"
                )


class WeightStore:
    """A folder into which one engine writes weights for its servers.

    Args:
        parent: a folder in memory, such as `/dev/shm`, in which the folder is created.

    Raises:
        ConfigError: `parent` is not a writable folder.
    """

    def __init__(self, parent: str) -> None:
        try:
            self._temp_dir = OwnedTempDir(PREFIX, parent)
        except OSError as error:
            raise ConfigError(
                f"VLLM: cannot write weights to exchange={parent!r}: {error.strerror}; give a "
                "folder in memory that servers can read"
            ) from error
        self.folder = self._temp_dir.path

    def write(
        self, spec: ServerSpec, weights: Mapping[str, Any], policy: str, version: int
    ) -> Weights:
        """Write whole weights into a file in the server's data type; return them as `Weights`.

        Raises:
            EngineMemoryError: the weights do not fit into the folder.
        """
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self.check_room(spec, policy)
        path = self.folder / f"{secrets.token_hex(8)}.safetensors"
        dtype = getattr(torch, spec.dtype)
        tensors = {
            name: weights[name].detach().to("cpu", dtype).contiguous() for name in spec.shapes
        }
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise self._full(_whole(spec, policy), str(error)) from error
        return Weights(
            version=version,
            label=_label(version),
            files=(str(path),),
            aliases=spec.aliases,
            temporary=path,
        )

    def write_lora(self, weights: LoRAWeights, policy: str, version: int) -> LoRAFiles:
        """Write LoRA weights as a PEFT adapter, and return its files.

        Raises:
            EngineMemoryError: the weights do not fit into the folder.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        name = _label(version)
        files = LoRAFiles(version=version, name=name, folder=self.folder / name)
        tensors = {
            f"base_model.model.{layer}.lora_{letter}.weight": tensor.contiguous()
            for layer, pair in weights.layers.items()
            for letter, tensor in zip("AB", pair, strict=True)
        }
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": weights.rank,
            "lora_alpha": weights.rank * weights.scale,
            "target_modules": sorted({layer.rpartition(".")[2] for layer in weights.layers}),
            "bias": "none",
        }
        try:
            files.folder.mkdir()
            save_file(tensors, files.folder / "adapter_model.safetensors")
            (files.folder / "adapter_config.json").write_text(json.dumps(config))
        except (OSError, SafetensorError) as error:
            files.remove()
            size = _mib(sum(tensor.nbytes for tensor in tensors.values()))
            what = f"the LoRA weights of policy {policy}, {size}"
            raise self._full(what, str(error)) from error
        return files

    def check_room(self, spec: ServerSpec, policy: str) -> None:
        """Raise `EngineMemoryError` if the policy's whole weights do not fit into the folder.

        LoRA weights are not checked.
        """
        if spec.lora_rank:  # whole weights are not written
            return
        free = shutil.disk_usage(self.folder).free
        if spec.bytes > free:
            raise self._full(_whole(spec, policy), f"{_mib(free)} are free")

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._temp_dir.close()

    def _full(self, what: str, reason: str) -> EngineError:
        parent = self.folder.parent
        return EngineMemoryError(
            f"{what}, do not fit into {parent}, where servers read them: {reason}. Make room there "
            "(an update needs two copies of a policy; a container has 64 MiB unless it is started "
            "with --shm-size), or name another folder in memory with VLLM(exchange=…)"
        )


def _whole(spec: ServerSpec, policy: str) -> str:
    return f"the weights of policy {policy}, {_mib(spec.bytes)} as {spec.dtype}"


def _vision_weights(config: Any) -> tuple[dict[str, tuple[int, ...]], frozenset[str], str]:
    """Return the weights of a vision model, as the learner names them.

    Their names in the model's files may be others. vLLM knows both.

    Returns:
        The shapes by name; the names in the vision part; and the name of the embeddings.
    """
    import torch

    from lightspan_torch.engine.weights import auto_class
    from lightspan_torch.vision.features import vision_parameters

    with torch.device("meta"):  # allocates no memory
        model = auto_class(config).from_config(config)
    weights = dict(model.named_parameters())
    embedded = model.get_input_embeddings().weight
    return (
        {name: tuple(weight.shape) for name, weight in weights.items()},
        frozenset(name for name, _ in vision_parameters(model)),
        next(name for name, weight in weights.items() if weight is embedded),
    )


def _read_shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return the shapes of the weights in a model's files, and the weights' data type.

    Raises:
        FileNotFoundError: there are no files.
        ValueError: a data type is unknown.
    """
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    types: set[str] = set()
    files = _files(folder)
    if not files:
        raise FileNotFoundError("there are no model*.safetensors files")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                shapes[name] = tuple(part.get_shape())
                types.add(part.get_dtype())
    dtypes = sorted(FILE_TYPES[kind] for kind in types if kind in FILE_TYPES)
    if len(dtypes) != len(types):
        raise ValueError(f"its weights are of the types {sorted(types)}")
    return shapes, "float32" if "float32" in dtypes else dtypes[0]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _label(version: int) -> str:
    return f"{LABEL}{version}-{secrets.token_hex(8)}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"

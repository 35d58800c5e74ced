"""A model's weights where a server on this machine reads them: files in shared memory.

Each engine has a folder of its own there, which only its user can read. It is removed when the
engine is closed; one whose trainer was killed is removed by the next engine that starts.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightspan.errors import ConfigError, EngineError, EngineMemoryError, ModelError
from lightspan.protocols.engine import LoRAWeights
from lightspan.tempdirs import OwnedTempDir
from lightspan_torch.engine.hub import cannot_load, locate
from lightspan_torch.engine.tokenizer import context_length

PREFIX: Final = "lightspan-weights-"
LABEL: Final = "lightspan-"
"""What servers say of weights begins so, if they are from here."""
HEAD: Final = "lm_head.weight"
EMBEDDINGS: Final = "model.embed_tokens.weight"
BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
_FILE_TYPES: Final[Mapping[str, str]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LINEAR: Final = ("_proj", "query_key_value", "Wqkv")
"""How layers are called that any model has which vLLM serves with LoRA."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A whole model as files, as one version of a policy."""

    version: int
    label: str
    """What a server that has loaded them says; no other weights of any run have it."""
    files: tuple[str, ...]
    again: Mapping[str, str]
    """Name → name of the weight in the files that it is equal to."""
    kept: Path | None = None
    """The file that is ours to remove."""

    def remove(self) -> None:
        """Give the memory back."""
        if self.kept is not None:
            self.kept.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class LoRAFiles:
    """The LoRA of one policy as files, as one version of it."""

    version: int
    name: str
    """By which servers know it; no other LoRA of any run has it, so that no key or value that was
    computed with another is taken for one of this."""
    folder: Path

    def remove(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.folder, ignore_errors=True)


class TargetWeights(NamedTuple):
    """What a server should have."""

    weights: Weights
    lora: Mapping[str, LoRAFiles] = {}
    """Of each policy, where they are LoRA beside the weights."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """What a server has to be to serve a model, read from the model's folder."""

    name: str
    """The model's, as it was given."""
    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    """Of the weights, by name; tied ones once."""
    dtype: str
    context: int
    vocabulary: int
    hidden: int
    layers: int
    tied: bool
    heads: int = 0
    """Of attention, by which devices share the model; 0: unknown."""
    tensor_parallel: int | None = None
    """How many devices share it in a server; None: whatever a server has."""
    on_gpu: bool = False
    """Whether it has to be on GPUs."""
    lora_rank: int = 0
    """The highest of the LoRA that it serves beside its own weights, which then never change; 0: it
    serves whole weights."""
    loras: int = 0
    """How many policies it serves so, those among them that never change."""

    @classmethod
    def of(cls, model: Any, *, dtype: str | None, context: int | None) -> ServerSpec:
        """Read what the folder or the hub has.

        Args:
            model: folder, or name on the hub.
            dtype: of the weights in the server; None for the files'.
            context: a shorter one than the model's.

        Raises:
            ConfigError: a loaded model, which no other process can read.
            ModelError: it is not there or cannot be read.
        """
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(
                "vLLM loads a model in a process of its own: give the folder or the hub's name, "
                f"not a loaded {type(model).__name__}"
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
        if tied:
            shapes.pop(HEAD, None)
            if EMBEDDINGS not in shapes:
                raise ModelError(
                    f"{origin.name} ties its output layer to its embeddings, and has no "
                    f"{EMBEDDINGS} to tie it to: lightspan does not know how vLLM names them for "
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
        )

    @property
    def again(self) -> dict[str, str]:
        """Weights that are sent twice, under another name: the output layer, where it is tied to
        the embeddings. A server that ties them itself would go on with the old one."""
        return {HEAD: EMBEDDINGS} if self.tied else {}

    @property
    def bytes(self) -> int:
        """Of one copy of the weights, as a server has them."""
        return BYTES[self.dtype] * sum(map(math.prod, self.shapes.values()))

    def as_saved(self, version: int) -> Weights:
        """The weights of the model's own files; a server of LoRA has read them itself."""
        if self.lora_rank:
            return Weights(version=version, label=_label(version), files=(), again={})
        files = tuple(str(path) for path in _files(self.folder))
        return Weights(version=version, label=_label(version), files=files, again=self.again)

    def nothing(self) -> LoRAWeights:
        """LoRA that adds nothing to the model's own weights. On a CPU vLLM gives calls that name
        none, and are computed beside some that do, the one in its last place; so every call names
        one.

        Raises:
            ModelError: no layer of the model is known to take LoRA in vLLM.
        """
        import torch

        # attention first: layers of experts may be served otherwise
        for name in sorted(self.shapes, key=lambda name: ("attn" not in name, name)):
            shape = self.shapes[name]
            layer = name.removesuffix(".weight")
            if len(shape) == 2 and layer.endswith(_LINEAR):
                outputs, inputs = shape
                pair = (torch.zeros(1, inputs), torch.zeros(outputs, 1))
                return LoRAWeights(rank=1, scale=1.0, layers={layer: pair})
        raise ModelError(
            f"{self.name} has no layer that ends in {' or '.join(_LINEAR)}: lightspan does not "
            "know where vLLM takes LoRA there; have it served merged, with VLLM(merge=True)"
        )

    def check(self, weights: Mapping[str, Any], policy: str) -> None:
        """Raise `ModelError` for weights that are not these, name by name."""
        unknown = sorted(set(weights) - set(self.shapes) - set(self.again))
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
    """The folder of one engine's weights.

    Args:
        parent: a folder in memory, such as `/dev/shm`.

    Raises:
        ConfigError: it is no folder, or cannot be written.
    """

    def __init__(self, parent: str) -> None:
        try:
            self._passing = OwnedTempDir(PREFIX, parent)
        except OSError as error:
            raise ConfigError(
                f"VLLM: exchange={parent!r}, where weights are handed over, cannot be written: "
                f"{error.strerror}; give a folder in memory that servers can read"
            ) from error
        self.folder = self._passing.path

    def write(
        self, blueprint: ServerSpec, weights: Mapping[str, Any], policy: str, version: int
    ) -> Weights:
        """Put weights into a file, in the server's type.

        Raises:
            EngineMemoryError: they do not fit there.
        """
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self.check_room(blueprint, policy)
        path = self.folder / f"{secrets.token_hex(8)}.safetensors"
        dtype = getattr(torch, blueprint.dtype)
        tensors = {
            name: weights[name].detach().to("cpu", dtype).contiguous() for name in blueprint.shapes
        }
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise self._full(_whole(blueprint, policy), str(error)) from error
        return Weights(
            version=version,
            label=_label(version),
            files=(str(path),),
            again=blueprint.again,
            kept=path,
        )

    def write_lora(self, weights: LoRAWeights, policy: str, version: int) -> LoRAFiles:
        """Put LoRA weights into a folder, as PEFT names them.

        Raises:
            EngineMemoryError: they do not fit there.
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
            size = sum(tensor.nbytes for tensor in tensors.values())
            raise self._full(
                f"the LoRA weights of policy {policy}, {_mib(size)}", str(error)
            ) from error
        return files

    def check_room(self, blueprint: ServerSpec, policy: str) -> None:
        """Raise `EngineMemoryError` unless the model's weights fit into the folder."""
        if blueprint.lora_rank:  # they are not handed over
            return
        free = shutil.disk_usage(self.folder).free
        if blueprint.bytes > free:
            raise self._full(_whole(blueprint, policy), f"{_mib(free)} are free")

    def close(self) -> None:
        """Remove it. Idempotent."""
        self._passing.close()

    def _full(self, what: str, reason: str) -> EngineError:
        parent = self.folder.parent
        return EngineMemoryError(
            f"{what}, do not fit into {parent}, where servers read them: {reason}. Make room there "
            "(two copies of a policy are there while one replaces the other; a container has 64 "
            "MiB unless it is started with --shm-size), or name another folder in memory with "
            "VLLM(exchange=…)"
        )


def _whole(blueprint: ServerSpec, policy: str) -> str:
    return f"the weights of policy {policy}, {_mib(blueprint.bytes)} as {blueprint.dtype}"


def _read_shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], str]:
    """Of the weights in a model's files, and the type that they have.

    Raises:
        FileNotFoundError: there are none.
        ValueError: of a type that no server takes in as it is.
    """
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    types: set[str] = set()
    files = _files(folder)
    if not files:
        raise FileNotFoundError("there are no model*.safetensors files")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(name)
                shapes[name] = tuple(part.get_shape())
                types.add(part.get_dtype())
    known = sorted(_FILE_TYPES[each] for each in types if each in _FILE_TYPES)
    if len(known) != len(types):
        raise ValueError(f"its weights are of the types {sorted(types)}")
    return shapes, "float32" if "float32" in known else known[0]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _label(version: int) -> str:
    return f"{LABEL}{version}-{secrets.token_hex(8)}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"

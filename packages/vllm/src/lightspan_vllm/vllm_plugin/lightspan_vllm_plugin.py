"""A plugin for vLLM, in vLLM's process: loads new weights, and describes the server.

vLLM's own weight transfers need a GPU on both sides, and vLLM in the trainer. This plugin needs
neither. It reads weights from safetensors files in shared memory, if the trainer is on the same
machine, or receives them over torch.distributed (`lightspan_broadcast`). vLLM loads the plugin by

    --worker-extension-cls lightspan_vllm_plugin.Extension
    --weight-transfer-config '{"backend": "lightspan"}'

with this file's folder on `PYTHONPATH`. lightspan need not be installed in vLLM's environment. No
module of lightspan imports the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightspan_broadcast
import torch
from safetensors import safe_open
from vllm import __version__, envs
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "lightspan"


@dataclass
class WholeInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Arguments of `init_transfer_engine`, of which there are none."""


@dataclass
class WholeUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where a server gets the weights of a whole model: from files, or over the network."""

    files: list[str] = field(default_factory=list)
    """Paths of safetensors files; empty if the weights are sent over the network."""
    sent: dict[str, Any] = field(default_factory=dict)
    """Argument `sent` of `lightspan_broadcast.receive`; empty if the weights are in files."""
    again: dict[str, str] = field(default_factory=dict)
    """Name of a weight that neither `files` nor `sent` has → name of the equal weight that they
    have."""


class WholeEngine(WeightTransferEngine[WholeInit, WholeUpdate]):  # type: ignore[misc]
    """Loads the weights of a whole model into vLLM, layer by layer."""

    init_info_cls = WholeInit
    update_info_cls = WholeUpdate

    def init_transfer_engine(self, init_info: WholeInit) -> None:
        """Do nothing, because every update opens its own connection."""

    def start_weight_update(self) -> None:
        """Prepare the model for weights in the layout of its checkpoint."""
        self._names = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load weights, and then wait for the accelerator, if there is one.

        The method of the base class would wait in any case.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WholeUpdate) -> None:
        """Load all weights of the model.

        Raises:
            ValueError: weights of the model are missing.
        """
        loaded = self.model.load_weights(self._weights(update_info))
        missing = sorted(self._names - set(loaded)) if loaded is not None else []
        if missing:
            raise ValueError(f"the weights lack {len(missing)} of the model: {missing[:5]}")

    def _weights(self, update: WholeUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        copies: dict[str, list[str]] = {}
        for name, source in update.again.items():
            copies.setdefault(source, []).append(name)
        if update.sent:
            parallel = self.parallel_config
            rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
            weights = lightspan_broadcast.receive(update.sent, rank, self.device)
        else:
            weights = _read(update.files)
        for name, tensor in weights:
            yield name, tensor
            for copy in copies.get(name, ()):
                yield copy, tensor

    def finish_weight_update(self) -> None:
        """Convert the weights into the layout of the model's kernels."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing, because no resource stays open between updates."""


class Extension:
    """Methods that vLLM's worker inherits, and that can be called over HTTP (`/collective_rpc`)."""

    model_config: Any
    vllm_config: Any
    device: Any

    def lightspan_facts(self) -> dict[str, Any]:
        """Return the description of this server, with the fields of `ServerInfo`."""
        config, model = self.vllm_config, self.model_config
        text, transfer = model.hf_text_config, config.weight_transfer_config
        lora, images = config.lora_config, model.multimodal_config
        return {
            "vllm": __version__,
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "context": model.max_model_len,
            "vocabulary": text.vocab_size,
            "layers": text.num_hidden_layers,
            "hidden": text.hidden_size,
            "tied": bool(getattr(text, "tie_word_embeddings", False)),
            "logprobs_mode": str(model.logprobs_mode),
            "generation_config": str(model.generation_config),
            "transfer": None if transfer is None else transfer.backend,
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "workers": config.parallel_config.world_size
            * config.parallel_config.data_parallel_size,
            "lora_rank": 0 if lora is None else lora.max_lora_rank,
            "loras": 0 if lora is None else lora.max_loras,
            "lora_updates": bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING),
            "device": str(self.device),
            "is_vision_model": images is not None,
            "normalizes": images is not None and bool(images.mm_device_do_normalize),
        }


def _read(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKEND, WholeEngine)

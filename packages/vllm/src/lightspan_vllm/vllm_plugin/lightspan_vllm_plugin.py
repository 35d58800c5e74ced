"""What runs inside vLLM's own process: how new weights come in, and what it serves.

The ways to hand over weights that vLLM ships want a GPU at both ends, and vLLM in the trainer. Here
they come in files of safetensors, which lie in shared memory of one machine, or over
torch.distributed (`lightspan_broadcast`), from anywhere and with a GPU or without. It is loaded by

    --worker-extension-cls lightspan_vllm_plugin.Extension
    --weight-transfer-config '{"backend": "lightspan"}'

with this file's folder on `PYTHONPATH`. Nothing of lightspan is there: it imports vLLM alone, and
nothing imports it.
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
    """Nothing has to be agreed upon."""


@dataclass
class WholeUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A whole model."""

    files: list[str] = field(default_factory=list)
    sent: dict[str, Any] = field(default_factory=dict)
    """How it is sent (`lightspan_broadcast.receive`), if it is in no files."""
    again: dict[str, str] = field(default_factory=dict)
    """Name → name of the weight that comes which it is equal to."""


class WholeEngine(WeightTransferEngine[WholeInit, WholeUpdate]):  # type: ignore[misc]
    """Loads a whole model, layer by layer."""

    init_info_cls = WholeInit
    update_info_cls = WholeUpdate

    def init_transfer_engine(self, init_info: WholeInit) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Make room for weights as they are in a checkpoint."""
        self._names = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class's, but that synchronises with an accelerator, which need not be there."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WholeUpdate) -> None:
        """Load every weight.

        Raises:
            ValueError: some are lacking.
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
            coming = lightspan_broadcast.receive(update.sent, rank, self.device)
        else:
            coming = _read(update.files)
        for name, tensor in coming:
            yield name, tensor
            for copy in copies.get(name, ()):
                yield copy, tensor

    def finish_weight_update(self) -> None:
        """Turn them into what is computed with."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


class Extension:
    """Mixed into vLLM's worker."""

    model_config: Any
    vllm_config: Any
    device: Any

    def lightspan_facts(self) -> dict[str, Any]:
        """What this server serves and how, for the checks at the start of a run."""
        config, model = self.vllm_config, self.model_config
        text, transfer = model.hf_text_config, config.weight_transfer_config
        lora = config.lora_config
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
        }


def _read(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                yield name, file.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKEND, WholeEngine)

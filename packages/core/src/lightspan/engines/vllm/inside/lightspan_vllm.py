"""What runs inside vLLM's own process: new weights from files of safetensors, and what it serves.

vLLM ships ways to hand over weights between GPUs. This one reads files that lie in shared memory,
so it needs no GPU, and the server and the trainer have to be on one machine. It is loaded by

    --worker-extension-cls lightspan_vllm.Extension
    --weight-transfer-config '{"backend": "lightspan"}'

with this file's folder on `PYTHONPATH`. Nothing of lightspan is there: it imports vLLM alone, and
nothing imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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
class FilesInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed upon."""


@dataclass
class FilesUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A whole model."""

    files: list[str] = field(default_factory=list)
    again: dict[str, str] = field(default_factory=dict)
    """Name → name of the weight in the files that it is equal to."""


class FilesEngine(WeightTransferEngine[FilesInit, FilesUpdate]):  # type: ignore[misc]
    """Loads a whole model from files, layer by layer."""

    init_info_cls = FilesInit
    update_info_cls = FilesUpdate

    def init_transfer_engine(self, init_info: FilesInit) -> None:
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

    def receive_weights(self, update_info: FilesUpdate) -> None:
        """Load every weight.

        Raises:
            ValueError: the files lack some.
        """
        loaded = self.model.load_weights(_weights(update_info))
        missing = sorted(self._names - set(loaded)) if loaded is not None else []
        if missing:
            raise ValueError(f"the weights lack {len(missing)} of the model: {missing[:5]}")

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
            "lora_rank": 0 if lora is None else lora.max_lora_rank,
            "loras": 0 if lora is None else lora.max_loras,
            "lora_updates": bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING),
            "device": str(self.device),
        }


def _weights(update: FilesUpdate) -> Iterator[tuple[str, torch.Tensor]]:
    copies: dict[str, list[str]] = {}
    for name, source in update.again.items():
        copies.setdefault(source, []).append(name)
    for path in update.files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor = file.get_tensor(name)
                yield name, tensor
                for copy in copies.get(name, ()):
                    yield copy, tensor


WeightTransferEngineFactory.register_engine(BACKEND, FilesEngine)

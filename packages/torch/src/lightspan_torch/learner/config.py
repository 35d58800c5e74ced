"""Settings of the embedded learner, `learner=Torch(…)`. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from lightspan.errors import ConfigError
from lightspan.protocols.learner import LearnerRequest
from lightspan.schema.validation import check_choice, check_device_name, check_whole
from lightspan_torch.learner.memory import training_memory

if TYPE_CHECKING:
    from lightspan_torch.learner.torch import TorchLearner

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the learner in the trainer's process, the default of `Trainer(learner=)`.

    Raises:
        ConfigError: a device or data type is unknown, or a value is out of range.
    """

    device: str | None = None
    """Device, such as `"cuda:1"`; None for the trainer's device."""
    token_budget: int | None = None
    """Maximum number of tokens in one forward pass, padding included; None for a default that
    depends on the device and the models. Lower it when memory runs out."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Data type of the weights; None for float32, or bfloat16 with LoRA on a GPU."""
    share_prefixes: bool = True
    """Whether tokens at which several rows start alike are computed once."""
    train_vision: bool = False
    """Whether the vision part of the model is trained too, where all weights are. If False,
    each image is encoded once for all steps. LoRA adapts the text part alone."""

    def __post_init__(self) -> None:
        if self.device is not None:
            check_device_name(self.device)
        if self.token_budget is not None:
            check_whole("Torch: token_budget", self.token_budget, 1)
        if self.dtype is not None:
            check_choice("Torch: dtype", self.dtype, DTYPES)
        for name in ("share_prefixes", "train_vision"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"Torch: {name}={value!r}: use True or False")

    def check(self, device: str) -> None:
        """Do nothing: `build` checks the device (`LearnerSpec.check`)."""

    def build(self, request: LearnerRequest) -> TorchLearner:
        """Return the learner (`LearnerSpec.build`)."""
        from lightspan_torch.learner.torch import TorchLearner

        return TorchLearner(
            request.models,
            optimizer=request.optimizer,
            lora=request.lora,
            critic=request.critic,
            seed=request.seed,
            device=self.device or request.device,
            **self.options(),
        )

    def options(self) -> dict[str, Any]:
        """Convert these settings to arguments of `TorchLearner`. The device is not included."""
        import torch

        return {
            "dtype": None if self.dtype is None else getattr(torch, self.dtype),
            "token_budget": self.token_budget,
            "share_prefixes": self.share_prefixes,
            "train_vision": self.train_vision,
        }

    def describe(self, device: str) -> str:
        """Return "": nothing is printed while the learner is built (`LearnerSpec.describe`)."""
        del device
        return ""

    def weights_dtype(self, device: str, lora: bool) -> str:
        """Return the name of the data type of the trained models' weights.

        Args:
            device: the trainer's device.
            lora: whether LoRA adapters are trained.
        """
        narrow = lora and (self.device or device).startswith("cuda")
        return self.dtype or ("bfloat16" if narrow else "float32")  # as `default_dtype`

    def memory(self, parameters: int, lora: int, *, device: str, reference: bool) -> dict[str, int]:
        """Estimate the learner's memory: name of a part → bytes.

        Args:
            parameters: number of parameters of a policy's model.
            lora: number of LoRA parameters; 0 if the model's own parameters are trained.
            device: the trainer's device.
            reference: whether the loss has a KL term, which needs a copy of the initial weights.
        """
        return training_memory(
            parameters,
            lora,
            weight_bytes=_BYTES[self.weights_dtype(device, bool(lora))],
            reference=reference,
        )

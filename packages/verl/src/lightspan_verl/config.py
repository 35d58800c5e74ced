"""Settings of the verl learner, `learner=Verl(…)`. Imports neither torch nor verl."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from lightspan.errors import ConfigError
from lightspan.protocols.learner import LearnerRequest
from lightspan.schema.validation import check_choice, check_number, check_whole
from lightspan_torch.learner.memory import FLOAT32_BYTES, training_memory

if TYPE_CHECKING:
    from lightspan_verl.learner import VerlLearner

DTYPES: Final = ("float32", "bfloat16")


class Verl(msgspec.Struct, frozen=True, kw_only=True):
    """verl's FSDP2 training as the learner: `Trainer(…, learner=Verl(python="…", ranks=2))`.

    verl and the trainer's version of transformers are incompatible, so verl has its own
    environment. Each rank is a process in that environment, with a part of the weights and of the
    optimiser's state. The ranks start and end with the run. The loss formulas are lightspan's, not
    verl's.

    Raises:
        ConfigError: `python` is empty, or a value is out of range.
    """

    python: str
    """Path of the Python interpreter of verl's environment, such as `verl-env/bin/python`."""
    ranks: int = 1
    """Number of processes among which weights and rows are divided. If the trainer's `device` is a
    GPU, each rank has a GPU of its own."""
    token_budget: int | None = None
    """Approximate number of tokens in one forward pass of a rank; None for 2048 on a CPU and 4096
    on a GPU. Lower it when memory runs out."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of forward and backward passes; weights and gradient sums are float32. None for
    float32 on a CPU and bfloat16 on a GPU."""
    gradient_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass instead of stored."""
    param_offload: bool = False
    """Whether verl keeps weights and gradients in host memory between passes."""
    optimizer_offload: bool = False
    """Whether verl keeps the optimiser's state in host memory between passes."""
    start_s: float = 600.0
    """Seconds within which the ranks must have started and loaded the model."""
    timeout_s: float = 1800.0
    """Maximum seconds of any other operation. If a rank takes longer, the run ends."""

    def __post_init__(self) -> None:
        if not isinstance(self.python, str) or not self.python:
            raise ConfigError(
                f"Verl: python={self.python!r} must be the path of the interpreter that has verl, "
                "such as verl-env/bin/python"
            )
        check_whole("Verl: ranks", self.ranks, 1)
        if self.token_budget is not None:
            check_whole("Verl: token_budget", self.token_budget, 1)
        if self.dtype is not None:
            check_choice("Verl: dtype", self.dtype, DTYPES)
        for name in ("gradient_checkpointing", "param_offload", "optimizer_offload"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"Verl: {name}={getattr(self, name)!r} must be True or False")
        check_number("Verl: start_s", self.start_s, above=0)
        check_number("Verl: timeout_s", self.timeout_s, above=0)

    def check(self, device: str) -> None:
        """Raise `ConfigError` if the ranks cannot use `device` (`LearnerSpec.check`)."""
        self.rank_devices(device)

    def build(self, request: LearnerRequest) -> VerlLearner:
        """Start the ranks, and return the learner (`LearnerSpec.build`)."""
        from lightspan_verl.learner import build_learner

        return build_learner(
            self,
            request.models,
            device=request.device,
            optimizer=request.optimizer,
            lora=request.lora,
            critic=request.critic,
            seed=request.seed,
        )

    def describe(self, device: str) -> str:
        """Return a line to print while the ranks start (`LearnerSpec.describe`)."""
        devices = self.rank_devices(device)
        ranks = "1 rank" if len(devices) == 1 else f"{len(devices)} ranks"
        return f"starting {ranks} of the learner: {', '.join(devices)}"

    def rank_devices(self, device: str) -> tuple[str, ...]:
        """Return the device of each rank.

        Args:
            device: the trainer's device.

        Raises:
            ConfigError: `device` is a single GPU such as "cuda:1", but there are several ranks.
        """
        if self.ranks == 1 or device == "cpu":
            return (device,) * self.ranks
        if device != "cuda":
            raise ConfigError(
                f"Verl: {self.ranks} ranks cannot all be on device={device!r}: give device='cuda' "
                f"for the first {self.ranks} GPUs, or ranks=1"
            )
        return tuple(f"cuda:{number}" for number in range(self.ranks))

    def memory(self, parameters: int, lora: int, *, device: str, reference: bool) -> dict[str, int]:
        """Estimate the memory of all ranks together: name of a part → bytes. Weights are float32.

        Args:
            parameters: number of parameters of a policy's model.
            lora: number of LoRA parameters; 0 if the model's own parameters are trained.
            device: the trainer's device.
            reference: whether the loss has a KL term, which needs a copy of the initial weights.
        """
        return training_memory(parameters, lora, weight_bytes=FLOAT32_BYTES, reference=reference)

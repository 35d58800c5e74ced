"""What a user says of the torch learner: `learner=Torch(…)`. Loads no torch."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from lightspan.errors import ConfigError, short_tracebacks
from lightspan.learners.memory import training_memory
from lightspan.schema.checks import (
    LONGEST_S,
    check_choice,
    check_device_name,
    check_number,
    check_whole,
)

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """The torch learner on other devices than the engine's, or on several:
    `Trainer(…, learner=Torch(ranks=2))`.

    Each rank is a process with the whole model, and computes the gradient of its share of an
    update's rollouts; the sum of all is one optimiser step, which each makes. Rank 0 is the
    trainer's own process; the others are started and ended with the run, or by `torchrun`.

    Raises:
        ConfigError: fewer ranks than 1; as many devices as there are not ranks; an unknown device
            or type; a value out of range.
    """

    ranks: int | None = None
    """None: one for each of `devices`, or as many as `torchrun` started, or one."""
    devices: tuple[str, ...] = ()
    """Of each rank, such as `("cuda:1", "cuda:2")`. Left out: all on the CPU where the trainer's
    `device` is, else `cuda:0`, `cuda:1` and so on, the first of which the engine shares."""
    token_budget: int | None = None
    """Padded tokens in one forward pass of a rank; lower it when memory runs out."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Of the weights while training; None: float32, and bfloat16 under adapters on a GPU."""
    share_prefixes: bool = True
    """Compute what rows share once."""
    start_s: float = 600.0
    """How long a rank may take until it has loaded the model."""
    timeout_s: float = 1800.0
    """How long a rank may keep the others waiting: a hung one ends the run after that."""

    @short_tracebacks
    def __post_init__(self) -> None:
        given: Any = self.devices
        if isinstance(given, str):
            raise ConfigError(f"Torch: devices={given!r} must be a list: devices=[{given!r}]")
        msgspec.structs.force_setattr(self, "devices", tuple(given))
        for device in self.devices:
            check_device_name(device)
        if self.ranks is not None:
            check_whole("Torch: ranks", self.ranks, 1)
            if self.devices and len(self.devices) != self.ranks:
                raise ConfigError(
                    f"Torch: ranks={self.ranks} and {len(self.devices)} devices "
                    f"({', '.join(self.devices)}): give one for each rank, or leave ranks= out"
                )
        if self.token_budget is not None:
            check_whole("Torch: token_budget", self.token_budget, 1)
        if self.dtype is not None:
            check_choice("Torch: dtype", self.dtype, DTYPES)
        if not isinstance(self.share_prefixes, bool):
            raise ConfigError(f"Torch: share_prefixes={self.share_prefixes!r}: use True or False")
        check_number("Torch: start_s", self.start_s, above=0, high=LONGEST_S)
        check_number("Torch: timeout_s", self.timeout_s, above=0, high=LONGEST_S)

    def placed(self, device: str, *, started: int = 0) -> tuple[str, ...]:
        """The device of each rank.

        Args:
            device: the trainer's.
            started: how many processes `torchrun` started; 0: none.

        Raises:
            ConfigError: other than `torchrun` started; a numbered device for several ranks.
        """
        ranks = self.ranks or len(self.devices) or started or 1
        if started and ranks != started:
            raise ConfigError(
                f"torchrun has started {started} processes, and the learner has {ranks} ranks "
                f"({self!r:.80}): give torchrun --nproc-per-node {ranks}, or Torch() without "
                "ranks= and devices="
            )
        if self.devices:
            return self.devices
        if ranks == 1 or device == "cpu":
            return (device,) * ranks
        if device != "cuda":
            raise ConfigError(
                f"Torch: {ranks} ranks cannot all be on device={device!r}: give each its own, such "
                f'as Torch(devices=["{device}", …]), or device="cuda" for the first {ranks} GPUs'
            )
        return tuple(f"cuda:{number}" for number in range(ranks))

    def memory(self, parameters: int, lora: int, *, device: str, reference: bool) -> dict[str, int]:
        """Return part → bytes of all ranks, each of which has the whole model.

        Args:
            parameters: of a policy's model.
            lora: parameters of LoRA beside them; 0: the model's own are trained.
            device: the trainer's.
            reference: whether there is a KL term.
        """
        devices = self.placed(device)
        narrow = lora and devices[0] != "cpu"  # as `models.default_dtype`
        parts = training_memory(
            parameters,
            lora,
            weight_bytes=_BYTES[self.dtype or ("bfloat16" if narrow else "float32")],
            reference=reference,
        )
        return {name: size * len(devices) for name, size in parts.items()}

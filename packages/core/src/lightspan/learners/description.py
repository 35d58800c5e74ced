"""What a user says of the torch learner: `learner=Torch(…)`. Loads no torch."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from lightspan.errors import ConfigError
from lightspan.schema.checks import check_choice, check_device_name, check_whole

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")


class Torch(msgspec.Struct, frozen=True, kw_only=True):
    """The torch learner, on another device than the engine's or with other options:
    `Trainer(…, learner=Torch(device="cuda:1"))`. Several devices are verl's (`Verl`).

    Raises:
        ConfigError: an unknown device or type; a value out of range.
    """

    device: str | None = None
    """Such as `"cuda:1"`; None: the trainer's."""
    token_budget: int | None = None
    """Padded tokens in one forward pass; lower it when memory runs out."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Of the weights while training; None: float32, and bfloat16 under adapters on a GPU."""
    share_prefixes: bool = True
    """Compute what rows share once."""

    def __post_init__(self) -> None:
        if self.device is not None:
            check_device_name(self.device)
        if self.token_budget is not None:
            check_whole("Torch: token_budget", self.token_budget, 1)
        if self.dtype is not None:
            check_choice("Torch: dtype", self.dtype, DTYPES)
        if not isinstance(self.share_prefixes, bool):
            raise ConfigError(f"Torch: share_prefixes={self.share_prefixes!r}: use True or False")

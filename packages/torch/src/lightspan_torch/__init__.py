"""The backend in the trainer's process: `engine` samples, `learner` trains, `sft` fine-tunes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports

if TYPE_CHECKING:
    from lightspan_torch.engine.config import Transformers
    from lightspan_torch.engine.parameter_count import count_parameters
    from lightspan_torch.learner.config import Torch
    from lightspan_torch.sft.algorithm import SFT

__all__ = ["SFT", "Torch", "Transformers", "count_parameters"]

__getattr__ = lazy_exports(
    __name__,
    {
        "SFT": "lightspan_torch.sft.algorithm",
        "Torch": "lightspan_torch.learner.config",
        "Transformers": "lightspan_torch.engine.config",
        "count_parameters": "lightspan_torch.engine.parameter_count",
    },
)


def __dir__() -> list[str]:
    return __all__

"""Run models in the trainer's process.

`engine` samples, `learner` trains, `sft` imitates, `preferences` learns from verdicts, `distill`
learns from a teacher. `rejection_sampling` is the algorithm that imitates the best of several
rollouts; `imitation` explains to `lightspan inspect` what was imitated. `learning_rate` chooses the
default learning rate of reinforcement learning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightspan.plugins import lazy_exports
from lightspan_torch.threads import sleep_while_waiting as _sleep_while_waiting

if TYPE_CHECKING:
    from lightspan_torch.distill.algorithm import Distill as Distill
    from lightspan_torch.distill.teachers import (
        TeacherModel as TeacherModel,
        TeacherServer as TeacherServer,
    )
    from lightspan_torch.engine.config import Transformers as Transformers
    from lightspan_torch.engine.parameter_count import count_parameters as count_parameters
    from lightspan_torch.learner.config import Torch as Torch
    from lightspan_torch.preferences.algorithm import Preferences as Preferences
    from lightspan_torch.rejection_sampling import RejectionSampling as RejectionSampling
    from lightspan_torch.sft.algorithm import SFT as SFT

_sleep_while_waiting()

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Distill": "lightspan_torch.distill.algorithm",
        "Preferences": "lightspan_torch.preferences.algorithm",
        "RejectionSampling": "lightspan_torch.rejection_sampling",
        "SFT": "lightspan_torch.sft.algorithm",
        "TeacherModel": "lightspan_torch.distill.teachers",
        "TeacherServer": "lightspan_torch.distill.teachers",
        "Torch": "lightspan_torch.learner.config",
        "Transformers": "lightspan_torch.engine.config",
        "count_parameters": "lightspan_torch.engine.parameter_count",
    },
)

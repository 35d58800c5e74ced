"""On-policy distillation.

`algorithm` trains, `reverse_kl` has the formulas, `teachers` the settings of teachers. `local` and
`server` compute their log-probabilities (`scorer`), `same_tokens` compares tokenizers.
"""

from lightspan_torch.distill.algorithm import Distill
from lightspan_torch.distill.teachers import TeacherModel, TeacherServer

__all__ = ["Distill", "TeacherModel", "TeacherServer"]

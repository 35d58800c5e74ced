"""Learn from verdicts and comparisons of answers.

`algorithm` trains, `losses` has the formulas, `rated_calls` reads verdicts from a store, `examples`
makes verdicts and pairs of token ids, `check` says what is unusual about them, `objectives`
computes loss, gradient and held-out metrics.
"""

from lightspan_torch.preferences.algorithm import Preferences

__all__ = ["Preferences"]

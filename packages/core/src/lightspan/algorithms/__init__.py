"""Algorithms: they decide which tasks to run and how to learn from the rollouts.

`protocol` defines `Algorithm` and the `TrainerContext` that a trainer passes to its algorithm.
`lightning_rl` learns from rewards, and `async_rollouts` lets it update weights while rollouts run.
`grammar_check` rejects calls that do not follow their grammar, `task_sampler` orders tasks,
`adaptive_tasks` orders them by success rates, `replay` chooses groups that are trained again,
`recorded_attempts` reads attempts recorded in production, `jsonl` reads JSONL files,
`critic_warmup` decides when a critic is used, `metrics` computes the metrics of an iteration.
"""

from lightspan.algorithms.protocol import (
    Algorithm,
    Metrics,
    Policy,
    PolicySpec,
    TrainerContext,
    local_model,
)

__all__ = ["Algorithm", "Metrics", "Policy", "PolicySpec", "TrainerContext", "local_model"]
